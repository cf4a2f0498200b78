/**
 * The handles that a program has on its subscriptions: `Subscription`, `Live`, `Topic`, `Feed` and
 * `Channel`. Each is a store, and is closed by itself. Handles of equal subscriptions share one
 * `Source`, which ends with the last of them.
 *
 * @typedef {import("./source.js").Source} Source
 * @typedef {import("../protocol.js").Row} Row
 * @typedef {import("../protocol.js").Key} Key
 * @typedef {import("../protocol.js").Cursor} Cursor
 * @typedef {import("../state/rows.js").Batch} Batch
 * @typedef {import("../state/feed.js").Transaction} Transaction
 * @typedef {import("../protocol.js").Publish | import("../protocol.js").SetState} ToChannel
 *
 * @typedef {object} SubscriptionOwner what a handle uses of the client
 * @property {(source: Source) => void} release one handle fewer
 * @property {(source: Source, after: Cursor | null) => Promise<Source | undefined>} reanchor
 * @property {(source: Source, message: ToChannel) => Promise<void>} sendToChannel when the channel
 *   is subscribed; sets the message's id
 * @property {(source: Source) => void} pause
 * @property {(source: Source) => void} resume
 */

import { newKey } from "../connection/calls.js";
import { subscriptionClosed } from "../errors.js";
import { jsonCopy } from "../json.js";
import { TRANSACTIONS_MAX } from "../limits.js";
import { callSafely } from "../store.js";

/** @template T */
export class Subscription {
  /** @type {Set<() => void>} */
  #undo = new Set();
  /** Called when the source is replaced. @type {Set<() => void>} */
  #moves = new Set();
  #isClosed = false;
  #source;

  /** @param {SubscriptionOwner} owner @param {Source} source */
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
   * The current value, never changed in place; undefined until the first has arrived.
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

  /** The position up to which the value is complete; undefined while that is not known. */
  get position() {
    return this.#source.state.position;
  }

  /** A promise of the first value; rejects if there will be none. @returns {Promise<T>} */
  get ready() {
    return this.#source.ready;
  }

