/**
 * One connection for several tabs of a browser. One tab is the leader and has the transport to the
 * gateway; the others reach the leader through a BroadcastChannel. Each tab uses this as its own
 * transport, with its own subscriptions and replicas. The leader holds a Web Lock: when its tab
 * closes or crashes, the next tab gets the lock and connects, and every tab continues from its
 * positions. A leader that does not respond, because its tab is frozen, loses the lock to another.
 *
 * Tabs share a connection only if they have the same user and gateway: the name of the group has the
 * claims of the token, except those about time, and the user that the page names. Without either,
 * nothing is shared: the user of a cookie may have changed.
 *
 * @typedef {import("./transport.js").TransportHandlers} TransportHandlers
 * @typedef {import("./transport.js").OpenTransport} OpenTransport
 * @typedef {import("../protocol.js").ClientMessage} ClientMessage
 * @typedef {Pick<LockManager, "request">} Locks
 * @typedef {{from: string, to?: string, message?: ClientMessage} | {leader: string}} ToAll
 *   a post to the leader, or from a new leader to all
 * @typedef {{leader: string, message?: import("../protocol.js").ServerMessage,
 *   error?: import("../errors.js").Refusal}} ToTab a post of the leader to one tab
 */

import { connectionFailed, errorOf } from "../errors.js";
import { stringify } from "../json.js";
import { TabLeader } from "./tab-leader.js";
import { LEADER_SECONDS } from "../limits.js";
import { gatewayUrl } from "./transport.js";

/** The Web Locks of this browser, if its tabs can share a connection. @returns {Locks | undefined} */
export function tabLocks() {
  const isPage = typeof document !== "undefined" && typeof BroadcastChannel !== "undefined";
  // Pages that are not in a secure context have none.
  return isPage ? globalThis.navigator?.locks : undefined;
}

/**
 * Transports that are shared between tabs.
 *
 * @param {OpenTransport} open
 * @param {string} kind
 * @param {Locks} locks
 * @param {string} [user] who is logged in, as the page says
 * @returns {OpenTransport}
 */
export function sharedByTabs(open, kind, locks, user) {
  return (url, token, handlers) => {
    if (!token && !user) return open(url, token, handlers);
    const group = groupOf(kind, url, token, user);
    return new TabTransport(group, locks, handlers, (own) => open(url, token, own));
  };
}

/**
 * The name of the group of tabs that share a connection.
 *
 * @param {string} kind
 * @param {string} url
 * @param {string | undefined} token
 * @param {string} [user]
 */
export function groupOf(kind, url, token, user = "") {
  return `headwater ${stringify([kind, gatewayUrl(url, "http"), user, identityOf(token)])}`;
}

/** The user of a token; a renewed token has the same. @param {string | undefined} token */
export function identityOf(token) {
  if (token === undefined) return "";
  try {
    const payload = token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(payload), (char) => char.charCodeAt(0));
    const { exp, iat, nbf, jti, ...claims } = JSON.parse(new TextDecoder().decode(bytes));
    // Without other claims the user is not known: every token is a group of its own.
    return Object.keys(claims).length ? stringify(claims, true) : token;
  } catch {
    return token; // not a JWT
  }
}

class TabTransport {
  #id = crypto.randomUUID();
  #group;
  #locks;
  #handlers;
  #open;
  /** Every tab of the group receives what is posted here. */
  #broadcast;
  /** The leader's posts to this tab. */
  #inbox;
  /** Set if this tab is the leader. @type {TabLeader | undefined} */
  #leading;
  /** The id of the leader. @type {string | undefined} */
  #leader;
  /** The leader whose hello was received last. @type {string | undefined} */
  #greetedBy;
  /**
   * The tab's own transport, where tabs cannot share one.
   *
   * @type {import("./transport.js").Transport | undefined}
   */
  #unshared;
  #lockRequest = new AbortController();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #leaderTimeout;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #heartbeat;

