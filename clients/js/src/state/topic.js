/**
 * The state of a topic: the rows that it has sent, and those that the program has read itself, by
 * table and key, in the order of their first arrival. A row may be sent twice: it is always sent as a
 * whole, with its current values. The program reads the rows from before the topic began and adds
 * them with `fill`; rows that the topic has sent since are not replaced.
 *
 * @typedef {import("../protocol.js").Row} Row
 * @typedef {import("../protocol.js").Upsert | import("../protocol.js").Remove} RowOp
 * @typedef {RowOp | {op: "poke"} | {op: "gap"}} TopicOp after `poke` (something changed) and `gap`
 *   (operations were lost) the program reads its rows again
 * @typedef {Readonly<Record<string, readonly Row[]>>} TopicValue
 * @typedef {Map<string, Row | undefined>} Rows by the text of the key; undefined for one that is
 *   gone
 */

import { TOPIC_ROWS_MAX } from "../limits.js";
import { keyText } from "./replica.js";
import { reuseEqual } from "./structural-sharing.js";

export class TopicState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** @type {undefined} */
  error;
  /** When the last operation was committed. @type {string | undefined} */
  at;
  /** @type {Map<string, Rows>} */
  #tables = new Map();
  /**
   * The keys of the rows that the topic has sent since the last gap, by table.
   *
   * @type {Map<string, Set<string>>}
   */
  #received = new Map();
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

  /** It was subscribed and has not begun. */
  get isPending() {
    return this.view === undefined;
  }

  /** @param {string} wireId @returns {import("../protocol.js").Subscribe} */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    return { type: "subscribe", id: wireId, topic: this.name, since: this.position };
  }

  /** @param {import("../protocol.js").Subscribed} message @returns {TopicOp[][]} */
  subscribed(message) {
    this.view = message.view;
    // The connection was lost before a position had arrived: it could not continue from there.
    const hasGap = this.#hasBegun && this.position === undefined;
    this.#hasBegun = true;
    return hasGap ? this.#missed() : [];
  }

  /**
   * Apply a message; returns its operations, as one list.
   *
   * @param {import("../protocol.js").ViewMessage} message
   * @returns {TopicOp[][]}
   */
  receive(message) {
    switch (message.type) {
      case "topic":
        this.position = message.position;
        this.at = message.at;
        if (!message.ops.length) return [];
        this.#apply(message.ops);
        return [[...message.ops]];
      case "poke":
        this.position = message.position;
        this.at = message.at;
        this.#value = Object.freeze({ ...this.#value });
        return [[{ op: "poke" }]];
      case "gap":
        this.position = message.position;
        return this.#missed();
      default:
        return [];
    }
  }

  /**
   * Add rows that the program has read; rows that the topic has sent are not replaced.
   *
   * @param {string} entity
   * @param {readonly Row[]} rows
   * @param {readonly string[]} key
   */
  fill(entity, rows, key) {
    const before = this.#tables.get(entity) ?? new Map();
    const received = this.#received.get(entity) ?? new Set();
    /** @type {Rows} */
    const filled = new Map();
    for (const row of rows) {
      const text = keyText(key.map((name) => row[name]));
      filled.set(text, reuseEqual(before.get(text), row));
    }
    // The rows keep the order in which they were read, also where the topic has newer values.
    for (const text of received) filled.set(text, before.get(text));
    for (const oldest of filled.keys()) {
      if (filled.size <= TOPIC_ROWS_MAX) break;
      filled.delete(oldest);
      received.delete(oldest);
    }
    this.#tables.set(entity, filled);
    this.#show([entity]);
  }

  /** @param {readonly RowOp[]} ops */
  #apply(ops) {
    for (const op of ops) {
      const rows = this.#tables.get(op.entity) ?? new Map();
      const received = this.#received.get(op.entity) ?? new Set();
      this.#tables.set(op.entity, rows);
      this.#received.set(op.entity, received);
      const text = keyText(op.key);
      rows.set(text, op.op === "upsert" ? reuseEqual(rows.get(text), op.row) : undefined);
      received.add(text);
      if (rows.size > TOPIC_ROWS_MAX) {
        const [oldest] = rows.keys();
        rows.delete(oldest);
        received.delete(oldest);
      }
    }
    this.#show(new Set(ops.map((op) => op.entity)));
  }

  /** Operations were lost: rows that the topic has sent may be out of date. @returns {TopicOp[][]} */
  #missed() {
    this.#received.clear();
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
