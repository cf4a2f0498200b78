/**
 * A replica: the rows of a live query, followed by folding its deltas. Strict: a delta that does
 * not fit throws `diverged`, because guessing would hide the fault; the rows then stay as they were
 * before the batch. For the rest it does what src/headwater/client/replica.py does; tests/vectors
 * hold both to it. Rows that are as they were keep their identity, and so does the array of them
 * while none has changed.
 *
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./protocol.js").Key} Key
 * @typedef {import("./protocol.js").Cursor} Cursor
 * @typedef {import("./protocol.js").Delta} Delta
 * @typedef {{key: Key, row: Row, cursor: Cursor}} Entry
 */

import { crc32 } from "./crc32.js";
import { diverged } from "./errors.js";
import { compareKeys, stringify } from "./json.js";
import { shared } from "./shared.js";

export class Replica {
  /** In the order of the query; empty for a streamed one. @type {string[]} */
  #order = [];
  /** By the text of the key. @type {Map<string, Entry>} */
  #entries = new Map();
  /** What a reset of the present batch has replaced. @type {Map<string, Entry> | undefined} */
  #replaced;
  /** @type {readonly Entry[] | undefined} */
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

  /** A row's place in the order, to page or to slide a window from. @param {Key} key */
  cursor(key) {
    return this.#entries.get(keyText(key))?.cursor;
  }

  /** The rows as deltas that lead there from anything. @returns {Delta[]} */
  present() {
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
   * Fold a batch. Throws `diverged` if it does not fit or does not lead to the hash.
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
      for (const delta of deltas) this.#fold(delta);
      if (expectedHash != null && expectedHash !== this.hash()) {
        throw diverged("the result's hash differs from the server's", HINT);
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
      ? this.#order.map((text) => /** @type {Entry} */ (this.#entries.get(text)))
      : [...this.#entries.values()].sort((a, b) => compareKeys(a.key, b.key));
    return this.#sorted;
  }

  /** @param {Delta} delta */
  #fold(delta) {
    if (delta.delta === "reset") {
      this.#replaced = this.#entries;
      this.#order = [];
      this.#entries = new Map();
      for (const enter of delta.rows) this.#fold(enter);
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
   * @param {Entry | undefined} known
   * @param {import("./protocol.js").Update} delta
   */
  #update(text, known, delta) {
    if (!known) throw misfit(delta);
    const { index, cursor } = delta;
    const placed = index != null && cursor != null;
    if (placed) this.#require(this.#order[index] === text, delta);
    const row = shared(known.row, delta.row);
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

/** @param {{key: Key, row: Row, cursor?: Cursor}} delta @param {Entry} [known] @returns {Entry} */
function entryOf({ key, row, cursor = [] }, known) {
  return known ? { key: known.key, row: shared(known.row, row), cursor } : { key, row, cursor };
}

/** @param {Key} key */
export const keyText = (key) => stringify(key);

/** @param {Delta} delta */
function misfit(delta) {
  return diverged(`${stringify(delta).slice(0, 200)} does not fit the replica`, HINT);
}

const HINT = "Subscribe again: the new snapshot replaces what the replica holds.";
