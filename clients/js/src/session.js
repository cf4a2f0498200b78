/**
 * Every subscription of a client, over all its connections: which of them a message is for, and
 * what to ask for after a lost connection. Each time one is asked for it has another id on the
 * wire, so that late messages about the old one fall on nobody.
 *
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("./protocol.js").Answer} Answer
 * @typedef {import("./protocol.js").ClientMessage} ClientMessage
 * @typedef {import("./protocol.js").Cursor} Cursor
 * @typedef {import("./protocol.js").ErrorMessage} ErrorMessage
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./source.js").State} State
 *
 * @typedef {object} Surroundings
 * @property {(message: ClientMessage) => unknown} send
 * @property {(error: HeadwaterErrorType) => void} onError
 * @property {(error: HeadwaterErrorType) => void} onBehind the gateway has not read what was seen
 *   at another
 * @property {() => import("./backoff.js").Backoff} newBackoff
 */

import { connectionFailed, errorOf } from "./errors.js";
import { stringify } from "./json.js";
import { covers } from "./position.js";
import { LiveState } from "./rows-state.js";
import { Source } from "./source.js";

export class Session {
  /** How often a replica was not what it should be, and was read anew. */
  diverged = 0;
  #send;
  #onError;
  #onBehind;
  #newBackoff;
  /**
   * The latest position that a message named, on any connection: no subscription begins before it.
   *
   * @type {string | undefined}
   */
  #seen;
  #isConnected = false;
  /** Why nothing will be followed any more. @type {HeadwaterErrorType | undefined} */
  #error;
  /** @type {Set<Source>} */
  #sources = new Set();
  /** By the question. @type {Map<string, Source>} */
  #shared = new Map();
  /** Those that were asked for on this connection. @type {Map<string, Source>} */
  #byWireId = new Map();
  /** @type {Map<number, Source>} */
  #byView = new Map();
  #number = 0;
  /**
   * Told how the slide of a window ended, by its request.
   *
   * @type {Map<string, (message: Answer | ErrorMessage) => void>}
   */
  #slides = new Map();
  /** Whoever waits for subscriptions to get somewhere. @type {Set<() => void>} */
  #waiters = new Set();

  /** @param {Surroundings} surroundings */
  constructor({ send, onError, onBehind, newBackoff }) {
    this.#send = send;
    this.#onError = onError;
    this.#onBehind = onBehind;
    this.#newBackoff = newBackoff;
  }

  // ------------------------------------------------------------------ for subscriptions

