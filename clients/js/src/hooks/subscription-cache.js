/**
 * Subscriptions that components share, and optimistic patches on their values. A subscription stays
 * open for a moment after its last component was unmounted, so that a component that is mounted
 * again has its value at once.
 *
 * While a patch waits for its mutation, the value below it is frozen: a newer value may already
 * contain what the mutation wrote, and the patch would then count twice. When the patch is removed,
 * the newer value is shown in the same step. A patch that waits too long no longer freezes the value.
 *
 * @typedef {import("../client.js").Client} Client
 * @typedef {import("../protocol.js").Key} Key
 * @typedef {import("../protocol.js").Row} Row
 * @typedef {import("./subscription-requests.js").SubscriptionRequest} SubscriptionRequest
 * @typedef {{value: any, status: import("../subscriptions/source.js").Status,
 *   error: import("../errors.js").HeadwaterError | undefined}} ShownState what components render
 * @typedef {{change: (value: any) => any, position?: string, isLate: boolean}} Patch
 * @typedef {{value: any, keys: readonly Key[]}} PatchBase
 * @typedef {Map<string, {key: Key, row: Row}>} Overlay the patched rows, by the texts of their keys
 */

import { LINGER_SECONDS } from "../limits.js";
import { covers } from "../state/position.js";
import { keyText } from "../state/replica.js";
import { callSafely, Store, ValueStore } from "../store.js";
import { Live } from "../subscriptions/handles.js";

/** What is shown before there is a subscription. @type {ShownState} */
export const WAITING = Object.freeze({ value: undefined, status: "waiting", error: undefined });

/** @template {import("../subscriptions/handles.js").Subscription<any>} [H=any] */
export class CachedSubscription extends Store {
  /** How many components use it. */
  holders = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  timer;
  shown = WAITING;
  /** The patched rows; undefined while there is no patch. */
  overlay = new ValueStore(/** @type {Overlay | undefined} */ (undefined));
  /** @type {Patch[]} */
  #patches = [];
  /** The value below the patches. @type {PatchBase | undefined} */
  #base;
  /** @type {any} */
  #patched;
  /** @type {readonly Key[]} */
  #keys = Object.freeze([]);

  /** @param {H} handle @param {string} [table] of a live query */
  constructor(handle, table) {
    super();
    this.handle = handle;
    this.table = table;
    handle.subscribe(() => this.refresh());
    this.refresh();
  }

  get isOver() {
    return this.handle.status === "failed" || this.handle.status === "closed";
  }

  /** The keys of the rows, in order; the same array while they are the same. */
  get keys() {
    const overlay = this.overlay.value;
    const keys = overlay ? Array.from(overlay.values(), ({ key }) => key) : this.#live.keys;
    const before = this.#keys;
    const same = keys.length === before.length && keys.every((key, i) => isSame(key, before[i]));
    if (!same) this.#keys = Object.freeze(keys);
    return this.#keys;
  }

  /** A store of one row, patches included. @param {Key} key */
  row(key) {
    const { overlay } = this;
    const row = this.#live.row(key);
    const text = keyText(key);
    return {
      get value() {
        return overlay.value ? overlay.value.get(text)?.row : row.value;
      },
      /** @param {() => void} listener */
      subscribe(listener) {
        const ends = [row.subscribe(listener), overlay.subscribe(listener)];
        return () => ends.forEach((end) => end());
      },
    };
  }

  /** Apply a patch to the value until it is removed. @param {Patch} patch */
  addPatch(patch) {
    this.#patches.push(patch);
    this.#applyPatches(this.#base ?? this.#current(), patch);
    this.refresh();
  }

  /** The value contains what the mutation wrote, or it wrote nothing. @param {Patch} patch */
  removePatch(patch) {
    const at = this.#patches.indexOf(patch);
    if (at < 0) return;
    this.#patches.splice(at, 1);
    this.#applyPatches(this.#patches.length ? this.#current() : undefined);
    this.refresh();
  }

