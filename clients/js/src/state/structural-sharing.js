/**
 * Structural sharing: parts of a value that have not changed stay the same objects, so that a
 * comparison by `===` (React, memoised selectors) finds only what changed.
 */

import { stringify } from "../json.js";

/**
 * `after`, in which every part that is equal in `before` is replaced by that; `before` itself if all
 * is equal.
 *
 * @template T
 * @param {unknown} before
 * @param {T} after
 * @returns {T}
 */
export function reuseEqual(before, after) {
  if (Object.is(before, after)) return /** @type {T} */ (before);
  if (Array.isArray(before) && Array.isArray(after)) {
    return /** @type {T} */ (/** @type {unknown} */ (reuseInArray(before, after)));
  }
  if (isPlain(before) && isPlain(after)) {
    return /** @type {T} */ (/** @type {unknown} */ (reuseInObject(before, after)));
  }
  return after;
}

/** @param {unknown} value @returns {value is Record<string, unknown>} */
function isPlain(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** @param {Record<string, unknown>} before @param {Record<string, unknown>} after */
function reuseInObject(before, after) {
  const names = Object.keys(after);
  let same = names.length === Object.keys(before).length;
  // Not by assignment: a name may be __proto__.
  const fields = names.map((name) => {
    const known = Object.hasOwn(before, name);
    const value = known ? reuseEqual(before[name], after[name]) : after[name];
    same &&= known && Object.is(value, before[name]);
    return /** @type {const} */ ([name, value]);
  });
  return same ? before : Object.fromEntries(fields);
}

/** @param {unknown[]} before @param {unknown[]} after */
function reuseInArray(before, after) {
  const found = finder(before);
  const result = after.map((item, i) => {
    const here = reuseEqual(before[i], item);
    return Object.is(here, before[i]) ? here : (found(item) ?? here);
  });
  const same =
    result.length === before.length && result.every((item, i) => Object.is(item, before[i]));
  return same ? before : result;
}

/**
 * Finds an equal object at another index, because rows were inserted or removed before it. It is
 * found by its text, as there is no key.
 *
 * @param {unknown[]} before
 * @returns {(item: unknown) => unknown}
 */
function finder(before) {
  /** @type {Map<string, unknown> | undefined} */
  let byText;
  return (item) => {
    if (!isPlain(item)) return undefined;
    byText ??= new Map(before.filter(isPlain).map((each) => [stringify(each, true), each]));
    return byText.get(stringify(item, true));
  };
}
