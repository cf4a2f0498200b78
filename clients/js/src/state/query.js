/**
 * The state of a reactive query whose results are sent as a whole. A result replaces the one before;
 * parts that are equal in both stay the same objects. If the query fails, the value stays, with the
 * error beside it, until the next result.
 */

import { behind, errorOf } from "../errors.js";
import { isBefore } from "./position.js";
import { reuseEqual } from "./structural-sharing.js";

export class QueryState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {string | undefined} */
  position;
  /** @type {any} */
  value;
  /** Why the value may be out of date. @type {import("../errors.js").HeadwaterError | undefined} */
  error;
  waiting = true;
  #call;

  /** @param {import("../protocol.js").QueryCall} call */
  constructor(call) {
    this.name = call.name;
    this.#call = call;
  }

  /** It was subscribed, and its result has not arrived yet. */
  get isPending() {
    return this.view === undefined || this.waiting;
  }

  /**
   * The message that subscribes. With `since`, a result is sent only if it has changed.
   *
   * @param {string} wireId
   * @returns {import("../protocol.js").Subscribe}
   */
  subscribe(wireId) {
    this.wireId = wireId;
    this.view = undefined;
    this.waiting = true;
    return { type: "subscribe", id: wireId, query: this.#call, since: this.position };
  }

  /** @param {import("../protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
    // The database was restored and no longer has this position: any result is accepted.
    if (message.lost) this.position = undefined;
    this.waiting = !message.resumed;
    if (message.resumed) this.error = undefined;
  }

  /**
   * Apply a message. Throws `behind` for a result that is older than the current one.
   *
   * @param {import("../protocol.js").ViewMessage} message
   * @returns {never[]}
   */
  receive(message) {
    if (message.type === "failed") this.error = errorOf(message);
    if (message.type === "result") {
      if (this.position !== undefined && isBefore(message.position, this.position)) {
        throw behind(this.name);
      }
      this.value = reuseEqual(this.value, message.value ?? null);
      this.position = message.position;
      this.waiting = false;
      this.error = undefined;
    }
    return [];
  }
}
