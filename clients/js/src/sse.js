/**
 * A link over Server-Sent Events: one stream from the gateway; what the client says goes beside it,
 * as requests. They run beside each other, for a subscription is answered when its rows are there;
 * but what concerns the same one arrives in order. `fetch` reads the stream, not EventSource, which
 * cannot send a token.
 *
 * @typedef {import("./protocol.js").ClientMessage} ClientMessage
 */

import {
  connectionFailed,
  errorOf,
  HeadwaterError,
  mutationRefusalIn,
  refusalIn,
} from "./errors.js";
import { stringify } from "./json.js";
import { REQUEST_KEEPALIVES, REQUESTS_AT_ONCE } from "./limits.js";
import { gatewayUrl, headersOf, readMessage, refused, unreachable } from "./links.js";
import { SseParser } from "./sse-parser.js";

/** @type {import("./links.js").Opener} */
export function openSse(url, token, ends) {
  return new SseLink(url, token, ends);
}

class SseLink {
  #url;
  #address;
  #token;
  #ends;
  #session = "";
  /** How often the gateway says something, in seconds. */
  #keepalive = 0;
  /** The last request about each subscription. @type {Map<string, Promise<void>>} */
  #latest = new Map();
  #underWay = 0;
  /** @type {(() => void)[]} */
  #waiting = [];

  /**
   * @param {string} url
   * @param {string | undefined} token
   * @param {import("./links.js").Ends} ends
   */
  constructor(url, token, ends) {
    this.#url = url;
    this.#address = gatewayUrl(url, "http");
    this.#token = token;
    this.#ends = ends;
    this.#pump().catch((error) => this.#end(error));
  }

  /** @param {unknown} error */
  #end(error) {
    if (!this.#ends.signal.aborted) this.#ends.onClose(unreachable(this.#url, error));
  }

  /** @param {import("./protocol.js").ServerMessage} message */
  #deliver(message) {
    if (!this.#ends.signal.aborted) this.#ends.onMessage(message);
  }

  // ------------------------------------------------------------------ the stream

