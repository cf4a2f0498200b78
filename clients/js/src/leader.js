/**
 * The tab that holds the link, for all tabs of a group. On the link, ids bear the number of the tab
 * that chose them; a view belongs to the tab whose subscription it feeds.
 *
 * @typedef {import("./protocol.js").ServerMessage} ServerMessage
 * @typedef {import("./protocol.js").ClientMessage} ClientMessage
 * @typedef {import("./tabs.js").ToTab} ToTab
 * @typedef {{say: (said: ToTab) => void, end: () => void}} Way how a tab is reached
 * @typedef {Way & {number: string, subscriptions: Set<string>}} Member
 */

import { SHARED_CALLS_AT_ONCE } from "./limits.js";
import { covers } from "./position.js";

export class Leader {
  #id;
  #group;
  #locks;
  #signal;
  #link;
  /** @type {Map<string, Member>} */
  #members = new Map();
  /** @type {Map<string, Member>} */
  #byNumber = new Map();
  /** @type {Map<number, Member>} */
  #byView = new Map();
  /** Of each subscription, by its id on the link. @type {Map<string, number>} */
  #views = new Map();
  /** Mutations under way, by their id on the link. @type {Set<string>} */
  #mutations = new Set();
  /** Calls of all tabs under way, by their id on the link. @type {Set<string>} */
  #calls = new Set();
  /** Beyond what may be under way. @type {{member: Member, message: ClientMessage}[]} */
  #queue = [];
  /** @type {ServerMessage | undefined} */
  #hello;
  /** The latest that a tab is known to have written. @type {string | undefined} */
  #written;
  #number = 0;

  /**
   * @param {string} id of the tab that leads
   * @param {string} group
   * @param {import("./tabs.js").Locks} locks
   * @param {AbortSignal} signal
   * @param {(ends: import("./links.js").Ends) => import("./links.js").Link} open
   */
  constructor(id, group, locks, signal, open) {
    this.#id = id;
    this.#group = group;
    this.#locks = locks;
    this.#signal = signal;
    this.#link = open({
      signal,
      onMessage: (message) => this.#route(message),
      onClose: ({ code, message, hint, retryable, retryAfter }) => {
        const error = { code, message, hint, retryable, retry_after_secs: retryAfter };
        for (const member of [...this.#members.values()]) member.say({ leader: id, error });
      },
    });
    signal.addEventListener("abort", () => {
      for (const member of this.#members.values()) member.end();
    });
  }

  // ------------------------------------------------------------------ tabs

  /** What another tab says. @param {{from: string, message?: ClientMessage}} said */
  receive({ from, message }) {
    if (message) this.take(from, message);
    else if (!this.#members.has(from)) this.#admit(from);
    else this.#say(this.#members.get(from), undefined); // it asks whether we still react
  }

  /** A tab of the group, and how it is reached. @param {string} id @param {Way} way */
  add(id, way) {
    const member = { ...way, number: `t${++this.#number}`, subscriptions: new Set() };
    this.#members.set(id, member);
    this.#byNumber.set(member.number, member);
    this.#say(member, this.#hello);
    if (this.#written !== undefined) {
      this.#say(member, { type: "written", position: this.#written });
    }
  }

  /**
   * @param {Member | undefined} member
   * @param {ServerMessage | undefined} message none is a sign of life
   */
  #say(member, message) {
    member?.say({ leader: this.#id, message });
  }

  /** @param {string} id */
  #admit(id) {
    const inbox = new BroadcastChannel(`${this.#group} ${id}`);
    this.add(id, { say: (said) => inbox.postMessage(said), end: () => inbox.close() });
    // It holds this lock for as long as it lives.
    const left = () => this.#remove(id);
    this.#locks.request(`${this.#group} ${id}`, { signal: this.#signal }, left).catch(() => {});
  }

  /** @param {string} id */
  #remove(id) {
    const member = this.#members.get(id);
    if (!member || this.#signal.aborted) return;
    this.#members.delete(id);
    this.#byNumber.delete(member.number);
    this.#queue = this.#queue.filter((call) => call.member !== member);
    // What is still under way for it must not go to an inbox that is closed.
    for (const id of member.subscriptions) {
      this.#forget(id);
      this.#link.send({ type: "unsubscribe", id });
    }
    member.end();
  }

  /** A subscription is over. @param {string} id */
  #forget(id) {
    const view = this.#views.get(id);
    if (view !== undefined) this.#byView.delete(view);
    this.#views.delete(id);
  }

  // ------------------------------------------------------------------ messages

  /**
   * Pass on what a tab says to the gateway; whether that is done.
   *
   * @param {string} from
   * @param {ClientMessage} message
   */
  take(from, message) {
    const member = this.#members.get(from);
    if (!member || !this.#hello) return false;
    const sent = numbered(message, member.number);
    if (sent.type === "subscribe") member.subscriptions.add(sent.id);
    if (sent.type === "unsubscribe") {
      member.subscriptions.delete(sent.id);
      this.#forget(sent.id);
    }
    if (callOf(sent) === undefined) this.#link.send(sent);
    else {
      this.#queue.push({ member, message: sent });
      this.#next();
    }
    return true;
  }

  /** Send the calls that may be under way. */
  #next() {
    while (this.#queue.length && this.#calls.size < SHARED_CALLS_AT_ONCE) {
      const { message } = /** @type {{message: ClientMessage}} */ (this.#queue.shift());
      this.#calls.add(/** @type {string} */ (callOf(message)));
      if (message.type === "mutate") this.#mutations.add(message.id);
      this.#link.send(message);
    }
  }

  /** Pass on what the gateway says. @param {ServerMessage} message */
  #route(message) {
    if (message.type === "hello") this.#hello = message;
    if ("view" in message && message.type !== "subscribed") {
      this.#say(this.#byView.get(message.view), message);
      return;
    }
    if (!("id" in message) || message.id == null) {
      for (const member of [...this.#members.values()]) this.#say(member, message);
      return;
    }
    if (this.#calls.delete(message.id)) this.#next();
    const [number, id] = split(message.id);
    const member = this.#byNumber.get(number);
    if (message.type === "subscribed" && member?.subscriptions.has(message.id)) {
      this.#forget(message.id);
      this.#byView.set(message.view, member);
      this.#views.set(message.id, message.view);
    }
    if (message.type === "error" && member?.subscriptions.delete(message.id)) {
      this.#forget(message.id);
    }
    this.#say(member, { ...message, id });
    if (this.#mutations.delete(message.id) && message.type === "answer") {
      this.#tellOthers(member, message.position);
    }
  }

  /**
   * What one tab has written, the others want to see too.
   *
   * @param {Member | undefined} writer
   * @param {string} position
   */
  #tellOthers(writer, position) {
    if (this.#written === undefined || !covers(this.#written, position)) this.#written = position;
    for (const member of this.#members.values()) {
      if (member !== writer) this.#say(member, { type: "written", position });
    }
  }
}

/**
 * The message with ids that are the tab's own.
 *
 * @param {ClientMessage} message
 * @param {string} number
 * @returns {ClientMessage}
 */
function numbered(message, number) {
  if (message.type === "authenticate") return message;
  const own = { ...message, id: `${number}.${message.id}` };
  if ("request" in own && own.request !== undefined) own.request = `${number}.${own.request}`;
  return own;
}

/** The id under which a call is answered, if it is one. @param {ClientMessage} message */
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
