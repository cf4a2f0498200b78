/**
 * A replica of the rows of a live query, made by applying its deltas. Strict: a delta that does not
 * fit throws `diverged`, because guessing would hide the fault; the rows then stay as they were
 * before the batch. It does the same as src/headwater/client/state/replica.py, which tests/vectors
 * checks. Rows that have not changed stay the same objects, and so does the array while none has.
 *
 * @typedef {import("../protocol.js").Row} Row
 * @typedef {import("../protocol.js").Key} Key
 * @typedef {import("../protocol.js").Cursor} Cursor
 * @typedef {import("../protocol.js").Delta} Delta
 * @typedef {{key: Key, row: Row, cursor: Cursor}} ReplicaRow
 */

import { crc32 } from "./crc32.js";
import { diverged } from "../errors.js";
import { compareKeys, stringify } from "../json.js";
import { reuseEqual } from "./structural-sharing.js";

export class Replica {
  /** In the order of the query; empty for a streamed one. @type {string[]} */
  #order = [];
  /** By the text of the key. @type {Map<string, ReplicaRow>} */
  #entries = new Map();
  /** The rows that a reset in this batch has replaced. @type {Map<string, ReplicaRow> | undefined} */
  #replaced;
  /** @type {readonly ReplicaRow[] | undefined} */
  #sorted;
  /** @type {readonly Row[]} */
  #rows = Object.freeze([]);
  #rowsAreFresh = true;

  /** The rows in the order of the query; of a streamed one, by key. */
  get rows() {
    if (!this.#rowsAreFresh) {
      const rows = this.#entriesInOrder().map((entry) => entry.row);
      const before = this.#rows;
      const same = rows.length === before.length && rows.every((row, i) => row === before[i]);
      if (!same) this.#rows = Object.freeze(rows);
      this.#rowsAreFresh = true;
    }
    return this.#rows;
  }

  /** Their keys, in the same order. @returns {Key[]} */
  get keys() {
    return this.#entriesInOrder().map((entry) => entry.key);
  }

  /** @param {Key} key */
  row(key) {
    return this.#entries.get(keyText(key))?.row;
  }

  /** The cursor of a row, for paging or sliding the window. @param {Key} key */
  cursor(key) {
    return this.#entries.get(keyText(key))?.cursor;
  }

  /** The rows as deltas that begin with a reset. @returns {Delta[]} */
  asDeltas() {
    const entries = this.#entriesInOrder();
    if (this.#order.length === 0) {
      const matches = entries.map(
        ({ key, row }) => /** @type {Delta} */ ({ delta: "match", key, row }),
      );
      return [{ delta: "reset", rows: [] }, ...matches];
    }
    const rows = entries.map((entry, index) => ({
      delta: /** @type {const} */ ("enter"),
      index,
      ...entry,
    }));
    return [{ delta: "reset", rows }];
  }

  /**
   * Apply a batch. Throws `diverged` if it does not fit, or if the result has another hash.
   *
   * @param {readonly Delta[]} deltas
   * @param {number | null} [expectedHash]
   */
  apply(deltas, expectedHash) {
    const before = this.#entriesInOrder();
    const isOrdered = this.#order.length > 0;
    this.#sorted = undefined;
    this.#rowsAreFresh = false;
    try {
      for (const delta of deltas) this.#apply(delta);
      if (expectedHash != null && expectedHash !== this.hash()) {
        throw diverged("the hash of the rows differs from the gateway's", HINT);
      }
    } catch (error) {
      this.#entries = new Map(before.map((entry) => [keyText(entry.key), entry]));
      this.#order = isOrdered ? [...this.#entries.keys()] : [];
      this.#sorted = before;
      throw error;
    } finally {
      this.#replaced = undefined;
    }
  }

  /** CRC-32 over `[key, row]` of every row as JSON, columns sorted by name, rows in order. */
  hash() {
    let checksum = 0;
    for (const { key, row } of this.#entriesInOrder()) {
      checksum = crc32(stringify([key, row], true), checksum);
    }
    return checksum;
  }

  #entriesInOrder() {
    this.#sorted ??= this.#order.length
      ? this.#order.map((text) => /** @type {ReplicaRow} */ (this.#entries.get(text)))
      : [...this.#entries.values()].sort((a, b) => compareKeys(a.key, b.key));
    return this.#sorted;
  }

  /** @param {Delta} delta */
  #apply(delta) {
    if (delta.delta === "reset") {
      this.#replaced = this.#entries;
      this.#order = [];
      this.#entries = new Map();
      for (const enter of delta.rows) this.#apply(enter);
      return;
    }
    const text = keyText(delta.key);
    const known = this.#entries.get(text);
    switch (delta.delta) {
      case "enter":
        this.#require(!known && delta.index <= this.#order.length, delta);
        this.#order.splice(delta.index, 0, text);
        this.#entries.set(text, entryOf(delta, this.#replaced?.get(text)));
        break;
      case "leave":
        this.#take(text, delta.index, delta);
        this.#entries.delete(text);
        break;
      case "move":
        this.#take(text, delta.source, delta);
        this.#require(delta.index <= this.#order.length, delta);
        this.#order.splice(delta.index, 0, text);
        this.#entries.set(text, entryOf(delta, known));
        break;
      case "update":
        this.#update(text, known, delta);
        break;
      case "match":
        this.#require(!known, delta);
        this.#entries.set(text, entryOf(delta, this.#replaced?.get(text)));
        break;
      case "unmatch":
        this.#require(this.#entries.delete(text), delta);
        break;
      default:
        this.#require(false, delta);
    }
  }

  /**
   * @param {string} text
   * @param {ReplicaRow | undefined} known
   * @param {import("../protocol.js").Update} delta
   */
  #update(text, known, delta) {
    if (!known) throw misfit(delta);
    const { index, cursor } = delta;
    const placed = index != null && cursor != null;
    if (placed) this.#require(this.#order[index] === text, delta);
    const row = reuseEqual(known.row, delta.row);
    this.#entries.set(text, { key: known.key, row, cursor: placed ? cursor : known.cursor });
  }

  /** @param {string} text @param {number} index @param {Delta} delta */
  #take(text, index, delta) {
    this.#require(this.#order[index] === text, delta);
    this.#order.splice(index, 1);
  }

  /** @param {boolean} holds @param {Delta} delta */
  #require(holds, delta) {
    if (!holds) throw misfit(delta);
  }
}

/**
 * @param {{key: Key, row: Row, cursor?: Cursor}} delta
 * @param {ReplicaRow} [known]
 * @returns {ReplicaRow}
 */
function entryOf({ key, row, cursor = [] }, known) {
  return known ? { key: known.key, row: reuseEqual(known.row, row), cursor } : { key, row, cursor };
}

/** @param {Key} key */
export const keyText = (key) => stringify(key);

/** @param {Delta} delta */
function misfit(delta) {
  return diverged(`a delta does not fit the rows: ${stringify(delta).slice(0, 200)}`, HINT);
}

const HINT = "The client reads the rows again; nothing needs to be done.";
