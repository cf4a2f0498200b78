/**
 * The state of a subscription to rows, made by applying deltas: of a live query, or of a reactive one
 * with `delta`. With its rows and position it can continue after a lost connection. A batch that does
 * not fit, or whose result has another hash, throws `diverged`.
 *
 * @typedef {import("../protocol.js").Delta} Delta
 * @typedef {import("../protocol.js").Snapshot} Snapshot
 * @typedef {import("../protocol.js").Reset} Reset
 * @typedef {import("../protocol.js").Deltas} Deltas
 * @typedef {import("../protocol.js").Subscribe} Subscribe
 * @typedef {import("../protocol.js").ViewMessage} ViewMessage
 * @typedef {{deltas: readonly Delta[], position: string, at?: string}} Batch deltas that were
 *   committed together; a snapshot begins with a reset, and has no `at`
 */

import { behind, diverged, errorOf } from "../errors.js";
import { BATCHES_MAX, DIVERGED_MAX } from "../limits.js";
import { covers, isBefore } from "./position.js";
import { Replica } from "./replica.js";

class RowsState {
  name = "";
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** Why the rows may be out of date. @type {import("../errors.js").HeadwaterError | undefined} */
  error;
  /** The names of the columns in a key. @type {readonly string[]} */
  key = [];
  replica = new Replica();
  waiting = true;
  /** Whether a first result has arrived. */
  #hasRows = false;
  /** The position of the rows that are shown. @type {string | undefined} */
  #shownPosition;
  /** Whether batches may have been lost, so that the next snapshot is always reported. */
  #mayHaveMissed = false;
  /** @type {(import("../protocol.js").Enter | import("../protocol.js").Match)[] | undefined} */
  #parts;
  /** @type {Deltas[]} */
  #laterDeltas = [];
  #diverged = 0;

  /** The rows; while they are read again, the last ones that were right. */
  get value() {
    return this.#hasRows ? this.replica.rows : undefined;
  }

  /** It was subscribed, and its rows have not arrived yet. */
  get isPending() {
    return this.view === undefined || this.waiting;
  }

  /**
   * The message that subscribes, from the current position.
   *
   * @param {string} wireId
   * @returns {Subscribe}
   */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    this.waiting = true;
    this.#parts = undefined;
    this.#laterDeltas = [];
    return this.request(this.position);
  }

  /** @param {string | undefined} _since @returns {Subscribe} */
  request(_since) {
    throw new Error("a subclass must implement request()");
  }

  /** @param {import("../protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
    this.key = message.key ?? [];
    // The database was restored and no longer has this position: any rows are accepted.
    if (message.lost) this.#shownPosition = undefined;
    this.waiting = !message.resumed;
    // Parts of an earlier view's result do not belong to this one.
    this.#parts = undefined;
    this.#laterDeltas = [];
  }

  /**
   * Apply a message; returns the batches that it completes. Throws `diverged`, and `behind` for rows
   * that are older than those that are shown.
   *
   * @param {ViewMessage} message
   * @returns {Batch[]}
   */
  receive(message) {
    switch (message.type) {
      case "deltas":
        return this.#apply(message);
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
    if (this.#shownPosition !== undefined && isBefore(message.position, this.#shownPosition)) {
      throw behind(this.name);
    }
    const deltas = asReset(parts);
    const before = moved || this.#mayHaveMissed ? undefined : this.value;
    this.position = undefined;
    this.waiting = false;
    this.replica.apply(deltas, message.hash);
    this.position = this.#shownPosition = message.position;
    this.#hasRows = true;
    this.#mayHaveMissed = false;
    // After a reconnect the rows are often unchanged; that is not reported.
    const batches = before === this.replica.rows ? [] : [{ deltas, position: message.position }];
    const laterDeltas = this.#laterDeltas;
    this.#laterDeltas = [];
    const later = laterDeltas.filter((each) => !covers(message.position, each.position));
    return [...batches, ...later.flatMap((each) => this.#apply(each))];
  }

  /** @param {Deltas} message @returns {Batch[]} */
  #apply(message) {
    if (this.waiting) {
      // Deltas between the parts of a result are applied after it; before the first they are in it.
      if (this.#parts) this.#laterDeltas.push(message);
      if (this.#laterDeltas.length > BATCHES_MAX) {
        throw diverged(
          `${this.name}: more than ${BATCHES_MAX} batches arrived between the parts of the result`,
        );
      }
      return [];
    }
    this.position = undefined;
    this.replica.apply(message.deltas, message.hash);
    this.position = this.#shownPosition = message.position;
    this.#diverged = 0;
    const { deltas, position, at } = message;
    return deltas.length ? [{ deltas, position, at }] : [];
  }

  /** The rows are wrong. Returns whether to read them again: false after several times in a row. */
  diverged() {
    this.position = undefined;
    this.#mayHaveMissed = true;
    this.waiting = true;
    this.#diverged += 1;
    return this.#diverged < DIVERGED_MAX;
  }
}

/**
 * @param {(import("../protocol.js").Enter | import("../protocol.js").Match)[]} rows
 * @returns {Delta[]}
 */
function asReset(rows) {
  /** @type {import("../protocol.js").Enter[]} */
  const entering = [];
  /** @type {Delta[]} */
  const matching = [];
  for (const row of rows) row.delta === "enter" ? entering.push(row) : matching.push(row);
  return [{ delta: "reset", rows: entering }, ...matching];
}

/** The state of a live query. */
export class LiveState extends RowsState {
  #query;
  /** @type {import("../protocol.js").LiveQuery | undefined} */
  #moving;

  /** @param {import("../protocol.js").LiveQuery} query @param {boolean} [verify] */
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
   * The message that slides the window to another cursor. Until it has moved, the old one is shown.
   *
   * @param {import("../protocol.js").Cursor | null} after
   * @param {string} request
   * @returns {import("../protocol.js").Reanchor}
   */
  move(after, request) {
    this.#moving = { ...this.#query, after };
    return { type: "reanchor", id: this.wireId, after, request };
  }

  /**
   * The gateway has moved the window. If its rows did not come with that, there are none, or a
   * gateway that is behind sends them later.
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

/** The state of a reactive query whose rows are sent as deltas, by their key. */
export class QueryRowsState extends RowsState {
  #call;

  /** @param {import("../protocol.js").QueryCall} call */
  constructor(call) {
    super();
    this.name = call.name;
    this.#call = call;
  }

  /** @override @param {string | undefined} since @returns {Subscribe} */
  request(since) {
    return { type: "subscribe", id: this.wireId, query: this.#call, since };
  }

  /** @override @param {import("../protocol.js").Subscribed} message */
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
