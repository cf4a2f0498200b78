/**
 * A change feed: where it is, and what it was given beyond that. The position is where to go on
 * after a lost connection; what was delivered beyond it is remembered by its number in the log, so
 * that nothing is delivered twice.
 *
 * @typedef {{xid: number, at: string, changes: any[], position?: string,
 *   complete: boolean}} Transaction
 *   changes that became visible together; `position` is where to resume once it is dealt with
 * @typedef {import("./protocol.js").WireTransaction} WireTransaction
 */

import { HeadwaterError } from "./errors.js";
import { DELIVERED_MAX } from "./limits.js";
import { contains, covers, parsePosition } from "./position.js";

/** What `receive` gives when the feed must be asked for anew. */
export const AGAIN = Symbol("again");

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
  /** The highest `seq` of each transaction beyond the position. @type {Map<number, number>} */
  #delivered = new Map();

  /** @param {import("./protocol.js").ChangesQuery} query */
  constructor(query) {
    this.name = `changes of ${query.tables?.join(", ") || "all tables"}`;
    this.#query = query;
    this.position = query.since ?? undefined;
  }

  /**
   * It was asked for and has not begun, or does not know yet where: cut off before that, it could
   * not resume.
   */
  get isDue() {
    return this.view === undefined || this.position === undefined;
  }

  /** @param {string} wireId @returns {import("./protocol.js").Subscribe} */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    return { type: "subscribe", id: wireId, changes: { ...this.#query, since: this.position } };
  }

  /** @param {import("./protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
  }

  /**
   * The transactions that were not delivered before.
   *
   * @param {import("./protocol.js").ViewMessage} message
   * @returns {Transaction[] | typeof AGAIN}
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
   * Go back to where the gap begins.
   *
   * @param {import("./protocol.js").Gap} message
   * @returns {typeof AGAIN}
   */
  #gap(message) {
    if (message.reason === "resync" || message.since === null) {
      throw new HeadwaterError("resync", "the log no longer reaches back to where this feed was", {
        hint: "Read the tables again, then follow from a position taken before.",
      });
    }
    this.position = message.since;
    return AGAIN;
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

  /** Drop what the position contains: nobody will send that again. @param {string} text */
  #forget(text) {
    const position = parsePosition(text);
    for (const xid of this.#delivered.keys()) {
      if (contains(position, xid) || this.#delivered.size > DELIVERED_MAX)
        this.#delivered.delete(xid);
    }
  }
}

/**
 * A change's number in the log, also out of a Debezium envelope.
 *
 * @param {any} change
 * @returns {number | undefined}
 */
const seqOf = (change) => change.seq ?? change.source?.seq;
