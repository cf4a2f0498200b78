/**
 * Every subscription of a client, over all its connections: finds the one that a message is for, and
 * subscribes again after a lost connection. Each time, the subscription gets a new id on the wire, so
 * that late messages with the old id are ignored.
 *
 * @typedef {import("../errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("../protocol.js").Answer} Answer
 * @typedef {import("../protocol.js").ClientMessage} ClientMessage
 * @typedef {import("../protocol.js").Cursor} Cursor
 * @typedef {import("../protocol.js").ErrorMessage} ErrorMessage
 * @typedef {import("../protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./source.js").State} State
 *
 * @typedef {object} SessionOptions
 * @property {(message: ClientMessage) => unknown} send
 * @property {(error: HeadwaterErrorType) => void} onError
 * @property {(error: HeadwaterErrorType) => void} onBehind the gateway has not yet read a position
 *   that the client received from another gateway
 * @property {() => import("../connection/backoff.js").Backoff} newBackoff
 */

import { errorOf, subscriptionClosed } from "../errors.js";
import { stringify } from "../json.js";
import { covers } from "../state/position.js";
import { LiveState } from "../state/rows.js";
import { Source } from "./source.js";

export class Session {
  /** How often a result did not match the gateway's and was read again. */
  diverged = 0;
  #send;
  #onError;
  #onBehind;
  #newBackoff;
  /**
   * The latest position in any message, on any connection: no subscription begins before it.
   *
   * @type {string | undefined}
   */
  #seen;
  #isConnected = false;
  /** Why there will be no more subscriptions. @type {HeadwaterErrorType | undefined} */
  #error;
  /** @type {Set<Source>} */
  #sources = new Set();
  /** By the text of the request. @type {Map<string, Source>} */
  #byRequest = new Map();
  /** Those that were subscribed on this connection. @type {Map<string, Source>} */
  #byWireId = new Map();
  /** @type {Map<number, Source>} */
  #byView = new Map();
  #number = 0;
  /**
   * Called with the answer to the slide of a window, by the id of its request.
   *
   * @type {Map<string, (message: Answer | ErrorMessage) => void>}
   */
  #slides = new Map();
  /** Called after the next message or change of the connection. @type {Set<() => void>} */
  #waiters = new Set();

  /** @param {SessionOptions} options */
  constructor({ send, onError, onBehind, newBackoff }) {
    this.#send = send;
    this.#onError = onError;
    this.#onBehind = onBehind;
    this.#newBackoff = newBackoff;
  }

  // ------------------------------------------------------------------ for subscriptions

