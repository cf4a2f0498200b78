/**
 * Several tabs, one connection: of those that a user has open, one leads and holds the link to the
 * gateway; the others reach it through a BroadcastChannel. To each tab this looks like a link of
 * its own, with its own subscriptions and replicas. Who leads holds a Web Lock, so when its tab
 * closes or crashes the next one in line takes over, says hello anew, and every tab goes on from
 * its positions. A leader that does not react, as its tab is frozen, is relieved of the lock.
 *
 * Tabs share only with tabs of the same user at the same gateway: the name of the group holds the
 * claims of the token, but for those about time, and who the page says is logged in. Where neither
 * is known nothing is shared: a cookie may be another user's by now.
 *
 * @typedef {import("./links.js").Ends} Ends
 * @typedef {import("./links.js").Opener} Opener
 * @typedef {import("./protocol.js").ClientMessage} ClientMessage
 * @typedef {Pick<LockManager, "request">} Locks
 * @typedef {{from: string, to?: string, message?: ClientMessage} | {leader: string}} ToAll
 *   to whoever leads, or the news who does
 * @typedef {{leader: string, message?: import("./protocol.js").ServerMessage,
 *   error?: import("./errors.js").Refusal}} ToTab what the leader says
 */

import { connectionFailed, errorOf } from "./errors.js";
import { stringify } from "./json.js";
import { Leader } from "./leader.js";
import { LEADER_SECONDS } from "./limits.js";
import { gatewayUrl } from "./links.js";

/** The locks of this browser, if its tabs can share. @returns {Locks | undefined} */
export function tabLocks() {
  const isPage = typeof document !== "undefined" && typeof BroadcastChannel !== "undefined";
  // Pages that are not served securely have none.
  return isPage ? globalThis.navigator?.locks : undefined;
}

/**
 * The same links, shared by tabs.
 *
 * @param {Opener} open
 * @param {string} kind
 * @param {Locks} locks
 * @param {string} [who] is logged in
 * @returns {Opener}
 */
export function sharedByTabs(open, kind, locks, who) {
  return (url, token, ends) => {
    if (!token && !who) return open(url, token, ends);
    const group = groupOf(kind, url, token, who);
    return new Tab(group, locks, ends, (own) => open(url, token, own));
  };
}

/**
 * The name that tabs with the same connection have in common.
 *
 * @param {string} kind
 * @param {string} url
 * @param {string | undefined} token
 * @param {string} [who]
 */
export function groupOf(kind, url, token, who = "") {
  return `headwater ${stringify([kind, gatewayUrl(url, "http"), who, identityOf(token)])}`;
}

/** Who a token is for; the same for a renewed one. @param {string | undefined} token */
export function identityOf(token) {
  if (token === undefined) return "";
  try {
    const payload = token.split(".")[1].replaceAll("-", "+").replaceAll("_", "/");
    const bytes = Uint8Array.from(atob(payload), (char) => char.charCodeAt(0));
    const { exp, iat, nbf, jti, ...claims } = JSON.parse(new TextDecoder().decode(bytes));
    // With none besides these, each token is its own.
    return Object.keys(claims).length ? stringify(claims, true) : token;
  } catch {
    return token; // of a kind that only its issuer understands
  }
}

class Tab {
  #id = crypto.randomUUID();
  #group;
  #locks;
  #ends;
  #open;
  /** All tabs of the group hear what is said here. */
  #room;
  /** What the leader says to this tab. */
  #inbox;
  /** @type {Leader | undefined} */
  #leading;
  /** Who does. @type {string | undefined} */
  #leader;
  /** Whose hello was heard last. @type {string | undefined} */
  #greeter;
  /** A link of its own, where tabs cannot share. @type {import("./links.js").Link | undefined} */
  #alone;
  #queueing = new AbortController();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #patience;
  /** @type {ReturnType<typeof setInterval> | undefined} */
  #heartbeat;

