/**
 * Calls that wait for their answer: queries, mutations, waits, and messages to channels. After a lost
 * connection they are sent again on the next one. For queries and waits that is safe by itself.
 * Mutations and messages have an idempotency key, made once for each call: the gateway executes a key
 * once and answers repetitions with the stored result. The outcome of a mutation that was sent is
 * unknown only if no gateway can be reached again, or the client is closed. The ids of calls begin
 * with a letter, so that they differ from those of subscriptions.
 *
 * @typedef {import("../protocol.js").Ask | import("../protocol.js").Mutate
 *   | import("../protocol.js").Wait | import("../protocol.js").Publish
 *   | import("../protocol.js").SetState} Call
 * @typedef {import("../protocol.js").Answer} Answer
 * @typedef {import("../errors.js").HeadwaterError} HeadwaterErrorType
 * @typedef {import("./backoff.js").Backoff} Backoff
 *
 * @typedef {object} PendingCall
 * @property {string} id
 * @property {Call} message
 * @property {number} attempts
 * @property {boolean} isSent on the current connection
 * @property {boolean} mayHaveRun whether it was sent and may have been executed
 * @property {number} since when it was first sent
 * @property {number | undefined} refused when it was first refused temporarily, on this connection
 * @property {Backoff} backoff counts these refusals
 * @property {ReturnType<typeof setTimeout>} [timer] until it is sent again
 * @property {(answer: Answer) => void} resolve
 * @property {(error: unknown) => void} reject
 */

import { connectionFailed, errorOf, isDenied, outcomeUnknown } from "../errors.js";
import {
  CALL_ATTEMPTS_MAX,
  CALLS_AT_ONCE,
  REFUSED_SECONDS_MAX,
  REPEAT_SECONDS_MAX,
} from "../limits.js";

export class PendingCalls {
  #send;
  #newBackoff;
  #number = 0;
  /** Calls under way, by id. @type {Map<string, PendingCall>} */
  #pending = new Map();
  /** Calls that wait until fewer are under way. @type {PendingCall[]} */
  #queue = [];

  /**
   * @param {(message: Call) => boolean} send returns false while there is no connection
   * @param {() => Backoff} newBackoff
   */
  constructor(send, newBackoff) {
    this.#send = send;
    this.#newBackoff = newBackoff;
  }

  /**
   * Make a call. Settles with its answer, or rejects with the gateway's error.
   *
   * @param {Omit<import("../protocol.js").Ask, "id"> | Omit<import("../protocol.js").Mutate, "id">
   *   | Omit<import("../protocol.js").Wait, "id"> | import("../protocol.js").Publish
   *   | import("../protocol.js").SetState} call
   * @returns {Promise<Answer>}
   */
  call(call) {
    return new Promise((resolve, reject) => {
      const id = `r${++this.#number}`;
      this.#queue.push({
        id,
        message: /** @type {Call} */ ({ ...call, [isChannelMessage(call) ? "request" : "id"]: id }),
        attempts: 0,
        isSent: false,
        mayHaveRun: false,
        since: 0,
        refused: undefined,
        backoff: this.#newBackoff(),
        resolve,
        reject,
      });
      this.#sendQueued();
    });
  }

  /** There is a connection: send the calls that were not answered. */
  connected() {
    for (const pending of [...this.#pending.values()]) {
      if (!pending.isSent) this.#attempt(pending);
    }
  }

  /**
   * Returns whether the message was the answer to a call.
   *
   * @param {Answer | import("../protocol.js").ErrorMessage} message
   */
  received(message) {
    const pending = this.#pending.get(message.id ?? "");
    if (!pending) return false;
    if (message.type === "error") this.#refused(pending, errorOf(message));
    else this.#remove(pending).resolve(message);
    return true;
  }

  /** The connection was lost. */
  lost() {
    // `channel-calls.js` repeats messages to channels: the channel will have another id.
    const unsent = this.#queue.filter(({ message }) => isChannelMessage(message));
    this.#queue = this.#queue.filter(({ message }) => !isChannelMessage(message));
    for (const { reject } of unsent) reject(new NotAnswered(false));
    for (const pending of [...this.#pending.values()]) {
      clearTimeout(pending.timer);
      pending.mayHaveRun ||= pending.isSent;
      pending.isSent = false;
      pending.refused = undefined;
      pending.backoff = this.#newBackoff();
      if (isChannelMessage(pending.message)) {
        this.#remove(pending).reject(new NotAnswered(pending.mayHaveRun));
      } else if (pending.attempts >= CALL_ATTEMPTS_MAX) this.#reject(pending, lostTooOften(pending));
    }
  }

  /** There will be no other connection. @param {HeadwaterErrorType} error */
  fail(error) {
    this.lost();
    const all = [...this.#pending.values(), ...this.#queue];
    this.#pending.clear();
    this.#queue = [];
    for (const pending of all) pending.reject(outcomeOf(pending, error));
  }

  #sendQueued() {
    while (this.#queue.length && this.#pending.size < CALLS_AT_ONCE) {
      const pending = /** @type {PendingCall} */ (this.#queue.shift());
      this.#pending.set(pending.id, pending);
      this.#attempt(pending);
    }
  }

  /** @param {PendingCall} pending */
  #attempt(pending) {
    // By now the gateway may have dropped the key, and would execute the call again.
    if (pending.mayHaveRun && isKeyed(pending) && secondsSince(pending.since) > REPEAT_SECONDS_MAX) {
      this.#reject(pending, connectionFailed(LOST_TOO_LONG));
      return;
    }
    if (!this.#send(pending.message)) {
      if (isChannelMessage(pending.message)) this.#remove(pending).reject(new NotAnswered(false));
      return;
    }
    if (!pending.attempts) pending.since = Date.now();
    pending.attempts += 1;
    pending.isSent = true;
  }

  /**
   * A mutation that is refused temporarily is sent again for a while: its key makes that safe.
   *
   * @param {PendingCall} pending
   * @param {HeadwaterErrorType} error
   */
  #refused(pending, error) {
    pending.isSent = false;
    pending.mayHaveRun ||= MAY_HAVE_RUN.has(error.code);
    pending.refused ??= Date.now();
    const isTemporary = error.retryAfter !== undefined || TEMPORARY.has(error.code);
    const mayRepeat = isKeyed(pending) && isTemporary;
    const pause = mayRepeat ? pending.backoff.failed(Math.random(), error.retryAfter) : null;
    if (pause === null || secondsSince(pending.refused) + pause > REFUSED_SECONDS_MAX) {
      this.#reject(pending, error);
      return;
    }
    pending.timer = setTimeout(() => this.#attempt(pending), pause * 1000);
  }

  /** @param {PendingCall} pending @param {HeadwaterErrorType} error */
  #reject(pending, error) {
    this.#remove(pending).reject(outcomeOf(pending, error));
  }

  /** The call has ended. @param {PendingCall} pending */
  #remove(pending) {
    clearTimeout(pending.timer);
    this.#pending.delete(pending.id);
    this.#sendQueued();
    return pending;
  }
}