  /**
   * The source for a request; equal requests share one.
   *
   * @param {object} request
   * @param {() => State} newState
   */
  share(request, newState) {
    const text = stringify(request, true);
    const known = this.#byRequest.get(text);
    if (known && !known.isOver) return known;
    const source = new Source(newState(), this.#newBackoff, text);
    this.#byRequest.set(text, source);
    return this.#begin(source);
  }

  /** A source that is not shared. @param {State} state */
  add(state) {
    return this.#begin(new Source(state, this.#newBackoff));
  }

  /** @param {LiveQuery} query @param {boolean} verify */
  live(query, verify) {
    return this.share({ live: query, verify }, () => new LiveState(query, verify));
  }

  /**
   * One handle fewer. The source ends with the last, unless a new one is opened in the same task.
   *
   * @param {Source} source
   */
  release(source) {
    source.holders -= 1;
    queueMicrotask(() => source.holders || this.#end(source));
  }

  /** Unsubscribe until `resume`. @param {Source} source */
  pause(source) {
    source.isPaused = true;
    this.#unsubscribe(source);
  }

  /** @param {Source} source */
  resume(source) {
    source.isPaused = false;
    if (this.#sources.has(source) && !this.#isSubscribed(source)) this.#subscribe(source);
  }

  /**
   * Slide the window of a live query. A source that other handles use is not changed.
   *
   * @param {Source} source
   * @param {Cursor | null} after
   * @returns {Promise<Source | undefined>} a new source if it was shared, held for the caller
   */
  async reanchor(source, after) {
    const state = /** @type {LiveState} */ (source.state);
    if (source.holders > 1 || source.isOver) {
      const moved = this.live({ ...state.query, after }, state.verify);
      moved.holders += 1;
      try {
        await moved.ready;
      } catch (error) {
        this.release(moved);
        throw error;
      }
      return moved;
    }
    // Its query changes, so that requests for the old one no longer find it.
    if (source.requestText) this.#byRequest.delete(source.requestText);
    source.requestText = undefined;
    const slide = source.slides.then(() => this.#slide(source, state, after));
    source.slides = slide.catch(() => {});
    await slide;
    return undefined;
  }

  /** @param {Source} source @param {LiveState} state @param {Cursor | null} after */
  async #slide(source, state, after) {
    // Without a subscription the gateway has no window to slide.
    await this.untilSubscribed(source);
    // The letter keeps it apart from the ids of subscriptions (digits) and of calls (`r`).
    const request = `s${++this.#number}`;
    /** @type {unknown} */
    let refusal;
    this.#slides.set(request, (message) => {
      if (message.type === "error") refusal = errorOf(message);
      else state.moved();
    });
    try {
      this.#send(state.move(after, request));
      while (state.isMoving && !refusal && !source.isOver) await this.nextEvent();
    } finally {
      this.#slides.delete(request);
      state.stay();
    }
    if (refusal) throw refusal;
    if (source.isOver) throw source.error ?? subscriptionClosed();
  }

  /**
   * Have the gateway wait until all current subscriptions have a position. It waits only for those
   * that it serves, so this first waits for those that have not begun: after a reconnect, or while
   * they are refused temporarily. If one was subscribed again meanwhile, the wait is repeated.
   *
   * @param {() => Promise<unknown>} wait
   */
  async waitForAll(wait) {
    const sources = [...this.#sources].filter((source) => !source.isPaused);
    for (;;) {
      while (sources.some((source) => this.#hasNotBegun(source))) await this.nextEvent();
      if (this.#error) throw this.#error;
      const wireIds = sources.map((source) => source.state.wireId);
      await wait();
      const isSame = sources.every(
        (source, i) => !this.#hasNotBegun(source) && source.state.wireId === wireIds[i],
      );
      if (isSame) return;
    }
  }

  /** Whether it has not begun, or not continued after a reconnect. @param {Source} source */
  #hasNotBegun(source) {
    if (!this.#sources.has(source) || source.isPaused) return false;
    if (!this.#isConnected || !this.#isSubscribed(source)) return true;
    return source.state.isPending && !source.state.error;
  }

  /** Wait until it has begun on the current connection. @param {Source} source */
  async untilSubscribed(source) {
    const hasBegun = () => this.#isSubscribed(source) && !source.state.isPending;
    while (!source.isOver && !hasBegun()) await this.nextEvent();
    if (source.isOver) throw source.error ?? subscriptionClosed();
  }

  // ------------------------------------------------------------------ for the connection

  /** There is a new connection: every source subscribes from its position. */
  connected() {
    this.#isConnected = true;
    for (const source of [...this.#sources]) {
      clearTimeout(source.timer);
      if (!source.isPaused) this.#subscribe(source);
    }
  }

  lost() {
    this.#isConnected = false;
    this.#byWireId.clear();
    this.#byView.clear();
    for (const source of this.#sources) source.markStale();
    this.#notifyWaiters();
  }

  /** There will be no other connection. @param {HeadwaterErrorType} error */
  fail(error) {
    this.#error = error;
    for (const source of [...this.#sources]) this.#fail(source, error);
    this.#notifyWaiters();
  }

  /** End every subscription. @param {HeadwaterErrorType} error for later subscriptions */
  close(error) {
    this.#error ??= error;
    for (const source of [...this.#sources]) this.#end(source);
    this.#notifyWaiters();
  }

  /** A message had this position. @param {string} position */
  sawPosition(position) {
    if (this.#seen === undefined || !covers(this.#seen, position)) this.#seen = position;
  }

  /** @param {import("../protocol.js").ServerMessage} message */
  receive(message) {
    if (message.type === "subscribed") this.#subscribed(message);
    else if (message.type === "answer") this.#slides.get(message.id)?.(message);
    else if (message.type === "error") this.#refused(message);
    else if ("view" in message) this.#fold(message);
    this.#notifyWaiters();
  }

  // ------------------------------------------------------------------ beginning and ending

  /** @param {Source} source */
  #begin(source) {
    if (this.#error) {
      source.fail(this.#error);
      return source;
    }
    this.#sources.add(source);
    this.#subscribe(source);
    return source;
  }

  /**
   * Subscribe, if there is a connection; otherwise `connected` does.
   *
   * @param {Source} source
   */
  #subscribe(source) {
    if (!this.#isConnected) return;
    const wireId = String(++this.#number);
    const message = source.state.subscribe(wireId);
    this.#byWireId.set(wireId, source);
    this.#send(message.channel ? message : { ...message, after: this.#seen });
  }

  /** Whether it was subscribed on this connection. @param {Source} source */
  #isSubscribed(source) {
    return this.#byWireId.get(source.state.wireId) === source;
  }

  /** @param {Source} source */
  #resubscribe(source) {
    this.#unsubscribe(source);
    this.#subscribe(source);
  }

  /** @param {Source} source */
  #unsubscribe(source) {
    clearTimeout(source.timer);
    const { view, wireId } = source.state;
    if (view !== undefined && this.#byView.get(view) === source) this.#byView.delete(view);
    if (this.#byWireId.delete(wireId)) this.#send({ type: "unsubscribe", id: wireId });
  }

  /** @param {Source} source */
  #drop(source) {
    this.#sources.delete(source);
    if (source.requestText && this.#byRequest.get(source.requestText) === source) {
      this.#byRequest.delete(source.requestText);
    }
    this.#unsubscribe(source);
    this.#notifyWaiters();
  }

  /** @param {Source} source */
  #end(source) {
    this.#drop(source);
    source.close();
  }

  /** @param {Source} source @param {HeadwaterErrorType} error */
  #fail(source, error) {
    this.#drop(source);
    source.fail(error);
    if (error !== this.#error) this.#onError(error);
  }

  /**
   * The gateway has ended it: subscribe again after a pause if the error is temporary.
   *
   * @param {Source} source
   * @param {HeadwaterErrorType} error
   */
  #failed(source, error) {
    const pause = error.retryable ? source.backoff.failed(Math.random(), error.retryAfter) : null;
    if (pause === null) {
      this.#fail(source, error);
      return;
    }
    source.markStale();
    source.timer = setTimeout(() => this.#subscribe(source), pause * 1000);
  }

  // ------------------------------------------------------------------ messages

  /** @param {import("../protocol.js").Subscribed} message */
  #subscribed(message) {
    const source = this.#byWireId.get(message.id);
    if (!source) return;
    if (message.lost) this.#seen = undefined;
    if (source.state.view !== undefined) this.#byView.delete(source.state.view);
    this.#byView.set(message.view, source);
    source.subscribed(message);
  }

  /** @param {import("../protocol.js").ViewMessage} message */
  #fold(message) {
    const source = this.#byView.get(message.view);
    if (!source) return;
    try {
      if (source.receive(message)) this.#resubscribe(source);
    } catch (error) {
      this.#receiveFailed(source, /** @type {HeadwaterErrorType} */ (error));
    }
    if (message.type === "failed") this.#onError(errorOf(message));
  }

  /** @param {Source} source @param {HeadwaterErrorType} error */
  #receiveFailed(source, error) {
    const { state } = source;
    if (error.code !== "diverged" || !("diverged" in state)) {
      this.#unsubscribe(source);
      this.#failed(source, error);
      return;
    }
    this.diverged += 1;
    if (!state.diverged()) {
      this.#fail(source, error);
      return;
    }
    source.markStale();
    this.#onError(error);
    this.#resubscribe(source);
  }

  /**
   * An error with an id ends the subscription or slide with that id. One without is only reported;
   * if the gateway ends the connection for it, `connection.js` handles that.
   *
   * @param {ErrorMessage} message
   */
  #refused(message) {
    if (message.id == null) {
      this.#onError(errorOf(message));
      return;
    }
    this.#slides.get(message.id)?.(message);
    const source = this.#byWireId.get(message.id);
    if (!source) return;
    this.#byWireId.delete(message.id);
    if (source.state.view !== undefined) this.#byView.delete(source.state.view);
    source.state.view = undefined;
    const error = errorOf(message);
    this.#failed(source, error);
    if (error.code === "behind") this.#onBehind(error);
  }

  // ------------------------------------------------------------------ waiting

  /** Wait for the next message, or change of the connection. @returns {Promise<void>} */
  nextEvent() {
    return new Promise((resolve) => this.#waiters.add(resolve));
  }

  #notifyWaiters() {
    const waiters = [...this.#waiters];
    this.#waiters.clear();
    for (const notify of waiters) notify();
  }
}
