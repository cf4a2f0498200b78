/**
 * Revenue by region: a live query over the table that a streaming view keeps. Spark takes its time
 * to start; until it is there this says how far it is, out of a live query over its progress.
 */

import { byId, element, mark, write } from "./dom.js";
import { draw } from "./frames.js";

const VIEW = "view.revenue";
/** A few changes are always on their way. */
const BEHIND = 20;
const AGAIN_MS = 1000;
const money = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {any} hw the manager's client @param {{lake: string | null}} about */
export function showRevenue(hw, about) {
  if (!about.lake) {
    write(byId("pipeline"), "no pipeline here");
    const why = "Spark was left out, or is not installed: pip install 'headwater[spark]'.";
    byId("bars").append(element("p.quiet", why));
    return;
  }
  const progress = hw.live({ table: "headwater.pipeline" });
  let revenue;

  function follow() {
    revenue?.close();
    revenue = hw.live({ table: "revenue", order: [["region"]] });
    revenue.subscribe(() => {
      draw(show);
      if (revenue.status === "failed") setTimeout(follow, AGAIN_MS);
    });
  }

  function show() {
    const streams = new Map((progress.value ?? []).map((each) => [each.name, each]));
    const [lake, view] = [streams.get("events"), streams.get(VIEW)];
    // The pipeline makes the view's table: before its first batch there is nothing to follow.
    if (!revenue && view && view.batch !== null) follow();
    const rows = revenue?.value ?? [];
    const isUp = view?.state === "running";
    showSteps([
      ["Spark starts", [lake, view].some((each) => each && each.state !== "stopped")],
      ["every change goes to the lake", lake?.state === "running"],
      ["the sums are worked out", isUp && rows.length > 0],
    ]);
    write(byId("pipeline"), inWords(view, lake));
    mark(byId("bars"), "stale", !isUp);
    showBars(rows);
  }

  progress.subscribe(() => draw(show));
}

/** How it is, for the corner of the card. */
function inWords(view, lake) {
  const failed = [view, lake].find((each) => each?.error);
  if (failed) return failed.error;
  if (view?.state !== "running") return "Spark is starting";
  const kept = `${money.format(lake?.changes ?? 0)} changes`;
  return view.behind_changes > BEHIND ? `${kept}, ${view.behind_changes} to go` : kept;
}

/** @param {[string, boolean | undefined][]} steps */
function showSteps(steps) {
  const list = byId("steps");
  const now = steps.findIndex(([, isDone]) => !isDone);
  byId("starting").hidden = now < 0;
  if (list.childElementCount !== steps.length) {
    list.replaceChildren(...steps.map(([text]) => element("li", text)));
  }
  steps.forEach(([, isDone], i) => {
    mark(list.children[i], "done", isDone);
    mark(list.children[i], "now", i === now);
  });
}

function showBars(rows) {
  const bars = byId("bars");
  const most = Math.max(...rows.map((row) => Number(row.revenue)), 1);
  const known = new Map([...bars.children].map((bar) => [bar.dataset.region, bar]));
  for (const row of rows) {
    const bar = known.get(row.region) ?? barFor(row.region);
    known.delete(row.region);
    const [, track, sum, orders] = bar.children;
    track.firstChild.style.transform = `scaleX(${Number(row.revenue) / most})`;
    write(sum, money.format(row.revenue));
    write(orders, `${row.orders} orders`);
    if (!bar.isConnected) bars.append(bar);
  }
  for (const bar of known.values()) bar.remove();
}

function barFor(region) {
  return element(
    "div.bar",
    { "data-region": region },
    element("span", region),
    element("span.track", null, element("i")),
    element("b.amount", ""),
    element("span.quiet.amount", ""),
  );
}
