/**
 * What a component asks for, and the text by which all that ask for the same find each other.
 *
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./subscriptions.js").Channel} Channel
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {{text: string, open: (client: Client) => any, table?: string}} Question `table` is that
 *   of a live query
 */

import { stringify } from "./json.js";

/** @param {LiveQuery | string} query @returns {Question} */
export function liveQuestion(query) {
  const live = typeof query === "string" ? { table: query } : query;
  const { table } = live;
  return { text: stringify({ live }, true), open: (client) => client.live(live), table };
}

/** @param {string} query @param {Record<string, any>} args @returns {Question} */
export function queryQuestion(query, args = {}) {
  const text = stringify({ query, args }, true);
  return { text, open: (client) => client.subscribe(query, args) };
}

/** @param {string} topic @returns {Question} */
export function topicQuestion(topic) {
  return { text: stringify({ topic }), open: (client) => client.topic(topic) };
}

/** @param {string} channel @param {any} state undefined to be there unseen @returns {Question} */
export function channelQuestion(channel, state) {
  const present = state !== undefined;
  const open = (/** @type {Client} */ client) => {
    const opened = client.channel(channel, { state, present });
    states.set(opened, stringify(state, true));
    return opened;
  };
  return { text: stringify({ channel, present }), open };
}

/** The state that each channel was told of last. @type {WeakMap<Channel, string>} */
const states = new WeakMap();

/** Tell a channel another state, if it is another. @param {Channel} channel @param {any} state */
export function tellState(channel, state) {
  const text = stringify(state, true);
  if (states.get(channel) === text) return Promise.resolve();
  states.set(channel, text);
  return channel.setState(state);
}
