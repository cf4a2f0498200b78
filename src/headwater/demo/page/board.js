/**
 * A board: the rows of a live query, with animations when they enter, leave and move.
 *
 * Each draw compares the rows with those on the screen, by key. A row that moves is animated from its
 * current place (first, last, invert, play), so that a row that is still moving does not jump. If
 * many rows enter or leave at once, they are not animated one by one.
 */

import { element, toggleClass, allowsMotion, setText } from "./dom.js";
import { draw } from "./frames.js";
import { received } from "./latency.js";

const MOVE = { duration: 340, easing: "cubic-bezier(.2, .7, .2, 1)" };
const COME = { duration: 300, easing: "ease-out" };
const GO = { duration: 220, easing: "ease-in", fill: "forwards" };
const TOUCH = { duration: 1100, easing: "ease-out" };
/** More rows than this, entering or leaving in one frame, are not animated one by one. */
const SINGLES_MAX = 4;

const NO_ROWS = "No order matches these filters.";

const money = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export class Board {
  #hw;
  #rows;
  #empty;
  /** The rows on the screen, by key. @type {Map<unknown, {line: HTMLElement, row: any}>} */
  #shown = new Map();
  #live;
  /** The next live query, whose rows have not arrived yet. */
  #next;
  #ends = () => {};

  /** @param {any} hw a client @param {HTMLElement} card */
  constructor(hw, card) {
    this.#hw = hw;
    this.#rows = card.querySelector(".rows");
    this.#empty = element("p.empty.quiet", NO_ROWS);
    this.#empty.hidden = true;
    this.#rows.before(this.#empty);
  }

  /** Show another query. The rows of the last one stay until those of this one have arrived. */
  async show(query) {
    const live = this.#hw.live(query);
    const before = this.#next;
    this.#next = live;
    before?.close();
    try {
      await live.ready;
    } catch {
      // The error is shown below.
    }
    if (this.#next !== live) return;
    this.#next = undefined;
    this.#ends();
    this.#live?.close();
    this.#live = live;
    this.#rows.style.setProperty("--limit", String(query.limit));
    const stops = [
      live.deltas(({ at }) => received(at)),
      live.subscribe(() => draw(this.#draw)),
    ];
    this.#ends = () => stops.forEach((stop) => stop());
    draw(this.#draw);
  }

  #draw = () => {
    const live = this.#live;
    const rows = live.value ?? [];
    toggleClass(this.#rows, "stale", live.status !== "live");
    this.#empty.hidden = rows.length > 0;
    setText(this.#empty, live.error?.message ?? NO_ROWS);
    const moves = allowsMotion() && !document.hidden;
    const before = moves ? this.#places() : new Map();
    const gone = this.#remove(new Set(rows.map((row) => row.id)));
    const came = this.#place(rows);
    if (!moves) return;
    slide(before);
    if (came.length <= SINGLES_MAX || before.size === 0) came.forEach(enter);
    if (gone.length <= SINGLES_MAX) gone.forEach((line) => this.#leave(line, before.get(line)));
  };

  /** The current place of each line, also of those that are moving. */
  #places() {
    return new Map([...this.#shown.values()].map(({ line }) => [line, topOf(line)]));
  }

  /** Remove the lines of rows that have left; returns them. */
  #remove(keys) {
    const gone = [];
    for (const [key, { line }] of this.#shown) {
      if (keys.has(key)) continue;
      gone.push(line);
      line.remove();
      this.#shown.delete(key);
    }
    return gone;
  }

  /** Put every row in its place; returns the new lines. */
  #place(rows) {
    const came = [];
    let next = this.#rows.firstElementChild;
    for (const row of rows) {
      const line = this.#lineOf(row, came);
      if (line === next) next = next.nextElementSibling;
      else this.#rows.insertBefore(line, next);
    }
    return came;
  }

  #lineOf(row, came) {
    const known = this.#shown.get(row.id);
    if (known) {
      // A row that is the same object is the same row.
      if (known.row !== row) touch(known.line, known.row, row);
      known.row = row;
      return known.line;
    }
    const line = lineFor(row);
    this.#shown.set(row.id, { line, row });
    came.push(line);
    return line;
  }

  /** Fade out a removed line at its last place. */
  #leave(line, top) {
    line.classList.add("leaving");
    line.setAttribute("aria-hidden", "true");
    line.style.top = `${top - topOf(this.#rows)}px`;
    line.getAnimations().forEach((each) => each.cancel());
    this.#rows.append(line);
    const going = line.animate(
      [{ opacity: 1 }, { opacity: 0, transform: "translateX(24px)" }],
      GO,
    );
    going.onfinish = () => line.remove();
  }
}

function lineFor(row) {
  const line = element("div.line", { role: "row", "data-id": String(row.id) });
  line.append(
    element("span.id.quiet", { role: "cell" }),
    element("span.item", { role: "cell" }, element("b", ""), " ", element("span.quiet.who", "")),
    element("span.region", { role: "cell" }),
    element("span.status", { role: "cell" }),
    element("span.amount", { role: "cell" }),
  );
  fill(line, row);
  return line;
}

function fill(line, row) {
  const [id, item, region, status, amount] = line.children;
  setText(id, `#${row.id}`);
  setText(item.firstChild, row.item);
  setText(item.lastChild, row.customer);
  setText(region, row.region);
  setText(status, row.status);
  status.dataset.status = row.status;
  setText(amount, money.format(row.amount));
}

/** Update the line of a changed row, and highlight it. */
function touch(line, before, row) {
  fill(line, row);
  const isOther = before.status !== row.status || before.amount !== row.amount;
  if (isOther && allowsMotion()) line.animate([{ backgroundColor: "var(--touch)" }, {}], TOUCH);
}

function enter(line) {
  line.animate([{ opacity: 0, transform: "translateX(-18px)" }, {}], COME);
}

/** Animate lines from their old to their new places. @param {Map<Element, number>} before */
function slide(before) {
  const lines = [...before.keys()].filter((line) => line.isConnected);
  for (const line of lines) {
    for (const each of line.getAnimations()) if (each.id === "slide") each.cancel();
  }
  // Measure all before any is animated, or each would cause another layout.
  const ways = lines.map((line) => before.get(line) - topOf(line));
  ways.forEach((way, i) => {
    if (Math.abs(way) < 0.5) return;
    const from = { transform: `translateY(${way}px)` };
    lines[i].animate([from, { transform: "none" }], { ...MOVE, id: "slide" });
  });
}

const topOf = (node) => node.getBoundingClientRect().top;
