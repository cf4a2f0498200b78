/**
 * Rows that are followed by folding deltas: those of a live query, or of a reactive one. The rows
 * and their position are what it takes to go on after a lost connection. Nothing is guessed: a
 * batch that does not fit, or does not lead to the hash it carries, throws `diverged`.
 *
 * @typedef {import("./protocol.js").Delta} Delta
 * @typedef {import("./protocol.js").Snapshot} Snapshot
 * @typedef {import("./protocol.js").Reset} Reset
 * @typedef {import("./protocol.js").Deltas} Deltas
 * @typedef {import("./protocol.js").Subscribe} Subscribe
 * @typedef {import("./protocol.js").ViewMessage} ViewMessage
 * @typedef {{deltas: readonly Delta[], position: string, at?: string}} Batch what changed at once;
 *   a snapshot begins with a reset, and has no `at`
 */

import { behind, diverged, errorOf } from "./errors.js";
import { BATCHES_MAX, DIVERGED_MAX } from "./limits.js";
import { covers, isBefore } from "./position.js";
import { Replica } from "./replica.js";

class RowsState {
  name = "";
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** Why the rows may be out of date. @type {import("./errors.js").HeadwaterError | undefined} */
  error;
  /** What the values in a key are called. @type {readonly string[]} */
  key = [];
  replica = new Replica();
  waiting = true;
  /** Whether there have been rows. */
  #whole = false;
  /** What the latest rows were complete up to. @type {string | undefined} */
  #shown;
  /** Whether batches may have been lost, so that the next rows are told in any case. */
  #isDoubted = false;
  /** @type {(import("./protocol.js").Enter | import("./protocol.js").Match)[] | undefined} */
  #parts;
  /** @type {Deltas[]} */
  #meanwhile = [];
  #diverged = 0;

  /** The rows; while they are read anew, those that were right last. */
  get value() {
    return this.#whole ? this.replica.rows : undefined;
  }

  /** It was asked for, and its rows are not there yet. */
  get isDue() {
    return this.view === undefined || this.waiting;
  }

