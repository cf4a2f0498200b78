/**
 * A transport: one connection to a gateway, over WebSocket or SSE. It is opened with a URL and a
 * token, delivers the gateway's messages and sends the client's. It does not reconnect, and has no
 * timeout for silence: `connection/connection.js` does both. It ends when the signal is aborted. If
 * it ends by itself, it calls `onClose` with the reason, once.
 *
 * @typedef {object} TransportHandlers
 * @property {AbortSignal} signal ends the transport
 * @property {(message: import("../protocol.js").ServerMessage) => void} onMessage
 * @property {(error: import("../errors.js").HeadwaterError) => void} onClose
 *
 * @typedef {{send: (message: import("../protocol.js").ClientMessage) => unknown}} Transport
 *   `send` may be called after the gateway's hello; it returns false if the message was not sent
 * @typedef {(url: string, token: string | undefined, handlers: TransportHandlers) => Transport
 *   } OpenTransport
 */

import { configError, connectionFailed, errorOf, HeadwaterError, refusalIn } from "../errors.js";
import { parse } from "../json.js";

/**
 * The base URL of the gateway's API. The gateway may be mounted below another path.
 *
 * @param {string} url
 * @param {"http" | "ws"} scheme
 */
export function gatewayUrl(url, scheme) {
  const found = parsed(url);
  const secure = { "http:": "", "ws:": "", "https:": "s", "wss:": "s" }[found?.protocol ?? ""];
  if (!found || secure === undefined) {
    const message = `'${url}' is not the URL of a gateway`;
    throw configError(message, "Pass an http or https URL, such as http://localhost:8484.");
  }
  return `${scheme}${secure}://${found.host}${found.pathname.replace(/\/+$/, "")}/v1`;
}

/** @param {string} url */
function parsed(url) {
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
 * Decode a message. Throws `connection` if it is not JSON.
 *
 * @param {string} text
 * @returns {import("../protocol.js").ServerMessage}
 */
export function readMessage(text) {
  try {
    return parse(text);
  } catch (cause) {
    throw connectionFailed("the gateway sent a message that is not JSON", {
      hint: "Check that the URL is that of a Headwater gateway, and that no proxy changes messages.",
      cause,
    });
  }
}

/** @param {string} url @param {unknown} cause */
export function unreachable(url, cause) {
  if (cause instanceof HeadwaterError) return cause;
  const reason = cause instanceof Error ? (reasonOf(cause) ?? cause.message) : String(cause);
  return connectionFailed(`cannot reach the gateway ${url}: ${reason}`, {
    hint: "Check that the gateway is running and that the URL is right.",
    cause,
  });
}

/** Node has the reason of a failed fetch in its cause. @param {Error} error */
const reasonOf = (error) => (error.cause instanceof Error ? error.cause.message : undefined);

/** The error in a response that is not OK. @param {Response} response */
export async function errorOfResponse(response) {
  return errorOf(refusalIn(response.status, await response.text()));
}
