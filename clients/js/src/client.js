/**
 * A client of a gateway: one connection with every subscription and call on it. `connection.js`
 * keeps it open, `session.js` has the subscriptions, `calls.js` what is asked once.
 *
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterErrorType
 *
 * @typedef {object} Setup
 * @property {string[]} urls
 * @property {import("./connection.js").Token} token
 * @property {import("./links.js").Opener} open
 * @property {() => import("./backoff.js").Backoff} newBackoff
 * @property {(error: HeadwaterErrorType) => void} onError
 */

import { Calls, newKey } from "./calls.js";
import { ChannelCalls } from "./channel-calls.js";
import { ChannelState } from "./channel-state.js";
import { Connection } from "./connection.js";
import { configError, connectionFailed, HeadwaterError } from "./errors.js";
import { FeedState } from "./feed-state.js";
import { plain } from "./json.js";
import { covers } from "./position.js";
import { QueryState } from "./query-state.js";
import { QueryRowsState } from "./rows-state.js";
import { Session } from "./session.js";
import { called, Value } from "./store.js";
import { Channel, Feed, Live, Subscription, Topic } from "./subscriptions.js";
import { TopicState } from "./topic-state.js";

export class Client {
  /** The latest position that this user is known to have written, in any tab. */
  written = new Value(/** @type {string | undefined} */ (undefined));
  #connection;
  #calls;
  #channelCalls;
  #session;
  /** @type {import("./subscriptions.js").Owner} */
  #owner;
  #onError;
  /** @type {HeadwaterErrorType | undefined} */
  #error;

