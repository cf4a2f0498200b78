/**
 * A fake gateway: the test decides which messages it sends, and when. Everything above the wire is the
 * real client.
 */

import { connectionFailed } from "../src/errors.js";
import { connect } from "../src/index.js";
import { until } from "./stage.js";

/**
 * @param {import("node:test").TestContext} test
 * @param {import("../src/index.js").Options & {urls?: string[],
 *   onOpen?: (url: string) => void}} [options]
 */
export function wired(test, { urls = ["http://gateway"], onOpen, ...options } = {}) {
  /** @type {any[]} */
  const sent = [];
  /** @type {(message: any) => void} */
  let deliver = () => {};
  let lose = () => {};
  /** @type {string[]} */
  const errors = [];
  const hw = connect(urls, {
    tabs: false,
    backoff: { seconds: [0.001, 0.002] },
    onError: ({ code }) => errors.push(code),
    ...options,
    transport: (url, _token, { onMessage, onClose }) => {
      onOpen?.(url);
      deliver = onMessage;
      lose = () => onClose(connectionFailed("the connection was lost"));
      queueMicrotask(() => deliver({ type: "hello", session: "s", version: 1, keepalive: 60 }));
      return { send: (message) => void sent.push(message) };
    },
  });
  test.after(() => hw.close());
  return {
    hw,
    sent,
    errors,
    deliver: (/** @type {any} */ message) => deliver(message),
    lose: () => lose(),
    /** Wait for the next message of a type; it is not found again. @param {string} type */
    async next(type) {
      await until(() => sent.some((message) => message.type === type), `${type} is sent`);
      return sent.splice(sent.findIndex((message) => message.type === type), 1)[0];
    },
  };
}

/** Rows of a snapshot. @param {number[]} ids */
export const rows = (...ids) =>
  ids.map((id, index) => ({ delta: "enter", key: [id], row: { id }, index, cursor: [id] }));
