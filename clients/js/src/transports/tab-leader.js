/**
 * The leader of a group of tabs: it has the transport, and passes messages between it and the tabs.
 * On the transport, every id has the number of its tab as a prefix. Messages about a view go to the
 * tab whose subscription it is.
 *
 * @typedef {import("../protocol.js").ServerMessage} ServerMessage
 * @typedef {import("../protocol.js").ClientMessage} ClientMessage
 * @typedef {import("./shared-tabs.js").ToTab} ToTab
 * @typedef {import("./transport.js").TransportHandlers} TransportHandlers
 * @typedef {{post: (message: ToTab) => void, end: () => void}} TabAddress how a tab is reached
 * @typedef {TabAddress & {number: string, subscriptions: Set<string>}} GroupTab
 */

import { SHARED_CALLS_AT_ONCE } from "../limits.js";
import { covers } from "../state/position.js";

export class TabLeader {
  #id;
  #group;
  #locks;
  #signal;
  #transport;
  /** @type {Map<string, GroupTab>} */
  #tabs = new Map();
  /** @type {Map<string, GroupTab>} */
  #byNumber = new Map();
  /** @type {Map<number, GroupTab>} */
  #byView = new Map();
  /** The view of each subscription, by its id on the transport. @type {Map<string, number>} */
  #views = new Map();
  /** Mutations under way, by their id on the transport. @type {Set<string>} */
  #mutations = new Set();
  /** Calls of all tabs under way, by their id on the transport. @type {Set<string>} */
  #calls = new Set();
  /** Calls that wait until fewer are under way. @type {{tab: GroupTab, message: ClientMessage}[]} */
  #queue = [];
  /** @type {ServerMessage | undefined} */
  #hello;
  /** The latest position that a tab has written. @type {string | undefined} */
  #written;
  #number = 0;