  /** @param {Setup} setup */
  constructor({ urls, token, open, newBackoff, onError: hear }) {
    const onError = (/** @type {HeadwaterErrorType} */ error) => void called(hear, error);
    const send = (/** @type {import("./protocol.js").ClientMessage} */ message) =>
      this.#connection.send(message);
    this.#onError = onError;
    this.#calls = new Calls(send, newBackoff);
    const onBehind = (/** @type {HeadwaterErrorType} */ error) => this.#connection.leave(error);
    const session = new Session({ send, onError, onBehind, newBackoff });
    this.#session = session;
    this.#channelCalls = new ChannelCalls(session, (message) => this.#ask(message));
    this.#owner = {
      leave: (source) => session.leave(source),
      pause: (source) => session.pause(source),
      resume: (source) => session.resume(source),
      reanchor: (source, after) => session.reanchor(source, after),
      say: (source, message) => this.#say(source, message),
    };
    this.#connection = new Connection(urls, token, open, newBackoff, {
      connected: () => {
        session.connected();
        this.#calls.connected();
      },
      message: (message) => this.#receive(message),
      lost: () => {
        session.lost();
        this.#calls.lost();
      },
      doubt: onError,
      over: (error) => this.#over(error),
    });
  }

  /** A store: "connecting", "open", "closed" or "failed". */
  get status() {
    return this.#connection.status;
  }

  /** Why there will be no other connection. */
  get error() {
    return this.#error;
  }

  /** How often a lost connection was replaced. */
  get reconnects() {
    return this.#connection.reconnects;
  }

  /** How often a replica was not what it should be, and was read anew. Expected: 0. */
  get diverged() {
    return this.#session.diverged;
  }

  /** End the connection and all that is on it. */
  close() {
    this.#connection.close();
    const error = connectionFailed("the connection was closed", { retryable: false });
    this.#error ??= error;
    this.#session.close(error);
    this.#calls.over(error);
  }

  /**
   * Follow a live query. With `verify`, every batch carries the hash of the result, and is checked
   * against it.
   *
   * @param {LiveQuery | string} query
   * @param {(rows: readonly Row[], live: Live) => void} [onRows]
   * @param {{verify?: boolean}} [options]
   */
  live(query, onRows, { verify = false } = {}) {
    const whole = plain(typeof query === "string" ? { table: query } : query);
    if (typeof whole?.table !== "string") {
      throw configError("a live query names its table", 'hw.live({ table: "orders", limit: 20 })');
    }
    const live = new Live(this.#owner, this.#session.live(whole, verify));
    if (onRows) live.onValue(onRows);
    return live;
  }

  /**
   * Follow a reactive query. With `delta`, its rows travel as what changed in them.
   *
   * @param {string} name
   * @param {Record<string, any>} [args]
   * @param {(value: any, subscription: Subscription<any>) => void} [onValue]
   * @param {{delta?: boolean}} [options]
   * @returns {Subscription<any>}
   */
  subscribe(name, args = {}, onValue, { delta = false } = {}) {
    const call = { ...namedCall(name, args), ...(delta && { delta }) };
    const source = this.#session.share({ query: call }, () =>
      delta ? new QueryRowsState(call) : new QueryState(call),
    );
    const subscription = new Subscription(this.#owner, source);
    if (onValue) subscription.onValue(onValue);
    return subscription;
  }

  /**
   * Follow a topic: from now on, or from a position.
   *
   * @param {string} name
   * @param {(ops: import("./topic-state.js").TopicOp[], topic: Topic) => void} [onOps]
   * @param {{since?: string}} [options]
   */
  topic(name, onOps, { since } = {}) {
    checkName(name, "topic");
    const source = this.#session.share({ topic: name, since }, () => new TopicState(name, since));
    const topic = new Topic(this.#owner, source);
    if (onOps) topic.onOps(onOps);
    return topic;
  }

  /**
   * Follow the changes of tables, none for all: from now on, or from a position. A callback that
   * gives a promise is waited for before the next transaction.
   *
   * @param {import("./protocol.js").ChangesQuery} query
   * @param {(transaction: import("./feed-state.js").Transaction) => unknown} onTransaction
   */
  changes(query, onTransaction) {
    const source = this.#session.follow(new FeedState(plain(query)));
    return new Feed(this.#owner, source, onTransaction);
  }

  /**
   * Be on a channel; with `present`, seen by the others, with a state.
   *
   * @param {string} name
   * @param {{state?: any, present?: boolean,
   *   onMessage?: (message: import("./protocol.js").ChannelMessage) => void}} [options]
   */
  channel(name, { state, present = state !== undefined, onMessage } = {}) {
    checkName(name, "channel");
    const call = plain({ name, ...(present && { present, state }) });
    const source = this.#session.follow(new ChannelState(call));
    const channel = new Channel(this.#owner, source);
    if (onMessage) channel.onMessage(onMessage);
    return channel;
  }

  /**
   * A reactive query's result, once. It contains what this user's own mutations have written; with
   * `after`, that position instead.
   *
   * @param {string} name
   * @param {Record<string, any>} [args]
   * @param {{after?: string}} [options]
   * @returns {Promise<any>}
   */
  async query(name, args = {}, { after } = {}) {
    const wanted = after ?? this.written.value;
    const call = namedCall(name, args);
    try {
      return (await this.#ask({ type: "query", ...call, after: wanted })).value ?? null;
    } catch (error) {
      const isOver = error instanceof HeadwaterError && error.code === "resync";
      if (after !== undefined || wanted === undefined || !isOver) throw error;
    }
    // The database was restored, or lost what we wrote: there is nothing left to wait for.
    if (this.written.value === wanted) this.written.set(undefined);
    return this.query(name, call.args);
  }

  /**
   * Run a mutation, once: after a lost connection it is sent again with the same idempotency key.
   * It rejects with the code `outcome_unknown` if it was sent and no gateway can be reached again.
   * A program that repeats a call itself, perhaps in another process, gives it a key of its own.
   *
   * @param {string} name
   * @param {Record<string, any>} [args]
   * @param {{idempotencyKey?: string}} [options]
   * @returns {Promise<{value: any, position: string}>}
   */
  async mutate(name, args = {}, { idempotencyKey = newKey() } = {}) {
    checkKey(idempotencyKey);
    const call = { ...namedCall(name, args), idempotency_key: idempotencyKey };
    const { value = null, position } = await this.#ask({ type: "mutate", ...call });
    this.#wrote(position);
    return { value, position };
  }

  /** Wait until every subscription has what the position contains. @param {string} position */
  async waitFor(position) {
    if (typeof position !== "string") {
      throw configError("a position is a text", "await hw.waitFor(placed.position)");
    }
    await this.#session.caughtUp(() => this.#ask({ type: "wait", position }));
  }

  // ------------------------------------------------------------------ within

  /** @param {import("./protocol.js").ServerMessage} message */
  #receive(message) {
    if ("position" in message && message.position) this.#session.saw(message.position);
    if (message.type === "written") this.#wrote(message.position);
    else if (!isEnd(message) || !this.#calls.received(message)) this.#session.receive(message);
  }

  /** @param {HeadwaterErrorType} error */
  #over(error) {
    this.#error = error;
    this.#session.over(error);
    this.#calls.over(error);
    this.#onError(error);
  }

  /** @param {Parameters<Calls["ask"]>[0]} call */
  async #ask(call) {
    if (this.#error) throw this.#error;
    return this.#calls.ask(plain(call));
  }

  /** @type {import("./subscriptions.js").Owner["say"]} */
  async #say(source, message) {
    try {
      await this.#channelCalls.send(source, message);
    } catch (error) {
      this.#onError(/** @type {HeadwaterErrorType} */ (error));
      throw error;
    }
  }

  /**
   * Mutations beside each other may be answered in any order: the latest counts.
   *
   * @param {string} position
   */
  #wrote(position) {
    const before = this.written.value;
    if (before === undefined || !covers(before, position)) this.written.set(position);
  }
}

/**
 * Whether it may be the end of a call.
 *
 * @param {import("./protocol.js").ServerMessage} message
 */
const isEnd = (message) => message.type === "answer" || message.type === "error";

/**
 * A reactive query or a mutation, by its name.
 *
 * @param {string} name
 * @param {Record<string, any>} args
 * @returns {{name: string, args: Record<string, any>}}
 */
function namedCall(name, args) {
  const call = plain({ name, args });
  if (typeof call.name === "string" && isObject(call.args)) return call;
  throw configError(
    "a query or a mutation has a name, and its arguments are an object",
    'hw.query("open_orders", { region: 7 })',
  );
}

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @param {unknown} key */
function checkKey(key) {
  if (typeof key === "string" && /^[!-~]{1,128}$/.test(key)) return;
  throw configError(
    "an idempotency key is a text of 1 to 128 printable ASCII characters",
    "A random one, such as crypto.randomUUID(), made once for each call.",
  );
}

/** @param {unknown} name @param {"topic" | "channel"} kind */
function checkName(name, kind) {
  if (typeof name !== "string") throw configError(`a ${kind} has a name`, `hw.${kind}("room:1")`);
}
