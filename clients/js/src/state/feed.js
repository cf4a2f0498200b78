/**
 * The state of a change feed: its position, and what was delivered after it. After a lost connection
 * it continues from the position; the log numbers of changes that were delivered after it are
 * remembered, so that none is delivered twice.
 *
 * @typedef {{xid: number, at: string, changes: any[], position?: string,
 *   complete: boolean}} Transaction
 *   changes that were committed together; `position` is where to resume after it
 * @typedef {import("../protocol.js").WireTransaction} WireTransaction
 */

import { HeadwaterError } from "../errors.js";
import { DELIVERED_MAX } from "../limits.js";
import { contains, covers, parsePosition } from "./position.js";

/** What `receive` returns when the feed must be subscribed again. */
export const RESUBSCRIBE = Symbol("resubscribe");

export class FeedState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** @type {undefined} */
  error;
  /** The latest transaction. @type {Transaction | undefined} */
  value;
  #query;
  /** The highest `seq` of each transaction after the position. @type {Map<number, number>} */
  #delivered = new Map();

  /** @param {import("../protocol.js").ChangesQuery} query */
  constructor(query) {
    this.name = `changes of ${query.tables?.join(", ") || "all tables"}`;
    this.#query = query;
    this.position = query.since ?? undefined;
  }

  /**
   * It was subscribed and has not begun, or has no position yet: without one it could not resume
   * after a lost connection.
   */
  get isPending() {
    return this.view === undefined || this.position === undefined;
  }

  /** @param {string} wireId @returns {import("../protocol.js").Subscribe} */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    return { type: "subscribe", id: wireId, changes: { ...this.#query, since: this.position } };
  }

  /** @param {import("../protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
  }

  /**
   * Apply a message; returns the transactions that were not delivered before.
   *
   * @param {import("../protocol.js").ViewMessage} message
   * @returns {Transaction[] | typeof RESUBSCRIBE}
   */
  receive(message) {
    if (message.type === "gap") return this.#gap(message);
    if (message.type !== "changes") return [];
    const before = this.position;
    const known = before === undefined ? undefined : parsePosition(before);
    const fresh = message.transactions
      .filter((each) => !known || !contains(known, each.xid))
      .flatMap((each) => this.#fresh(each) ?? []);
    if (before === undefined || !covers(before, message.position)) {
      this.position = message.position;
      this.#forget(message.position);
    }
    const last = fresh.length - 1;
    const found = fresh.map((each, i) => ({
      ...each,
      position: i === last ? this.position : before,
      complete: each.complete ?? true,
    }));
    this.value = found.at(-1) ?? this.value;
    return found;
  }

  /**
   * Continue from where the gap begins.
   *
   * @param {import("../protocol.js").Gap} message
   * @returns {typeof RESUBSCRIBE}
   */
  #gap(message) {
    if (message.reason === "resync" || message.since === null) {
      const message = `the change log no longer has the position of this feed (${this.name})`;
      throw new HeadwaterError("resync", message, {
        hint: "Take a position, read the tables again, then start a feed from that position.",
      });
    }
    this.position = message.since;
    return RESUBSCRIBE;
  }

  /** @param {WireTransaction} transaction @returns {WireTransaction | undefined} */
  #fresh(transaction) {
    const last = this.#delivered.get(transaction.xid);
    const changes =
      last === undefined
        ? transaction.changes
        : transaction.changes.filter((change) => (seqOf(change) ?? 0) > last);
    if (!changes.length && transaction.changes.length) return undefined;
    const seqs = changes.map(seqOf).filter((seq) => seq !== undefined);
    if (seqs.length || transaction.complete !== false) {
      this.#delivered.set(
        transaction.xid,
        seqs.reduce((a, b) => Math.max(a, b), 0),
      );
    }
    return { ...transaction, changes };
  }

  /** Forget what the position contains: it is not sent again. @param {string} text */
  #forget(text) {
    const position = parsePosition(text);
    for (const xid of this.#delivered.keys()) {
      if (contains(position, xid) || this.#delivered.size > DELIVERED_MAX)
        this.#delivered.delete(xid);
    }
  }
}

/**
 * The log number of a change, also in a Debezium envelope.
 *
 * @param {any} change
 * @returns {number | undefined}
 */
const seqOf = (change) => change.seq ?? change.source?.seq;