  /**
   * @param {string} id of the tab that leads
   * @param {string} group
   * @param {import("./shared-tabs.js").Locks} locks
   * @param {AbortSignal} signal
   * @param {(handlers: TransportHandlers) => import("./transport.js").Transport} open
   */
  constructor(id, group, locks, signal, open) {
    this.#id = id;
    this.#group = group;
    this.#locks = locks;
    this.#signal = signal;
    this.#transport = open({
      signal,
      onMessage: (message) => this.#route(message),
      onClose: ({ code, message, hint, retryable, retryAfter }) => {
        const error = { code, message, hint, retryable, retry_after_secs: retryAfter };
        for (const tab of [...this.#tabs.values()]) tab.post({ leader: id, error });
      },
    });
    signal.addEventListener("abort", () => {
      for (const tab of this.#tabs.values()) tab.end();
    });
  }

  // ------------------------------------------------------------------ tabs

  /**
   * Another tab posted; without a message, it asks for a sign of life.
   *
   * @param {{from: string, message?: ClientMessage}} post
   */
  receive({ from, message }) {
    if (message) this.forward(from, message);
    else if (!this.#tabs.has(from)) this.#admit(from);
    else this.#post(this.#tabs.get(from), undefined);
  }

  /** Add a tab of the group. @param {string} id @param {TabAddress} address */
  add(id, address) {
    const tab = { ...address, number: `t${++this.#number}`, subscriptions: new Set() };
    this.#tabs.set(id, tab);
    this.#byNumber.set(tab.number, tab);
    this.#post(tab, this.#hello);
    if (this.#written !== undefined) {
      this.#post(tab, { type: "written", position: this.#written });
    }
  }

  /**
   * @param {GroupTab | undefined} tab
   * @param {ServerMessage | undefined} message undefined for a sign of life
   */
  #post(tab, message) {
    tab?.post({ leader: this.#id, message });
  }

  /** @param {string} id */
  #admit(id) {
    const inbox = new BroadcastChannel(`${this.#group} ${id}`);
    this.add(id, { post: (message) => inbox.postMessage(message), end: () => inbox.close() });
    // The tab holds this lock as long as it is open.
    const left = () => this.#remove(id);
    this.#locks.request(`${this.#group} ${id}`, { signal: this.#signal }, left).catch(() => {});
  }

  /** @param {string} id */
  #remove(id) {
    const tab = this.#tabs.get(id);
    if (!tab || this.#signal.aborted) return;
    this.#tabs.delete(id);
    this.#byNumber.delete(tab.number);
    this.#queue = this.#queue.filter((call) => call.tab !== tab);
    // No message may be posted to its inbox after that is closed.
    for (const id of tab.subscriptions) {
      this.#forget(id);
      this.#transport.send({ type: "unsubscribe", id });
    }
    tab.end();
  }

  /** A subscription is over. @param {string} id */
  #forget(id) {
    const view = this.#views.get(id);
    if (view !== undefined) this.#byView.delete(view);
    this.#views.delete(id);
  }

  // ------------------------------------------------------------------ messages

  /**
   * Send a tab's message to the gateway. Returns false if that is not possible now.
   *
   * @param {string} from
   * @param {ClientMessage} message
   */
  forward(from, message) {
    const tab = this.#tabs.get(from);
    if (!tab || !this.#hello) return false;
    const sent = withTabNumber(message, tab.number);
    if (sent.type === "subscribe") tab.subscriptions.add(sent.id);
    if (sent.type === "unsubscribe") {
      tab.subscriptions.delete(sent.id);
      this.#forget(sent.id);
    }
    if (callOf(sent) === undefined) this.#transport.send(sent);
    else {
      this.#queue.push({ tab, message: sent });
      this.#sendQueued();
    }
    return true;
  }

  /** Send as many queued calls as may be under way. */
  #sendQueued() {
    while (this.#queue.length && this.#calls.size < SHARED_CALLS_AT_ONCE) {
      const { message } = /** @type {{message: ClientMessage}} */ (this.#queue.shift());
      this.#calls.add(/** @type {string} */ (callOf(message)));
      if (message.type === "mutate") this.#mutations.add(message.id);
      this.#transport.send(message);
    }
  }

  /** Post a message of the gateway to its tab, or to all tabs. @param {ServerMessage} message */
  #route(message) {
    if (message.type === "hello") this.#hello = message;
    if ("view" in message && message.type !== "subscribed") {
      this.#post(this.#byView.get(message.view), message);
      return;
    }
    if (!("id" in message) || message.id == null) {
      for (const tab of [...this.#tabs.values()]) this.#post(tab, message);
      return;
    }
    if (this.#calls.delete(message.id)) this.#sendQueued();
    const [number, id] = split(message.id);
    const tab = this.#byNumber.get(number);
    if (message.type === "subscribed" && tab?.subscriptions.has(message.id)) {
      this.#forget(message.id);
      this.#byView.set(message.view, tab);
      this.#views.set(message.id, message.view);
    }
    if (message.type === "error" && tab?.subscriptions.delete(message.id)) {
      this.#forget(message.id);
    }
    this.#post(tab, { ...message, id });
    if (this.#mutations.delete(message.id) && message.type === "answer") {
      this.#postWritten(tab, message.position);
    }
  }

  /**
   * Post the position that one tab has written to the others, so that their queries contain it.
   *
   * @param {GroupTab | undefined} writer
   * @param {string} position
   */
  #postWritten(writer, position) {
    if (this.#written === undefined || !covers(this.#written, position)) this.#written = position;
    for (const tab of this.#tabs.values()) {
      if (tab !== writer) this.#post(tab, { type: "written", position });
    }
  }
}

/**
 * The message with the tab's number in its ids.
 *
 * @param {ClientMessage} message
 * @param {string} number
 * @returns {ClientMessage}
 */
function withTabNumber(message, number) {
  if (message.type === "authenticate") return message;
  const own = { ...message, id: `${number}.${message.id}` };
  if ("request" in own && own.request !== undefined) own.request = `${number}.${own.request}`;
  return own;
}

/** The id with which a call is answered, if it is a call. @param {ClientMessage} message */
function callOf(message) {
  if (message.type === "publish" || message.type === "state") return message.request;
  return CALLS.has(message.type) && "id" in message ? message.id : undefined;
}

const CALLS = new Set(["query", "mutate", "wait"]);

/** @param {string} id @returns {[string, string]} */
function split(id) {
  const dot = id.indexOf(".");
  return [id.slice(0, dot), id.slice(dot + 1)];
}
