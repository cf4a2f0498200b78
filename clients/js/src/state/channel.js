/**
 * The state of a channel: its members, which of them this client is, and the last message. After a
 * lost connection the gateway sends the messages that it still has again; those that were already
 * delivered are recognised by their ids.
 *
 * @typedef {import("../protocol.js").Member} Member
 * @typedef {import("../protocol.js").ChannelMessage} ChannelMessage
 */

import { MESSAGES_SEEN_MAX } from "../limits.js";
import { reuseEqual } from "./structural-sharing.js";
import { ValueStore } from "../store.js";

export class ChannelState {
  wireId = "";
  /** @type {number | undefined} */
  view;
  /** @type {undefined} */
  position;
  /** @type {undefined} */
  error;
  /** The latest message. @type {ChannelMessage | undefined} */
  value;
  /** The id of this client among the members. @type {string | undefined} */
  member;
  /** In the order in which they joined. */
  members = new ValueStore(/** @type {readonly Member[]} */ (Object.freeze([])));
  /** How often messages may have been lost: after a lost connection, or as the gateway reports. */
  missed = 0;
  waiting = true;
  #call;
  /** The ids of the latest messages, oldest first. @type {Set<string>} */
  #seen = new Set();

  /** @param {import("../protocol.js").ChannelCall} call */
  constructor(call) {
    this.name = call.name;
    this.#call = call;
  }

  /** It was subscribed, and its members have not arrived yet. */
  get isPending() {
    return this.view === undefined || this.waiting;
  }

  /** @param {string} wireId @returns {import("../protocol.js").Subscribe} */
  subscribe(wireId) {
    if (!this.isPending) this.missed += 1;
    this.wireId = wireId;
    this.view = undefined;
    this.waiting = true;
    return { type: "subscribe", id: wireId, channel: this.#call };
  }

  /** @param {import("../protocol.js").Subscribed} message */
  subscribed(message) {
    this.view = message.view;
    this.member = message.member ?? undefined;
  }

  /** The state with which the next connection subscribes, if it is a member. @param {any} state */
  setState(state) {
    if (this.#call.present) this.#call = { ...this.#call, state };
  }

  /**
   * Apply a message; returns the published messages that were not delivered before.
   *
   * @param {import("../protocol.js").ViewMessage} message
   * @returns {ChannelMessage[]}
   */
  receive(message) {
    if (message.type === "presence") this.#updateMembers(message);
    if (message.type !== "message" || this.#seen.has(message.id)) return [];
    this.#seen.add(message.id);
    if (this.#seen.size > MESSAGES_SEEN_MAX) {
      const [oldest] = this.#seen;
      this.#seen.delete(oldest);
    }
    this.value = message;
    return [message];
  }

  /** @param {import("../protocol.js").Presence} message */
  #updateMembers({ joined = [], left = [], whole = false, missed = false }) {
    if (whole) this.waiting = false;
    if (missed) this.missed += 1;
    const before = new Map(this.members.value.map((each) => [each.member, each]));
    const members = new Map(whole ? [] : before);
    for (const each of joined) members.set(each.member, reuseEqual(before.get(each.member), each));
    for (const member of left) members.delete(member);
    const present = [...members.values()];
    const same =
      present.length === before.size && present.every((each, i) => each === this.members.value[i]);
    if (!same) this.members.set(Object.freeze(present));
  }
}
