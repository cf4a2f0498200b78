/**
 * What can go wrong, and how a gateway says it. The `code` is for programs, `message` and `hint`
 * are for people; `retryable` says whether the same may go well later.
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
    /** Stable, for programs: docs/reference/errors.md has them all. */
    this.code = code;
    /** The way out. */
    this.hint = hint;
    /** Whether the same may go well later. */
    this.retryable = retryable;
    /** When to try again, in seconds, where the gateway said so. */
    this.retryAfter = retryAfter;
  }
}

/** What a gateway says went wrong. @param {Refusal} said */
export function errorOf(said) {
  return new HeadwaterError(said.code, said.message, {
    hint: said.hint ?? undefined,
    retryable: said.retryable ?? false,
    retryAfter: said.retry_after_secs ?? undefined,
  });
}

/** @param {string} message @param {Details} [details] */
export function connectionFailed(message, details = {}) {
  return new HeadwaterError("connection", message, { retryable: true, ...details });
}

/** @param {string} message @param {string} [hint] */
export function diverged(message, hint = "The result is read anew.") {
  return new HeadwaterError("diverged", message, { hint, retryable: true });
}

/** What a gateway sent is older than what was shown. @param {string} name */
export function behind(name) {
  const message = `the gateway has sent an older result of ${name} than the one that is shown`;
  return new HeadwaterError("behind", message, {
    hint: "It is asked for again, until the gateway has caught up.",
    retryable: true,
  });
}

/** @param {string} message @param {string} [hint] */
export function configError(message, hint) {
  return new HeadwaterError("config", message, { hint });
}

const LOOK_FIRST = "It may have happened or not: look before you call it again.";

/** @param {string} what @param {HeadwaterError} cause */
export function outcomeUnknown(what, cause) {
  if (cause.code === "outcome_unknown") return cause;
  const message = `it is not known whether ${what} has happened: ${cause.message}`;
  return new HeadwaterError("outcome_unknown", message, { hint: LOOK_FIRST, cause });
}

const DENIED = /^(unauthorized|forbidden|access_changed|token_.*|ticket|origin|host)$/;

/** Whether it is about who asks, and not about what. @param {HeadwaterError} error */
export const isDenied = (error) => DENIED.test(error.code);

/** Whether another token may help. @param {HeadwaterError} error */
export const isAboutToken = (error) => /^(unauthorized|token_.*)$/.test(error.code);

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
 * What an answer with this status says; something sensible for a proxy's page.
 *
 * @param {number} status
 * @param {string} body
 * @returns {Refusal}
 */
export function refusalIn(status, body) {
  const said = parsed(body);
  if (said) return said;
  const code = CODES[status] ?? (status >= 502 ? "unavailable" : "headwater_error");
  const retryable = status === 429 || status >= 500;
  return { code, message: `the gateway answered with status ${status}`, retryable };
}

/**
 * The same for a mutation: a proxy that failed has told nobody what became of it.
 *
 * @param {number} status
 * @param {string} body
 * @returns {Refusal}
 */
export function mutationRefusalIn(status, body) {
  if (status < 500 || parsed(body)) return refusalIn(status, body);
  const message = `the mutation was answered with status ${status}, and not by the gateway`;
  return { code: "outcome_unknown", message, hint: LOOK_FIRST };
}

/** @param {string} body @returns {Refusal | undefined} */
function parsed(body) {
  try {
    const said = JSON.parse(body).error;
    if (typeof said?.code === "string" && typeof said.message === "string") return said;
  } catch {
    // Not ours: a proxy's page.
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
  return new HeadwaterError(known[0], reason || `closed with code ${code}`, {
    retryable: known[1],
  });
}
