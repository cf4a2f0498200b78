/**
 * Exponential backoff: how long to wait after a failure (1 s, 2 s, 4 s … 30 s), and when to give up.
 * Every pause is shortened at random by up to half, so that the clients of a gateway that restarts
 * do not all reconnect at once.
 */

import { BACKOFF_SECONDS, FAILURES_MAX } from "../limits.js";

/** @typedef {{seconds?: readonly [number, number], failuresMax?: number}} BackoffOptions */

export class Backoff {
  #first;
  #longest;
  #failuresMax;
  /** Failures in a row. */
  failures = 0;

  /** @param {BackoffOptions} [options] */
  constructor({ seconds = BACKOFF_SECONDS, failuresMax = FAILURES_MAX } = {}) {
    [this.#first, this.#longest] = seconds;
    this.#failuresMax = failuresMax;
  }

  /**
   * The pause before the next attempt, in seconds; null to give up.
   *
   * @param {number} chance a random number between 0 and 1
   * @param {number} [atLeast] the gateway's `retryAfter`
   */
  failed(chance, atLeast = 0) {
    this.failures += 1;
    if (this.failures >= this.#failuresMax) return null;
    const whole = Math.min(this.#first * 2 ** (this.failures - 1), this.#longest);
    return Math.max(whole * (0.5 + chance / 2), atLeast);
  }

  /** A message was received: the next failure counts as the first. */
  succeeded() {
    this.failures = 0;
  }
}
