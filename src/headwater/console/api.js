/** The pages' requests to the gateway: the admin API, and one client for all live data. */

import { errorOf, refusalIn } from "../client/errors.js";
import { connect, HeadwaterError } from "../client/index.js";
import { parse } from "../client/json.js";
import { setGatewayTime } from "./format.js";

const TOKEN = "headwater.token";
/** A page that stores a new token there and comes back, if the page that opened the console has one. */
const TOKEN_PAGE = "headwater.token_page";
/** The URL of the gateway, which may be mounted below another path. */
const GATEWAY = new URL("..", import.meta.url).href.replace(/\/$/, "");

export const token = {
  get value() {
    return sessionStorage.getItem(TOKEN) ?? undefined;
  },
  /** Stored for this tab only, until it is closed. @param {string | undefined} text */
  set value(text) {
    if (text) sessionStorage.setItem(TOKEN, text);
    else sessionStorage.removeItem(TOKEN);
  },
  get page() {
    return sessionStorage.getItem(TOKEN_PAGE) ?? undefined;
  },
};

/**
 * GET a path below `/v1/admin/`. Throws HeadwaterError.
 *
 * @param {string} path
 * @param {Record<string, any>} [parameters]
 * @param {AbortSignal} [signal]
 * @param {(text: string) => any} [read]
 */
export async function ask(path, parameters = {}, signal, read = parse) {
  const url = new URL(`${GATEWAY}/v1/admin/${path}`);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  const headers = token.value ? { authorization: `Bearer ${token.value}` } : {};
  const response = await fetch(url, { headers, signal, cache: "no-store" }).catch((error) => {
    if (signal?.aborted) throw error;
    const message = `the gateway ${GATEWAY} does not answer`;
    const hint = "Check that it is running, then try again.";
    throw new HeadwaterError("connection", message, { hint, retryable: true });
  });
  setGatewayTime(response.headers.get("date"));
  const body = await response.text();
  if (!response.ok) {
    const error = errorOf(refusalIn(response.status, body));
    // A gateway without authentication ignores tokens: another one would not help.
    const tokenIsUseless = error.code === "admin_only" && !response.headers.has("www-authenticate");
    throw Object.assign(error, { tokenIsUseless });
  }
  return read(body);
}

/**
 * JSON with all digits of its numbers: a `numeric` column may have more than a Number holds. Browsers
 * that do not give the source text of a number show the Number.
 *
 * @param {string} text
 */
export function exact(text) {
  return JSON.parse(text, /** @type {any} */ (withAllDigits));
}

/** @param {string} _name @param {any} value @param {{source?: string}} [context] */
function withAllDigits(_name, value, context) {
  const source = typeof value === "number" ? context?.source : undefined;
  return source === undefined || source === String(value) ? value : source;
}

/** Whether the token is missing or not an admin's, and another would help. @param {any} error */
export function wantsToken(error) {
  return !error?.tokenIsUseless && /^(unauthorized|ticket|token_|admin_only)/.test(error?.code ?? "");
}

/** Connect to the gateway. @param {(error: any) => void} onError */
export function open(onError) {
  return connect(GATEWAY, { token: token.value && (() => token.value), tabs: false, onError });
}
