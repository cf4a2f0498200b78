/**
 * What a component subscribes to. Requests with the same key share one subscription.
 *
 * @typedef {import("../client.js").Client} Client
 * @typedef {import("../subscriptions/handles.js").Channel} Channel
 * @typedef {import("../protocol.js").LiveQuery} LiveQuery
 * @typedef {{key: string, open: (client: Client) => any, table?: string}} SubscriptionRequest
 *   `table` is that of a live query
 */

import { stringify } from "../json.js";

/** @param {LiveQuery | string} query @returns {SubscriptionRequest} */
export function liveRequest(query) {
  const live = typeof query === "string" ? { table: query } : query;
  const { table } = live;
  return { key: stringify({ live }, true), open: (client) => client.live(live), table };
}

/** @param {string} query @param {Record<string, any>} args @returns {SubscriptionRequest} */
export function queryRequest(query, args = {}) {
  const key = stringify({ query, args }, true);
  return { key, open: (client) => client.subscribe(query, args) };
}

/** @param {string} topic @returns {SubscriptionRequest} */
export function topicRequest(topic) {
  return { key: stringify({ topic }), open: (client) => client.topic(topic) };
}

/**
 * @param {string} channel
 * @param {any} state undefined to follow the channel without being a member
 * @returns {SubscriptionRequest}
 */
export function channelRequest(channel, state) {
  const present = state !== undefined;
  const open = (/** @type {Client} */ client) => {
    const opened = client.channel(channel, { state, present });
    sentStates.set(opened, stringify(state, true));
    return opened;
  };
  return { key: stringify({ channel, present }), open };
}

/** The state that was last sent to each channel, as text. @type {WeakMap<Channel, string>} */
const sentStates = new WeakMap();

/** Send a state to a channel if it has changed. @param {Channel} channel @param {any} state */
export function sendState(channel, state) {
  const text = stringify(state, true);
  if (sentStates.get(channel) === text) return Promise.resolve();
  sentStates.set(channel, text);
  return channel.setState(state);
}
