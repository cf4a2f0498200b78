/** A live query for as long as its page is seen. */

import { trouble } from "./dom.js";

/**
 * @param {any} context of the page
 * @param {HTMLElement} page where to say what goes wrong
 * @param {any} query
 * @param {(rows: readonly any[]) => void} onRows
 */
export function follow({ client, signal, refused }, page, query, onRows) {
  const live = client.live(query, onRows);
  /** @type {any} */
  let told;
  live.subscribe(() => {
    if (live.status === "failed" && live.error && !told) {
      refused(live.error);
      told = trouble(live.error);
      page.append(told);
    }
  });
  live.ready.catch(() => undefined);
  signal.addEventListener("abort", () => live.close());
  return live;
}

/**
 * Be called with every change of a table, or of all. Where a rule keeps the table's own feed from
 * this user, who is an admin, that of all tables has it.
 *
 * @param {any} context of the page
 * @param {string} table empty for all
 * @param {{change: (change: any) => void, begun: () => void, over: (error: any) => void}} hears
 * @returns {() => void} what ends it
 */
export function tail({ client, signal, refused }, table, hears) {
  // Changes name it so, whichever way it was asked for.
  const label = table.replaceAll('"', "").replace(/^public\./, "");
  /** @type {any} */
  let feed;
  const begin = (/** @type {string[]} */ tables) => {
    const begun = client.changes({ tables }, (/** @type {any} */ transaction) => {
      for (const change of transaction.changes) {
        if (tables.length || !label || change.table === label) hears.change({ ...change, at: transaction.at, user: change.user_id });
      }
    });
    begun.subscribe(() => {
      if (begun !== feed || begun.status !== "failed") return;
      const { error } = begun;
      begun.close();
      if (tables.length && /^(forbidden|authorize_failed|access_changed)$/.test(error?.code)) begin([]);
      else {
        refused(error);
        hears.over(error);
      }
    });
    begun.ready.then(() => begun === feed && begun.status === "live" && hears.begun(), () => undefined);
    feed = begun;
  };
  begin(table ? [table] : []);
  const end = () => feed.close();
  signal.addEventListener("abort", end);
  return end;
}

/** Why there is nothing yet of what gateways write down. @param {any} info */
export function awaited({ activity_seconds: seconds }) {
  return seconds ? "Waiting for the first report." : "The setting activity is 0: gateways write nothing down.";
}

/**
 * Do something now, and again every so many seconds; one after the other.
 *
 * @param {AbortSignal} signal
 * @param {number} period in seconds
 * @param {() => Promise<unknown>} work
 */
export async function every(signal, period, work) {
  while (!signal.aborted) {
    await work();
    await new Promise((done) => {
      const timer = setTimeout(done, period * 1000);
      signal.addEventListener("abort", () => (clearTimeout(timer), done(undefined)), { once: true });
    });
  }
}
