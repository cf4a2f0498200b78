/** Line plots of the last minutes, as inline SVG. Missing values are gaps. */

import { fill, h, setText, svg } from "./dom.js";
import { now as present, seconds } from "./format.js";

const LONGEST = 5 * 60_000;
const SHORTEST = 60_000;
const WIDTH = 300;
const HEIGHT = 100;

/** A series: the values of the last minutes, with their times. */
export class Series {
  /** @type {{at: number, value: number}[]} */
  points = [];

  /** @param {number} at in milliseconds @param {number | null | undefined} value */
  add(at, value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return;
    const last = this.points.at(-1);
    if (last && at <= last.at) return;
    this.points.push({ at, value });
    const oldest = at - LONGEST;
    while (this.points.length && this.points[0].at < oldest) this.points.shift();
  }

  get last() {
    return this.points.at(-1)?.value;
  }
}

const STEP = 1000;
const QUIET = 3000;

/**
 * How fast a counter grows, a second. The counter is reported about once a second while it grows, and not at all while it
 * does not. Two reports that are closer count as one: a rate over a few milliseconds means nothing.
 */
export class RateSeries extends Series {
  /** The report that the next rate begins at. @type {{at: number, value: number} | undefined} */
  #since;
  /** @type {number | undefined} */
  #rate;

  /** A report: the counter at a time, in milliseconds. It may begin again at 0. @param {number} at @param {number} value */
  report(at, value) {
    this.rest(at);
    const passed = this.#since ? at - this.#since.at : STEP;
    if (passed < STEP / 2) return;
    if (this.#since) this.#set(at, (Math.max(0, value - this.#since.value) * 1000) / passed);
    this.#since = { at, value };
  }

  /** The rate is 0 if there was no report for some seconds. @param {number} now in milliseconds */
  rest(now) {
    if (!this.#since || now - this.#since.at <= QUIET) return;
    this.#set(this.#since.at + STEP, 0);
    this.#since.at = now - STEP;
    this.#set(this.#since.at, 0);
  }

  /** There is no rate until there are two reports again. */
  end() {
    this.#since = this.#rate = undefined;
  }

  get last() {
    return this.#rate;
  }

  /** @param {number} at @param {number} rate */
  #set(at, rate) {
    this.#rate = rate;
    this.add(at, rate);
  }
}

/**
 * A plot of one or two series on one scale.
 *
 * @param {string} title
 * @param {(value: number) => string} words how a value is written
 * @param {Series[]} series
 * @param {string[]} [names] of the series, where there are two
 */
export function plot(title, words, series, names) {
  const drawing = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  const now = h("strong");
  const top = h("span");
  const left = h("span");
  const element = h(
    "figure",
    {},
    h("figcaption", {}, h("span", {}, title), now),
    drawing,
    h("div", { class: "scale" },
      left,
      names && h("span", {}, names.map((name, i) => [h("span", { class: i ? "key second" : "key" }, name), " "])),
      top,
    ),
  );
  return {
    element,
    draw() {
      const end = present();
      const starts = series.flatMap((each) => each.points.slice(0, 1).map((point) => point.at));
      const span = Math.min(LONGEST, Math.max(SHORTEST, end - Math.min(end, ...starts)));
      setText(left, `${seconds(Math.round(span / 1000))} ago`);
      const values = series.flatMap((each) => each.points.map((point) => point.value));
      const most = ceiling(Math.max(0, ...values));
      setText(now, series[0].last === undefined ? "–" : words(series[0].last));
      setText(top, values.length ? `up to ${words(most)}` : "collecting");
      drawing.setAttribute("aria-label", `${title}: now ${now.textContent}, ${top.textContent}`);
      fill(drawing, [0, 0.5, 1].map(gridLine), series.map((each, i) => drawn(each, i, end, span, most)));
    },
  };
}

/** @param {number} share */
function gridLine(share) {
  const y = share * HEIGHT;
  return svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
}

/** @param {Series} series @param {number} index @param {number} end @param {number} span @param {number} most */
function drawn(series, index, end, span, most) {
  const places = series.points.map(({ at, value }) => [
    WIDTH * (1 - (end - at) / span),
    HEIGHT * (1 - value / most),
  ]).filter(([x]) => x >= 0);
  if (!places.length) return [];
  const line = places.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const [first, last] = [places[0][0].toFixed(1), places.at(-1)[0].toFixed(1)];
  return [
    index === 0 && svg("polygon", { class: "area", points: `${first},${HEIGHT} ${line} ${last},${HEIGHT}` }),
    svg("polyline", { class: index ? "line second" : "line", points: line }),
  ].filter(Boolean);
}

/** The next round number: 1, 2 or 5 with zeros. @param {number} value */
function ceiling(value) {
  if (value <= 0) return 1;
  const base = 10 ** Math.floor(Math.log10(value));
  return base * ([1, 2, 5, 10].find((step) => step * base >= value * 1.02) ?? 10);
}
