/**
 * The stage that tests/support/stage.py sets: a database and a gateway, controlled over HTTP.
 */

import { connect } from "../src/index.js";

const CONTROL = process.env.HEADWATER_STAGE;

/**
 * Have the stage do something.
 *
 * @param {string} what
 * @param {object} [how]
 * @returns {Promise<any>}
 */
async function tell(what, how = {}) {
  if (!CONTROL) throw new Error("no stage: run `pytest tests/javascript`");
  const response = await fetch(`${CONTROL}/${what}`, { method: "POST", body: JSON.stringify(how) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer);
  return answer;
}

/** @param {string} statement @returns {Promise<any[]>} */
export const sql = (statement) => tell("sql", { statement });
/**
 * Run a statement, and wait until the gateway has read what it wrote: a feed or a topic that begins
 * then is not sent that.
 *
 * @param {string} statement
 */
export const written = (statement) => tell("written", { statement });
/** @param {object} [settings] @returns {Promise<string>} */
export const start = (settings) => tell("start", settings);
export const stop = () => tell("stop");
export const kill = () => tell("kill");
export const restartDatabase = () => tell("restart_database");
/** @param {string} name @param {object} [labels] @returns {Promise<number>} */
export const metric = (name, labels) => tell("metric", { name, labels });

/** Tables as they were, and a gateway that runs. */
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
 * Wait until something holds that needs nothing but the event loop to go round.
 *
 * @param {() => unknown} holds
 */
export async function settled(holds) {
  for (let turn = 0; !holds(); turn++) {
    if (turn > 1000) throw new Error(`it did not come to pass: ${holds}`);
    await new Promise((resolve) => setTimeout(resolve, 0));
  }
}
