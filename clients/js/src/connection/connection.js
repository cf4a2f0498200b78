/**
 * Keeps a client connected: when a transport ends it opens another, at the next URL if there are
 * several. It gives up after `limits.FAILURES_MAX` failures in a row, or at once after an error that
 * is final. Before a token expires it is renewed on the open connection.
 *
 * @typedef {"connecting" | "open" | "closed" | "failed"} ConnectionStatus
 * @typedef {import("../errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("../protocol.js").ServerMessage} ServerMessage
 * @typedef {string | undefined | (() => string | Promise<string>)} Token
 *
 * @typedef {object} ConnectionHandlers
 * @property {() => void} connected
 * @property {(message: ServerMessage) => void} message
 * @property {() => void} lost
 * @property {(error: HeadwaterErrorType) => void} retrying after this error
 * @property {(error: HeadwaterErrorType) => void} gaveUp there will be no other connection
 */

import { connectionFailed, errorOf, HeadwaterError, isAboutToken, isDenied } from "../errors.js";
import { BACKOFF_SECONDS, CONNECT_SECONDS, REFRESH_SECONDS } from "../limits.js";
import { unreachable } from "../transports/transport.js";
import { ValueStore } from "../store.js";

const TIMER_MAX = 2 ** 31 - 1;

export class Connection {
  status = new ValueStore(/** @type {ConnectionStatus} */ ("connecting"));
  /** How often a lost connection was replaced. */
  reconnects = 0;
  #urls;
  #token;
  /** Whether the token function was called again after its token was refused. */
  #triedNewToken = false;
  #open;
  #newBackoff;
  /** @type {ConnectionHandlers} */
  #handlers;
  /**
   * The current transport, after the gateway's hello.
   *
   * @type {import("../transports/transport.js").Transport | undefined}
   */
  #transport;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #renewal;
  #closing = new AbortController();
  #wasConnected = false;
  /** Ends the current transport. @type {(error: HeadwaterErrorType) => void} */
  #endTransport = () => {};

  /**
   * @param {string[]} urls
   * @param {Token} token
   * @param {import("../transports/transport.js").OpenTransport} open
   * @param {() => import("./backoff.js").Backoff} newBackoff
   * @param {ConnectionHandlers} handlers
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
   * Returns whether the message was sent: false while there is no connection.
   *
   * @param {import("../protocol.js").ClientMessage} message
   */
  send(message) {
    return this.#transport !== undefined && this.#transport.send(message) !== false;
  }

