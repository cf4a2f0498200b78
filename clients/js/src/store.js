/**
 * A value that changes, with listeners, as `useSyncExternalStore` expects it. Listeners are called
 * without arguments, in a microtask, once for all changes since the last call.
 */

/** @typedef {() => void} Listener */

export class Store {
  /** @type {Set<Listener>} */
  #listeners = new Set();
  #isScheduled = false;

  /**
   * Call a listener after every change; returns the function that stops it.
   *
   * @param {Listener} listener
   * @returns {() => void}
   */
  subscribe(listener) {
    // Its own function each time: the same listener may be added twice.
    const own = () => listener();
    this.#listeners.add(own);
    return () => void this.#listeners.delete(own);
  }

  get hasListeners() {
    return this.#listeners.size > 0;
  }

  /** @protected */
  changed() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    queueMicrotask(() => {
      this.#isScheduled = false;
      for (const listener of [...this.#listeners]) callSafely(listener);
    });
  }
}

/**
 * A store whose value is set.
 *
 * @template T
 */
export class ValueStore extends Store {
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
 * Call a function of the program. If it throws, the error is reported as uncaught and the client
 * continues.
 *
 * @template {any[]} A
 * @param {(...args: A) => unknown} listener
 * @param {A} args
 */
export function callSafely(listener, ...args) {
  try {
    return listener(...args);
  } catch (error) {
    queueMicrotask(() => {
      throw error;
    });
    return undefined;
  }
}
