/** Values as people read them. */

import { stringify } from "../client/json.js";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** @param {number | bigint | null | undefined} value */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(Number(value)) < 100_000 ? WHOLE.format(value) : SHORT.format(value);
}

/** A rate: with a decimal where it is small. @param {number | null | undefined} value */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value < 10 ? value.toFixed(value === 0 ? 0 : 1) : count(Math.round(value));
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return "–";
  let size = Number(value);
  let unit = 0;
  while (size >= 1000 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

/** A length of time. @param {number | null | undefined} seconds */
export function seconds(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 ms";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} days`;
}

/** How far the gateway's clock is ahead of the browser's, in milliseconds. */
let ahead = 0;

/** Set the gateway's time, in whole seconds: the browser's clock may be wrong. @param {string | null} date */
export function setGatewayTime(date) {
  const off = Date.parse(date ?? "") - Date.now();
  ahead = Math.abs(off) > 2000 ? off : 0;
}

/** The gateway's time, in milliseconds. */
export const now = () => Date.now() + ahead;

/** How long ago, in whole seconds. @param {string | null | undefined} at */
export function age(at) {
  if (!at) return "–";
  const passed = Math.floor(Math.max(0, (now() - Date.parse(at)) / 1000));
  return passed ? seconds(passed) : "0 s";
}

const TIME = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DATE = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** Today's times without the day. @param {string} at */
export function moment(at) {
  const then = new Date(at);
  const time = TIME.format(then);
  return then.toDateString() === new Date().toDateString() ? time : `${DATE.format(then)}, ${time}`;
}

/** An ISO 8601 duration, as the gateway writes retention. @param {string} text */
export function period(text) {
  const found = /^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?$/.exec(text ?? "");
  if (!found) return text ?? "–";
  const [days, hours, minutes, rest] = found.slice(1).map((part) => Number(part ?? 0));
  return seconds(days * 86_400 + hours * 3600 + minutes * 60 + rest);
}

// The log writes times as PostgreSQL does, feeds as browsers do.
const UTC = /^\d{4,}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?\+00:00$/;

/** A value of a row, on one line. @param {any} value */
export function value(value) {
  if (typeof value === "string") return UTC.test(value) ? `${value.slice(0, -6)}Z` : value;
  return stringify(value);
}

// Random, so that no text in the data is mistaken for a number.
const TAG = `bigint-${Math.random().toString(36).slice(2)}-`;
const TAGGED = new RegExp(`"${TAG}(-?\\d+)"`, "g");

/** JSON on many lines, with all digits of large numbers. @param {any} value */
export function pretty(value) {
  return JSON.stringify(value, tagged, 2).replace(TAGGED, "$1");
}

/** @param {string} _name @param {any} value */
function tagged(_name, value) {
  return typeof value === "bigint" ? `${TAG}${value}` : value;
}

/** A key as text, as it is typed into a field. @param {Record<string, any> | null | undefined} key */
export function key(key) {
  return key ? Object.values(key).map((part) => (typeof part === "string" ? part : value(part))).join(",") : "";
}

const KEY_TIME = /(T\d\d:\d\d:\d\d)(?:\.(\d*?)0*)?(Z|\+00:00)?(?=,|$)/g;

/** Whether two keys are of one row, however times in them are written. @param {string} one @param {string} other */
export function sameKey(one, other) {
  return one === other || plainTimes(one) === plainTimes(other);
}

/** @param {string} key */
function plainTimes(key) {
  return key.replace(KEY_TIME, (_, time, digits, zone) => `${time}.${digits ?? ""}${zone ? "Z" : ""}`);
}

/** A text that is not too long for its place. @param {string} text @param {number} most */
export function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