  /** Connect to the next gateway, if there are several. @param {HeadwaterErrorType} error */
  switchGateway(error) {
    if (this.#urls.length > 1) this.#endTransport(error);
  }

  close() {
    this.#transport = undefined;
    this.#closing.abort();
    if (this.status.value !== "failed") this.status.set("closed");
  }

  async #run() {
    try {
      await this.#stayConnected();
    } catch (error) {
      if (this.#closing.signal.aborted) return;
      this.status.set("failed");
      this.#handlers.gaveUp(asHeadwaterError(error));
    }
  }

  async #stayConnected() {
    const backoff = this.#newBackoff();
    let urlsTried = 0;
    for (let turn = 0; ; turn++) {
      const began = Date.now();
      const error = await this.#connectOnce(this.#urls[turn % this.#urls.length], backoff);
      if (this.#closing.signal.aborted) return;
      this.status.set("connecting");
      // After a connection that lasted, the next gateway is tried without a pause.
      const lasted = Date.now() - began > BACKOFF_SECONDS[0] * 1000;
      urlsTried = lasted ? 1 : urlsTried + 1;
      if (lasted) this.#triedNewToken = false;
      if (urlsTried < this.#urls.length) continue;
      urlsTried = 0;
      const pause = backoff.failed(Math.random(), error.retryAfter);
      if (pause === null) throw givenUp(backoff.failures, error);
      this.#handlers.retrying(error);
      if (this.#closing.signal.aborted) return;
      await this.#sleep(pause);
    }
  }

  /**
   * Connect, and wait until the connection is lost. Returns the reason; throws if it is final.
   *
   * @param {string} url
   * @param {import("./backoff.js").Backoff} backoff
   */
  async #connectOnce(url, backoff) {
    const ending = new AbortController();
    const signal = AbortSignal.any([ending.signal, this.#closing.signal]);
    let greeted = false;
    try {
      const token = await this.#currentToken();
      return await new Promise((resolve, reject) => {
        const close = () => resolve(connectionFailed("closed"));
        if (signal.aborted) return close();
        signal.addEventListener("abort", close);
        this.#endTransport = resolve;
        const watchdog = new KeepaliveWatchdog(url, signal, resolve);
        /** @type {HeadwaterErrorType | undefined} */
        let lastError;
        const transport = this.#open(url, token, {
          signal,
          onMessage: (message) => {
            watchdog.received();
            backoff.succeeded();
            lastError = connectionError(message, greeted);
            if (message.type === "hello") {
              // A second hello means that the transport continues with another session.
              // Send nothing before `lost` and `connected`: `connected` would send it again.
              this.#transport = undefined;
              if (greeted) this.#handlers.lost();
              greeted = true;
              watchdog.greeted(message.keepalive);
              this.#greeted(transport, message);
            } else if (lastError && !greeted) reject(lastError);
            else if (greeted) this.#received(message);
          },
          // The gateway's last error says more than that the connection was closed.
          onClose: (error) => reject(lastError ?? error),
        });
      });
    } catch (error) {
      const reason = unreachable(url, error);
      if (this.#isFinal(reason, greeted)) throw reason;
      return reason;
    } finally {
      ending.abort();
      this.#transport = undefined;
      clearTimeout(this.#renewal);
      if (greeted) this.#handlers.lost();
    }
  }

  /**
   * @param {import("../transports/transport.js").Transport} transport
   * @param {import("../protocol.js").Hello} hello
   */
  #greeted(transport, hello) {
    if (this.#wasConnected) this.reconnects += 1;
    this.#wasConnected = true;
    this.#transport = transport;
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
   * Whether connecting again would fail in the same way. A refused token that is a text would be
   * refused again; a function is called for a new one, once. Without either it may be a cookie.
   *
   * @param {HeadwaterErrorType} error
   * @param {boolean} greeted
   */
  #isFinal(error, greeted) {
    if (error.retryable) return false;
    // After a hello, a right may have been revoked: the next connection shows what is left.
    if (!isAboutToken(error) || !this.#token) return !(greeted && isDenied(error));
    if (typeof this.#token !== "function") {
      error.hint ??= "Pass a function that returns a new token: connect(url, { token: () => … }).";
      return true;
    }
    const triedBefore = this.#triedNewToken;
    this.#triedNewToken = true;
    return triedBefore;
  }

  async #currentToken() {
    if (typeof this.#token !== "function") return this.#token;
    try {
      return await this.#token();
    } catch (cause) {
      if (cause instanceof HeadwaterError) throw cause;
      const hint = "See the `token` function that was passed to connect(); it is called again.";
      throw connectionFailed(`the token function failed: ${cause}`, { hint, cause });
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
    const transport = this.#transport;
    try {
      const token = await this.#currentToken();
      if (transport && transport === this.#transport) {
        transport.send({ type: "authenticate", token: token ?? "" });
      }
    } catch (error) {
      this.#handlers.retrying(asHeadwaterError(error));
    }
  }

  // ------------------------------------------------------------------ time

  /**
   * Wait, at most until the machine is online again.
   *
   * @param {number} seconds
   * @returns {Promise<void>}
   */
  #sleep(seconds) {
    return new Promise((resolve) => {
      const done = new AbortController();
      const end = () => {
        done.abort();
        clearTimeout(timer);
        resolve();
      };
      const timer = setTimeout(end, seconds * 1000);
      this.#closing.signal.addEventListener("abort", end, { signal: done.signal });
      globalThis.addEventListener?.("online", end, { signal: done.signal });
    });
  }
}

/** Ends a connection without a hello, or without a message for twice the keepalive interval. */
class KeepaliveWatchdog {
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
      end(
        connectionFailed(`${this.#url} sent no hello within ${CONNECT_SECONDS} seconds`, {
          hint: "Check that the URL is that of a Headwater gateway, and that it is not overloaded.",
        }),
      );
    }, CONNECT_SECONDS * 1000);
    signal.addEventListener("abort", () => clearInterval(this.#timer));
  }

  received() {
    this.#last = Date.now();
  }

  /** @param {number} keepalive */
  greeted(keepalive) {
    clearTimeout(this.#timer);
    this.#timer = setInterval(() => {
      const silent = (Date.now() - this.#last) / 1000;
      if (silent <= 2 * keepalive) return;
      const message = `the gateway ${this.#url} sent nothing for ${2 * keepalive} seconds`;
      this.#end(connectionFailed(message));
    }, keepalive * 500);
  }
}

/**
 * The error for which the gateway may end the connection next. After the hello, other errors without
 * an id do not concern the connection.
 *
 * @param {ServerMessage} message
 * @param {boolean} greeted
 */
function connectionError(message, greeted) {
  if (message.type !== "error" || message.id != null) return undefined;
  const error = errorOf(message);
  return !greeted || error.retryable || isDenied(error) ? error : undefined;
}

/** @param {unknown} error */
function asHeadwaterError(error) {
  return error instanceof HeadwaterError
    ? error
    : new HeadwaterError("internal", String(error), { cause: error });
}

/** @param {number} failures @param {HeadwaterErrorType} error */
function givenUp(failures, error) {
  if (error.retryAfter !== undefined) return error;
  return connectionFailed(`gave up after ${failures} failures in a row: ${error.message}`, {
    hint: error.hint ?? "Check that the gateway is running and that the URL is right.",
    cause: error,
  });
}