  /**
   * Call a listener after every change of value or status; returns the function that stops it.
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
    this.owner.release(this.#source);
  }

  /**
   * Call a function with the current value, and then with every changed one.
   *
   * @param {(value: T, subscription: this) => void} onValue
   */
  onValue(onValue) {
    let isStopped = false;
    /** @type {unknown} */
    let last;
    const notify = () => {
      const { value } = this;
      if (value === undefined || value === last) return;
      last = value;
      onValue(value, this);
    };
    if (this.value !== undefined) {
      queueMicrotask(() => isStopped || this.#isClosed || callSafely(notify));
    }
    const end = this.subscribe(notify);
    return () => {
      isStopped = true;
      end();
    };
  }

  /**
   * Begin something on the source, until the returned function is called or the handle is closed.
   * If the source is replaced, it is ended there and begun on the new one.
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
   * Use another source from now on, which is already held for this handle.
   *
   * @protected
   * @param {Source} source
   */
  move(source) {
    if (this.#isClosed || source === this.#source) return this.owner.release(source);
    const before = this.#source;
    this.#source = source;
    for (const again of this.#moves) again();
    source.refresh(); // listeners of this handle saw other rows before
    this.owner.release(before);
  }
}

/**
 * A live query: the value is its rows, in order.
 *
 * @extends {Subscription<readonly Row[]>}
 */
export class Live extends Subscription {
  /** The number of the last call of `reanchor`, and of the last one that was done. */
  #lastSlide = 0;
  #lastSlideDone = 0;

  /** @returns {import("../state/rows.js").LiveState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /** The primary keys of the rows, in the same order. */
  get keys() {
    return this.#state.replica.keys;
  }

  /** The names of the columns in a key. */
  get keyColumns() {
    return this.#state.key;
  }

  /** A row's place in the order, for `reanchor` or another query's `after`. @param {Key} key */
  cursor(key) {
    return this.#state.replica.cursor(key);
  }

  /** A store of one row; its listeners are called only for that row. @param {Key} key */
  row(key) {
    const whole = Array.isArray(key) ? key : [key];
    const current = () => this.source.row(whole);
    return {
      get value() {
        return current().value;
      },
      /** @param {() => void} listener */
      subscribe: (listener) => this.attach((source) => source.row(whole).subscribe(listener)),
    };
  }

  /**
   * Call a function with every batch that was applied; first, if there are rows, with a reset to
   * them.
   *
   * @param {(batch: Batch) => void} onBatch
   */
  deltas(onBatch) {
    return this.attach((source) => {
      const { state } = source;
      if (state.value !== undefined && state.position !== undefined) {
        callSafely(onBatch, { deltas: this.#state.replica.asDeltas(), position: state.position });
      }
      return source.onEvent(onBatch);
    });
  }

  /**
   * Slide the window: it then begins after this cursor, or with null at the start.
   *
   * @param {Cursor | null} after
   */
  async reanchor(after) {
    if (this.status === "closed") {
      throw subscriptionClosed();
    }
    const slide = ++this.#lastSlide;
    const moved = await this.owner.reanchor(this.source, jsonCopy(after));
    // Several slides may be done in any order: the latest counts.
    const isLatest = slide > this.#lastSlideDone;
    if (isLatest) this.#lastSlideDone = slide;
    if (moved && isLatest) this.move(moved);
    else if (moved) this.owner.release(moved);
  }
}

/**
 * A topic: the value is the rows that were sent since it began, by table.
 *
 * @extends {Subscription<import("../state/topic.js").TopicValue>}
 */
export class Topic extends Subscription {
  /** When the last operation was committed. */
  get at() {
    return this.#state.at;
  }

  /**
   * Add the rows of a table that were there before the topic began, as the program has read them.
   * Rows that the topic has sent since are not replaced.
   *
   * @param {string} entity
   * @param {readonly Row[]} rows
   * @param {string | readonly string[]} [key]
   */
  fill(entity, rows, key = "id") {
    this.#state.fill(entity, rows, typeof key === "string" ? [key] : key);
    this.source.refresh();
  }

  /** @returns {import("../state/topic.js").TopicState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /**
   * Call a function with the operations of each flush.
   *
   * @param {(ops: import("../state/topic.js").TopicOp[], topic: this) => void} onOps
   */
  onOps(onOps) {
    return this.attach((source) => source.onEvent((ops) => onOps(ops, this)));
  }
}

/**
 * A change feed: every transaction, in order, once. If the callback returns a promise, the next
 * transaction waits for it.
 *
 * @extends {Subscription<Transaction>}
 */
export class Feed extends Subscription {
  /** @type {Transaction[]} */
  #waiting = [];
  #isDelivering = false;
  #isPaused = false;
  #onTransaction;

  /**
   * @param {SubscriptionOwner} owner
   * @param {Source} source
   * @param {(transaction: Transaction) => unknown} onTransaction
   */
  constructor(owner, source, onTransaction) {
    super(owner, source);
    this.#onTransaction = onTransaction;
    this.attach((source) => source.onEvent((transaction) => this.#take(transaction)));
  }

  /** @param {Transaction} transaction */
  #take(transaction) {
    this.#waiting.push(transaction);
    if (!this.#isDelivering) void this.#deliver();
    if (this.#waiting.length <= TRANSACTIONS_MAX || this.#isPaused) return;
    this.#isPaused = true;
    this.owner.pause(this.source);
  }

  async #deliver() {
    this.#isDelivering = true;
    for (;;) {
      const transaction = this.#waiting.shift();
      if (!transaction || this.status === "closed") break;
      const result = callSafely(this.#onTransaction, transaction);
      // `instanceof Promise` would miss promises of libraries and of other frames.
      if (typeof (/** @type {any} */ (result)?.then) === "function") {
        await Promise.resolve(result).catch(reportUncaught);
      }
    }
    this.#isDelivering = false;
    if (!this.#isPaused || this.status === "closed") return;
    this.#isPaused = false;
    this.owner.resume(this.source);
  }
}

/** @param {unknown} error */
function reportUncaught(error) {
  queueMicrotask(() => {
    throw error;
  });
}

/**
 * A channel: the value is the latest message.
 *
 * @extends {Subscription<import("../protocol.js").ChannelMessage>}
 */
export class Channel extends Subscription {
  /** @returns {import("../state/channel.js").ChannelState} */
  get #state() {
    return /** @type {any} */ (this.source.state);
  }

  /** A store: the members of the channel. */
  get members() {
    return this.#state.members;
  }

  /**
   * Call a function with every message.
   *
   * @param {(message: import("../protocol.js").ChannelMessage) => void} onMessage
   */
  onMessage(onMessage) {
    return this.attach((source) => source.onEvent(onMessage));
  }

  /** The id of this client among the members; undefined if it is not one. */
  get member() {
    return this.#state.member;
  }

  /** How often messages may have been lost before they reached this client. */
  get missed() {
    return this.#state.missed;
  }

  /**
   * Send a message to all clients on the channel; settles when the gateway has published it.
   *
   * @param {any} data
   * @returns {Promise<void>}
   */
  publish(data) {
    const own = jsonCopy(data) ?? null;
    return this.#send({ type: "publish", id: "", data: own, idempotency_key: newKey() });
  }

  /** Change this member's state, which the others see. @param {any} state @returns {Promise<void>} */
  setState(state) {
    const own = jsonCopy(state) ?? null;
    this.#state.setState(own);
    return this.#send({ type: "state", id: "", state: own });
  }

  /** @param {ToChannel} message */
  #send(message) {
    const sent = this.owner.sendToChannel(this.source, message);
    // `onError` is called with a failure, also if the program does not await the promise.
    sent.catch(() => {});
    return sent;
  }
}
