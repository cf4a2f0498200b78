/**
 * A board: the rows of a live query, which slide in and out and move to where they belong.
 *
 * Each draw compares the rows with those on the screen, by key. What moves is animated from where
 * it is now (first, last, invert, play), so that a row that is still on its way changes course and
 * does not jump. When much happens at once rows take their places without ado.
 */

import { element, mark, mayMove, write } from "./dom.js";
import { draw } from "./frames.js";
import { received } from "./latency.js";

const MOVE = { duration: 340, easing: "cubic-bezier(.2, .7, .2, 1)" };
const COME = { duration: 300, easing: "ease-out" };
const GO = { duration: 220, easing: "ease-in", fill: "forwards" };
const TOUCH = { duration: 1100, easing: "ease-out" };
/** More rows than this, coming or going in one frame, are not shown one by one. */
const SINGLES_MAX = 4;

const NOTHING = "Nothing to see here.";

const money = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export class Board {
  #hw;
  #rows;
  #empty;
  /** What is on the screen, by key. @type {Map<unknown, {line: HTMLElement, row: any}>} */
  #shown = new Map();
  #live;
  /** Asked for, and not there yet. */
  #next;
  #ends = () => {};

  /** @param {any} hw a client @param {HTMLElement} card */
  constructor(hw, card) {
    this.#hw = hw;
    this.#rows = card.querySelector(".rows");
    this.#empty = element("p.empty.quiet", NOTHING);
    this.#empty.hidden = true;
    this.#rows.before(this.#empty);
  }

  /** Show another query. The rows of the last one stay until those of this one are there. */
  async show(query) {
    const live = this.#hw.live(query);
    const before = this.#next;
    this.#next = live;
    before?.close();
    try {
      await live.ready;
    } catch {
      // It says why itself, below.
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
    mark(this.#rows, "stale", live.status !== "live");
    this.#empty.hidden = rows.length > 0;
    write(this.#empty, live.error?.message ?? NOTHING);
    const moves = mayMove() && !document.hidden;
    const before = moves ? this.#places() : new Map();
    const gone = this.#remove(new Set(rows.map((row) => row.id)));
    const came = this.#place(rows);
    if (!moves) return;
    slide(before);
    if (came.length <= SINGLES_MAX || before.size === 0) came.forEach(enter);
    if (gone.length <= SINGLES_MAX) gone.forEach((line) => this.#leave(line, before.get(line)));
  };

  /** Where each line is at this moment, on its way or not. */
  #places() {
    return new Map([...this.#shown.values()].map(({ line }) => [line, topOf(line)]));
  }

  /** Take away the lines of rows that have left; gives them. */
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

  /** Put every row in its place; gives the lines that are new. */
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

  /** Let a line that was removed fade where it was. */
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
  write(id, `#${row.id}`);
  write(item.firstChild, row.item);
  write(item.lastChild, row.customer);
  write(region, row.region);
  write(status, row.status);
  status.dataset.status = row.status;
  write(amount, money.format(row.amount));
}

/** Write what is new about a row, and let that be seen. */
function touch(line, before, row) {
  fill(line, row);
  const isOther = before.status !== row.status || before.amount !== row.amount;
  if (isOther && mayMove()) line.animate([{ backgroundColor: "var(--touch)" }, {}], TOUCH);
}

function enter(line) {
  line.animate([{ opacity: 0, transform: "translateX(-18px)" }, {}], COME);
}

/** Let lines move from where they were to where they are. @param {Map<Element, number>} before */
function slide(before) {
  const lines = [...before.keys()].filter((line) => line.isConnected);
  for (const line of lines) {
    for (const each of line.getAnimations()) if (each.id === "slide") each.cancel();
  }
  // All are measured before any is animated, or each would have the page laid out anew.
  const ways = lines.map((line) => before.get(line) - topOf(line));
  ways.forEach((way, i) => {
    if (Math.abs(way) < 0.5) return;
    const from = { transform: `translateY(${way}px)` };
    lines[i].animate([from, { transform: "none" }], { ...MOVE, id: "slide" });
  });
}

const topOf = (node) => node.getBoundingClientRect().top;
