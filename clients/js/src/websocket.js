/**
 * A link over WebSocket. A page cannot send a token with one, so it shows a ticket instead, which
 * it gets for the token beforehand. Nor is a page told why one was refused: the same question is
 * then asked as a stream, whose refusal it can read.
 */

import { configError, connectionFailed, errorOfClose } from "./errors.js";
import { stringify } from "./json.js";
import { gatewayUrl, headersOf, readMessage, refused, unreachable } from "./links.js";

/** @type {import("./links.js").Opener} */
export function openWebSocket(url, token, ends) {
  if (typeof WebSocket === "undefined") {
    throw configError(
      "this runtime has no WebSocket",
      'Use Node 22 or later, `node --experimental-websocket`, or the transport "sse".',
    );
  }
  /** @type {WebSocket | undefined} */
  let socket;
  const { signal, onClose } = ends;
  begin(url, token, ends)
    .then((opened) => {
      socket = opened;
      if (signal.aborted) socket.close();
    })
    .catch((error) => signal.aborted || onClose(unreachable(url, error)));
  signal.addEventListener("abort", () => socket?.close());
  return { send: (message) => socket?.send(stringify(message)) };
}

/** @param {string} url @param {string | undefined} token @param {import("./links.js").Ends} ends */
async function begin(url, token, { signal, onMessage, onClose }) {
  const query = token === undefined ? "" : `?ticket=${await ticket(url, token, signal)}`;
  const socket = new WebSocket(`${gatewayUrl(url, "ws")}/ws${query}`);
  let isOpen = false;
  socket.onopen = () => (isOpen = true);
  socket.onmessage = ({ data }) => {
    if (signal.aborted) return;
    try {
      onMessage(readMessage(data));
    } catch (error) {
      onClose(unreachable(url, error));
    }
  };
  socket.onclose = ({ code, reason }) => {
    if (isOpen && !signal.aborted) onClose(errorOfClose(code, reason, url));
  };
  // Of a refused handshake every runtime tells so much, and Node 20 no more.
  socket.onerror = async () => {
    if (!isOpen && !signal.aborted) onClose(await whyNot(url, token, signal));
  };
  return socket;
}

/**
 * @param {string} url
 * @param {string} token
 * @param {AbortSignal} signal
 * @returns {Promise<string>}
 */
async function ticket(url, token, signal) {
  const response = await fetch(`${gatewayUrl(url, "http")}/tickets`, {
    method: "POST",
    headers: headersOf(token),
    signal,
  });
  if (!response.ok) throw await refused(response);
  return (await response.json()).ticket;
}

/**
 * Why a connection was refused.
 *
 * @param {string} url
 * @param {string | undefined} token
 * @param {AbortSignal} signal
 */
async function whyNot(url, token, signal) {
  const asking = new AbortController();
  try {
    const response = await fetch(`${gatewayUrl(url, "http")}/stream`, {
      headers: headersOf(token),
      signal: AbortSignal.any([signal, asking.signal]),
    });
    if (!response.ok) return await refused(response);
    return connectionFailed(`the gateway ${url} does not take WebSockets`, {
      hint: 'A proxy in between may not pass them on; the transport "sse" needs none.',
    });
  } catch (error) {
    return unreachable(url, error);
  } finally {
    asking.abort();
  }
}