  /**
   * @param {string} group
   * @param {Locks} locks
   * @param {TransportHandlers} handlers
   * @param {(handlers: TransportHandlers) => import("./transport.js").Transport} open
   */
  constructor(group, locks, handlers, open) {
    this.#group = group;
    this.#locks = locks;
    this.#handlers = handlers;
    this.#open = open;
    this.#broadcast = new BroadcastChannel(group);
    this.#inbox = new BroadcastChannel(`${group} ${this.#id}`);
    this.#broadcast.onmessage = ({ data }) => this.#receivedByAll(data);
    this.#inbox.onmessage = ({ data }) => this.#received(data);
    handlers.signal.addEventListener("abort", () => this.#close());
    // Each tab holds a lock of its own while it is open: the leader waits for its release.
    // No other tab takes that lock. If it is refused, this page may not use locks.
    this.#hold(`${group} ${this.#id}`, () => this.#begin(), {}, () => this.#openUnshared());
  }

  /** @param {ClientMessage} message */
  send(message) {
    if (this.#unshared) return this.#unshared.send(message);
    if (this.#leading) return this.#leading.forward(this.#id, message);
    // After the hello of a new leader everything is sent again: sent earlier, it would be doubled.
    const isGreeted = this.#greetedBy === this.#leader;
    if (isGreeted) this.#postToAll({ from: this.#id, to: this.#leader, message });
    this.#expectLeader();
    return isGreeted;
  }

  #begin() {
    this.#hold(this.#group, () => this.#lead(), { signal: this.#lockRequest.signal });
    this.#expectLeader();
    this.#heartbeat = setInterval(() => this.#expectLeader(), LEADER_SECONDS * 500);
  }

  /** Ask the leader for a sign of life; without one, take its lock. @param {boolean} [isLast] */
  #expectLeader(isLast = false) {
    if (this.#leading || this.#leaderTimeout !== undefined || this.#handlers.signal.aborted) return;
    this.#postToAll({ from: this.#id, to: this.#leader });
    const due = Date.now() + LEADER_SECONDS * 1000;
    this.#leaderTimeout = setTimeout(() => {
      this.#leaderTimeout = undefined;
      // If the timer is late, this tab was frozen, and the answer may be in its inbox.
      if (Date.now() > due + 1000 && !isLast) this.#expectLeader(true);
      else this.#takeOver();
    }, LEADER_SECONDS * 1000);
  }

  #clearLeaderTimeout() {
    clearTimeout(this.#leaderTimeout);
    this.#leaderTimeout = undefined;
  }

  #openUnshared() {
    this.#close();
    this.#unshared = this.#open(this.#handlers);
  }

  #close() {
    this.#lockRequest.abort();
    this.#clearLeaderTimeout();
    clearInterval(this.#heartbeat);
    this.#broadcast.close();
    this.#inbox.close();
  }

  /**
   * Request a lock, and hold it until the transport ends.
   *
   * @param {string} name
   * @param {() => void} begin
   * @param {LockOptions} [options]
   * @param {() => void} [lost]
   */
  #hold(name, begin, options = {}, lost = () => this.#lostLead()) {
    const { signal } = this.#handlers;
    const held = () =>
      signal.aborted
        ? undefined
        : new Promise((resolve) => {
            signal.addEventListener("abort", resolve);
            begin();
          });
    this.#locks.request(name, options, held).catch(() => {
      // The transport has ended, or the request was aborted, or another tab has taken the lock.
      if (!signal.aborted && !options.signal?.aborted) lost();
    });
  }

  #lostLead() {
    this.#handlers.onClose(connectionFailed("another tab has taken over the connection"));
  }

  // ------------------------------------------------------------------ following

  /** @param {ToAll} post */
  #postToAll(post) {
    this.#broadcast.postMessage(post);
  }

  /** @param {ToAll} post */
  #receivedByAll(post) {
    if ("leader" in post) {
      // A late post of an earlier leader: this tab has the lock, so it is the leader.
      if (this.#leading) return;
      this.#leader = post.leader;
      this.#clearLeaderTimeout();
      this.#expectLeader();
    } else if (post.to === undefined || post.to === this.#id) this.#leading?.receive(post);
  }

  /** @param {ToTab} post */
  #received({ leader, message, error }) {
    this.#leader ??= leader;
    // An earlier leader whose tab was frozen may not know yet that it lost the lock.
    if (this.#handlers.signal.aborted || leader !== this.#leader) return;
    this.#clearLeaderTimeout();
    if (message?.type === "hello") this.#greetedBy = leader;
    if (message) this.#handlers.onMessage(message);
    // The leader's token was refused, or it gave up: that need not be true of this tab.
    if (error) this.#handlers.onClose(errorOf(this.#leading ? error : { ...error, retryable: true }));
  }

  /** The leader does not respond: take its lock. */
  #takeOver() {
    if (this.#leading || this.#handlers.signal.aborted) return;
    this.#lockRequest.abort();
    this.#hold(this.#group, () => this.#lead(), { steal: true });
  }

  // ------------------------------------------------------------------ leading

  #lead() {
    this.#clearLeaderTimeout();
    clearInterval(this.#heartbeat);
    this.#leader = this.#id;
    const { signal } = this.#handlers;
    this.#leading = new TabLeader(this.#id, this.#group, this.#locks, signal, this.#open);
    this.#leading.add(this.#id, { post: (post) => this.#received(post), end: () => {} });
    this.#postToAll({ leader: this.#id });
  }
}
