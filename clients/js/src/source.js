/**
 * What a client follows: one subscription of the gateway, for all handles that ask for the same.
 * It says how it stands, and passes on what happens; the `state` knows what messages mean.
 *
 * @typedef {"waiting" | "live" | "stale" | "failed" | "closed"} Status
 * @typedef {import("./rows-state.js").LiveState | import("./rows-state.js").QueryRowsState
 *   | import("./query-state.js").QueryState | import("./feed-state.js").FeedState
 *   | import("./topic-state.js").TopicState | import("./channel-state.js").ChannelState} State
 * @typedef {import("./protocol.js").ViewMessage} ViewMessage
 * @typedef {import("./protocol.js").Key} Key
 */

import { Backoff } from "./backoff.js";
import { connectionFailed } from "./errors.js";
import { AGAIN } from "./feed-state.js";
import { SUBSCRIBE_ATTEMPTS_MAX } from "./limits.js";
import { keyText } from "./replica.js";
import { RowStore } from "./row-store.js";
import { called, Store } from "./store.js";

export class Source extends Store {
  /** @type {Status} */
  status = "waiting";
  /** How many handles there are. */
  holders = 0;
  /** Whether nothing of it is wanted for now. */
  isPaused = false;
  /** Refusals in a row; of something new, fewer are borne. */
  backoff = new Backoff({ failuresMax: SUBSCRIBE_ATTEMPTS_MAX });
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  timer;
  /** The last of the slides of its window, which are done one by one. @type {Promise<unknown>} */
  slides = Promise.resolve();
  /** @type {Promise<any>} */
  ready;
  /** @type {(value: any) => void} */
  #resolve = () => {};
  /** @type {(error: unknown) => void} */
  #reject = () => {};
  /** @type {import("./errors.js").HeadwaterError | undefined} */
  #error;
  /** @type {Set<(event: any) => void>} */
  #followers = new Set();
  /** @type {Map<string, RowStore>} */
  #rowStores = new Map();
  #newBackoff;

  /**
   * @param {State} state
   * @param {() => Backoff} newBackoff counts failures once it has begun
   * @param {string} [sharedAs] by what others find it
   */
  constructor(state, newBackoff, sharedAs) {
    super();
    this.state = state;
    this.sharedAs = sharedAs;
    this.#newBackoff = newBackoff;
    this.ready = new Promise((resolve, reject) => {
      this.#resolve = resolve;
      this.#reject = reject;
    });
    // Whoever does not wait for it learns of failures by `status`.
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
   * Be told every event: a batch, a transaction, ops or a message.
   *
   * @param {(event: any) => void} follower
   */
  follow(follower) {
    const own = (/** @type {any} */ event) => follower(event);
    this.#followers.add(own);
    return () => void this.#followers.delete(own);
  }

  /** The store of one row. @param {Key} key */
  row(key) {
    const text = keyText(key);
    return this.#rowStores.get(text) ?? new RowStore(this, key, this.#rowStores);
  }

  /** The value is another, by the program's own doing. */
  refresh() {
    this.changed();
    for (const store of this.#rowStores.values()) store.refresh(true);
  }

  // ------------------------------------------------------------------ for the client

  /** @param {import("./protocol.js").Subscribed} message */
  subscribed(message) {
    const before = this.value;
    for (const event of this.state.subscribed(message) ?? []) this.#tell(event);
    if (before !== this.value) this.changed();
    this.#settle();
  }

  /** Take a frame; whether the subscription must be asked for anew. @param {ViewMessage} message */
  receive(message) {
    const before = this.value;
    const events = this.state.receive(message);
    if (events === AGAIN) return true;
    for (const event of events) this.#tell(event);
    if (before !== this.value) this.changed();
    this.#settle();
    return false;
  }

  /** The connection is lost, or what is there is known to be wrong. */
  doubted() {
    if (this.status === "live") this.#become("stale");
  }

  /** @param {import("./errors.js").HeadwaterError} error */
  fail(error) {
    if (this.isOver) return;
    this.#error = error;
    this.#end("failed", error);
  }

  close() {
    if (!this.isOver) this.#end("closed", connectionFailed("the subscription was closed"));
  }

  /** @param {"failed" | "closed"} status @param {unknown} error */
  #end(status, error) {
    clearTimeout(this.timer);
    this.#become(status);
    this.#reject(error);
  }

  #settle() {
    if (this.isOver) return;
    const { state } = this;
    if (state.isDue) {
      if (state.error) this.doubted();
      return;
    }
    this.#become(state.error ? "stale" : "live");
    this.backoff = this.#newBackoff();
    this.#resolve(this.value);
  }

  /** @param {Status} status */
  #become(status) {
    if (this.status !== status) this.changed();
    this.status = status;
  }

  /** @param {any} event */
  #tell(event) {
    for (const follower of [...this.#followers]) called(follower, event);
    if (this.#rowStores.size && event.deltas) this.#tellRows(event.deltas);
  }

  /** @param {readonly import("./protocol.js").Delta[]} deltas */
  #tellRows(deltas) {
    const all = deltas.some((delta) => delta.delta === "reset");
    const touched = all
      ? [...this.#rowStores.values()]
      : deltas.map((delta) => "key" in delta && this.#rowStores.get(keyText(delta.key)));
    for (const store of touched) if (store) store.refresh();
  }
}
