/**
 * The client of a Headwater gateway, for browsers and Node: live queries, reactive queries,
 * mutations, change feeds, topics and channels over one connection. docs/reference/javascript.md
 * has all of it.
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
 * @property {import("./connection.js").Token} [token] a text, or what brings one: asked at every
 *   connect, and shortly before one ends
 * @property {"ws" | "sse" | import("./links.js").Opener} [transport] the default is "ws" where
 *   there is a WebSocket
 * @property {boolean | string} [tabs] whether the tabs of a browser share one connection: they do
 *   where there is a token, or a text here that says who is logged in
 * @property {(error: HeadwaterError) => void} [onError] hears all that goes wrong, also what is
 *   tried again; the default writes a warning to the console
 * @property {import("./backoff.js").BackoffOptions} [backoff] other pauses than the usual
 */

import { Backoff } from "./backoff.js";
import { Client } from "./client.js";
import { configError, HeadwaterError } from "./errors.js";
import { gatewayUrl } from "./links.js";
import { openSse } from "./sse.js";
import { sharedByTabs, tabLocks } from "./tabs.js";
import { openWebSocket } from "./websocket.js";

export { Client } from "./client.js";
export { HeadwaterError } from "./errors.js";
export { Channel, Feed, Live, Subscription, Topic } from "./subscriptions.js";

/** @type {Record<string, import("./links.js").Opener>} */
const TRANSPORTS = { ws: openWebSocket, sse: openSse };

/**
 * A client of the gateway at `url`; of the page's own origin where none is given. Several are
 * gateways over the same database: when one is lost, the next is tried.
 *
 * @param {string | string[]} [url]
 * @param {Options} [options]
 */
export function connect(url, options = {}) {
  const { token, transport = fitting(), tabs = true, onError = warn, backoff } = options;
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
  if (!open) throw configError(`there is no transport ${transport}`, 'Use "ws" or "sse".');
  const locks = tabs ? tabLocks() : undefined;
  const who = typeof tabs === "string" ? tabs : undefined;
  return locks ? sharedByTabs(open, transport, locks, who) : open;
}

/** Node 20 has no WebSocket. */
const fitting = () => (typeof WebSocket === "undefined" ? "sse" : "ws");

/** @param {string | string[] | undefined} url */
function urlsOf(url = globalThis.location?.origin) {
  const urls = typeof url === "string" ? [url] : (url ?? []);
  if (!urls.length) throw configError("no gateway is given", 'connect("http://localhost:8484")');
  for (const each of urls) gatewayUrl(each, "http");
  return urls;
}

/** @param {HeadwaterError} error */
function warn(error) {
  console.warn(`headwater: ${error.message}${error.hint ? ` (${error.hint})` : ""}`);
}
