/**
 * A client of a gateway: one connection with every subscription and call on it. `connection/` keeps
 * it open and repeats calls, `subscriptions/` has the subscriptions.
 *
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterErrorType
 *
 * @typedef {object} ClientSetup
 * @property {string[]} urls
 * @property {import("./connection/connection.js").Token} token
 * @property {import("./transports/transport.js").OpenTransport} open
 * @property {() => import("./connection/backoff.js").Backoff} newBackoff
 * @property {(error: HeadwaterErrorType) => void} onError
 */

import { PendingCalls, newKey } from "./connection/calls.js";
import { ChannelCalls } from "./connection/channel-calls.js";
import { ChannelState } from "./state/channel.js";
import { Connection } from "./connection/connection.js";
import { configError, connectionFailed, HeadwaterError } from "./errors.js";
import { FeedState } from "./state/feed.js";
import { jsonCopy } from "./json.js";
import { covers } from "./state/position.js";
import { QueryState } from "./state/query.js";
import { QueryRowsState } from "./state/rows.js";
import { Session } from "./subscriptions/session.js";
import { callSafely, ValueStore } from "./store.js";
import { Channel, Feed, Live, Subscription, Topic } from "./subscriptions/handles.js";
import { TopicState } from "./state/topic.js";

export class Client {
  /** A store: the latest position that this user has written, in any tab. */
  written = new ValueStore(/** @type {string | undefined} */ (undefined));
  #connection;
  #calls;
  #channelCalls;
  #session;
  /** @type {import("./subscriptions/handles.js").SubscriptionOwner} */
  #owner;
  #onError;
  /** @type {HeadwaterErrorType | undefined} */
  #error;

