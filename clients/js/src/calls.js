/**
 * What is asked once: queries, mutations, waits, and what is said on channels. To ask for a query
 * or a wait again is safe, and so they are asked again on the next connection. A mutation is sent
 * once: if it was sent and not answered, nobody here knows whether it has happened, and that is its
 * outcome; so it is with what is said on a channel. Ids begin with a letter, so that they are never
 * those of subscriptions.
 *
 * @typedef {import("./protocol.js").Ask | import("./protocol.js").Mutate
 *   | import("./protocol.js").Wait | import("./protocol.js").Publish
 *   | import("./protocol.js").SetState} Call
 * @typedef {import("./protocol.js").Answer} Answer
 * @typedef {{id: string, message: Call, attempts: number, resolve: (answer: Answer) => void,
 *   reject: (error: unknown) => void}} Pending
 */

import { connectionFailed, errorOf, outcomeUnknown } from "./errors.js";
import { CALL_ATTEMPTS_MAX, CALLS_AT_ONCE } from "./limits.js";

export class Calls {
  #send;
  #number = 0;
  /** Under way, by id. @type {Map<string, Pending>} */
  #pending = new Map();
  /** Beyond what may be under way. @type {Pending[]} */
  #queue = [];

  /**
   * @param {(message: Call) => boolean} send whether it was sent: not while there is no connection
   */
  constructor(send) {
    this.#send = send;
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
      const message = /** @type {Call} */ ({ ...call, [isSaid(call) ? "request" : "id"]: id });
      this.#queue.push({ id, message, attempts: 0, resolve, reject });
      this.#next();
    });
  }

  /** There is a connection: ask what is not answered. */
  connected() {
    for (const pending of [...this.#pending.values()]) {
      // What may be sent only once and was, was sent on this connection: `lost` ended the others.
      if (!pending.attempts || !isOnce(pending.message)) this.#ask(pending);
    }
  }

  /**
   * Whether the message was the end of a call.
   *
   * @param {Answer | import("./protocol.js").ErrorMessage} message
   */
  received(message) {
    const pending = this.#take(message.id);
    if (!pending) return false;
    if (message.type === "answer") pending.resolve(message);
    else pending.reject(errorOf(message));
    return true;
  }

  /** The connection is gone: the calls that cannot be asked again are over. */
  lost() {
    // By the next connection the channel has another id.
    const unsaid = this.#queue.filter(({ message }) => isSaid(message));
    this.#queue = this.#queue.filter(({ message }) => !isSaid(message));
    for (const { reject } of unsaid) reject(notSaid());
    for (const { id, message, attempts } of [...this.#pending.values()]) {
      if (isOnce(message) && attempts) this.#take(id)?.reject(outcomeUnknown(nameOf(message)));
      else if (isSaid(message)) this.#take(id)?.reject(notSaid());
      else if (attempts >= CALL_ATTEMPTS_MAX) this.#take(id)?.reject(tooOften(message));
    }
  }

  /** There will be no other connection. @param {unknown} error */
  over(error) {
    this.lost();
    for (const { reject } of [...this.#pending.values(), ...this.#queue]) reject(error);
    this.#pending.clear();
    this.#queue = [];
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
    if (this.#send(pending.message)) pending.attempts += 1;
  }

  /** @param {string | null | undefined} id */
  #take(id) {
    const pending = this.#pending.get(id ?? "");
    if (pending) {
      this.#pending.delete(pending.id);
      this.#next();
    }
    return pending;
  }
}

/** Whether it is said on a channel. @param {{type: string}} call */
const isSaid = (call) => call.type === "publish" || call.type === "state";

/** Whether it is sent once. @param {{type: string}} call */
const isOnce = (call) => call.type === "mutate" || isSaid(call);

/** @param {Call} call */
function nameOf(call) {
  return "name" in call
    ? `${call.type === "query" ? "query" : "mutation"} ${call.name}`
    : call.type;
}

function notSaid() {
  return connectionFailed("the connection was lost before this was said on the channel");
}

/** @param {Call} call */
function tooOften(call) {
  return connectionFailed(
    `the connection was lost ${CALL_ATTEMPTS_MAX} times before ${nameOf(call)} was answered`,
    { hint: "If the connection is lost each time it is asked, the gateway's log says why." },
  );
}
