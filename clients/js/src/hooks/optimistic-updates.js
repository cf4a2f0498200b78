/**
 * Optimistic updates: show what a mutation is expected to change before the gateway has answered.
 * They are patches on the values that components show. A patch is removed when the mutation fails,
 * or in the same step in which the rows that the mutation wrote are shown.
 *
 * @typedef {import("../client.js").Client} Client
 * @typedef {import("../protocol.js").LiveQuery} LiveQuery
 * @typedef {import("../protocol.js").Row} Row
 * @typedef {import("./subscription-cache.js").CachedSubscription} CachedSubscription
 * @typedef {import("./subscription-cache.js").Patch} Patch
 * @typedef {(local: OptimisticUpdates, args: any) => void} Optimistic
 */

import { HOLD_SECONDS } from "../limits.js";
import { cacheOf } from "./subscription-cache.js";
import { liveRequest, queryRequest } from "./subscription-requests.js";

/** The patches of one mutation. A value that no component shows is not patched. */
export class OptimisticUpdates {
  #cache;
  /** @type {{cached: CachedSubscription, patch: Patch}[]} */
  #patches = [];

  /** @param {Client} client */
  constructor(client) {
    this.#cache = cacheOf(client);
  }

  /**
   * Change the rows of a live query. The function returns new rows for the rows it is given, and is
   * called again when those change.
   *
   * @param {LiveQuery | string} query
   * @param {(rows: readonly Row[]) => readonly Row[]} change
   */
  live(query, change) {
    this.#patch(this.#cache.find(liveRequest(query).key), change);
  }

  /**
   * Change the rows of every live query over a table, in the same way.
   *
   * @param {string} name
   * @param {(rows: readonly Row[]) => readonly Row[]} change
   */
  table(name, change) {
    for (const cached of this.#cache.liveQueriesOver(name)) this.#patch(cached, change);
  }

  /**
   * Change the value of a reactive query.
   *
   * @param {string} name
   * @param {Record<string, any>} args
   * @param {(value: any) => any} change
   */
  query(name, args, change) {
    this.#patch(this.#cache.find(queryRequest(name, args).key), change);
  }

  /** @param {CachedSubscription | undefined} cached @param {(value: any) => any} change */
  #patch(cached, change) {
    if (!cached) return;
    const patch = { change, isLate: false };
    this.#patches.push({ cached, patch });
    cached.addPatch(patch);
  }

  /** The mutation takes long: the values below its patches change again. */
  unfreeze() {
    for (const { cached, patch } of this.#patches) {
      patch.isLate = true;
      cached.refresh();
    }
  }

  /** The mutation is committed at this position. @param {string} position */
  committed(position) {
    for (const { cached, patch } of this.#patches) {
      patch.position = position;
      cached.refresh();
    }
  }

  /** The mutation has failed, or the rows that it wrote have arrived. */
  remove() {
    for (const { cached, patch } of this.#patches) cached.removePatch(patch);
  }
}

/**
 * Run a mutation with optimistic updates.
 *
 * @param {Client} client
 * @param {string} name
 * @param {Record<string, any>} args
 * @param {Optimistic} [optimistic]
 */
export async function mutateOptimistically(client, name, args, optimistic) {
  if (!optimistic) return client.mutate(name, args);
  const updates = new OptimisticUpdates(client);
  const timer = setTimeout(() => updates.unfreeze(), HOLD_SECONDS * 1000);
  const end = () => {
    clearTimeout(timer);
    updates.remove();
  };
  try {
    optimistic(updates, args);
    const done = await client.mutate(name, args);
    updates.committed(done.position);
    // A live query that the mutation did not touch never reaches its position: wait for it here.
    client
      .waitFor(done.position)
      .catch(() => {})
      .finally(end);
    return done;
  } catch (error) {
    end();
    throw error;
  }
}
