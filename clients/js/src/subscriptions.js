/**
 * What a program holds: handles on what the client follows. Each is a store of its own value, and
 * closed by itself; what it follows ends with the last that asked for it.
 *
 * @typedef {import("./source.js").Source} Source
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./protocol.js").Key} Key
 * @typedef {import("./protocol.js").Cursor} Cursor
 * @typedef {import("./rows-state.js").Batch} Batch
 * @typedef {import("./feed-state.js").Transaction} Transaction
 * @typedef {import("./protocol.js").Publish | import("./protocol.js").SetState} Said
 *
 * @typedef {object} Owner the client, as its subscriptions see it
 * @property {(source: Source) => void} leave one holder fewer
 * @property {(source: Source, after: Cursor | null) => Promise<Source | undefined>} reanchor
 * @property {(source: Source, message: Said) => Promise<void>} say once it is followed, which gives
 *   the message its id
 * @property {(source: Source) => void} pause
 * @property {(source: Source) => void} resume
 */

import { newKey } from "./calls.js";
import { connectionFailed } from "./errors.js";
import { plain } from "./json.js";
import { TRANSACTIONS_MAX } from "./limits.js";
import { called } from "./store.js";

/** @template T */
export class Subscription {
  /** @type {Set<() => void>} */
  #undo = new Set();
  /** What is done when the source is another. @type {Set<() => void>} */
  #moves = new Set();
  #isClosed = false;
  #source;

  /** @param {Owner} owner @param {Source} source */
  constructor(owner, source) {
    /** @protected */
    this.owner = owner;
    this.#source = source;
    source.holders += 1;
  }

  /** @protected */
  get source() {
    return this.#source;
  }

  /**
   * The present value, never changed in place; undefined before the first.
   *
   * @returns {T | undefined}
   */
  get value() {
    return this.#source.value;
  }

  /** @returns {import("./source.js").Status} */
  get status() {
    return this.#isClosed ? "closed" : this.#source.status;
  }

  /** Why it failed, or why the value may be out of date. */
  get error() {
    return this.#source.error;
  }

  /** What the value is complete up to; undefined while that is not known. */
  get position() {
    return this.#source.state.position;
  }

  /** Settles when there is a first value, or none will be. @returns {Promise<T>} */
  get ready() {
    return this.#source.ready;
  }

  /**
   * Be called after every change of value or status; gives what ends that.
   *
   * @param {() => void} listener
   */
  subscribe(listener) {
    return this.attach((source) => source.subscribe(listener));
  }

