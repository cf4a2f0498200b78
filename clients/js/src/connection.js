/**
 * Keeps connected: when the connection is lost it opens another, at the next of its URLs if there
 * are several. It gives up after `limits.FAILURES_MAX` failures in a row, or at once when it is
 * refused for good. Before a token ends it is renewed on the open connection.
 *
 * @typedef {"connecting" | "open" | "closed" | "failed"} ConnectionStatus
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("./protocol.js").ServerMessage} ServerMessage
 * @typedef {string | undefined | (() => string | Promise<string>)} Token
 *
 * @typedef {object} Handlers whom it tells
 * @property {() => void} connected
 * @property {(message: ServerMessage) => void} message
 * @property {() => void} lost
 * @property {(error: HeadwaterErrorType) => void} doubt what went wrong and is tried again
 * @property {(error: HeadwaterErrorType) => void} over there will be no other connection
 */

import { connectionFailed, errorOf, HeadwaterError, isAboutToken, isDenied } from "./errors.js";
import { BACKOFF_SECONDS, CONNECT_SECONDS, REFRESH_SECONDS } from "./limits.js";
import { unreachable } from "./links.js";
import { Value } from "./store.js";

const TIMER_MAX = 2 ** 31 - 1;

export class Connection {
  status = new Value(/** @type {ConnectionStatus} */ ("connecting"));
  /** How often a lost connection was replaced. */
  reconnects = 0;
  #urls;
  #token;
  #askedAgain = false;
  #open;
  #newBackoff;
  /** @type {Handlers} */
  #handlers;
  /** The present connection, once it has greeted. @type {import("./links.js").Link | undefined} */
  #link;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #renewal;
  #closing = new AbortController();
  #hasBegun = false;
  /** Ends the present connection. @type {(error: HeadwaterErrorType) => void} */
  #lose = () => {};

  /**
   * @param {string[]} urls
   * @param {Token} token
   * @param {import("./links.js").Opener} open
   * @param {() => import("./backoff.js").Backoff} newBackoff
   * @param {Handlers} handlers
   */
  constructor(urls, token, open, newBackoff, handlers) {
    this.#urls = urls;
    this.#token = token;
    this.#open = open;
    this.#newBackoff = newBackoff;
    this.#handlers = handlers;
    void this.#run();
  }

  /**
   * Whether the message was sent: not while there is no connection.
   *
   * @param {import("./protocol.js").ClientMessage} message
   */
  send(message) {
    return this.#link !== undefined && this.#link.send(message) !== false;
  }

