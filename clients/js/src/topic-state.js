/**
 * A topic: the rows that it told of, and those that the program has read itself, by table and key,
 * in the order in which they were first heard of. What is told twice does no harm: a row is always
 * told whole, as it is then. What was there before the topic was followed is for the program to
 * read (`fill`); of a row that the topic has told of since, what the topic said counts.
 *
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./protocol.js").Upsert | import("./protocol.js").Remove} RowOp
 * @typedef {RowOp | {op: "poke"} | {op: "gap"}} TopicOp `poke` and `gap` say to read again what one
 *   shows: something changed, or more happened than could be told
 * @typedef {Readonly<Record<string, readonly Row[]>>} TopicValue
 * @typedef {Map<string, Row | undefined>} Rows by the text of the key; undefined for one that is
 *   gone
 */

import { TOPIC_ROWS_MAX } from "./limits.js";
import { keyText } from "./replica.js";
import { shared } from "./shared.js";

export class TopicState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** @type {undefined} */
  error;
  /** When the last of what was told happened. @type {string | undefined} */
  at;
  /** @type {Map<string, Rows>} */
  #tables = new Map();
  /**
   * What the topic said something about since nothing was missed.
   *
   * @type {Map<string, Set<string>>}
   */
  #told = new Map();
  /** @type {TopicValue} */
  #value = Object.freeze({});
  #hasBegun = false;

  /** @param {string} name @param {string} [since] */
  constructor(name, since) {
    this.name = name;
    this.position = since;
  }

  /** The rows by table. */
  get value() {
    return this.#value;
  }

  /** It was asked for and has not begun. */
  get isDue() {
    return this.view === undefined;
  }

  /** @param {string} wireId @returns {import("./protocol.js").Subscribe} */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    return { type: "subscribe", id: wireId, topic: this.name, since: this.position };
  }

  /** @param {import("./protocol.js").Subscribed} message @returns {TopicOp[][]} */
  subscribed(message) {
    this.view = message.view;
    // It had begun at a place that it was never told: there was no way to go on from there.
    const isLost = this.#hasBegun && this.position === undefined;
    this.#hasBegun = true;
    return isLost ? this.#doubt() : [];
  }

  /**
   * What was told, all at once.
   *
   * @param {import("./protocol.js").ViewMessage} message
   * @returns {TopicOp[][]}
   */
  receive(message) {
    switch (message.type) {
      case "topic":
        this.position = message.position;
        this.at = message.at;
        if (!message.ops.length) return [];
        this.#take(message.ops);
        return [[...message.ops]];
      case "poke":
        this.position = message.position;
        this.at = message.at;
        this.#value = Object.freeze({ ...this.#value });
        return [[{ op: "poke" }]];
      case "gap":
        this.position = message.position;
        return this.#doubt();
      default:
        return [];
    }
  }

  /**
   * These are the rows that there are, but for what the topic has told.
   *
   * @param {string} entity
   * @param {readonly Row[]} rows
   * @param {readonly string[]} key
   */
  fill(entity, rows, key) {
    const before = this.#tables.get(entity) ?? new Map();
    const told = this.#told.get(entity) ?? new Set();
    /** @type {Rows} */
    const filled = new Map();
    for (const row of rows) {
      const text = keyText(key.map((name) => row[name]));
      filled.set(text, shared(before.get(text), row));
    }
    // Those that were read keep their order, also where the topic has newer ones.
    for (const text of told) filled.set(text, before.get(text));
    for (const oldest of filled.keys()) {
      if (filled.size <= TOPIC_ROWS_MAX) break;
      filled.delete(oldest);
      told.delete(oldest);
    }
    this.#tables.set(entity, filled);
    this.#show([entity]);
  }

  /** @param {readonly RowOp[]} ops */
  #take(ops) {
    for (const op of ops) {
      const rows = this.#tables.get(op.entity) ?? new Map();
      const told = this.#told.get(op.entity) ?? new Set();
      this.#tables.set(op.entity, rows);
      this.#told.set(op.entity, told);
      const text = keyText(op.key);
      rows.set(text, op.op === "upsert" ? shared(rows.get(text), op.row) : undefined);
      told.add(text);
      if (rows.size > TOPIC_ROWS_MAX) {
        const [oldest] = rows.keys();
        rows.delete(oldest);
        told.delete(oldest);
      }
    }
    this.#show(new Set(ops.map((op) => op.entity)));
  }

  /** Something was missed: what the topic has told may be out of date. @returns {TopicOp[][]} */
  #doubt() {
    this.#told.clear();
    this.#value = Object.freeze({ ...this.#value });
    return [[{ op: "gap" }]];
  }

  /** @param {Iterable<string>} entities whose rows have changed */
  #show(entities) {
    /** @type {Record<string, readonly Row[]>} */
    const changed = {};
    for (const entity of entities) {
      const rows = [...(this.#tables.get(entity)?.values() ?? [])];
      changed[entity] = Object.freeze(rows.filter((row) => row !== undefined));
    }
    this.#value = Object.freeze({ ...this.#value, ...changed });
  }
}
