/**
 * The source of one or more handles: one subscription at the gateway. It has their status and calls
 * their listeners; its `state` interprets the messages.
 *
 * @typedef {"waiting" | "live" | "stale" | "failed" | "closed"} Status
 * @typedef {import("../state/rows.js").LiveState | import("../state/rows.js").QueryRowsState
 *   | import("../state/query.js").QueryState | import("../state/feed.js").FeedState
 *   | import("../state/topic.js").TopicState | import("../state/channel.js").ChannelState} State
 * @typedef {import("../protocol.js").ViewMessage} ViewMessage
 * @typedef {import("../protocol.js").Key} Key
 */

import { Backoff } from "../connection/backoff.js";
import { subscriptionClosed } from "../errors.js";
import { RESUBSCRIBE } from "../state/feed.js";
import { SUBSCRIBE_ATTEMPTS_MAX } from "../limits.js";
import { keyText } from "../state/replica.js";
import { RowStore } from "./row-store.js";
import { callSafely, Store } from "../store.js";

export class Source extends Store {
  /** @type {Status} */
  status = "waiting";
  /** How many handles there are. */
  holders = 0;
  isPaused = false;
  /** Refusals in a row; a new subscription gives up after fewer. */
  backoff = new Backoff({ failuresMax: SUBSCRIBE_ATTEMPTS_MAX });
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  timer;
  /** The last slide of its window; slides are done one by one. @type {Promise<unknown>} */
  slides = Promise.resolve();
  /** @type {Promise<any>} */
  ready;
  /** @type {(value: any) => void} */
  #resolve = () => {};
  /** @type {(error: unknown) => void} */
  #reject = () => {};
  /** @type {import("../errors.js").HeadwaterError | undefined} */
  #error;
  /** @type {Set<(event: any) => void>} */
  #eventListeners = new Set();
  /** @type {Map<string, RowStore>} */
  #rowStores = new Map();
  #newBackoff;

  /**
   * @param {State} state
   * @param {() => Backoff} newBackoff for the time after it has begun
   * @param {string} [requestText] the text of its request, if it is shared
   */
  constructor(state, newBackoff, requestText) {
    super();
    this.state = state;
    this.requestText = requestText;
    this.#newBackoff = newBackoff;
    this.ready = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    // A program that does not await it sees failures in `status`.
    this.ready.catch(() => {});
  }

  get value() {
    return this.state.value;
  }

  get error() {
    return this.#error ?? this.state.error;
  }

  get isOver() {
    return this.status === "failed" || this.status === "closed";
  }

  /**
   * Call a listener with every event: a batch, a transaction, operations or a message.
   *
   * @param {(event: any) => void} listener
   */
  onEvent(listener) {
    const own = (/** @type {any} */ event) => listener(event);
    this.#eventListeners.add(own);
    return () => void this.#eventListeners.delete(own);
  }

  /** A store of one row. @param {Key} key */
  row(key) {
    const text = keyText(key);
    return this.#rowStores.get(text) ?? new RowStore(this, key, this.#rowStores);
  }

  /** The program itself has changed the value. */
  refresh() {
    this.changed();
    for (const store of this.#rowStores.values()) store.refresh(true);
  }

  // ------------------------------------------------------------------ for the session

  /** @param {import("../protocol.js").Subscribed} message */
  subscribed(message) {
    const before = this.value;
    for (const event of this.state.subscribed(message) ?? []) this.#notify(event);
    if (before !== this.value) this.changed();
    this.#updateStatus();
  }

  /** Apply a message. Returns whether to subscribe again. @param {ViewMessage} message */
  receive(message) {
    const before = this.value;
    const events = this.state.receive(message);
    if (events === RESUBSCRIBE) return true;
    for (const event of events) this.#notify(event);
    if (before !== this.value) this.changed();
    this.#updateStatus();
    return false;
  }

  /** The connection is lost, or the value is known to be wrong. */
  markStale() {
    if (this.status === "live") this.#setStatus("stale");
  }

  /** @param {import("../errors.js").HeadwaterError} error */
  fail(error) {
    if (this.isOver) return;
    this.#error = error;
    this.#end("failed", error);
  }

  close() {
    if (!this.isOver) this.#end("closed", subscriptionClosed());
  }

  /** @param {"failed" | "closed"} status @param {unknown} error */
  #end(status, error) {
    clearTimeout(this.timer);
    this.#setStatus(status);
    this.#reject(error);
  }

  #updateStatus() {
    if (this.isOver) return;
    const { state } = this;
    if (state.isPending) {
      if (state.error) this.markStale();
      return;
    }
    this.#setStatus(state.error ? "stale" : "live");
    this.backoff = this.#newBackoff();
    this.#resolve(this.value);
  }

  /** @param {Status} status */
  #setStatus(status) {
    if (this.status !== status) this.changed();
    this.status = status;
  }

  /** @param {any} event */
  #notify(event) {
    for (const listener of [...this.#eventListeners]) callSafely(listener, event);
    if (this.#rowStores.size && event.deltas) this.#notifyRows(event.deltas);
  }

  /** @param {readonly import("../protocol.js").Delta[]} deltas */
  #notifyRows(deltas) {
    const all = deltas.some((delta) => delta.delta === "reset");
    const touched = all
      ? [...this.#rowStores.values()]
      : deltas.map((delta) => "key" in delta && this.#rowStores.get(keyText(delta.key)));
    for (const store of touched) if (store) store.refresh();
  }
}
