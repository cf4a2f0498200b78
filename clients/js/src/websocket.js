/**
 * A link over WebSocket. A page cannot send a token with one, so it shows a ticket instead, which
 * it gets for the token beforehand. Nor is a page told why one was refused: the same question is
 * then asked as a stream, whose refusal it can read.
 */

import { configError, connectionFailed, errorOfClose } from "./errors.js";
import { stringify } from "./json.js";
import { CLOSE_SECONDS } from "./limits.js";
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

/** @param {string} url @param {string | undefined} token @param {import("./links.js").Ends} ends */
async function begin(url, token, { signal, onMessage, onClose }) {
  const shown = token === undefined ? undefined : await ticket(url, token, signal);
  const query = shown === undefined ? "" : `?ticket=${shown}`;
  signal.throwIfAborted();
  const { socket, hangUp } = dial(`${gatewayUrl(url, "ws")}/ws${query}`);
  signal.addEventListener("abort", hangUp, { once: true });
  let isOpen = false;
  socket.onopen = () => {
    isOpen = true;
    // A ticket lets it follow; to call and to publish, the gateway must have the token itself.
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
  // Of a refused handshake every runtime tells so much, and Node 20 no more.
  socket.onerror = async () => {
    if (isOpen) return;
    const reason = await whyNot(url, token, signal);
    if (!signal.aborted) onClose(reason);
  };
  return socket;
}

/**
 * Open a WebSocket, and how to end it. One that is closed waits for its peer to confirm that. If the
 * peer is gone a browser gives up by itself; Node never does, and the process stays alive for it.
 * So the TCP connection below it is noted when it is there, and destroyed.
 *
 * @param {string} address
 */
function dial(address) {
  /** @type {{destroy: () => void} | undefined} */
  let connection;
  const socket = opened(address, (found) => (connection = found));
  const hangUp = () => {
    socket.onopen = socket.onmessage = socket.onerror = socket.onclose = null;
    socket.close();
    if (!connection) return;
    const timer = setTimeout(() => connection?.destroy(), CLOSE_SECONDS * 1000);
    // The open connection keeps the process alive until then, and the timer need not.
    timer.unref?.();
    socket.onclose = () => clearTimeout(timer);
  };
  return { socket, hangUp };
}

/** By this name Node's `fetch` and `WebSocket` find what opens their connections. */
const DISPATCHER = Symbol.for("undici.globalDispatcher.1");

/** @param {string} address @param {(connection: any) => void} onConnection */
function opened(address, onConnection) {
  const global = /** @type {any} */ (globalThis);
  if (typeof process === "undefined" || !global[DISPATCHER]) return new WebSocket(address);
  const dispatcher = {
    dispatch: (/** @type {any} */ options, /** @type {any} */ handler) =>
      global[DISPATCHER].dispatch(options, noting(handler, onConnection)),
  };
  try {
    return new WebSocket(address, /** @type {any} */ ({ dispatcher }));
  } catch {
    return new WebSocket(address); // not Node's own
  }
}

/**
 * The handler of a request, which notes the connection that is upgraded for it.
 *
 * @param {any} handler
 * @param {(connection: any) => void} onConnection
 */
function noting(handler, onConnection) {
  return new Proxy(handler, {
    get(target, name) {
      const value = target[name];
      if (typeof value !== "function") return value;
      return (/** @type {any[]} */ ...args) => {
        // In every release the connection is the last argument.
        if (name === "onUpgrade" || name === "onRequestUpgrade") onConnection(args.at(-1));
        return value.apply(target, args);
      };
    },
    set: (target, name, value) => Reflect.set(target, name, value),
  });
}

/**
 * A ticket for the token; none at a gateway that verifies no tokens.
 *
 * @param {string} url
 * @param {string} token
 * @param {AbortSignal} signal
 * @returns {Promise<string | undefined>}
 */
async function ticket(url, token, signal) {
  const response = await fetch(`${gatewayUrl(url, "http")}/tickets`, {
    method: "POST",
    headers: headersOf(token),
    signal,
  });
  if (response.ok) return (await response.json()).ticket;
  const error = await refused(response);
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
