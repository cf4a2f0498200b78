/**
 * What is asked once: queries, mutations, waits, and messages to channels. After a lost connection
 * all of them are asked again on the next. For queries and waits that is safe by itself. Mutations
 * and messages carry an idempotency key, made once for each call: the gateway executes a key once
 * and answers its repetitions with the stored result. Only when no gateway can be reached again, or
 * the client is closed, is the outcome of a mutation that was sent unknown. Ids begin with a
 * letter, so that they are never those of subscriptions.
 *
 * @typedef {import("./protocol.js").Ask | import("./protocol.js").Mutate
 *   | import("./protocol.js").Wait | import("./protocol.js").Publish
 *   | import("./protocol.js").SetState} Call
 * @typedef {import("./protocol.js").Answer} Answer
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("./backoff.js").Backoff} Backoff
 *
 * @typedef {object} Pending
 * @property {string} id
 * @property {Call} message
 * @property {number} attempts
 * @property {boolean} isSent on the present connection
 * @property {boolean} isDoubtful whether it was sent and may have been executed
 * @property {number} since when it was sent first
 * @property {number | undefined} refused when it was refused for now first, on this connection
 * @property {Backoff} backoff counts these refusals
 * @property {ReturnType<typeof setTimeout>} [timer] until it is asked again
 * @property {(answer: Answer) => void} resolve
 * @property {(error: unknown) => void} reject
 */

import { connectionFailed, errorOf, isDenied, outcomeUnknown } from "./errors.js";
import {
  CALL_ATTEMPTS_MAX,
  CALLS_AT_ONCE,
  REFUSED_SECONDS_MAX,
  REPEAT_SECONDS_MAX,
} from "./limits.js";

export class Calls {
  #send;
  #newBackoff;
  #number = 0;
  /** Under way, by id. @type {Map<string, Pending>} */
  #pending = new Map();
  /** Beyond what may be under way. @type {Pending[]} */
  #queue = [];

  /**
   * @param {(message: Call) => boolean} send whether it was sent: not while there is no connection
   * @param {() => Backoff} newBackoff
   */
  constructor(send, newBackoff) {
    this.#send = send;
    this.#newBackoff = newBackoff;
  }

  /**
   * Have it answered. Rejects with what the gateway refused it with.
   *
   * @param {Omit<import("./protocol.js").Ask, "id"> | Omit<import("./protocol.js").Mutate, "id">
   *   | Omit<import("./protocol.js").Wait, "id"> | import("./protocol.js").Publish
   *   | import("./protocol.js").SetState} call
   * @returns {Promise<Answer>}
   */
  ask(call) {
    return new Promise((resolve, reject) => {
      const id = `r${++this.#number}`;
      this.#queue.push({
        id,
        message: /** @type {Call} */ ({ ...call, [isSaid(call) ? "request" : "id"]: id }),
        attempts: 0,
        isSent: false,
        isDoubtful: false,
        since: 0,
        refused: undefined,
        backoff: this.#newBackoff(),
        resolve,
        reject,
      });
      this.#next();
    });
  }

  /** There is a connection: ask what is not answered. */
  connected() {
    for (const pending of [...this.#pending.values()]) {
      if (!pending.isSent) this.#ask(pending);
    }
  }

  /**
   * Whether the message was the end of a call, or of an attempt.
   *
   * @param {Answer | import("./protocol.js").ErrorMessage} message
   */
  received(message) {
    const pending = this.#pending.get(message.id ?? "");
    if (!pending) return false;
    if (message.type === "error") this.#refused(pending, errorOf(message));
    else this.#take(pending).resolve(message);
    return true;
  }

  /** The connection is gone. */
  lost() {
    // Messages to a channel are asked for again by their channel, which then has another id.
    const unsent = this.#queue.filter(({ message }) => isSaid(message));
    this.#queue = this.#queue.filter(({ message }) => !isSaid(message));
    for (const { reject } of unsent) reject(new NotAnswered(false));
    for (const pending of [...this.#pending.values()]) {
      clearTimeout(pending.timer);
      pending.isDoubtful ||= pending.isSent;
      pending.isSent = false;
      pending.refused = undefined;
      pending.backoff = this.#newBackoff();
      if (isSaid(pending.message)) this.#take(pending).reject(new NotAnswered(pending.isDoubtful));
      else if (pending.attempts >= CALL_ATTEMPTS_MAX) this.#fail(pending, tooOften(pending));
    }
  }

  /** There will be no other connection. @param {HeadwaterErrorType} error */
  over(error) {
    this.lost();
    const all = [...this.#pending.values(), ...this.#queue];
    this.#pending.clear();
    this.#queue = [];
    for (const pending of all) pending.reject(outcomeOf(pending, error));
  }

  #next() {
    while (this.#queue.length && this.#pending.size < CALLS_AT_ONCE) {
      const pending = /** @type {Pending} */ (this.#queue.shift());
      this.#pending.set(pending.id, pending);
      this.#ask(pending);
    }
  }

  /** @param {Pending} pending */
  #ask(pending) {
    // The gateway may have forgotten the key by now, and would execute it once more.
    if (pending.isDoubtful && isKeyed(pending) && ago(pending.since) > REPEAT_SECONDS_MAX) {
      this.#fail(pending, connectionFailed("the connection was lost for too long"));
      return;
    }
    if (!this.#send(pending.message)) {
      if (isSaid(pending.message)) this.#take(pending).reject(new NotAnswered(false));
      return;
    }
    if (!pending.attempts) pending.since = Date.now();
    pending.attempts += 1;
    pending.isSent = true;
  }

  /**
   * A mutation that is refused for now is asked again for a while: its key makes that safe.
   *
   * @param {Pending} pending
   * @param {HeadwaterErrorType} error
   */
  #refused(pending, error) {
    pending.isSent = false;
    pending.isDoubtful ||= NOT_KNOWN.has(error.code);
    pending.refused ??= Date.now();
    const isForNow = error.retryAfter !== undefined || FOR_NOW.has(error.code);
    const mayRepeat = isKeyed(pending) && isForNow;
    const pause = mayRepeat ? pending.backoff.failed(Math.random(), error.retryAfter) : null;
    if (pause === null || ago(pending.refused) + pause > REFUSED_SECONDS_MAX) {
      this.#fail(pending, error);
      return;
    }
    pending.timer = setTimeout(() => this.#ask(pending), pause * 1000);
  }

  /** @param {Pending} pending @param {HeadwaterErrorType} error */
  #fail(pending, error) {
    this.#take(pending).reject(outcomeOf(pending, error));
  }

  /** It is over. @param {Pending} pending */
  #take(pending) {
    clearTimeout(pending.timer);
    this.#pending.delete(pending.id);
    this.#next();
    return pending;
  }
}

