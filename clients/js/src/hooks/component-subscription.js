/**
 * One component's use of a cached subscription. It opens nothing until it is used: before that it
 * only reads what the cache already has. While it is used, the cache keeps the subscription open.
 *
 * @typedef {import("../client.js").Client} Client
 * @typedef {import("./subscription-cache.js").CachedSubscription} CachedSubscription
 * @typedef {import("./subscription-requests.js").SubscriptionRequest} SubscriptionRequest
 */

import { cacheOf } from "./subscription-cache.js";

export class ComponentSubscription {
  #client;
  #request;
  #cache;
  /** @type {CachedSubscription | undefined} */
  #held;
  #users = 0;

  /** @param {Client} client @param {SubscriptionRequest | undefined} request */
  constructor(client, request) {
    this.#client = client;
    this.#request = request;
    this.#cache = cacheOf(client);
  }

  /** The subscription, if the cache has it. */
  get cached() {
    return this.#held ?? (this.#request && this.#cache.find(this.#request.key));
  }

  /**
   * Call a listener after every change; returns the function that stops it.
   *
   * @param {() => void} listener
   */
  subscribe = (listener) => this.use((cached) => cached.subscribe(listener));

  /**
   * Hold the subscription from `begin` until the returned function is called.
   *
   * @param {(cached: CachedSubscription) => () => void} begin returns the function that ends it
   */
  use(begin) {
    const request = this.#request;
    if (!request) return () => {};
    const cached = (this.#held ??= this.#cache.hold(this.#client, request));
    this.#users += 1;
    const end = begin(cached);
    return () => {
      end();
      this.#users -= 1;
      if (this.#users) return;
      this.#held = undefined;
      this.#cache.release(request.key, cached);
    };
  }
}
