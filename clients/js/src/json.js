/**
 * JSON without loss of digits. A `bigint` column may have values that a Number cannot hold: integers
 * beyond 2⁵³ are read as BigInt, and written with all their digits. Texts are compared by code
 * point, as PostgreSQL's collation "C" and Python do; JavaScript itself compares UTF-16 units.
 */

import { configError } from "./errors.js";

// Random, so that no text in the data is mistaken for a number.
const TAG = `headwater-bigint-${Math.random().toString(36).slice(2)}-`;
const MAY_HOLD_BIG = /[0-9]{16}/;
const QUOTE_OR_NUMBER = /"|-?[0-9]{16,}(?![0-9.eE])|-?[0-9]+\.[0-9]+/g;

/** Parse JSON. Throws SyntaxError. @param {string} text @returns {any} */
export function parse(text) {
  // Some texts have long runs of digits too. They are rare, so the slower path below is acceptable.
  if (!MAY_HOLD_BIG.test(text)) return JSON.parse(text);
  const parts = [];
  let from = 0;
  const numbers = new RegExp(QUOTE_OR_NUMBER);
  for (let found = numbers.exec(text); found; found = numbers.exec(text)) {
    const [token] = found;
    if (token === '"') numbers.lastIndex = endOfText(text, found.index + 1);
    else if (!token.includes(".") && !Number.isSafeInteger(Number(token))) {
      parts.push(text.slice(from, found.index), `"${TAG}${token}"`);
      from = numbers.lastIndex;
    }
  }
  return from ? JSON.parse(parts.join("") + text.slice(from), untag) : JSON.parse(text);
}

/**
 * The index after the quote that ends a text. A regular expression would overflow on large texts.
 *
 * @param {string} text
 * @param {number} begin
 */
function endOfText(text, begin) {
  for (let at = text.indexOf('"', begin); at >= 0; at = text.indexOf('"', at + 1)) {
    let slashes = 0;
    while (text[at - 1 - slashes] === "\\") slashes += 1;
    if (slashes % 2 === 0) return at + 1;
  }
  return text.length;
}

/** @param {string} _key @param {unknown} value */
function untag(_key, value) {
  return typeof value === "string" && value.startsWith(TAG)
    ? BigInt(value.slice(TAG.length))
    : value;
}

/** Write JSON; with `sorted`, the names in every object by code point. @param {unknown} value */
export function stringify(value, sorted = false) {
  return write(value, sorted) ?? "null";
}

/**
 * A copy of a value as JSON has it: the caller cannot change it later, and it can be posted to
 * another tab. Throws `config` for a value that JSON cannot represent.
 *
 * @template T
 * @param {T} value
 * @returns {T}
 */
export function jsonCopy(value) {
  try {
    return value === undefined ? value : parse(stringify(value));
  } catch (cause) {
    const hint = "Pass objects, arrays, texts, numbers, booleans and null; no events or elements.";
    throw configError(`an argument cannot be written as JSON: ${cause}`, hint);
  }
}

/** @param {any} value @param {boolean} sorted @returns {string | undefined} */
function write(value, sorted) {
  if (typeof value === "bigint") return String(value);
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if (typeof value.toJSON === "function") return write(value.toJSON(), sorted);
  if (Array.isArray(value)) {
    return `[${value.map((item) => write(item, sorted) ?? "null").join(",")}]`;
  }
  const names = sorted ? Object.keys(value).sort(compareText) : Object.keys(value);
  const fields = [];
  for (const name of names) {
    const written = write(value[name], sorted);
    if (written !== undefined) fields.push(`${JSON.stringify(name)}:${written}`);
  }
  return `{${fields.join(",")}}`;
}

const SURROGATE = /[\ud800-\udfff]/;

/** Order texts by code point. @param {string} a @param {string} b */
export function compareText(a, b) {
  if (a === b) return 0;
  if (!SURROGATE.test(a) && !SURROGATE.test(b)) return a < b ? -1 : 1;
  const left = Array.from(a, codePoint);
  const right = Array.from(b, codePoint);
  const at = left.findIndex((point, i) => point !== right[i]);
  if (at < 0) return -1;
  return left[at] < (right[at] ?? -1) ? -1 : 1;
}

/** @param {string} char */
const codePoint = (char) => /** @type {number} */ (char.codePointAt(0));

/**
 * Order keys as Python orders tuples.
 *
 * @param {readonly any[]} a
 * @param {readonly any[]} b
 * @returns {number}
 */
export function compareKeys(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i++) {
    const order = compareValues(a[i], b[i]);
    if (order) return order;
  }
  return a.length - b.length;
}

/** @param {any} a @param {any} b @returns {number} */
function compareValues(a, b) {
  if (typeof a === "string" && typeof b === "string") return compareText(a, b);
  if (Array.isArray(a) && Array.isArray(b)) return compareKeys(a, b);
  return a < b ? -1 : a > b ? 1 : 0;
}
