/**
 * The WebSocket transport. Browsers cannot send a token header with a WebSocket, so the client first
 * exchanges the token for a ticket and puts that into the URL. Browsers also hide why a WebSocket was
 * refused: the client then requests the SSE stream, whose error response it can read.
 */

import { configError, connectionFailed, errorOfClose } from "../errors.js";
import { stringify } from "../json.js";
import { CLOSE_SECONDS } from "../limits.js";
import { errorOfResponse, gatewayUrl, headersOf, readMessage, unreachable } from "./transport.js";

/** @type {import("./transport.js").OpenTransport} */
export function openWebSocket(url, token, handlers) {
  if (typeof WebSocket === "undefined") {
    throw configError(
      "this runtime has no WebSocket",
      'Use Node 22 or later, `node --experimental-websocket`, or the transport "sse".',
    );
  }
  /** @type {WebSocket | undefined} */
  let socket;
  const { signal, onClose } = handlers;
  begin(url, token, handlers)
    .then((opened) => (socket = opened))
    .catch((error) => signal.aborted || onClose(unreachable(url, error)));
  return {
    send(message) {
      if (socket?.readyState !== OPEN) return false;
      socket.send(stringify(message));
    },
  };
}

const OPEN = 1;

/**
 * @param {string} url
 * @param {string | undefined} token
 * @param {import("./transport.js").TransportHandlers} handlers
 */
async function begin(url, token, { signal, onMessage, onClose }) {
  const ticket = token === undefined ? undefined : await ticketFor(url, token, signal);
  const query = ticket === undefined ? "" : `?ticket=${ticket}`;
  signal.throwIfAborted();
  const { socket, disconnect } = openSocket(`${gatewayUrl(url, "ws")}/ws${query}`);
  signal.addEventListener("abort", disconnect, { once: true });
  let isOpen = false;
  socket.onopen = () => {
    isOpen = true;
    // A ticket allows subscriptions only; calls and publishing need the token itself.
    if (token !== undefined) socket.send(stringify({ type: "authenticate", token }));
  };
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
  // For a refused handshake this is the only event that every runtime has (Node 20 has no `close`).
  socket.onerror = async () => {
    if (isOpen) return;
    const reason = await reasonOfRefusal(url, token, signal);
    if (!signal.aborted) onClose(reason);
  };
  return socket;
}

/**
 * Open a WebSocket; returns it with a function that disconnects it. A WebSocket that is closed waits
 * for its peer to confirm. If the peer is gone, browsers give up after a while; Node waits forever,
 * and the process stays alive. So the TCP connection below is remembered, and destroyed.
 *
 * @param {string} address
 */
function openSocket(address) {
  /** @type {{destroy: () => void} | undefined} */
  let connection;
  const socket = newSocket(address, (found) => (connection = found));
  const disconnect = () => {
    socket.onopen = socket.onmessage = socket.onerror = socket.onclose = null;
    socket.close();
    if (!connection) return;
    const timer = setTimeout(() => connection?.destroy(), CLOSE_SECONDS * 1000);
    // The open connection keeps the process alive until then; the timer must not.
    timer.unref?.();
    socket.onclose = () => clearTimeout(timer);
  };
  return { socket, disconnect };
}

/** The name under which Node's `fetch` and `WebSocket` find the dispatcher of connections. */
const DISPATCHER = Symbol.for("undici.globalDispatcher.1");

/** @param {string} address @param {(connection: any) => void} onConnection */
function newSocket(address, onConnection) {
  const global = /** @type {any} */ (globalThis);
  if (typeof process === "undefined" || !global[DISPATCHER]) return new WebSocket(address);
  const dispatcher = {
    dispatch: (/** @type {any} */ options, /** @type {any} */ handler) =>
      global[DISPATCHER].dispatch(options, watchingUpgrade(handler, onConnection)),
  };
  try {
    return new WebSocket(address, /** @type {any} */ ({ dispatcher }));
  } catch {
    return new WebSocket(address); // a WebSocket that is not Node's own takes no dispatcher
  }
}

/**
 * The handler of a request, which also passes on the connection that is upgraded for it.
 *
 * @param {any} handler
 * @param {(connection: any) => void} onConnection
 */
function watchingUpgrade(handler, onConnection) {
  return new Proxy(handler, {
    get(target, name) {
      const value = target[name];
      if (typeof value !== "function") return value;
      return (/** @type {any[]} */ ...args) => {
        // In every release of Node the connection is the last argument.
        if (name === "onUpgrade" || name === "onRequestUpgrade") onConnection(args.at(-1));
        return value.apply(target, args);
      };
    },
    set: (target, name, value) => Reflect.set(target, name, value),
  });
}

/**
 * Exchange a token for a ticket; undefined at a gateway that verifies no tokens.
 *
 * @param {string} url
 * @param {string} token
 * @param {AbortSignal} signal
 * @returns {Promise<string | undefined>}
 */
async function ticketFor(url, token, signal) {
  const response = await fetch(`${gatewayUrl(url, "http")}/tickets`, {
    method: "POST",
    headers: headersOf(token),
    signal,
  });
  if (response.ok) return (await response.json()).ticket;
  const error = await errorOfResponse(response);
  if (error.code !== "ticket") throw error;
  return undefined;
}

/**
 * Why a connection was refused.
 *
 * @param {string} url
 * @param {string | undefined} token
 * @param {AbortSignal} signal
 */
async function reasonOfRefusal(url, token, signal) {
  const request = new AbortController();
  try {
    const response = await fetch(`${gatewayUrl(url, "http")}/stream`, {
      headers: headersOf(token),
      signal: AbortSignal.any([signal, request.signal]),
    });
    if (!response.ok) return await errorOfResponse(response);
    return connectionFailed(`no WebSocket could be opened to ${url}, but its SSE stream works`, {
      hint: 'A proxy may block WebSockets: allow them there, or connect with { transport: "sse" }.',
    });
  } catch (error) {
    return unreachable(url, error);
  } finally {
    request.abort();
  }
}
