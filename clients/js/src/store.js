/**
 * A value that changes, and who wants to know: made for `useSyncExternalStore`. Listeners are
 * called without arguments, once for all that changed since the last time, in a microtask.
 */

/** @typedef {() => void} Listener */

export class Store {
  /** @type {Set<Listener>} */
  #listeners = new Set();
  #isScheduled = false;

  /**
   * Be called after every change; gives what ends that.
   *
   * @param {Listener} listener
   * @returns {() => void}
   */
  subscribe(listener) {
    const own = () => listener();
    this.#listeners.add(own);
    return () => void this.#listeners.delete(own);
  }

  get isWatched() {
    return this.#listeners.size > 0;
  }

  /** @protected */
  changed() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    queueMicrotask(() => {
      this.#isScheduled = false;
      for (const listener of [...this.#listeners]) called(listener);
    });
  }
}

/**
 * A store that is told its value.
 *
 * @template T
 */
export class Value extends Store {
  #value;

  /** @param {T} value */
  constructor(value) {
    super();
    this.#value = value;
  }

  get value() {
    return this.#value;
  }

  /** @param {T} value */
  set(value) {
    if (Object.is(value, this.#value)) return;
    this.#value = value;
    this.changed();
  }
}

/**
 * Call a program's function. What it throws is the program's, and reported as such; it must not
 * keep the client from going on.
 *
 * @template {any[]} A
 * @param {(...args: A) => unknown} listener
 * @param {A} args
 */
export function called(listener, ...args) {
  try {
    return listener(...args);
  } catch (error) {
    queueMicrotask(() => {
      throw error;
    });
    return undefined;
  }
}
