/**
 * A gateway of which the test decides what it says, and when. Everything above the wire is the real
 * client.
 */

import { connect } from "../src/index.js";
import { until } from "./stage.js";

/** @param {import("node:test").TestContext} test */
export function wired(test) {
  /** @type {any[]} */
  const sent = [];
  /** @type {(message: any) => void} */
  let say = () => {};
  const hw = connect("http://gateway", {
    tabs: false,
    transport: (_url, _token, { onMessage }) => {
      say = onMessage;
      queueMicrotask(() => say({ type: "hello", session: "s", version: 1, keepalive: 60 }));
      return { send: (message) => void sent.push(message) };
    },
  });
  test.after(() => hw.close());
  return {
    hw,
    sent,
    say: (/** @type {any} */ message) => say(message),
    /** Wait for the next message of a type; it is not found again. @param {string} type */
    async next(type) {
      await until(() => sent.some((message) => message.type === type), `${type} is sent`);
      return sent.splice(sent.findIndex((message) => message.type === type), 1)[0];
    },
  };
}