  /** Go to the next gateway, if there are several. @param {HeadwaterErrorType} error */
  leave(error) {
    if (this.#urls.length > 1) this.#lose(error);
  }

  close() {
    this.#link = undefined;
    this.#closing.abort();
    if (this.status.value !== "failed") this.status.set("closed");
  }

  async #run() {
    try {
      await this.#stayConnected();
    } catch (error) {
      if (this.#closing.signal.aborted) return;
      this.status.set("failed");
      this.#handlers.over(asOurs(error));
    }
  }

  async #stayConnected() {
    const backoff = this.#newBackoff();
    let tried = 0;
    for (let turn = 0; ; turn++) {
      const began = Date.now();
      const error = await this.#oneConnection(this.#urls[turn % this.#urls.length], backoff);
      if (this.#closing.signal.aborted) return;
      this.status.set("connecting");
      // A connection that lasted is no reason to wait before another gateway is tried.
      const lasted = Date.now() - began > BACKOFF_SECONDS[0] * 1000;
      tried = lasted ? 1 : tried + 1;
      if (lasted) this.#askedAgain = false;
      if (tried < this.#urls.length) continue;
      tried = 0;
      const pause = backoff.failed(Math.random(), error.retryAfter);
      if (pause === null) throw givenUp(backoff.failures, error);
      this.#handlers.doubt(error);
      if (this.#closing.signal.aborted) return;
      await this.#sleep(pause);
    }
  }

  /**
   * Connect and go on until the connection is lost; why. Throws if that is for good.
   *
   * @param {string} url
   * @param {import("./backoff.js").Backoff} backoff
   */
  async #oneConnection(url, backoff) {
    const ending = new AbortController();
    const signal = AbortSignal.any([ending.signal, this.#closing.signal]);
    let greeted = false;
    try {
      const token = await this.#currentToken();
      return await new Promise((resolve, reject) => {
        const close = () => resolve(connectionFailed("closed"));
        if (signal.aborted) return close();
        signal.addEventListener("abort", close);
        this.#lose = resolve;
        const silence = new Silence(url, signal, resolve);
        /** @type {HeadwaterErrorType | undefined} */
        let said;
        const link = this.#open(url, token, {
          signal,
          onMessage: (message) => {
            silence.heard();
            backoff.succeeded();
            said = aboutConnection(message, greeted);
            if (message.type === "hello") {
              // One more says that the link goes on with another session.
              // Nothing is sent until everybody knows: it would be sent again by `connected`.
              this.#link = undefined;
              if (greeted) this.#handlers.lost();
              greeted = true;
              silence.greeted(message.keepalive);
              this.#greeted(link, message);
            } else if (said && !greeted) reject(said);
            else if (greeted) this.#received(message);
          },
          // What the gateway said last tells more than that it hung up.
          onClose: (error) => reject(said ?? error),
        });
      });
    } catch (error) {
      const ours = unreachable(url, error);
      if (this.#isFinal(ours, greeted)) throw ours;
      return ours;
    } finally {
      ending.abort();
      this.#link = undefined;
      clearTimeout(this.#renewal);
      if (greeted) this.#handlers.lost();
    }
  }

  /** @param {import("./links.js").Link} link @param {import("./protocol.js").Hello} hello */
  #greeted(link, hello) {
    if (this.#hasBegun) this.reconnects += 1;
    this.#hasBegun = true;
    this.#link = link;
    this.status.set("open");
    this.#renewBefore(hello.expires_at);
    this.#handlers.connected();
  }

  /** @param {ServerMessage} message */
  #received(message) {
    if (message.type === "authenticated") this.#renewBefore(message.expires_at);
    else if (message.type !== "keepalive") this.#handlers.message(message);
  }

  // ------------------------------------------------------------------ tokens

  /**
   * Whether to connect again would be of no use. A token that is a text is refused again; a
   * function is asked for another one, once. Without either it may be a cookie.
   *
   * @param {HeadwaterErrorType} error
   * @param {boolean} greeted
   */
  #isFinal(error, greeted) {
    if (error.retryable) return false;
    // A right may have been taken: the next greeting will tell.
    if (!isAboutToken(error) || !this.#token) return !(greeted && isDenied(error));
    if (typeof this.#token !== "function") {
      error.hint ??= "Give a function that brings a token: connect(url, { token: () => … }).";
      return true;
    }
    const askedAgain = this.#askedAgain;
    this.#askedAgain = true;
    return askedAgain;
  }

  async #currentToken() {
    if (typeof this.#token !== "function") return this.#token;
    try {
      return await this.#token();
    } catch (cause) {
      if (cause instanceof HeadwaterError) throw cause;
      throw connectionFailed(`a token could not be had: ${cause}`, { cause });
    }
  }

  /** A token that is a text cannot be renewed. @param {string | null | undefined} expiresAt */
  #renewBefore(expiresAt) {
    clearTimeout(this.#renewal);
    if (!expiresAt || typeof this.#token !== "function") return;
    const left = (Date.parse(expiresAt) - Date.now()) / 1000;
    const pause = Math.max(left - Math.min(REFRESH_SECONDS, left / 2), 1);
    this.#renewal = setTimeout(() => this.#renew(), Math.min(pause * 1000, TIMER_MAX));
  }

  async #renew() {
    const link = this.#link;
    try {
      const token = await this.#currentToken();
      if (link && link === this.#link) link.send({ type: "authenticate", token: token ?? "" });
    } catch (error) {
      this.#handlers.doubt(asOurs(error));
    }
  }

  // ------------------------------------------------------------------ time

  /**
   * Wait; not any longer once the machine is online again.
   *
   * @param {number} seconds
   * @returns {Promise<void>}
   */
  #sleep(seconds) {
    return new Promise((resolve) => {
      const over = new AbortController();
      const end = () => {
        over.abort();
        clearTimeout(timer);
        resolve();
      };
      const timer = setTimeout(end, seconds * 1000);
      this.#closing.signal.addEventListener("abort", end, { signal: over.signal });
      globalThis.addEventListener?.("online", end, { signal: over.signal });
    });
  }
}

/** Ends a connection that is silent: before the greeting, or for twice the keepalive interval. */
class Silence {
  #url;
  #end;
  #last = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;

  /**
   * @param {string} url
   * @param {AbortSignal} signal
   * @param {(error: HeadwaterErrorType) => void} end
   */
  constructor(url, signal, end) {
    this.#url = url;
    this.#end = end;
    this.#timer = setTimeout(() => {
      end(connectionFailed(`the gateway ${this.#url} does not greet`));
    }, CONNECT_SECONDS * 1000);
    signal.addEventListener("abort", () => clearInterval(this.#timer));
  }

  heard() {
    this.#last = Date.now();
  }

  /** @param {number} keepalive */
  greeted(keepalive) {
    clearTimeout(this.#timer);
    this.#timer = setInterval(() => {
      const silent = (Date.now() - this.#last) / 1000;
      if (silent <= 2 * keepalive) return;
      this.#end(connectionFailed(`nothing was heard from the gateway for ${2 * keepalive} s`));
    }, keepalive * 500);
  }
}

/**
 * What the gateway may end the connection for. Once it has greeted, any other error without an id
 * is about something that nobody named.
 *
 * @param {ServerMessage} message
 * @param {boolean} greeted
 */
function aboutConnection(message, greeted) {
  if (message.type !== "error" || message.id != null) return undefined;
  const error = errorOf(message);
  return !greeted || error.retryable || isDenied(error) ? error : undefined;
}

/** @param {unknown} error */
function asOurs(error) {
  return error instanceof HeadwaterError
    ? error
    : new HeadwaterError("internal", String(error), { cause: error });
}

/** @param {number} failures @param {HeadwaterErrorType} error */
function givenUp(failures, error) {
  if (error.retryAfter !== undefined) return error;
  return connectionFailed(`gave up after ${failures} failures in a row: ${error.message}`, {
    hint: error.hint ?? "Check that the gateway runs and the URL is right.",
    cause: error,
  });
}