  /** End it. */
  close() {
    if (this.#isClosed) return;
    this.#isClosed = true;
    for (const undo of this.#undo) undo();
    this.#undo.clear();
    this.owner.leave(this.#source);
  }

  /** Be called with every other value. @param {(value: T, subscription: this) => void} onValue */
  onValue(onValue) {
    let isOver = false;
    /** @type {unknown} */
    let last;
    const look = () => {
      const { value } = this;
      if (value === undefined || value === last) return;
      last = value;
      onValue(value, this);
    };
    if (this.value !== undefined) {
      queueMicrotask(() => isOver || this.#isClosed || called(look));
    }
    const end = this.subscribe(look);
    return () => {
      isOver = true;
      end();
    };
  }

  /**
   * Do something with the source until that is ended, or this is closed.
   *
   * @protected
   * @param {(source: Source) => () => void} begin
   */
  attach(begin) {
    let end = begin(this.#source);
    const again = () => {
      end();
      end = begin(this.#source);
    };
    this.#moves.add(again);
    const undo = () => {
      end();
      this.#moves.delete(again);
      this.#undo.delete(undo);
    };
    if (this.#isClosed) undo();
    else this.#undo.add(undo);
    return undo;
  }

  /**
   * Follow another source from here on, which is held for this already.
   *
   * @protected
   * @param {Source} source
   */
  move(source) {
    if (this.#isClosed || source === this.#source) return this.owner.leave(source);
    const before = this.#source;
    this.#source = source;
    for (const again of this.#moves) again();
    source.refresh(); // its rows are other ones to who listens here
    this.owner.leave(before);
  }
}

/**
 * A live query: the value is its rows, in order.
 *
 * @extends {Subscription<readonly Row[]>}
 */
export class Live extends Subscription {
  /** How often it was to slide, and which of these calls it has come to. */
  #slides = 0;
  #slid = 0;

  /** @returns {import("./rows-state.js").LiveState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /** The primary keys of the rows, in the same order. */
  get keys() {
    return this.#state.replica.keys;
  }

  /** What the values in a key are called. */
  get keyColumns() {
    return this.#state.key;
  }

  /** A row's place in the order, for `reanchor` or another query's `after`. @param {Key} key */
  cursor(key) {
    return this.#state.replica.cursor(key);
  }

  /** The store of one row, which tells of that row only. @param {Key} key */
  row(key) {
    const whole = Array.isArray(key) ? key : [key];
    const present = () => this.source.row(whole);
    return {
      get value() {
        return present().value;
      },
      /** @param {() => void} listener */
      subscribe: (listener) => this.attach((source) => source.row(whole).subscribe(listener)),
    };
  }

  /**
   * Be called with every batch that was applied; first, if there are rows, with a reset to them.
   *
   * @param {(batch: Batch) => void} onBatch
   */
  deltas(onBatch) {
    return this.attach((source) => {
      const { state } = source;
      if (state.value !== undefined && state.position !== undefined) {
        called(onBatch, { deltas: this.#state.replica.present(), position: state.position });
      }
      return source.follow(onBatch);
    });
  }

  /**
   * Slide the window: it begins behind this cursor, or with null at the start.
   *
   * @param {Cursor | null} after
   */
  async reanchor(after) {
    if (this.status === "closed") {
      throw connectionFailed("the subscription was closed", { retryable: false });
    }
    const slide = ++this.#slides;
    const moved = await this.owner.reanchor(this.source, plain(after));
    // The rows of several may come in any order: the latest counts.
    const isLatest = slide > this.#slid;
    if (isLatest) this.#slid = slide;
    if (moved && isLatest) this.move(moved);
    else if (moved) this.owner.leave(moved);
  }
}

/**
 * A topic: the value is what was told since it began, by table.
 *
 * @extends {Subscription<import("./topic-state.js").TopicValue>}
 */
export class Topic extends Subscription {
  /** When the last of what was told happened. */
  get at() {
    return this.#state.at;
  }

  /**
   * What there was before: rows of a table as they were read. Of those that the topic has told of
   * since, what the topic said counts.
   *
   * @param {string} entity
   * @param {readonly Row[]} rows
   * @param {string | readonly string[]} [key]
   */
  fill(entity, rows, key = "id") {
    this.#state.fill(entity, rows, typeof key === "string" ? [key] : key);
    this.source.refresh();
  }

  /** @returns {import("./topic-state.js").TopicState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /**
   * Be called with what was told, all of one flush at once.
   *
   * @param {(ops: import("./topic-state.js").TopicOp[], topic: this) => void} onOps
   */
  onOps(onOps) {
    return this.attach((source) => source.follow((ops) => onOps(ops, this)));
  }
}

/**
 * A change feed: every transaction, in order, none twice. A callback that gives a promise is waited
 * for before the next.
 *
 * @extends {Subscription<Transaction>}
 */
export class Feed extends Subscription {
  /** @type {Transaction[]} */
  #waiting = [];
  #isWorking = false;
  #isPaused = false;
  #onTransaction;

  /**
   * @param {Owner} owner
   * @param {Source} source
   * @param {(transaction: Transaction) => unknown} onTransaction
   */
  constructor(owner, source, onTransaction) {
    super(owner, source);
    this.#onTransaction = onTransaction;
    this.attach((source) => source.follow((transaction) => this.#take(transaction)));
  }

  /** @param {Transaction} transaction */
  #take(transaction) {
    this.#waiting.push(transaction);
    if (!this.#isWorking) void this.#work();
    if (this.#waiting.length <= TRANSACTIONS_MAX || this.#isPaused) return;
    this.#isPaused = true;
    this.owner.pause(this.source);
  }

  async #work() {
    this.#isWorking = true;
    for (;;) {
      const transaction = this.#waiting.shift();
      if (!transaction || this.status === "closed") break;
      const given = called(this.#onTransaction, transaction);
      // Of another kind or frame, it is no `Promise` of ours.
      if (typeof (/** @type {any} */ (given)?.then) === "function") {
        await Promise.resolve(given).catch(thrown);
      }
    }
    this.#isWorking = false;
    if (!this.#isPaused || this.status === "closed") return;
    this.#isPaused = false;
    this.owner.resume(this.source);
  }
}

/** @param {unknown} error */
function thrown(error) {
  queueMicrotask(() => {
    throw error;
  });
}

/**
 * A channel: the value is the latest message.
 *
 * @extends {Subscription<import("./protocol.js").ChannelMessage>}
 */
export class Channel extends Subscription {
  /** @returns {import("./channel-state.js").ChannelState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /** Who is present. A store. */
  get members() {
    return this.#state.members;
  }

  /**
   * Be called with every message.
   *
   * @param {(message: import("./protocol.js").ChannelMessage) => void} onMessage
   */
  onMessage(onMessage) {
    return this.attach((source) => source.follow(onMessage));
  }

  /** Which of the members this is; undefined if it is not one. */
  get member() {
    return this.#state.member;
  }

  /** How often messages may have been lost on the way here. */
  get missed() {
    return this.#state.missed;
  }

  /**
   * Say something to all who follow the channel; settles when it was passed on.
   *
   * @param {any} data
   * @returns {Promise<void>}
   */
  publish(data) {
    const own = plain(data) ?? null;
    return this.#say({ type: "publish", id: "", data: own, idempotency_key: newKey() });
  }

  /** Have another state, which the others see. @param {any} state @returns {Promise<void>} */
  setState(state) {
    const own = plain(state) ?? null;
    this.#state.setState(own);
    return this.#say({ type: "state", id: "", state: own });
  }

  /** @param {Said} message */
  #say(message) {
    const said = this.owner.say(this.source, message);
    // Who does not wait for it hears of a failure by `onError`.
    said.catch(() => {});
    return said;
  }
}
