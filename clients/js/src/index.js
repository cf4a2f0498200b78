/**
 * The client of a Headwater gateway, for browsers and Node: live queries, reactive queries,
 * mutations, change feeds, topics and channels over one connection. docs/reference/javascript.md
 * has all of it.
 *
 * This folder has the entry points (`index.js`, `react.js`, `tanstack.js`), the `Client`, and what
 * every part uses: errors, limits, JSON, stores and the types of messages. The parts are folders:
 *
 * - `transports/`: one connection to a gateway, over WebSocket or SSE, or shared by the tabs of a
 *   browser. Messages in, messages out; nothing is repeated here.
 * - `connection/`: keeps a transport open, renews tokens, repeats calls after a lost connection.
 * - `subscriptions/`: every subscription of a client, and the handles that a program holds on them.
 * - `state/`: what a client knows of one subscription, by folding its messages. Pure: no I/O, no
 *   clock.
 * - `hooks/`: below `react.js`: subscriptions that components share, and optimistic updates.
 *
 * ```js
 * import { connect } from "headwater";
 *
 * const hw = connect("http://localhost:8484", { token });
 * const board = hw.live({ table: "orders", order: [["amount", "desc"]], limit: 20 }, show);
 * await hw.mutate("place_order", { region: 7, amount: 5 });
 * ```
 *
 * @typedef {object} Options
 * @property {import("./connection/connection.js").Token} [token] a text, or a function that returns
 *   one: it is called at every connect, and shortly before a token expires
 * @property {"ws" | "sse" | import("./transports/transport.js").OpenTransport} [transport] the
 *   default is "ws" where there is a WebSocket
 * @property {boolean | string} [tabs] whether the tabs of a browser share one connection: they do
 *   if there is a token, or a text here that names the user who is logged in
 * @property {(error: HeadwaterError) => void} [onError] called with every error, also with those
 *   that are retried; the default writes a warning to the browser's console
 * @property {import("./connection/backoff.js").BackoffOptions} [backoff] the pauses between attempts
 */

import { Backoff } from "./connection/backoff.js";
import { Client } from "./client.js";
import { configError, HeadwaterError } from "./errors.js";
import { gatewayUrl } from "./transports/transport.js";
import { openSse } from "./transports/sse.js";
import { sharedByTabs, tabLocks } from "./transports/shared-tabs.js";
import { openWebSocket } from "./transports/websocket.js";

export { Client } from "./client.js";
export { HeadwaterError } from "./errors.js";
export { Channel, Feed, Live, Subscription, Topic } from "./subscriptions/handles.js";

/** @type {Record<string, import("./transports/transport.js").OpenTransport>} */
const TRANSPORTS = { ws: openWebSocket, sse: openSse };

/**
 * A client of the gateway at `url`; without one, at the page's own origin. Several URLs are gateways
 * of the same database: when the connection to one is lost, the next is tried.
 *
 * @param {string | string[]} [url]
 * @param {Options} [options]
 */
export function connect(url, options = {}) {
  const { token, transport = defaultTransport(), tabs = true, onError = warn, backoff } = options;
  const urls = urlsOf(url);
  const open = opener(transport, tabs);
  return new Client({ urls, token, open, newBackoff: () => new Backoff(backoff), onError });
}

/**
 * @param {Options["transport"] & {}} transport
 * @param {boolean | string} tabs
 */
function opener(transport, tabs) {
  if (typeof transport === "function") return transport;
  const open = TRANSPORTS[transport];
  if (!open) throw configError(`there is no transport '${transport}'`, 'Use "ws" or "sse".');
  const locks = tabs ? tabLocks() : undefined;
  const user = typeof tabs === "string" ? tabs : undefined;
  return locks ? sharedByTabs(open, transport, locks, user) : open;
}

/** Node 20 has no WebSocket. */
const defaultTransport = () => (typeof WebSocket === "undefined" ? "sse" : "ws");

/** @param {string | string[] | undefined} url */
function urlsOf(url = globalThis.location?.origin) {
  const urls = typeof url === "string" ? [url] : (url ?? []);
  if (!urls.length) {
    const hint = 'Pass its URL, as in connect("http://localhost:8484").';
    throw configError("connect() needs the URL of a gateway outside of a page", hint);
  }
  for (const each of urls) gatewayUrl(each, "http");
  return urls;
}

/** @param {HeadwaterError} error */
function warn(error) {
  console.warn(`headwater: ${error.message}${error.hint ? ` (${error.hint})` : ""}`);
}
