/** The streams of the data pipeline and the jobs beside them: their progress, rates and errors. */

import { ask } from "../api.js";
import { card, fill, h, head } from "../dom.js";
import { age, count, moment, rate, seconds } from "../format.js";
import { Grid } from "../grid.js";
import { follow } from "../subscriptions.js";
import { plot, Series } from "../plot.js";

/** @type {Record<string, string>} */
const LEVELS = { running: "good", starting: "accent", waiting: "warn", failed: "bad", stopped: "" };

/** What a job beside the streams counts. @type {Record<string, string>} */
const JOBS = {
  snapshots: "rows stored", tables: "changes merged", compaction: "files joined", reconcile: "rows compared",
};

/** @param {any} row */
const isJob = (row) => row.name in JOBS;

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal } = context;
  const grid = new Grid("Streams", COLUMNS, {
    key: (row) => row.name,
    empty: ["No pipeline has run over this database. Start one: ", h("code", {}, "headwater pipeline run")],
  });
  const jobs = new Grid("Jobs", JOB_COLUMNS, { key: (row) => row.name, empty: ["No job has run."] });
  const plots = h("div", { class: "page" });
  /** @type {Map<string, Stream>} */
  const streams = new Map();
  const stream = (/** @type {string} */ name) => {
    let found = streams.get(name);
    if (!found) {
      found = new Stream(name);
      streams.set(name, found);
      fill(plots, [...streams.keys()].sort().map((each) => streams.get(each)?.element));
    }
    return found;
  };
  const draw = () => streams.forEach((each) => each.draw());
  page.append(
    head("Pipeline", "Each stream writes changes of the log into the lake, or into a streaming view. Behind: changes that it has not processed yet."),
    card("Streams", grid.element),
    card("Jobs beside the streams", jobs.element),
    plots,
  );
  void past(signal).then((rows) => {
    if (signal.aborted) return;
    rows.filter((row) => !isJob(row)).forEach((row) => stream(row.name).add(row));
    follow(context, page, { table: "headwater.pipeline", limit: 200 }, (now) => {
      const running = now.filter((/** @type {any} */ row) => !isJob(row));
      grid.update(running);
      jobs.update(now.filter(isJob));
      running.forEach((/** @type {any} */ row) => stream(row.name).add(row));
      draw();
    });
  });
  const timer = setInterval(draw, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}

const PAST_MS = 2000;

/** The reports of the streams in the last minutes, if the log has them quickly. @param {AbortSignal} signal @returns {Promise<any[]>} */
async function past(signal) {
  try {
    const soon = AbortSignal.any([signal, AbortSignal.timeout(PAST_MS)]);
    const { changes } = await ask("log", { table: "headwater.pipeline", limit: 500 }, soon);
    return changes.map((/** @type {any} */ change) => change.after).filter(Boolean).reverse();
  } catch {
    return []; // The plots then begin now.
  }
}

class Stream {
  #behind = new Series();
  #arrived = new Series();
  #capacity = new Series();

  /** @param {string} name */
  constructor(name) {
    this.plots = [
      plot("Behind", seconds, [this.#behind]),
      plot("Changes a second", rate, [this.#arrived, this.#capacity], ["arrived", "capacity"]),
    ];
    this.element = card(name, h("div", { class: "plots" }, this.plots.map((each) => each.element)));
  }

  /** @param {any} row */
  add(row) {
    const at = Date.parse(row.updated_at);
    this.#behind.add(at, row.behind_seconds);
    this.#arrived.add(at, row.input_rate);
    this.#capacity.add(at, row.processed_rate);
  }

  draw() {
    this.plots.forEach((each) => each.draw());
  }
}

/** @param {any} row */
function name(row) {
  return [
    h("strong", { class: "wrap" }, row.name), " ", h("span", { class: `badge ${LEVELS[row.state] ?? ""}` }, row.state),
    row.error && h("div", { class: "problem fail" }, h("p", {}, row.error), row.error_at && h("p", { class: "hint" }, moment(row.error_at))),
  ];
}

const COLUMNS = [
  { name: "Stream", by: (/** @type {any} */ row) => row.name, show: name },
  { name: "Batch", number: true, show: (/** @type {any} */ row) => count(row.batch) },
  { name: "Changes", number: true, by: (/** @type {any} */ row) => row.changes, show: (/** @type {any} */ row) => count(row.changes) },
  { name: "Changes a second", number: true, show: (/** @type {any} */ row) => rate(row.input_rate) },
  { name: "Behind", number: true, by: (/** @type {any} */ row) => row.behind_changes, show: (/** @type {any} */ row) => row.behind_changes === null ? "not known" : `${count(row.behind_changes)} changes` },
  { name: "Lag", number: true, by: (/** @type {any} */ row) => row.behind_seconds, show: (/** @type {any} */ row) => seconds(row.behind_seconds) },
  { name: "Restarts", number: true, show: (/** @type {any} */ row) => count(row.restarts) },
  { name: "Last report", number: true, show: (/** @type {any} */ row) => `${age(row.updated_at)} ago` },
];

/** What a job is busy with. @param {any} row */
function task(row) {
  if (!row.task) return "";
  const done = row.task_total ? `: ${Math.floor((100 * (row.task_done ?? 0)) / row.task_total)} %` : "";
  const left = row.task_seconds_left === null ? "" : `, ${seconds(row.task_seconds_left)} left`;
  return `${row.task}${done}${left}`;
}

const JOB_COLUMNS = [
  { name: "Job", by: (/** @type {any} */ row) => row.name, show: name },
  { name: "Done", number: true, show: (/** @type {any} */ row) => `${count(row.changes)} ${JOBS[row.name]}` },
  { name: "Now", show: task },
  { name: "Restarts", number: true, show: (/** @type {any} */ row) => count(row.restarts) },
  { name: "Last report", number: true, show: (/** @type {any} */ row) => `${age(row.updated_at)} ago` },
];
