/**
 * One connection to a gateway, over WebSocket or SSE. A link is opened by URL and token, passes on
 * the gateway's messages and takes ours. It neither reconnects nor judges how long silence may
 * last; `connection.js` does. It ends when the signal is aborted; if it ends by itself, it says
 * why, once.
 *
 * @typedef {object} Ends what a link is given
 * @property {AbortSignal} signal
 * @property {(message: import("./protocol.js").ServerMessage) => void} onMessage
 * @property {(error: import("./errors.js").HeadwaterError) => void} onClose
 *
 * @typedef {{send: (message: import("./protocol.js").ClientMessage) => unknown}} Link
 *   `send` may be called once the gateway has greeted; false says that it was not sent
 * @typedef {(url: string, token: string | undefined, ends: Ends) => Link} Opener
 */

import { configError, connectionFailed, errorOf, HeadwaterError, refusalIn } from "./errors.js";
import { parse } from "./json.js";

/**
 * The URL of the interface below the gateway's own, which may be mounted anywhere.
 *
 * @param {string} url
 * @param {"http" | "ws"} scheme
 */
export function gatewayUrl(url, scheme) {
  const found = read(url);
  const secure = { "http:": "", "ws:": "", "https:": "s", "wss:": "s" }[found?.protocol ?? ""];
  if (!found || secure === undefined) {
    throw configError(`${url} is not the URL of a gateway`, "It looks like http://localhost:8484.");
  }
  return `${scheme}${secure}://${found.host}${found.pathname.replace(/\/+$/, "")}/v1`;
}

/** @param {string} url */
function read(url) {
  try {
    return new URL(url, globalThis.location?.href);
  } catch {
    return undefined;
  }
}

/** @param {string | undefined} token @returns {Record<string, string>} */
export function headersOf(token) {
  return token === undefined ? {} : { Authorization: `Bearer ${token}` };
}

/**
 * A message; throws for what is none.
 *
 * @param {string} text
 * @returns {import("./protocol.js").ServerMessage}
 */
export function readMessage(text) {
  try {
    return parse(text);
  } catch (cause) {
    throw connectionFailed("the gateway sent what is not JSON", { cause });
  }
}

/** @param {string} url @param {unknown} cause */
export function unreachable(url, cause) {
  if (cause instanceof HeadwaterError) return cause;
  const reason = cause instanceof Error ? (reasonOf(cause) ?? cause.message) : String(cause);
  return connectionFailed(`cannot reach the gateway ${url}: ${reason}`, {
    hint: "Check that it runs and the URL is right.",
    cause,
  });
}

/** Of a failed fetch Node says why in its cause. @param {Error} error */
const reasonOf = (error) => (error.cause instanceof Error ? error.cause.message : undefined);

/** What a refused request says. @param {Response} response */
export async function refused(response) {
  return errorOf(refusalIn(response.status, await response.text()));
}
