/**
 * Messages and states that a program sends to its channels, in the order of its calls. Those that
 * were not answered before the connection was lost are sent again on the next one, after the channel
 * is subscribed there. A message has the same idempotency key each time, so that it is published
 * once; a state replaces the one before.
 *
 * @typedef {import("../subscriptions/source.js").Source} Source
 * @typedef {import("../protocol.js").Publish | import("../protocol.js").SetState} ToChannel
 * @typedef {{message: ToChannel, isSent: boolean, mayHaveRun: boolean, attempts: number,
 *   since: number, resolve: () => void, reject: (error: unknown) => void}} OutboxEntry
 * @typedef {{entries: OutboxEntry[], isSending: boolean}} Outbox
 */

import { NotAnswered } from "./calls.js";
import { connectionFailed, outcomeUnknown } from "../errors.js";
import { CALL_ATTEMPTS_MAX, PUBLISH_SECONDS_MAX } from "../limits.js";

export class ChannelCalls {
  #session;
  #call;
  /** @type {WeakMap<Source, Outbox>} */
  #outboxes = new WeakMap();

  /**
   * @param {Pick<import("../subscriptions/session.js").Session,
   *   "untilSubscribed" | "nextEvent">} session
   * @param {(message: ToChannel) => Promise<unknown>} call
   */
  constructor(session, call) {
    this.#session = session;
    this.#call = call;
  }

  /**
   * Send a message to the channel of a source; settles when it was published.
   *
   * @param {Source} source
   * @param {ToChannel} message
   * @returns {Promise<void>}
   */
  send(source, message) {
    const outbox = this.#outboxes.get(source) ?? { entries: [], isSending: false };
    this.#outboxes.set(source, outbox);
    return new Promise((resolve, reject) => {
      const since = Date.now();
      const unsent = { isSent: false, mayHaveRun: false, attempts: 0, since };
      outbox.entries.push({ message, ...unsent, resolve, reject });
      void this.#sendAll(source, outbox);
    });
  }

  /** Send the unsent entries when that is possible. @param {Source} source @param {Outbox} outbox */
  async #sendAll(source, outbox) {
    if (outbox.isSending) return;
    outbox.isSending = true;
    const unsent = () => outbox.entries.filter((entry) => !entry.isSent);
    try {
      while (unsent().length) {
        await this.#session.untilSubscribed(source);
        for (const entry of unsent()) void this.#attempt(source, outbox, entry);
      }
    } catch (error) {
      for (const entry of unsent()) this.#fail(outbox, entry, error);
    } finally {
      outbox.isSending = false;
    }
  }

  /** @param {Source} source @param {Outbox} outbox @param {OutboxEntry} entry */
  async #attempt(source, outbox, entry) {
    entry.isSent = true;
    try {
      await this.#call({ ...entry.message, id: source.state.wireId });
      remove(outbox, entry);
      entry.resolve();
    } catch (error) {
      if (!(error instanceof NotAnswered)) return this.#fail(outbox, entry, error);
      if (error.mayHaveRun) {
        entry.mayHaveRun = true;
        entry.attempts += 1;
      } else await this.#session.nextEvent(); // the connection is about to change
      if (isTooLate(entry)) return this.#fail(outbox, entry, connectionFailed(TOO_LATE));
      entry.isSent = false;
      void this.#sendAll(source, outbox);
    }
  }

  /** @param {Outbox} outbox @param {OutboxEntry} entry @param {any} error */
  #fail(outbox, entry, error) {
    remove(outbox, entry);
    const isUnknown = entry.mayHaveRun && entry.message.type === "publish";
    entry.reject(isUnknown ? outcomeUnknown("a message to a channel", error) : error);
  }
}

/** @param {Outbox} outbox @param {OutboxEntry} entry */
function remove({ entries }, entry) {
  entries.splice(entries.indexOf(entry), 1);
}

const TOO_LATE =
  `the connection was lost ${CALL_ATTEMPTS_MAX} times, ` +
  `or for more than ${PUBLISH_SECONDS_MAX} seconds, before the message was published`;

/** @param {OutboxEntry} entry */
const isTooLate = ({ attempts, since }) =>
  attempts >= CALL_ATTEMPTS_MAX || Date.now() - since > PUBLISH_SECONDS_MAX * 1000;
