/**
 * What a program sends to its channels: messages and states, in the order of its calls. What was
 * not answered before a connection was lost is sent again on the next, once the channel is followed
 * there. A message carries its idempotency key each time, so that it is passed on once; a state
 * replaces the one before.
 *
 * @typedef {import("./source.js").Source} Source
 * @typedef {import("./protocol.js").Publish | import("./protocol.js").SetState} Said
 * @typedef {{message: Said, isSent: boolean, isDoubtful: boolean, attempts: number, since: number,
 *   resolve: () => void, reject: (error: unknown) => void}} Entry
 * @typedef {{entries: Entry[], isWorking: boolean}} Outbox
 */

import { NotAnswered } from "./calls.js";
import { connectionFailed, outcomeUnknown } from "./errors.js";
import { CALL_ATTEMPTS_MAX, PUBLISH_SECONDS_MAX } from "./limits.js";

export class ChannelCalls {
  #session;
  #ask;
  /** @type {WeakMap<Source, Outbox>} */
  #outboxes = new WeakMap();

  /**
   * @param {Pick<import("./session.js").Session, "followed" | "heard">} session
   * @param {(message: Said) => Promise<unknown>} ask
   */
  constructor(session, ask) {
    this.#session = session;
    this.#ask = ask;
  }

  /**
   * Send it to the channel that the source follows; settles when it was passed on.
   *
   * @param {Source} source
   * @param {Said} message
   * @returns {Promise<void>}
   */
  send(source, message) {
    const outbox = this.#outboxes.get(source) ?? { entries: [], isWorking: false };
    this.#outboxes.set(source, outbox);
    return new Promise((resolve, reject) => {
      const since = Date.now();
      const begun = { isSent: false, isDoubtful: false, attempts: 0, since };
      outbox.entries.push({ message, ...begun, resolve, reject });
      void this.#work(source, outbox);
    });
  }

  /** Send what is not sent, once that is possible. @param {Source} source @param {Outbox} outbox */
  async #work(source, outbox) {
    if (outbox.isWorking) return;
    outbox.isWorking = true;
    const unsent = () => outbox.entries.filter((entry) => !entry.isSent);
    try {
      while (unsent().length) {
        await this.#session.followed(source);
        for (const entry of unsent()) void this.#attempt(source, outbox, entry);
      }
    } catch (error) {
      for (const entry of unsent()) this.#fail(outbox, entry, error);
    } finally {
      outbox.isWorking = false;
    }
  }

  /** @param {Source} source @param {Outbox} outbox @param {Entry} entry */
  async #attempt(source, outbox, entry) {
    entry.isSent = true;
    try {
      await this.#ask({ ...entry.message, id: source.state.wireId });
      remove(outbox, entry);
      entry.resolve();
    } catch (error) {
      if (!(error instanceof NotAnswered)) return this.#fail(outbox, entry, error);
      if (error.isDoubtful) {
        entry.isDoubtful = true;
        entry.attempts += 1;
      } else await this.#session.heard(); // whose connection it is, is about to change
      if (isTooLate(entry)) {
        const lost = connectionFailed("the connection was lost too often, or for too long");
        return this.#fail(outbox, entry, lost);
      }
      entry.isSent = false;
      void this.#work(source, outbox);
    }
  }

  /** @param {Outbox} outbox @param {Entry} entry @param {any} error */
  #fail(outbox, entry, error) {
    remove(outbox, entry);
    const isUnknown = entry.isDoubtful && entry.message.type === "publish";
    entry.reject(isUnknown ? outcomeUnknown("a message to a channel", error) : error);
  }
}

/** @param {Outbox} outbox @param {Entry} entry */
function remove({ entries }, entry) {
  entries.splice(entries.indexOf(entry), 1);
}

/** @param {Entry} entry */
const isTooLate = ({ attempts, since }) =>
  attempts >= CALL_ATTEMPTS_MAX || Date.now() - since > PUBLISH_SECONDS_MAX * 1000;
