/**
 * Revenue by region: a live query over the table that a streaming view updates. Spark takes some time
 * to start; until then this shows its progress, from a live query over the pipeline's table.
 */

import { byId, element, toggleClass, setText } from "./dom.js";
import { draw } from "./frames.js";

const VIEW = "view.revenue";
/** Fewer changes than this are always in progress. */
const BEHIND = 20;
const AGAIN_MS = 1000;
const money = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {any} hw the manager's client @param {{lake: string | null}} about */
export function showRevenue(hw, about) {
  if (!about.lake) {
    setText(byId("pipeline"), "no pipeline is running");
    const why =
      "The demo runs without Spark: it was switched off, or is not installed " +
      "(pip install 'headwater[spark]').";
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
    // The pipeline creates the view's table when it builds it; before that it cannot be followed.
    if (!revenue && view && view.position !== null) follow();
    const rows = revenue?.value ?? [];
    const isUp = view?.state === "running";
    showSteps([
      ["Spark starts", [lake, view].some((each) => each && each.state !== "stopped")],
      ["changes are written to the lake", lake?.state === "running"],
      ["the sums are computed", isUp && rows.length > 0],
    ]);
    setText(byId("pipeline"), statusText(view, lake, streams.get("views")));
    toggleClass(byId("bars"), "stale", !isUp);
    showBars(rows);
  }

  progress.subscribe(() => draw(show));
}

/** The status line of the card. */
function statusText(view, lake, views) {
  const failed = [view, lake].find((each) => each?.error);
  if (failed) return failed.error;
  if (view?.state !== "running") return "Spark is starting";
  const changes = `${money.format(lake?.changes ?? 0)} changes`;
  const behind = views?.behind_changes ?? 0;
  return behind > BEHIND ? `${changes}, ${behind} behind` : changes;
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
    toggleClass(list.children[i], "done", isDone);
    toggleClass(list.children[i], "now", i === now);
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
    setText(sum, money.format(row.revenue));
    setText(orders, `${row.orders} orders`);
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
