/**
 * The environment that tests/support/stage.py starts: a database and a gateway, controlled over HTTP.
 */

import { connect } from "../src/index.js";

const CONTROL = process.env.HEADWATER_STAGE;

/**
 * Call a method of the stage.
 *
 * @param {string} what
 * @param {object} [how]
 * @returns {Promise<any>}
 */
async function call(what, how = {}) {
  if (!CONTROL) throw new Error("no stage: run `pytest tests/javascript`");
  const response = await fetch(`${CONTROL}/${what}`, { method: "POST", body: JSON.stringify(how) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer);
  return answer;
}

/** @param {string} statement @returns {Promise<any[]>} */
export const sql = (statement) => call("sql", { statement });
/**
 * Run a statement, and wait until the gateway has read what it wrote: a feed or a topic that begins
 * then does not get that change.
 *
 * @param {string} statement
 */
export const written = (statement) => call("written", { statement });
/** @param {object} [settings] @returns {Promise<string>} */
export const start = (settings) => call("start", settings);
export const stop = () => call("stop");
export const kill = () => call("kill");
export const restartDatabase = () => call("restart_database");
/** @param {string} name @param {object} [labels] @returns {Promise<number>} */
export const metric = (name, labels) => call("metric", { name, labels });

/** Restore the tables, and start a gateway. */
export async function reset() {
  await sql("truncate orders, readings restart identity");
  return start();
}

/**
 * A client that ends with its test.
 *
 * @param {import("node:test").TestContext} test
 * @param {string | string[]} url
 * @param {import("../src/index.js").Options} [options]
 */
export function client(test, url, options) {
  /** @type {import("../src/index.js").HeadwaterError[]} */
  const errors = [];
  const hw = connect(url, {
    backoff: { seconds: [0.05, 0.3], failuresMax: 200 },
    onError: (error) => errors.push(error),
    ...options,
  });
  test.after(() => hw.close());
  return Object.assign(hw, { errors });
}

/** Wait until something holds. @param {() => unknown} holds @param {string} [what] */
export async function until(holds, what = String(holds)) {
  const deadline = Date.now() + 30_000;
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error(`it did not come to pass: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

/**
 * Wait until something holds that only needs further turns of the event loop.
 *
 * @param {() => unknown} holds
 */
export async function settled(holds) {
  for (let turn = 0; !holds(); turn++) {
    if (turn > 1000) throw new Error(`it did not come to pass: ${holds}`);
    await new Promise((resolve) => setTimeout(resolve, 0));
  }
}
