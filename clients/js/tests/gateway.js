/**
 * A gateway in memory, for what needs no real one: a table of numbers, live queries over all of it
 * or what lies behind a cursor, and one mutation. A link may be cut, and what is sent to it looked
 * at.
 */

import { connectionFailed } from "../src/errors.js";
import { client as clientOf } from "./stage.js";

/**
 * A client of it, which ends with its test and tries again at once.
 *
 * @param {import("node:test").TestContext} test
 * @param {Gateway} gateway
 * @param {import("../src/index.js").Options} [options]
 */
export const client = (test, { open }, options) =>
  clientOf(test, "http://memory", {
    transport: open,
    backoff: { seconds: [0.001, 0.002] },
    ...options,
  });

export class Gateway {
  /** @type {Set<MemoryLink>} */
  links = new Set();
  /** How many links there have been. */
  opened = 0;
  /** @type {number[]} */
  ids = [];
  /** Everything that clients have said. @type {any[]} */
  heard = [];
  /**
   * Called with what a client says; true if that is all.
   *
   * @type {(message: any, link: MemoryLink) => unknown}
   */
  instead = () => false;
  /** Whether it lets anybody in. */
  isUp = true;
  #number = 100;
  #views = 0;

  /** @type {import("../src/links.js").Opener} */
  open = (_url, token, ends) => {
    const link = new MemoryLink(this, ends, token);
    setTimeout(() => {
      if (ends.signal.aborted) return;
      if (!this.isUp) return ends.onClose(connectionFailed("nobody is there"));
      this.opened += 1;
      this.links.add(link);
      link.say({ type: "hello", session: `s${this.opened}`, version: 1, keepalive: 15 });
    });
    return link;
  };

  get position() {
    return `ab-${this.#number}:${this.#number}:`;
  }

  get subscriptions() {
    return [...this.links].reduce((sum, link) => sum + link.views.size, 0);
  }

  /** @param {number} id */
  place(id) {
    this.ids.push(id);
    this.#number += 1;
    const index = this.ids.length - 1;
    for (const link of this.links) {
      for (const view of link.views.values()) {
        link.say({
          type: "deltas",
          view,
          position: this.position,
          at: "2026-01-31T12:00:00Z",
          deltas: [{ delta: "enter", key: [id], row: { id }, index, cursor: [id] }],
        });
      }
    }
  }

  /** @param {any} message @param {MemoryLink} link */
  hear(message, link) {
    this.heard.push(message);
    if (this.instead(message, link)) return;
    const { position } = this;
    switch (message.type) {
      case "subscribe": {
        const view = --this.#views; // as of those that a session has more than once
        link.views.set(message.id, view);
        link.say({ type: "subscribed", id: message.id, view, key: ["id"] });
        link.say({ type: "snapshot", view, position, rows: this.#rows(message.live?.after) });
        break;
      }
      case "reanchor": {
        const { request: id, after } = message;
        const view = link.views.get(message.id);
        if (typeof after?.[0] === "string") {
          link.say({ type: "error", id, code: "invalid_query", message: "expected a number" });
          break;
        }
        link.say({ type: "reset", view, position, reason: "window", rows: this.#rows(after) });
        link.say({ type: "answer", id, position });
        break;
      }
      case "unsubscribe":
        link.views.delete(message.id);
        break;
      case "mutate":
        this.place(message.args.id);
        link.say({
          type: "answer",
          id: message.id,
          position: this.position,
          value: message.args.id,
        });
        break;
      case "query":
        link.say({ type: "answer", id: message.id, position, value: this.ids.length });
        break;
      case "wait":
        link.say({ type: "answer", id: message.id, position });
        break;
    }
  }

  /** @param {number[]} [after] */
  #rows(after) {
    const behind = this.ids.filter((id) => !after || id > after[0]);
    return behind.map((id, index) => ({
      delta: "enter",
      key: [id],
      row: { id },
      index,
      cursor: [id],
    }));
  }
}

class MemoryLink {
  /** Of its subscriptions. @type {Map<string, number>} */
  views = new Map();
  #gateway;
  #ends;

  /**
   * @param {Gateway} gateway
   * @param {import("../src/links.js").Ends} ends
   * @param {string | undefined} token
   */
  constructor(gateway, ends, token) {
    this.#gateway = gateway;
    this.#ends = ends;
    this.token = token;
    ends.signal.addEventListener("abort", () => gateway.links.delete(this));
  }

  /** @param {any} message */
  say(message) {
    setTimeout(() => this.#ends.signal.aborted || this.#ends.onMessage(message));
  }

  /** @param {any} message */
  send(message) {
    const text = JSON.parse(JSON.stringify(message));
    setTimeout(() => this.#ends.signal.aborted || this.#gateway.hear(text, this));
  }

  /** @param {import("../src/errors.js").HeadwaterError} [error] */
  cut(error = connectionFailed("the link was cut")) {
    this.#gateway.links.delete(this);
    this.#ends.onClose(error);
  }
}