  /**
   * @param {string} group
   * @param {Locks} locks
   * @param {Ends} ends
   * @param {(ends: Ends) => import("./links.js").Link} open
   */
  constructor(group, locks, ends, open) {
    this.#group = group;
    this.#locks = locks;
    this.#ends = ends;
    this.#open = open;
    this.#room = new BroadcastChannel(group);
    this.#inbox = new BroadcastChannel(`${group} ${this.#id}`);
    this.#room.onmessage = ({ data }) => this.#overheard(data);
    this.#inbox.onmessage = ({ data }) => this.#heard(data);
    ends.signal.addEventListener("abort", () => this.#close());
    // As long as this tab lives it holds a lock of its own: the leader waits for that.
    // Nobody can take that away, so if it is refused, pages of this kind have no locks.
    this.#hold(`${group} ${this.#id}`, () => this.#begin(), {}, () => this.#goAlone());
  }

  /** @param {ClientMessage} message */
  send(message) {
    if (this.#alone) return this.#alone.send(message);
    if (this.#leading) return this.#leading.take(this.#id, message);
    // The hello of a new leader has all of it asked for again: said before, it would count twice.
    const isGreeted = this.#greeter === this.#leader;
    if (isGreeted) this.#tellAll({ from: this.#id, to: this.#leader, message });
    this.#expect();
    return isGreeted;
  }

  #begin() {
    this.#hold(this.#group, () => this.#lead(), { signal: this.#queueing.signal });
    this.#expect();
    this.#heartbeat = setInterval(() => this.#expect(), LEADER_SECONDS * 500);
  }

  /** Ask who leads for a sign of life, and bear so much silence. @param {boolean} [isLast] */
  #expect(isLast = false) {
    if (this.#leading || this.#patience !== undefined || this.#ends.signal.aborted) return;
    this.#tellAll({ from: this.#id, to: this.#leader });
    const due = Date.now() + LEADER_SECONDS * 1000;
    this.#patience = setTimeout(() => {
      this.#patience = undefined;
      // It may be this tab that slept, and the answer may be waiting for it.
      if (Date.now() > due + 1000 && !isLast) this.#expect(true);
      else this.#relieve();
    }, LEADER_SECONDS * 1000);
  }

  #calm() {
    clearTimeout(this.#patience);
    this.#patience = undefined;
  }

  #goAlone() {
    this.#close();
    this.#alone = this.#open(this.#ends);
  }

  #close() {
    this.#queueing.abort();
    this.#calm();
    clearInterval(this.#heartbeat);
    this.#room.close();
    this.#inbox.close();
  }

  /**
   * Hold a lock from when it is had until the link ends.
   *
   * @param {string} name
   * @param {() => void} begin
   * @param {LockOptions} [options]
   * @param {() => void} [lost]
   */
  #hold(name, begin, options = {}, lost = () => this.#relieved()) {
    const { signal } = this.#ends;
    const held = () =>
      signal.aborted
        ? undefined
        : new Promise((resolve) => {
            signal.addEventListener("abort", resolve);
            begin();
          });
    this.#locks.request(name, options, held).catch(() => {
      // Either it is over, or another tab queues in our place, or has taken the lock away.
      if (!signal.aborted && !options.signal?.aborted) lost();
    });
  }

  #relieved() {
    this.#ends.onClose(connectionFailed("another tab has taken over the connection"));
  }

  // ------------------------------------------------------------------ following

  /** @param {ToAll} said */
  #tellAll(said) {
    this.#room.postMessage(said);
  }

  /** @param {ToAll} said */
  #overheard(said) {
    if ("leader" in said) {
      // Others may have led before, and are heard of late. That one is relieved the lock says.
      if (this.#leading) return;
      this.#leader = said.leader;
      this.#calm();
      this.#expect();
    } else if (said.to === undefined || said.to === this.#id) this.#leading?.receive(said);
  }

  /** @param {ToTab} said */
  #heard({ leader, message, error }) {
    this.#leader ??= leader;
    // One that was relieved while its tab was frozen may not know it yet.
    if (this.#ends.signal.aborted || leader !== this.#leader) return;
    this.#calm();
    if (message?.type === "hello") this.#greeter = leader;
    if (message) this.#ends.onMessage(message);
    // Another tab's token was refused, or its luck has run out: that says nothing about ours.
    if (error) this.#ends.onClose(errorOf(this.#leading ? error : { ...error, retryable: true }));
  }

  /** Nobody reacts: who leads is frozen. */
  #relieve() {
    if (this.#leading || this.#ends.signal.aborted) return;
    this.#queueing.abort();
    this.#hold(this.#group, () => this.#lead(), { steal: true });
  }

  // ------------------------------------------------------------------ leading

  #lead() {
    this.#calm();
    clearInterval(this.#heartbeat);
    this.#leader = this.#id;
    this.#leading = new Leader(this.#id, this.#group, this.#locks, this.#ends.signal, this.#open);
    this.#leading.add(this.#id, { say: (said) => this.#heard(said), end: () => {} });
    this.#tellAll({ leader: this.#id });
  }
}
