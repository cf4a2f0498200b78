/** Live queries and change feeds for as long as their page is open. */

import { errorNote } from "./dom.js";

/**
 * @param {any} context of the page
 * @param {HTMLElement} page where to show an error
 * @param {any} query
 * @param {(rows: readonly any[]) => void} onRows
 */
export function follow({ client, signal, refused }, page, query, onRows) {
  const live = client.live(query, onRows);
  /** @type {any} */
  let shown;
  live.subscribe(() => {
    if (live.status === "failed" && live.error && !shown) {
      refused(live.error);
      shown = errorNote(live.error);
      page.append(shown);
    }
  });
  live.ready.catch(() => undefined);
  signal.addEventListener("abort", () => live.close());
  return live;
}

/**
 * Receive every change of a table, or of all tables. If a rule refuses this admin the feed of the
 * table, the feed of all tables is used instead.
 *
 * @param {any} context of the page
 * @param {string} table empty for all
 * @param {{change: (change: any) => void, begun: () => void, failed: (error: any) => void}} handlers
 * @returns {() => void} stops it
 */
export function tail({ client, signal, refused }, table, handlers) {
  // The name that changes have, however the table was written.
  const label = table.replaceAll('"', "").replace(/^public\./, "");
  /** @type {any} */
  let feed;
  const begin = (/** @type {string[]} */ tables) => {
    const begun = client.changes({ tables }, (/** @type {any} */ transaction) => {
      for (const change of transaction.changes) {
        if (tables.length || !label || change.table === label) handlers.change({ ...change, at: transaction.at, user: change.user_id });
      }
    });
    begun.subscribe(() => {
      if (begun !== feed || begun.status !== "failed") return;
      const { error } = begun;
      begun.close();
      if (tables.length && /^(forbidden|authorize_failed|access_changed)$/.test(error?.code)) begin([]);
      else {
        refused(error);
        handlers.failed(error);
      }
    });
    begun.ready.then(() => begun === feed && begun.status === "live" && handlers.begun(), () => undefined);
    feed = begun;
  };
  begin(table ? [table] : []);
  const end = () => feed.close();
  signal.addEventListener("abort", end);
  return end;
}

/** Shown where no gateway has reported activity yet. */
export const NOTHING_REPORTED = "Waiting for the first report of a gateway.";

/**
 * Run something now and then again after each pause, one at a time.
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