  /** Called after a change of the handle or of a patch. */
  refresh() {
    const done = this.#patches.find((patch) => this.#contains(patch));
    if (done) return this.removePatch(done);
    if (this.#base && this.#mayAdvance(this.#base)) this.#applyPatches(this.#current());
    const value = this.#base ? this.#patched : this.handle.value;
    const { status, error } = this.handle;
    const before = this.shown;
    if (before.value === value && before.status === status && before.error === error) return;
    this.shown = Object.freeze({ value, status, error });
    this.changed();
  }

  get #live() {
    return /** @type {Live} */ (/** @type {unknown} */ (this.handle));
  }

  /** @returns {PatchBase} */
  #current() {
    const { handle } = this;
    return { value: handle.value, keys: handle instanceof Live ? handle.keys : [] };
  }

  /**
   * Apply the patches to a value. If a new patch throws, its mutation fails with that. Any other
   * patch that throws is skipped, because it must not stop the removal of another mutation's patch.
   *
   * @param {PatchBase | undefined} base
   * @param {Patch} [latest] a new one
   */
  #applyPatches(base, latest) {
    this.#base = base;
    const patches = base?.value === undefined ? [] : this.#patches;
    this.#patched = patches.reduce((value, patch) => {
      if (patch === latest) return patch.change(value);
      const changed = callSafely(patch.change, value);
      return changed === undefined ? value : changed;
    }, base?.value);
    this.overlay.set(base && this.#overlayOf(base, this.#patched));
  }

  /** Whether there is a newer value, and no patch freezes this one. @param {PatchBase} base */
  #mayAdvance({ value }) {
    if (value === this.handle.value) return false;
    return value === undefined || this.#patches.every((patch) => patch.isLate);
  }

  /** Whether the handle's value contains what the mutation wrote. @param {Patch} patch */
  #contains({ position }) {
    const reached = this.handle.position;
    return position !== undefined && reached !== undefined && covers(reached, position);
  }

  /** @param {PatchBase} base @param {any} rows @returns {Overlay | undefined} */
  #overlayOf({ value, keys }, rows) {
    if (!(this.handle instanceof Live) || value === undefined) return undefined;
    const columns = this.handle.keyColumns;
    const known = new Map(/** @type {Row[]} */ (value).map((row, i) => [row, keys[i]]));
    const entries = /** @type {Row[]} */ (rows).map((row) => {
      const key = known.get(row) ?? columns.map((column) => row[column]);
      return /** @type {const} */ ([keyText(key), { key, row }]);
    });
    return new Map(entries);
  }
}

/** @param {Key} key @param {Key} other */
const isSame = (key, other) => key === other || keyText(key) === keyText(other);

/** The subscriptions of a client's components, by the keys of their requests. */
export class SubscriptionCache {
  /** @type {Map<string, CachedSubscription>} */
  #byKey = new Map();

  /**
   * The open subscription. One that failed is not found, so that it is opened again.
   *
   * @param {string} key
   */
  find(key) {
    const cached = this.#byKey.get(key);
    return cached?.isOver ? undefined : cached;
  }

  /** All live queries over a table. @param {string} table */
  liveQueriesOver(table) {
    return [...this.#byKey.values()].filter((cached) => cached.table === table && !cached.isOver);
  }

  /**
   * Hold a subscription until `release`.
   *
   * @param {Client} client
   * @param {SubscriptionRequest} request
   */
  hold(client, { key, open, table }) {
    const cached = this.find(key) ?? new CachedSubscription(open(client), table);
    this.#byKey.set(key, cached);
    clearTimeout(cached.timer);
    cached.holders += 1;
    return cached;
  }

  /** @param {string} key @param {CachedSubscription} cached */
  release(key, cached) {
    cached.holders -= 1;
    if (cached.holders) return;
    cached.timer = setTimeout(() => this.#close(key, cached), LINGER_SECONDS * 1000);
    // The timer must not keep a Node process alive.
    if (typeof cached.timer === "object") cached.timer.unref?.();
  }

  /** @param {string} key @param {CachedSubscription} cached */
  #close(key, cached) {
    if (this.#byKey.get(key) === cached) this.#byKey.delete(key);
    cached.handle.close();
  }
}

/** @type {WeakMap<Client, SubscriptionCache>} */
const caches = new WeakMap();

/** The cache of a client. @param {Client} client */
export function cacheOf(client) {
  const cache = caches.get(client) ?? new SubscriptionCache();
  caches.set(client, cache);
  return cache;
}