  /**
   * What follows from a question; the same for the same question.
   *
   * @param {object} question
   * @param {() => State} newState
   */
  share(question, newState) {
    const text = stringify(question, true);
    const known = this.#shared.get(text);
    if (known && !known.isOver) return known;
    const source = new Source(newState(), this.#newBackoff, text);
    this.#shared.set(text, source);
    return this.#begin(source);
  }

  /** Follow something that is not shared. @param {State} state */
  follow(state) {
    return this.#begin(new Source(state, this.#newBackoff));
  }

  /** @param {LiveQuery} query @param {boolean} verify */
  live(query, verify) {
    return this.share({ live: query, verify }, () => new LiveState(query, verify));
  }

  /**
   * One who holds it fewer. It ends with the last, unless another comes in this very moment.
   *
   * @param {Source} source
   */
  leave(source) {
    source.holders -= 1;
    queueMicrotask(() => source.holders || this.#end(source));
  }

  /** Nothing of it is wanted for now. @param {Source} source */
  pause(source) {
    source.isPaused = true;
    this.#forget(source);
  }

  /** @param {Source} source */
  resume(source) {
    source.isPaused = false;
    if (this.#sources.has(source) && !this.#isAsked(source)) this.#askFor(source);
  }

  /**
   * Slide a window; one that is shared with others is left to them. What then has the rows.
   *
   * @param {Source} source
   * @param {Cursor | null} after
   * @returns {Promise<Source | undefined>} another source, held once for who asked
   */
  async reanchor(source, after) {
    const state = /** @type {LiveState} */ (source.state);
    if (source.holders > 1 || source.isOver) {
      const moved = this.live({ ...state.query, after }, state.verify);
      moved.holders += 1;
      try {
        await moved.ready;
      } catch (error) {
        this.leave(moved);
        throw error;
      }
      return moved;
    }
    // From here on it is another question's.
    if (source.sharedAs) this.#shared.delete(source.sharedAs);
    source.sharedAs = undefined;
    const slide = source.slides.then(() => this.#slide(source, state, after));
    source.slides = slide.catch(() => {});
    await slide;
    return undefined;
  }

  /** @param {Source} source @param {LiveState} state @param {Cursor | null} after */
  async #slide(source, state, after) {
    // Before that the gateway has no window to slide.
    await this.followed(source);
    // It begins with a letter, so that it is never a subscription's, and with another than calls'.
    const request = `s${++this.#number}`;
    /** @type {unknown} */
    let refusal;
    this.#slides.set(request, (message) => {
      if (message.type === "error") refusal = errorOf(message);
      else state.moved();
    });
    try {
      this.#send(state.move(after, request));
      while (state.isMoving && !refusal && !source.isOver) await this.heard();
    } finally {
      this.#slides.delete(request);
      state.stay();
    }
    if (refusal) throw refusal;
    if (source.isOver) throw source.error ?? connectionFailed("the subscription was closed");
  }

  /**
   * Have the gateway asked to wait, for all that is followed by now. It waits for what it serves, so
   * what has yet to begin is waited for before: what continues after a reconnect, or is refused for
   * now. What was asked for again meanwhile is asked about once more.
   *
   * @param {() => Promise<unknown>} wait
   */
  async caughtUp(wait) {
    const due = [...this.#sources].filter((source) => !source.isPaused);
    for (;;) {
      while (due.some((source) => this.#isBehind(source))) await this.heard();
      if (this.#error) throw this.#error;
      const asked = due.map((source) => source.state.wireId);
      await wait();
      const isSame = due.every(
        (source, i) => !this.#isBehind(source) && source.state.wireId === asked[i],
      );
      if (isSame) return;
    }
  }

  /** Whether it has yet to begin, or to go on. @param {Source} source */
  #isBehind(source) {
    if (!this.#sources.has(source) || source.isPaused) return false;
    if (!this.#isConnected || !this.#isAsked(source)) return true;
    return source.state.isDue && !source.state.error;
  }

  /** Wait until it is followed on the present connection. @param {Source} source */
  async followed(source) {
    const isFollowed = () => this.#isAsked(source) && !source.state.isDue;
    while (!source.isOver && !isFollowed()) await this.heard();
    if (source.isOver) throw source.error ?? connectionFailed("the subscription was closed");
  }

  // ------------------------------------------------------------------ for the connection

  /** There is a new one: everything is asked for from where it is. */
  connected() {
    this.#isConnected = true;
    for (const source of [...this.#sources]) {
      clearTimeout(source.timer);
      if (!source.isPaused) this.#askFor(source);
    }
  }

  lost() {
    this.#isConnected = false;
    this.#byWireId.clear();
    this.#byView.clear();
    for (const source of this.#sources) source.doubted();
    this.#wake();
  }

  /** There will be no other. @param {HeadwaterErrorType} error */
  over(error) {
    this.#error = error;
    for (const source of [...this.#sources]) this.#fail(source, error);
    this.#wake();
  }

  /** All of it is ended. @param {HeadwaterErrorType} error for who comes later */
  close(error) {
    this.#error ??= error;
    for (const source of [...this.#sources]) this.#end(source);
    this.#wake();
  }

  /** The database was complete up to here. @param {string} position */
  saw(position) {
    if (this.#seen === undefined || !covers(this.#seen, position)) this.#seen = position;
  }

  /** @param {import("./protocol.js").ServerMessage} message */
  receive(message) {
    if (message.type === "subscribed") this.#subscribed(message);
    else if (message.type === "answer") this.#slides.get(message.id)?.(message);
    else if (message.type === "error") this.#refused(message);
    else if ("view" in message) this.#fold(message);
    this.#wake();
  }

  // ------------------------------------------------------------------ beginning and ending

  /** @param {Source} source */
  #begin(source) {
    if (this.#error) {
      source.fail(this.#error);
      return source;
    }
    this.#sources.add(source);
    this.#askFor(source);
    return source;
  }

  /**
   * Subscribe, now if there is a connection; else that happens when there is one.
   *
   * @param {Source} source
   */
  #askFor(source) {
    if (!this.#isConnected) return;
    const wireId = String(++this.#number);
    const message = source.state.subscribe(wireId);
    this.#byWireId.set(wireId, source);
    this.#send(message.channel ? message : { ...message, after: this.#seen });
  }

  /** Whether it was asked for on this connection. @param {Source} source */
  #isAsked(source) {
    return this.#byWireId.get(source.state.wireId) === source;
  }

  /** @param {Source} source */
  #again(source) {
    this.#forget(source);
    this.#askFor(source);
  }

  /** Nothing of it is wanted until it is asked for again. @param {Source} source */
  #forget(source) {
    clearTimeout(source.timer);
    const { view, wireId } = source.state;
    if (view !== undefined && this.#byView.get(view) === source) this.#byView.delete(view);
    if (this.#byWireId.delete(wireId)) this.#send({ type: "unsubscribe", id: wireId });
  }

  /** @param {Source} source */
  #drop(source) {
    this.#sources.delete(source);
    if (source.sharedAs && this.#shared.get(source.sharedAs) === source) {
      this.#shared.delete(source.sharedAs);
    }
    this.#forget(source);
    this.#wake();
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
   * It is over on the server: ask again later if that may help.
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
    source.doubted();
    source.timer = setTimeout(() => this.#askFor(source), pause * 1000);
  }

  // ------------------------------------------------------------------ messages

  /** @param {import("./protocol.js").Subscribed} message */
  #subscribed(message) {
    const source = this.#byWireId.get(message.id);
    if (!source) return;
    if (message.lost) this.#seen = undefined;
    if (source.state.view !== undefined) this.#byView.delete(source.state.view);
    this.#byView.set(message.view, source);
    source.subscribed(message);
  }

  /** @param {import("./protocol.js").ViewMessage} message */
  #fold(message) {
    const source = this.#byView.get(message.view);
    if (!source) return;
    try {
      if (source.receive(message)) this.#again(source);
    } catch (error) {
      this.#misfit(source, /** @type {HeadwaterErrorType} */ (error));
    }
    if (message.type === "failed") this.#onError(errorOf(message));
  }

  /** @param {Source} source @param {HeadwaterErrorType} error */
  #misfit(source, error) {
    const { state } = source;
    if (error.code !== "diverged" || !("diverged" in state)) {
      this.#forget(source);
      this.#failed(source, error);
      return;
    }
    this.diverged += 1;
    if (!state.diverged()) {
      this.#fail(source, error);
      return;
    }
    source.doubted();
    this.#onError(error);
    this.#again(source);
  }

  /**
   * With an id it is the end of what has that id. Without, nobody waits for it, or it is why the
   * connection ends next, which `connection.js` knows.
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

  /** Wait until something was heard, or is over. @returns {Promise<void>} */
  heard() {
    return new Promise((resolve) => this.#waiters.add(resolve));
  }

  #wake() {
    const waiters = [...this.#waiters];
    this.#waiters.clear();
    for (const wake of waiters) wake();
  }
}
