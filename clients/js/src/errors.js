/**
 * The client's errors, and how they are made from a gateway's answers. `code` is for programs;
 * `message` and `hint` are for people.
 *
 * @typedef {{hint?: string, retryable?: boolean, retryAfter?: number, cause?: unknown}} Details
 * @typedef {{code: string, message: string, hint?: string | null, retryable?: boolean,
 *   retry_after_secs?: number | null, id?: string | null}} Refusal
 */

export class HeadwaterError extends Error {
  /** @param {string} code @param {string} message @param {Details} [details] */
  constructor(code, message, { hint, retryable = false, retryAfter, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    this.name = "HeadwaterError";
    /** Stable, for programs: docs/reference/errors.md lists them. */
    this.code = code;
    /** What to do about it. */
    this.hint = hint;
    /** Whether the same request may succeed later. */
    this.retryable = retryable;
    /** After how many seconds to try again, if the gateway says so. */
    this.retryAfter = retryAfter;
  }
}

/** The error of a gateway's answer. @param {Refusal} refusal */
export function errorOf(refusal) {
  return new HeadwaterError(refusal.code, refusal.message, {
    hint: refusal.hint ?? undefined,
    retryable: refusal.retryable ?? false,
    retryAfter: refusal.retry_after_secs ?? undefined,
  });
}

/** @param {string} message @param {Details} [details] */
export function connectionFailed(message, details = {}) {
  return new HeadwaterError("connection", message, { retryable: true, ...details });
}

/** @param {string} message @param {string} [hint] */
export function diverged(message, hint = "The client reads the result again.") {
  return new HeadwaterError("diverged", message, { hint, retryable: true });
}

/** The gateway sent an older result than the one that is shown. @param {string} name */
export function behind(name) {
  const message = `the gateway sent an older result of ${name} than the one that is shown`;
  return new HeadwaterError("behind", message, {
    hint: "The client subscribes again until the gateway has caught up.",
    retryable: true,
  });
}

/** The program closed a subscription that it still uses. */
export function subscriptionClosed() {
  const hint = "Subscribe again instead of using a handle after its close().";
  return connectionFailed("the subscription was closed", { hint, retryable: false });
}

/** @param {string} message @param {string} [hint] */
export function configError(message, hint) {
  return new HeadwaterError("config", message, { hint });
}

const CHECK_FIRST = "Check whether it was executed before you call it again.";

/** @param {string} what @param {HeadwaterError} cause */
export function outcomeUnknown(what, cause) {
  if (cause.code === "outcome_unknown") return cause;
  const message = `it is not known whether ${what} was executed: ${cause.message}`;
  return new HeadwaterError("outcome_unknown", message, { hint: CHECK_FIRST, cause });
}

const DENIED = /^(unauthorized|forbidden|access_changed|token_.*|ticket|origin|host)$/;

/** Whether access was denied, for any request. @param {HeadwaterError} error */
export const isDenied = (error) => DENIED.test(error.code);

/** Whether a new token may help. @param {HeadwaterError} error */
export const isAboutToken = (error) => /^(unauthorized|token_.*)$/.test(error.code);

const PROXY = "A proxy may have answered. Check the URL, and that the gateway is running.";

/** @type {Record<number, string>} */
const CODES = {
  400: "invalid_query",
  401: "unauthorized",
  403: "forbidden",
  404: "not_found",
  413: "limit",
  422: "refused",
  429: "limit",
};

/**
 * The refusal in a response; made from the status if a proxy answered, and not the gateway.
 *
 * @param {number} status
 * @param {string} body
 * @returns {Refusal}
 */
export function refusalIn(status, body) {
  const refusal = parsed(body);
  if (refusal) return refusal;
  const code = CODES[status] ?? (status >= 502 ? "unavailable" : "headwater_error");
  const retryable = status === 429 || status >= 500;
  const message = `the response has status ${status} and no error of a gateway`;
  return { code, message, hint: PROXY, retryable };
}

/**
 * The same for a mutation: if a proxy failed, the mutation may have been executed.
 *
 * @param {number} status
 * @param {string} body
 * @returns {Refusal}
 */
export function mutationRefusalIn(status, body) {
  if (status < 500 || parsed(body)) return refusalIn(status, body);
  const message = `a proxy answered the mutation with status ${status}: it may have been executed`;
  return { code: "outcome_unknown", message, hint: CHECK_FIRST };
}

/** @param {string} body @returns {Refusal | undefined} */
function parsed(body) {
  try {
    const refusal = JSON.parse(body).error;
    if (typeof refusal?.code === "string" && typeof refusal.message === "string") return refusal;
  } catch {
    // Not a gateway's answer: a proxy's page.
  }
  return undefined;
}

/** @type {Record<number, [string, boolean]>} */
const CLOSE_CODES = {
  4401: ["unauthorized", false],
  4403: ["forbidden", false],
  4429: ["limit", true],
  1012: ["unavailable", true],
  1013: ["unavailable", true],
};

/** Why a WebSocket was closed. @param {number} code @param {string} reason @param {string} url */
export function errorOfClose(code, reason, url) {
  const known = CLOSE_CODES[code];
  if (!known) {
    const why = reason || `code ${code}`;
    return connectionFailed(`the connection to ${url} was lost: ${why}`);
  }
  const message = reason || `the gateway ${url} closed the connection with code ${code}`;
  return new HeadwaterError(known[0], message, {
    retryable: known[1],
  });
}