  /** Ask for it, from where it is. @param {string} wireId @returns {Subscribe} */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    this.waiting = true;
    this.#parts = undefined;
    this.#meanwhile = [];
    return this.request(this.position);
  }

  /** @param {string | undefined} _since @returns {Subscribe} */
  request(_since) {
    throw new Error("each kind asks for something else");
  }

  /** @param {import("./protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
    this.key = message.key ?? [];
    // The database no longer has what was shown: anything else counts.
    if (message.lost) this.#shown = undefined;
    this.waiting = !message.resumed;
    // Parts of another view's result are none of this one's.
    this.#parts = undefined;
    this.#meanwhile = [];
  }

  /**
   * Fold a frame; the batches it completes. Throws `diverged`, and `behind` for rows that are older
   * than those that are shown.
   *
   * @param {ViewMessage} message
   * @returns {Batch[]}
   */
  receive(message) {
    switch (message.type) {
      case "deltas":
        return this.#fold(message);
      case "reset":
        this.waiting = true;
        this.#parts = [];
        return this.#collect(message);
      case "snapshot":
        return this.waiting ? this.#collect(message) : [];
      default:
        return [];
    }
  }

  /**
   * Whether these are the rows of another window than before.
   *
   * @param {Snapshot | Reset} _message
   */
  hasMoved(_message) {
    return false;
  }

  /** @param {Snapshot | Reset} message @returns {Batch[]} */
  #collect(message) {
    const moved = this.hasMoved(message);
    const parts = [...(this.#parts ?? []), ...(message.rows ?? [])];
    this.#parts = message.more ? parts : undefined;
    if (message.more) return [];
    if (this.#shown !== undefined && isBefore(message.position, this.#shown)) {
      throw behind(this.name);
    }
    const deltas = replacing(parts);
    const before = moved || this.#isDoubted ? undefined : this.value;
    this.position = undefined;
    this.waiting = false;
    this.replica.apply(deltas, message.hash);
    this.position = this.#shown = message.position;
    this.#whole = true;
    this.#isDoubted = false;
    // After a reconnect the result is often what it was; nobody needs to hear that.
    const batches = before === this.replica.rows ? [] : [{ deltas, position: message.position }];
    const meanwhile = this.#meanwhile;
    this.#meanwhile = [];
    const later = meanwhile.filter((each) => !covers(message.position, each.position));
    return [...batches, ...later.flatMap((each) => this.#fold(each))];
  }

  /** @param {Deltas} message @returns {Batch[]} */
  #fold(message) {
    if (this.waiting) {
      // Between the parts of a result; before the first there is nothing to apply it to.
      if (this.#parts) this.#meanwhile.push(message);
      if (this.#meanwhile.length > BATCHES_MAX) {
        throw diverged("too much changed while the result was being received");
      }
      return [];
    }
    this.position = undefined;
    this.replica.apply(message.deltas, message.hash);
    this.position = this.#shown = message.position;
    this.#diverged = 0;
    const { deltas, position, at } = message;
    return deltas.length ? [{ deltas, position, at }] : [];
  }

  /** The rows are to be read anew; whether that is worth another snapshot. */
  diverged() {
    this.position = undefined;
    this.#isDoubted = true;
    this.waiting = true;
    this.#diverged += 1;
    return this.#diverged < DIVERGED_MAX;
  }
}

/**
 * @param {(import("./protocol.js").Enter | import("./protocol.js").Match)[]} rows
 * @returns {Delta[]}
 */
function replacing(rows) {
  /** @type {import("./protocol.js").Enter[]} */
  const entering = [];
  /** @type {Delta[]} */
  const matching = [];
  for (const row of rows) row.delta === "enter" ? entering.push(row) : matching.push(row);
  return [{ delta: "reset", rows: entering }, ...matching];
}

/** A live query as the client knows it. */
export class LiveState extends RowsState {
  #query;
  /** @type {import("./protocol.js").LiveQuery | undefined} */
  #moving;

  /** @param {import("./protocol.js").LiveQuery} query @param {boolean} [verify] */
  constructor(query, verify = false) {
    super();
    this.name = query.table;
    this.#query = query;
    this.verify = verify;
  }

  get query() {
    return this.#query;
  }

  get isMoving() {
    return this.#moving !== undefined;
  }

  /**
   * Ask for the window behind another cursor. Until it comes, the old one is followed.
   *
   * @param {import("./protocol.js").Cursor | null} after
   * @param {string} request
   * @returns {import("./protocol.js").Reanchor}
   */
  move(after, request) {
    this.#moving = { ...this.#query, after };
    return { type: "reanchor", id: this.wireId, after, request };
  }

  /**
   * The gateway has done it. Where that was not told with the rows, there were none to tell, or
   * they are yet to come, to a client that is behind.
   */
  moved() {
    if (!this.#moving) return;
    this.#query = this.#moving;
    this.#moving = undefined;
    this.position = undefined;
  }

  /** The move was refused. */
  stay() {
    this.#moving = undefined;
  }

  /** @override @param {string | undefined} since @returns {Subscribe} */
  request(since) {
    const live = this.#moving ?? this.#query;
    return {
      type: "subscribe",
      id: this.wireId,
      live,
      since: this.#moving ? undefined : since,
      verify: this.verify || undefined,
    };
  }

  /** @override @param {Snapshot | Reset} message */
  hasMoved(message) {
    if (!this.#moving || (message.type === "reset" && message.reason !== "window")) return false;
    this.#query = this.#moving;
    this.#moving = undefined;
    return true;
  }
}

/** A reactive query whose rows come as deltas by their key. */
export class QueryRowsState extends RowsState {
  #call;

  /** @param {import("./protocol.js").QueryCall} call */
  constructor(call) {
    super();
    this.name = call.name;
    this.#call = call;
  }

  /** @override @param {string | undefined} since @returns {Subscribe} */
  request(since) {
    return { type: "subscribe", id: this.wireId, query: this.#call, since };
  }

  /** @override @param {import("./protocol.js").Subscribed} message */
  subscribed(message) {
    super.subscribed(message);
    if (message.resumed) this.error = undefined;
  }

  /** @override @param {ViewMessage} message */
  receive(message) {
    if (message.type === "failed") {
      this.error = errorOf(message);
      return [];
    }
    const batches = super.receive(message);
    if (!this.waiting) this.error = undefined;
    return batches;
  }
}