/** The connection was lost before a message to a channel was answered. */
export class NotAnswered {
  /** @param {boolean} mayHaveRun whether the message was sent */
  constructor(mayHaveRun) {
    this.mayHaveRun = mayHaveRun;
  }
}

/** An idempotency key for a call and its repetitions. Pages without HTTPS have no `randomUUID`. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Errors after which the same call may succeed in a moment. */
const TEMPORARY = new Set(["unavailable", "database", "outcome_unknown", "still_running"]);

/** Errors after which an attempt may still succeed, or may have succeeded. */
const MAY_HAVE_RUN = new Set(["outcome_unknown", "still_running"]);

/** Whether it is a message to a channel. @param {{type: string}} call */
const isChannelMessage = (call) => call.type === "publish" || call.type === "state";

/** Whether it has an idempotency key. @param {PendingCall} pending */
const isKeyed = ({ message }) => "idempotency_key" in message;

/** @param {number} time */
const secondsSince = (time) => (Date.now() - time) / 1000;

/** Errors of a mutation that ran and was rolled back: it wrote nothing. */
const ROLLED_BACK = new Set(["conflict", "timed_out"]);

/**
 * Final errors from before the gateway looks up the key, for example at a gateway with another
 * release of the application. They say nothing about an earlier attempt.
 */
const BEFORE_KEY_LOOKUP = new Set([
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

/** Whether the error shows that no attempt has succeeded. @param {HeadwaterErrorType} error */
const isConclusive = (error) =>
  ROLLED_BACK.has(error.code) ||
  !(error.retryable || isDenied(error) || BEFORE_KEY_LOOKUP.has(error.code));

/**
 * The error for the caller: `outcome_unknown` if an earlier attempt may have been executed and the
 * error does not show that it was not.
 *
 * @param {PendingCall} pending
 * @param {HeadwaterErrorType} error
 */
function outcomeOf({ message, mayHaveRun }, error) {
  if (message.type !== "mutate" || !mayHaveRun || isConclusive(error)) return error;
  return outcomeUnknown(nameOf(message), error);
}

/** @param {Call} call */
function nameOf(call) {
  return "name" in call
    ? `${call.type === "query" ? "query" : "mutation"} ${call.name}`
    : call.type;
}

const LOST_TOO_LONG = `the connection was lost for more than ${REPEAT_SECONDS_MAX} seconds`;

/** @param {PendingCall} pending */
function lostTooOften({ message }) {
  return connectionFailed(
    `the connection was lost ${CALL_ATTEMPTS_MAX} times before ${nameOf(message)} was answered`,
    { hint: "If this call makes the gateway fail, the error is in the log of the gateway process." },
  );
}
