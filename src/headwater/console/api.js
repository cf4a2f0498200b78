/** What the pages ask the gateway: questions for admins, and one client for all that is live. */

import { errorOf, refusalIn } from "../client/errors.js";
import { connect, HeadwaterError } from "../client/index.js";
import { parse } from "../client/json.js";
import { hearTime } from "./format.js";

const TOKEN = "headwater.token";
/** A page that puts a new token there and comes back, if the one who sent us here has one. */
const TOKEN_PAGE = "headwater.token_page";
/** Where the gateway is: it may be mounted below another path. */
const GATEWAY = new URL("..", import.meta.url).href.replace(/\/$/, "");

export const token = {
  get value() {
    return sessionStorage.getItem(TOKEN) ?? undefined;
  },
  /** Kept for this tab only, and until it is closed. @param {string | undefined} text */
  set value(text) {
    if (text) sessionStorage.setItem(TOKEN, text);
    else sessionStorage.removeItem(TOKEN);
  },
  get page() {
    return sessionStorage.getItem(TOKEN_PAGE) ?? undefined;
  },
};

/**
 * Ask for something below `/v1/admin/`. Throws HeadwaterError.
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
    const hint = "It is tried again when you ask again.";
    throw new HeadwaterError("connection", "the gateway does not answer", { hint, retryable: true });
  });
  hearTime(response.headers.get("date"));
  const body = await response.text();
  if (!response.ok) {
    const error = errorOf(refusalIn(response.status, body));
    // A gateway without authentication looks at no token.
    const tokenIsUseless = error.code === "admin_only" && !response.headers.has("www-authenticate");
    throw Object.assign(error, { tokenIsUseless });
  }
  return read(body);
}

/**
 * JSON with its numbers as they are written: what a `numeric` column holds has more digits than a
 * number keeps. Browsers that do not tell how a number was written show the number.
 *
 * @param {string} text
 */
export function exact(text) {
  return JSON.parse(text, /** @type {any} */ (written));
}

/** @param {string} _name @param {any} value @param {{source?: string}} [context] */
function written(_name, value, context) {
  const source = typeof value === "number" ? context?.source : undefined;
  return source === undefined || source === String(value) ? value : source;
}

/** Whether a token is missing, or is not one of an admin, and another would help. @param {any} error */
export function wantsToken(error) {
  return !error?.tokenIsUseless && /^(unauthorized|ticket|token_|admin_only)/.test(error?.code ?? "");
}

/** The connection of this page. @param {(error: any) => void} onError */
export function open(onError) {
  return connect(GATEWAY, { token: token.value && (() => token.value), tabs: false, onError });
}
