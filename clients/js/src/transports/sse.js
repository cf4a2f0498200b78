/**
 * The SSE transport: one stream of Server-Sent Events from the gateway, and an HTTP request for each
 * message of the client. Requests run concurrently, because a subscription is answered only when its
 * rows are ready; requests about the same subscription are sent in order. The stream is read with
 * `fetch`, because EventSource cannot send a token.
 *
 * @typedef {import("../protocol.js").ClientMessage} ClientMessage
 */

import {
  connectionFailed,
  errorOf,
  HeadwaterError,
  mutationRefusalIn,
  refusalIn,
} from "../errors.js";
import { stringify } from "../json.js";
import { REQUEST_KEEPALIVES, REQUESTS_AT_ONCE } from "../limits.js";
import { errorOfResponse, gatewayUrl, headersOf, readMessage, unreachable } from "./transport.js";
import { SseParser } from "./sse-parser.js";

/** @type {import("./transport.js").OpenTransport} */
export function openSse(url, token, handlers) {
  return new SseTransport(url, token, handlers);
}

class SseTransport {
  #url;
  #address;
  #token;
  #handlers;
  #session = "";
  /** The gateway's keepalive interval, in seconds. */
  #keepalive = 0;
  /** The last request about each subscription. @type {Map<string, Promise<void>>} */
  #latest = new Map();
  #underWay = 0;
  /** @type {(() => void)[]} */
  #waiting = [];

  /**
   * @param {string} url
   * @param {string | undefined} token
   * @param {import("./transport.js").TransportHandlers} handlers
   */
  constructor(url, token, handlers) {
    this.#url = url;
    this.#address = gatewayUrl(url, "http");
    this.#token = token;
    this.#handlers = handlers;
    this.#readStream().catch((error) => this.#end(error));
  }

  /** @param {unknown} error */
  #end(error) {
    if (!this.#handlers.signal.aborted) this.#handlers.onClose(unreachable(this.#url, error));
  }

  /** @param {import("../protocol.js").ServerMessage} message */
  #deliver(message) {
    if (!this.#handlers.signal.aborted) this.#handlers.onMessage(message);
  }

  // ------------------------------------------------------------------ the stream

  async #readStream() {
    const response = await this.#fetch(`${this.#address}/stream`);
    if (!response.ok || !response.body) throw await errorOfResponse(response);
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    const parser = new SseParser();
    for (;;) {
      const { done, value } = await reader.read().catch((cause) => {
        throw connectionFailed(`the connection to ${this.#url} was lost`, { cause });
      });
      if (done) break;
      const events = parser.feed(decoder.decode(value, { stream: true }));
      for (const data of events) this.#receive(data);
      // Any data, a comment too, shows that the gateway is alive.
      if (!events.length) this.#deliver({ type: "keepalive" });
    }
    throw connectionFailed(`the gateway ${this.#url} ended the stream`);
  }

  /** @param {string} data */
  #receive(data) {
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
      if (ok) this.#answered(message, body);
      else this.#refused(message, status, body);
    } finally {
      this.#underWay -= 1;
      this.#waiting.shift()?.();
    }
  }

  /**
   * The answer to a request. Its connection may be half-open while that of the stream works: a query
   * or a mutation that is not answered in time is sent again, with a longer timeout each time. Any
   * other request that is not answered ends the transport.
   *
   * @param {ClientMessage} message
   */
  async #answer(message) {
    const isCall = message.type === "query" || message.type === "mutate";
    let timeout = this.#keepalive * REQUEST_KEEPALIVES[isCall ? "call" : "session"];
    for (;;) {
      const late = new AbortController();
      const timer = setTimeout(() => late.abort(), timeout * 1000);
      try {
        const response = await this.#post(message, late.signal);
        return { ok: response.ok, status: response.status, body: await response.text() };
      } catch (error) {
        if (!late.signal.aborted || !isCall || this.#handlers.signal.aborted) throw error;
        timeout *= 2;
      } finally {
        clearTimeout(timer);
      }
    }
  }

  /**
   * Deliver an answer that is in the response and not in the stream.
   *
   * @param {ClientMessage} message
   * @param {string} body
   */
  #answered(message, body) {
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
    const isSessionOver = status === 401 || refusal.code === "session_unknown";
    // Queries and mutations need no session: a refusal ends them, and not the connection.
    if (isSessionOver && message.type !== "query" && message.type !== "mutate") {
      throw status === 401 ? errorOf(refusal) : connectionFailed(refusal.message);
    }
    if (message.type === "unsubscribe") {
      // An unsubscribe must be repeated, or the subscription would stay at the gateway.
      if (status === 429) this.#later(() => this.send(message), refusal.retry_after_secs ?? 1);
      return;
    }
    this.#deliver({ ...refusal, type: "error", id: requestId(message) });
  }

  /** Run later, unless the transport has ended. @param {() => void} action @param {number} seconds */
  #later(action, seconds) {
    const { signal } = this.#handlers;
    if (signal.aborted) return;
    const end = () => clearTimeout(timer);
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", end);
      action();
    }, seconds * 1000);
    signal.addEventListener("abort", end, { once: true });
  }

  /** @param {ClientMessage} message @param {AbortSignal} late @returns {Promise<Response>} */
  #post(message, late) {
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
    const { signal } = this.#handlers;
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

/** The id of the request or subscription that a refusal ends. @param {ClientMessage} message */
function requestId(message) {
  if ("request" in message) return message.request;
  return message.type === "authenticate" ? undefined : message.id;
}