  /** @param {ClientSetup} setup */
  constructor({ urls, token, open, newBackoff, onError: listener }) {
    const onError = (/** @type {HeadwaterErrorType} */ error) => void callSafely(listener, error);
    const send = (/** @type {import("./protocol.js").ClientMessage} */ message) =>
      this.#connection.send(message);
    this.#onError = onError;
    this.#calls = new PendingCalls(send, newBackoff);
    const onBehind = (/** @type {HeadwaterErrorType} */ error) =>
      this.#connection.switchGateway(error);
    const session = new Session({ send, onError, onBehind, newBackoff });
    this.#session = session;
    this.#channelCalls = new ChannelCalls(session, (message) => this.#call(message));
    this.#owner = {
      release: (source) => session.release(source),
      pause: (source) => session.pause(source),
      resume: (source) => session.resume(source),
      reanchor: (source, after) => session.reanchor(source, after),
      sendToChannel: (source, message) => this.#sendToChannel(source, message),
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
      retrying: onError,
      gaveUp: (error) => this.#gaveUp(error),
    });
  }

  /** A store: "connecting", "open", "closed" or "failed". */
  get status() {
    return this.#connection.status;
  }

  /** Why the client gave up or was closed. */
  get error() {
    return this.#error;
  }

  /** How often a lost connection was replaced. */
  get reconnects() {
    return this.#connection.reconnects;
  }

  /** How often a result did not match the gateway's and was read again. Expected: 0. */
  get diverged() {
    return this.#session.diverged;
  }

  /** End the connection with all its subscriptions and calls. */
  close() {
    this.#connection.close();
    const error = connectionFailed("the client was closed", {
      hint: "Call connect() for a new client.",
      retryable: false,
    });
    this.#error ??= error;
    this.#session.close(error);
    this.#calls.fail(error);
  }

  /**
   * Follow a live query. With `verify`, every batch has the hash of the result and is checked
   * against it.
   *
   * @param {LiveQuery | string} query
   * @param {(rows: readonly Row[], live: Live) => void} [onRows]
   * @param {{verify?: boolean}} [options]
   */
  live(query, onRows, { verify = false } = {}) {
    const whole = jsonCopy(typeof query === "string" ? { table: query } : query);
    if (typeof whole?.table !== "string") {
      const hint = 'Name one: hw.live({ table: "orders", limit: 20 }).';
      throw configError("the live query has no table", hint);
    }
    const live = new Live(this.#owner, this.#session.live(whole, verify));
    if (onRows) live.onValue(onRows);
    return live;
  }

  /**
   * Follow a reactive query. With `delta`, only the changes of its rows are sent.
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
   * Follow a topic, from now on or from a position.
   *
   * @param {string} name
   * @param {(ops: import("./state/topic.js").TopicOp[], topic: Topic) => void} [onOps]
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
   * Follow the changes of tables (without `tables`, of all), from now on or from a position. If the
   * callback returns a promise, the next transaction waits for it.
   *
   * @param {import("./protocol.js").ChangesQuery} query
   * @param {(transaction: import("./state/feed.js").Transaction) => unknown} onTransaction
   */
  changes(query, onTransaction) {
    const source = this.#session.add(new FeedState(jsonCopy(query)));
    return new Feed(this.#owner, source, onTransaction);
  }

  /**
   * Follow a channel. With `present`, or a state, as a member that the other clients see.
   *
   * @param {string} name
   * @param {{state?: any, present?: boolean,
   *   onMessage?: (message: import("./protocol.js").ChannelMessage) => void}} [options]
   */
  channel(name, { state, present = state !== undefined, onMessage } = {}) {
    checkName(name, "channel");
    const call = jsonCopy({ name, ...(present && { present, state }) });
    const source = this.#session.add(new ChannelState(call));
    const channel = new Channel(this.#owner, source);
    if (onMessage) channel.onMessage(onMessage);
    return channel;
  }

  /**
   * The result of a reactive query, once. It contains what this user's mutations have written, or
   * with `after` what that position contains.
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
      return (await this.#call({ type: "query", ...call, after: wanted })).value ?? null;
    } catch (error) {
      const isLost = error instanceof HeadwaterError && error.code === "resync";
      if (after !== undefined || wanted === undefined || !isLost) throw error;
    }
    // The database was restored, and no longer has what this user wrote: do not wait for that.
    if (this.written.value === wanted) this.written.set(undefined);
    return this.query(name, call.args);
  }

  /**
   * Run a mutation, once: after a lost connection it is sent again with the same idempotency key.
   * It rejects with the code `outcome_unknown` if it was sent and no gateway can be reached again.
   * A program that repeats a call itself, perhaps in another process, passes its own key.
   *
   * @param {string} name
   * @param {Record<string, any>} [args]
   * @param {{idempotencyKey?: string}} [options]
   * @returns {Promise<{value: any, position: string}>}
   */
  async mutate(name, args = {}, { idempotencyKey = newKey() } = {}) {
    checkKey(idempotencyKey);
    const call = { ...namedCall(name, args), idempotency_key: idempotencyKey };
    const { value = null, position } = await this.#call({ type: "mutate", ...call });
    this.#wrote(position);
    return { value, position };
  }

  /** Wait until every subscription has what the position contains. @param {string} position */
  async waitFor(position) {
    if (typeof position !== "string") {
      const hint = "Pass the position of a mutation: await hw.waitFor(placed.position).";
      throw configError("waitFor() needs a position, which is a text", hint);
    }
    await this.#session.waitForAll(() => this.#call({ type: "wait", position }));
  }

  // ------------------------------------------------------------------ private

  /** @param {import("./protocol.js").ServerMessage} message */
  #receive(message) {
    if ("position" in message && message.position) this.#session.sawPosition(message.position);
    if (message.type === "written") this.#wrote(message.position);
    else if (!isAnswer(message) || !this.#calls.received(message)) this.#session.receive(message);
  }

  /** @param {HeadwaterErrorType} error */
  #gaveUp(error) {
    this.#error = error;
    this.#session.fail(error);
    this.#calls.fail(error);
    this.#onError(error);
  }

  /** @param {Parameters<PendingCalls["call"]>[0]} call */
  async #call(call) {
    if (this.#error) throw this.#error;
    return this.#calls.call(jsonCopy(call));
  }

  /** @type {import("./subscriptions/handles.js").SubscriptionOwner["sendToChannel"]} */
  async #sendToChannel(source, message) {
    try {
      await this.#channelCalls.send(source, message);
    } catch (error) {
      this.#onError(/** @type {HeadwaterErrorType} */ (error));
      throw error;
    }
  }

  /**
   * Concurrent mutations may be answered in any order: the latest position counts.
   *
   * @param {string} position
   */
  #wrote(position) {
    const before = this.written.value;
    if (before === undefined || !covers(before, position)) this.written.set(position);
  }
}

/**
 * Whether it may be the answer to a call.
 *
 * @param {import("./protocol.js").ServerMessage} message
 */
const isAnswer = (message) => message.type === "answer" || message.type === "error";

/**
 * The name and arguments of a reactive query or a mutation.
 *
 * @param {string} name
 * @param {Record<string, any>} args
 * @returns {{name: string, args: Record<string, any>}}
 */
function namedCall(name, args) {
  const call = jsonCopy({ name, args });
  if (typeof call.name === "string" && isObject(call.args)) return call;
  throw configError(
    "a query or mutation needs its name, which is a text, and its arguments, which are an object",
    'For example: hw.query("open_orders", { region: 7 }).',
  );
}

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @param {unknown} key */
function checkKey(key) {
  if (typeof key === "string" && /^[!-~]{1,128}$/.test(key)) return;
  throw configError(
    "idempotencyKey is not a text of 1 to 128 printable ASCII characters without spaces",
    "Make one for each call, for example with crypto.randomUUID(), or leave it out.",
  );
}

/** @param {unknown} name @param {"topic" | "channel"} kind */
function checkName(name, kind) {
  if (typeof name === "string") return;
  throw configError(`the name of a ${kind} is a text`, `For example: hw.${kind}("room:1").`);
}
