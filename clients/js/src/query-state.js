/**
 * A reactive query whose results come whole. A result replaces the one before; what is equal in
 * both keeps its identity. One that could not be had again leaves the value as it was, with the
 * error beside it, until the next.
 */

import { behind, errorOf } from "./errors.js";
import { isBefore } from "./position.js";
import { shared } from "./shared.js";

export class QueryState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** @type {any} */
  value;
  /** Why the value may be out of date. @type {import("./errors.js").HeadwaterError | undefined} */
  error;
  waiting = true;
  #call;

  /** @param {import("./protocol.js").QueryCall} call */
  constructor(call) {
    this.name = call.name;
    this.#call = call;
  }

  /** It was asked for, and its result is not there yet. */
  get isDue() {
    return this.view === undefined || this.waiting;
  }

  /**
   * Ask for it: for a result only if there is another than this.
   *
   * @param {string} wireId
   * @returns {import("./protocol.js").Subscribe}
   */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    this.waiting = true;
    return { type: "subscribe", id: wireId, query: this.#call, since: this.position };
  }

  /** @param {import("./protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
    // The database no longer has what was shown: anything else counts.
    if (message.lost) this.position = undefined;
    this.waiting = !message.resumed;
    if (message.resumed) this.error = undefined;
  }

  /**
   * Take a result. Throws `behind` for one that is older than the one before.
   *
   * @param {import("./protocol.js").ViewMessage} message
   * @returns {never[]}
   */
  receive(message) {
    if (message.type === "failed") this.error = errorOf(message);
    if (message.type === "result") {
      if (this.position !== undefined && isBefore(message.position, this.position)) {
        throw behind(this.name);
      }
      this.value = shared(this.value, message.value ?? null);
      this.position = message.position;
      this.waiting = false;
      this.error = undefined;
    }
    return [];
  }
}
