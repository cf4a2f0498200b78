/**
 * A fake gateway in memory: a table of numbers, live queries over all of it or over the rows after a
 * cursor, and one mutation. A test may cut a transport, and read the messages that are sent to it.
 */

import { connectionFailed } from "../src/errors.js";
import { client as clientOf } from "./stage.js";

/**
 * A client of the fake gateway. It is closed after its test, and reconnects at once.
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
  /** @type {Set<MemoryTransport>} */
  transports = new Set();
  /** How many transports there have been. */
  opened = 0;
  /** @type {number[]} */
  ids = [];
  /** Every message of the clients. @type {any[]} */
  received = [];
  /**
   * Called with every message of a client; returns true if the message needs no other answer.
   *
   * @type {(message: any, transport: MemoryTransport) => unknown}
   */
  instead = () => false;
  /** Whether it accepts connections. */
  isUp = true;
  #number = 100;
  #views = 0;

  /** @type {import("../src/transports/transport.js").OpenTransport} */
  open = (_url, token, handlers) => {
    const transport = new MemoryTransport(this, handlers, token);
    setTimeout(() => {
      if (handlers.signal.aborted) return;
      if (!this.isUp) return handlers.onClose(connectionFailed("the gateway is down"));
      this.opened += 1;
      this.transports.add(transport);
      transport.deliver({ type: "hello", session: `s${this.opened}`, version: 1, keepalive: 15 });
    });
    return transport;
  };

  get position() {
    return `ab-${this.#number}:${this.#number}:`;
  }

  get subscriptions() {
    return [...this.transports].reduce((sum, transport) => sum + transport.views.size, 0);
  }

  /** @param {number} id */
  place(id) {
    this.ids.push(id);
    this.#number += 1;
    const index = this.ids.length - 1;
    for (const transport of this.transports) {
      for (const view of transport.views.values()) {
        transport.deliver({
          type: "deltas",
          view,
          position: this.position,
          at: "2026-01-31T12:00:00Z",
          deltas: [{ delta: "enter", key: [id], row: { id }, index, cursor: [id] }],
        });
      }
    }
  }

  /** @param {any} message @param {MemoryTransport} transport */
  receive(message, transport) {
    this.received.push(message);
    if (this.instead(message, transport)) return;
    const { position } = this;
    switch (message.type) {
      case "subscribe": {
        const view = --this.#views; // as of those that a session has more than once
        transport.views.set(message.id, view);
        transport.deliver({ type: "subscribed", id: message.id, view, key: ["id"] });
        transport.deliver({ type: "snapshot", view, position, rows: this.#rows(message.live?.after) });
        break;
      }
      case "reanchor": {
        const { request: id, after } = message;
        const view = transport.views.get(message.id);
        if (typeof after?.[0] === "string") {
          transport.deliver({ type: "error", id, code: "invalid_query", message: "expected a number" });
          break;
        }
        transport.deliver({ type: "reset", view, position, reason: "window", rows: this.#rows(after) });
        transport.deliver({ type: "answer", id, position });
        break;
      }
      case "unsubscribe":
        transport.views.delete(message.id);
        break;
      case "mutate":
        this.place(message.args.id);
        transport.deliver({
          type: "answer",
          id: message.id,
          position: this.position,
          value: message.args.id,
        });
        break;
      case "query":
        transport.deliver({ type: "answer", id: message.id, position, value: this.ids.length });
        break;
      case "wait":
        transport.deliver({ type: "answer", id: message.id, position });
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

class MemoryTransport {
  /** Of its subscriptions. @type {Map<string, number>} */
  views = new Map();
  #gateway;
  #handlers;

  /**
   * @param {Gateway} gateway
   * @param {import("../src/transports/transport.js").TransportHandlers} handlers
   * @param {string | undefined} token
   */
  constructor(gateway, handlers, token) {
    this.#gateway = gateway;
    this.#handlers = handlers;
    this.token = token;
    handlers.signal.addEventListener("abort", () => gateway.transports.delete(this));
  }

  /** @param {any} message */
  deliver(message) {
    setTimeout(() => this.#handlers.signal.aborted || this.#handlers.onMessage(message));
  }

  /** @param {any} message */
  send(message) {
    const text = JSON.parse(JSON.stringify(message));
    setTimeout(() => this.#handlers.signal.aborted || this.#gateway.receive(text, this));
  }

  /** @param {import("../src/errors.js").HeadwaterError} [error] */
  cut(error = connectionFailed("the transport was cut")) {
    this.#gateway.transports.delete(this);
    this.#handlers.onClose(error);
  }
}