/** The connection was lost before a message to a channel was answered. */
export class NotAnswered {
  /** @param {boolean} isDoubtful whether it was sent */
  constructor(isDoubtful) {
    this.isDoubtful = isDoubtful;
  }
}

/** A key for one call, and for its repetitions. Pages without HTTPS have no `randomUUID`. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What the gateway may be able to do in a moment. */
const FOR_NOW = new Set(["unavailable", "database", "outcome_unknown", "still_running"]);

/** An attempt may succeed yet, or may have succeeded. */
const NOT_KNOWN = new Set(["outcome_unknown", "still_running"]);

/** Whether it is a message to a channel. @param {{type: string}} call */
const isSaid = (call) => call.type === "publish" || call.type === "state";

/** Whether the gateway executes it once. @param {Pending} pending */
const isKeyed = ({ message }) => "idempotency_key" in message;

/** How many seconds. @param {number} time */
const ago = (time) => (Date.now() - time) / 1000;

/** Refusals of a mutation that has run: it wrote nothing, and may succeed later. */
const RAN = new Set(["conflict", "timed_out"]);

/**
 * Refusals from before its key was looked up, although they are final: of a gateway with another
 * release of the application, say. They say nothing about an attempt before.
 */
const NOT_LOOKED_UP = new Set([
  "connection",
  "content_type",
  "headwater_error",
  "internal",
  "invalid_query",
  "limit",
  "method",
  "mutation_unknown",
  "not_found",
  "not_installed",
  "path",
  "session_unknown",
  "too_large",
]);

/** Whether it says that no attempt has succeeded. @param {HeadwaterErrorType} error */
const isWord = (error) =>
  RAN.has(error.code) || !(error.retryable || isDenied(error) || NOT_LOOKED_UP.has(error.code));

/**
 * What its caller learns: of what may have been executed only the gateway's own word counts.
 *
 * @param {Pending} pending
 * @param {HeadwaterErrorType} error
 */
function outcomeOf({ message, isDoubtful }, error) {
  if (message.type !== "mutate" || !isDoubtful || isWord(error)) return error;
  return outcomeUnknown(nameOf(message), error);
}

/** @param {Call} call */
function nameOf(call) {
  return "name" in call
    ? `${call.type === "query" ? "query" : "mutation"} ${call.name}`
    : call.type;
}

/** @param {Pending} pending */
function tooOften({ message }) {
  return connectionFailed(
    `the connection was lost ${CALL_ATTEMPTS_MAX} times before ${nameOf(message)} was answered`,
    { hint: "If the connection is lost each time it is asked, the gateway's log says why." },
  );
}
