/** A slider through the versions of a record, with the row of the selected version. */

import { fill, h, labelled, setText } from "./dom.js";
import { count, moment, pretty } from "./format.js";

export class Rewind {
  #slider = h("input", { type: "range", min: 0, max: 0, step: 1, oninput: () => this.#show() });
  #when = h("p", { class: "muted" });
  #row = h("pre");
  /** The oldest first. @type {any[]} */
  #versions = [];
  element = h("div", { class: "rewind", hidden: true }, labelled("Rewind", this.#slider), this.#when, this.#row);

  clear() {
    this.#take([], 0);
  }

  /** Add a version before all others. @param {any} change */
  older(change) {
    this.#take([change, ...this.#versions], this.#at + 1);
  }

  /** Add the newest version; it is selected if the newest was. @param {any} change */
  newer(change) {
    const isLast = this.#at === this.#versions.length - 1;
    this.#take([...this.#versions, change], isLast ? this.#at + 1 : this.#at);
  }

  /** Replace all versions, the newest first. @param {any[]} changes */
  replace(changes) {
    this.#take(changes.toReversed(), changes.length - 1);
  }

  get #at() {
    return this.#versions.length ? Number(this.#slider.value) : -1;
  }

  /** @param {any[]} versions @param {number} at */
  #take(versions, at) {
    this.#versions = versions;
    this.#slider.max = String(Math.max(versions.length - 1, 0));
    this.#slider.value = String(at);
    this.element.hidden = versions.length < 2;
    this.#show();
  }

  #show() {
    const version = this.#versions[this.#at];
    if (!version) return;
    const words = `${count(this.#at + 1)} of ${count(this.#versions.length)}${version.at ? `, ${moment(version.at)}` : ""}`;
    setText(this.#when, words);
    this.#slider.setAttribute("aria-valuetext", words);
    fill(this.#row, rowOf(version));
  }
}

/** @param {any} version */
function rowOf(version) {
  if (version.cut) return "The row is too large to be shown here.";
  return version.after ? pretty(version.after) : "No row: it was deleted.";
}