  async #pump() {
    const response = await this.#fetch(`${this.#address}/stream`);
    if (!response.ok || !response.body) throw await refused(response);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new SseParser();
    for (;;) {
      const { done, value } = await reader.read().catch((cause) => {
        throw connectionFailed(`the connection to ${this.#url} was lost`, { cause });
      });
      if (done) break;
      const events = parser.feed(decoder.decode(value, { stream: true }));
      for (const data of events) this.#read(data);
      // Whatever came, a comment too, says that the gateway lives.
      if (!events.length) this.#deliver({ type: "keepalive" });
    }
    throw connectionFailed(`the stream of ${this.#url} ended`);
  }

  /** @param {string} data */
  #read(data) {
    const message = readMessage(data);
    if (message.type === "hello") {
      this.#session = message.session;
      this.#keepalive = message.keepalive;
    }
    this.#deliver(message);
  }

  // ------------------------------------------------------------------ requests

  /** @param {ClientMessage} message */
  send(message) {
    const name = "id" in message ? message.id : "";
    const before = this.#latest.get(name) ?? Promise.resolve();
    const request = before.then(() => this.#request(message)).catch((error) => this.#end(error));
    this.#latest.set(name, request);
    void request.then(() => {
      if (this.#latest.get(name) === request) this.#latest.delete(name);
    });
  }

  /** @param {ClientMessage} message */
  async #request(message) {
    if (this.#underWay >= REQUESTS_AT_ONCE) {
      await new Promise((resolve) => this.#waiting.push(() => resolve(undefined)));
    }
    this.#underWay += 1;
    try {
      const { ok, status, body } = await this.#answer(message);
      if (ok) this.#heard(message, body);
      else this.#refused(message, status, body);
    } finally {
      this.#underWay -= 1;
      this.#waiting.shift()?.();
    }
  }

  /**
   * The answer to a request. Its connection may be half-open while the stream's lives: a query or a
   * mutation that is not answered is sent once more, and waits longer each time. Anything else then
   * ends the link.
   *
   * @param {ClientMessage} message
   */
  async #answer(message) {
    const isCall = message.type === "query" || message.type === "mutate";
    let patience = this.#keepalive * REQUEST_KEEPALIVES[isCall ? "call" : "session"];
    for (;;) {
      const late = new AbortController();
      const timer = setTimeout(() => late.abort(), patience * 1000);
      try {
        const response = await this.#say(message, late.signal);
        return { ok: response.ok, status: response.status, body: await response.text() };
      } catch (error) {
        if (!late.signal.aborted || !isCall || this.#ends.signal.aborted) throw error;
        patience *= 2;
      } finally {
        clearTimeout(timer);
      }
    }
  }

  /**
   * Pass on what the gateway answers in the response, and not in the stream.
   *
   * @param {ClientMessage} message
   * @param {string} body
   */
  #heard(message, body) {
    if (message.type === "query" || message.type === "mutate") {
      const { position, value } = /** @type {any} */ (readMessage(body));
      this.#deliver({ type: "answer", id: message.id, position, value });
    } else if (message.type === "publish" || message.type === "state") {
      this.#deliver({ type: "answer", id: message.request ?? "", position: "" });
    } else if (message.type === "authenticate") {
      this.#deliver({ ...JSON.parse(body || "{}"), type: "authenticated" });
    }
  }

  /** @param {ClientMessage} message @param {number} status @param {string} body */
  #refused(message, status, body) {
    const refusal = ("idempotency_key" in message ? mutationRefusalIn : refusalIn)(status, body);
    const hungUp = status === 401 || refusal.code === "session_unknown";
    // Queries and mutations need no session, and a refusal is what becomes of them.
    if (hungUp && message.type !== "query" && message.type !== "mutate") {
      throw status === 401 ? errorOf(refusal) : connectionFailed(refusal.message);
    }
    if (message.type === "unsubscribe") {
      // Whatever else is refused, this must be done, or it would stay for good.
      if (status === 429) this.#later(() => this.send(message), refusal.retry_after_secs ?? 1);
      return;
    }
    this.#deliver({ ...refusal, type: "error", id: ended(message) });
  }

  /** Do it then, unless the link has ended. @param {() => void} action @param {number} seconds */
  #later(action, seconds) {
    const { signal } = this.#ends;
    if (signal.aborted) return;
    const end = () => clearTimeout(timer);
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", end);
      action();
    }, seconds * 1000);
    signal.addEventListener("abort", end, { once: true });
  }

  /** @param {ClientMessage} message @param {AbortSignal} late @returns {Promise<Response>} */
  #say(message, late) {
    const fetch = (
      /** @type {string} */ url,
      /** @type {string} */ method,
      /** @type {unknown} */ body = undefined,
      headers = {},
    ) => this.#fetch(url, method, body, headers, late);
    const session = `${this.#address}/sessions/${encodeURIComponent(this.#session)}`;
    switch (message.type) {
      case "subscribe": {
        const { type: _, ...fields } = message;
        return fetch(`${session}/subscriptions`, "POST", fields);
      }
      case "unsubscribe":
        return fetch(`${session}/subscriptions/${message.id}`, "DELETE");
      case "reanchor":
        return fetch(`${session}/subscriptions/${message.id}`, "PATCH", {
          after: message.after,
          request: message.request,
        });
      case "publish": {
        const { id, data } = message;
        return fetch(`${session}/publish`, "POST", { id, data }, keyOf(message));
      }
      case "state":
        return fetch(`${session}/state`, "POST", { id: message.id, state: message.state });
      case "authenticate":
        this.#token = message.token;
        return fetch(`${session}/token`, "POST", { token: message.token });
      case "wait":
        return fetch(`${session}/wait`, "POST", {
          id: message.id,
          position: message.position,
        });
      case "mutate":
        return fetch(
          `${this.#address}/mutation/${encodeURIComponent(message.name)}`,
          "POST",
          message.args,
          keyOf(message),
        );
      case "query": {
        const after =
          message.after === undefined ? "" : `?after=${encodeURIComponent(message.after)}`;
        return fetch(
          `${this.#address}/query/${encodeURIComponent(message.name)}${after}`,
          "POST",
          message.args,
        );
      }
    }
  }

  /**
   * @param {string} url
   * @param {string} [method]
   * @param {unknown} [body]
   * @param {Record<string, string>} [headers]
   * @param {AbortSignal} [late]
   * @returns {Promise<Response>}
   */
  async #fetch(url, method = "GET", body, headers, late) {
    const { signal } = this.#ends;
    try {
      return await fetch(url, {
        method,
        headers: {
          ...headersOf(this.#token),
          ...headers,
          ...(body !== undefined && { "Content-Type": "application/json" }),
        },
        body: body === undefined ? undefined : stringify(body),
        signal: late ? AbortSignal.any([signal, late]) : signal,
        cache: "no-store",
      });
    } catch (error) {
      throw error instanceof HeadwaterError ? error : unreachable(this.#url, error);
    }
  }
}

/** @param {{idempotency_key: string}} message */
const keyOf = (message) => ({ "Idempotency-Key": message.idempotency_key });

/** What a refusal is the end of. @param {ClientMessage} message */
function ended(message) {
  if ("request" in message) return message.request;
  return message.type === "authenticate" ? undefined : message.id;
}
