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
import { ANSWER_SECONDS, REQUESTS_AT_ONCE } from "./limits.js";
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
  /** The last request about each subscription. @type {Map<string, Promise<void>>} */
  #latest = new Map();
  /** @type {Set<Promise<void>>} */
  #mutations = new Set();
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
    await this.#lastAnswers();
    throw connectionFailed(`the stream of ${this.#url} ended`);
  }

  /** @param {string} data */
  #read(data) {
    const message = readMessage(data);
    if (message.type === "hello") this.#session = message.session;
    this.#deliver(message);
  }

  /** A gateway that stops still answers what it has begun. */
  async #lastAnswers() {
    if (!this.#mutations.size) return;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const enough = new Promise((resolve) => (timer = setTimeout(resolve, ANSWER_SECONDS * 1000)));
    await Promise.race([Promise.allSettled(this.#mutations), enough]);
    clearTimeout(timer);
  }

  // ------------------------------------------------------------------ requests

  /** @param {ClientMessage} message */
  send(message) {
    const name = "id" in message ? message.id : "";
    const before = this.#latest.get(name) ?? Promise.resolve();
    const request = before.then(() => this.#request(message)).catch((error) => this.#end(error));
    this.#latest.set(name, request);
    if (message.type === "mutate") this.#mutations.add(request);
    void request.then(() => {
      this.#mutations.delete(request);
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
      const response = await this.#say(message);
      const body = await response.text();
      if (response.ok) this.#heard(message, body);
      else await this.#refused(message, response.status, body);
    } finally {
      this.#underWay -= 1;
      this.#waiting.shift()?.();
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
  async #refused(message, status, body) {
    const refusal = (message.type === "mutate" ? mutationRefusalIn : refusalIn)(status, body);
    const hungUp = status === 401 || refusal.code === "session_unknown";
    // Queries and mutations need no session, and a refusal is what becomes of them.
    if (hungUp && message.type !== "query" && message.type !== "mutate") {
      throw status === 401 ? errorOf(refusal) : connectionFailed(refusal.message);
    }
    if (message.type === "unsubscribe") {
      // Whatever else is refused, this must be done, or it would stay for good.
      if (status === 429)
        setTimeout(() => this.send(message), (refusal.retry_after_secs ?? 1) * 1000);
      return;
    }
    this.#deliver({ ...refusal, type: "error", id: ended(message) });
  }

  /** @param {ClientMessage} message @returns {Promise<Response>} */
  #say(message) {
    const session = `${this.#address}/sessions/${encodeURIComponent(this.#session)}`;
    switch (message.type) {
      case "subscribe": {
        const { type: _, ...fields } = message;
        return this.#fetch(`${session}/subscriptions`, "POST", fields);
      }
      case "unsubscribe":
        return this.#fetch(`${session}/subscriptions/${message.id}`, "DELETE");
      case "reanchor":
        return this.#fetch(`${session}/subscriptions/${message.id}`, "PATCH", {
          after: message.after,
          request: message.request,
        });
      case "publish":
        return this.#fetch(`${session}/publish`, "POST", { id: message.id, data: message.data });
      case "state":
        return this.#fetch(`${session}/state`, "POST", { id: message.id, state: message.state });
      case "authenticate":
        this.#token = message.token;
        return this.#fetch(`${session}/token`, "POST", { token: message.token });
      case "wait":
        return this.#fetch(`${session}/wait`, "POST", {
          id: message.id,
          position: message.position,
        });
      case "mutate":
        return this.#fetch(
          `${this.#address}/mutation/${encodeURIComponent(message.name)}`,
          "POST",
          message.args,
        );
      case "query": {
        const after =
          message.after === undefined ? "" : `?after=${encodeURIComponent(message.after)}`;
        return this.#fetch(
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
   * @returns {Promise<Response>}
   */
  async #fetch(url, method = "GET", body) {
    try {
      return await fetch(url, {
        method,
        headers: {
          ...headersOf(this.#token),
          ...(body !== undefined && { "Content-Type": "application/json" }),
        },
        body: body === undefined ? undefined : stringify(body),
        signal: this.#ends.signal,
        cache: "no-store",
      });
    } catch (error) {
      throw error instanceof HeadwaterError ? error : unreachable(this.#url, error);
    }
  }
}

/** What a refusal is the end of. @param {ClientMessage} message */
function ended(message) {
  if ("request" in message) return message.request;
  return message.type === "authenticate" ? undefined : message.id;
}
