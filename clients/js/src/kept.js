/**
 * Subscriptions as components use them. All that ask for the same share one; when the last has gone
 * it is kept for a moment, so that a page that mounts it again finds its value there. On top of the
 * value lie the patches of mutations that are under way (`optimism.js`).
 *
 * While a patch waits, the value below it stands still: a newer one may contain what the mutation
 * wrote already, and the patch would count twice. When the patch ends, the newer value takes its
 * place in the same step. What waits too long holds nothing up.
 *
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./protocol.js").Key} Key
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./questions.js").Question} Question
 * @typedef {{value: any, status: import("./source.js").Status,
 *   error: import("./errors.js").HeadwaterError | undefined}} Snapshot
 * @typedef {{change: (value: any) => any, position?: string, isLate: boolean}} Patch
 * @typedef {{value: any, keys: readonly Key[]}} Base
 * @typedef {Map<string, {key: Key, row: Row}>} Overlay the patched rows, by the texts of their keys
 */

import { LINGER_SECONDS } from "./limits.js";
import { covers } from "./position.js";
import { keyText } from "./replica.js";
import { called, Store, Value } from "./store.js";
import { Live } from "./subscriptions.js";

/** What there is before anything was asked for. @type {Snapshot} */
export const NOTHING = Object.freeze({ value: undefined, status: "waiting", error: undefined });

/** @template {import("./subscriptions.js").Subscription<any>} [H=any] */
export class Kept extends Store {
  /** How many components hold it. */
  holders = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  timer;
  snapshot = NOTHING;
  /** The rows as patched; undefined while no patch lies on them. */
  overlay = new Value(/** @type {Overlay | undefined} */ (undefined));
  /** @type {Patch[]} */
  #patches = [];
  /** What the patches lie on. @type {Base | undefined} */
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
    handle.subscribe(() => this.look());
    this.look();
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

  /** Lay a patch on the value, until it is lifted. @param {Patch} patch */
  patch(patch) {
    this.#patches.push(patch);
    this.#lay(this.#base ?? this.#present(), patch);
    this.look();
  }

  /** The value has what the mutation wrote, or it wrote nothing. @param {Patch} patch */
  lift(patch) {
    const at = this.#patches.indexOf(patch);
    if (at < 0) return;
    this.#patches.splice(at, 1);
    this.#lay(this.#patches.length ? this.#present() : undefined);
    this.look();
  }

  /** The handle has changed, or a patch has. */
  look() {
    const done = this.#patches.find((patch) => this.#has(patch));
    if (done) return this.lift(done);
    if (this.#base && this.#mayGoOn(this.#base)) this.#lay(this.#present());
    const value = this.#base ? this.#patched : this.handle.value;
    const { status, error } = this.handle;
    const before = this.snapshot;
    if (before.value === value && before.status === status && before.error === error) return;
    this.snapshot = Object.freeze({ value, status, error });
    this.changed();
  }

  get #live() {
    return /** @type {Live} */ (/** @type {unknown} */ (this.handle));
  }

  /** @returns {Base} */
  #present() {
    const { handle } = this;
    return { value: handle.value, keys: handle instanceof Live ? handle.keys : [] };
  }

  /**
   * Lay the patches on this. Of a new one the mutation hears if it throws; any other then leaves
   * the value as it was, for it must not keep another mutation's from being lifted.
   *
   * @param {Base | undefined} base
   * @param {Patch} [latest] a new one
   */
  #lay(base, latest) {
    this.#base = base;
    const patches = base?.value === undefined ? [] : this.#patches;
    this.#patched = patches.reduce((value, patch) => {
      if (patch === latest) return patch.change(value);
      const changed = called(patch.change, value);
      return changed === undefined ? value : changed;
    }, base?.value);
    this.overlay.set(base && this.#overlayOf(base, this.#patched));
  }

  /** Whether what the patches lie on is old, and need not stand still. @param {Base} base */
  #mayGoOn({ value }) {
    if (value === this.handle.value) return false;
    return value === undefined || this.#patches.every((patch) => patch.isLate);
  }

  /** Whether the handle's value has what the mutation wrote. @param {Patch} patch */
  #has({ position }) {
    const reached = this.handle.position;
    return position !== undefined && reached !== undefined && covers(reached, position);
  }

  /** @param {Base} base @param {any} rows @returns {Overlay | undefined} */
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

/** What the components of a client hold. */
export class Keeper {
  /** By the text of what is asked for. @type {Map<string, Kept>} */
  #kept = new Map();

  /** What is kept; not what has failed, so that it is asked for again. @param {string} text */
  find(text) {
    const kept = this.#kept.get(text);
    return kept?.isOver ? undefined : kept;
  }

  /** All live queries over a table. @param {string} table */
  over(table) {
    return [...this.#kept.values()].filter((kept) => kept.table === table && !kept.isOver);
  }

  /** Hold it, until it is released. @param {Client} client @param {Question} question */
  hold(client, { text, open, table }) {
    const kept = this.find(text) ?? new Kept(open(client), table);
    this.#kept.set(text, kept);
    clearTimeout(kept.timer);
    kept.holders += 1;
    return kept;
  }

  /** @param {string} text @param {Kept} kept */
  release(text, kept) {
    kept.holders -= 1;
    if (kept.holders) return;
    kept.timer = setTimeout(() => this.#close(text, kept), LINGER_SECONDS * 1000);
    // In Node, a program need not stay for it.
    if (typeof kept.timer === "object") kept.timer.unref?.();
  }

  /** @param {string} text @param {Kept} kept */
  #close(text, kept) {
    if (this.#kept.get(text) === kept) this.#kept.delete(text);
    kept.handle.close();
  }
}

/** @type {WeakMap<Client, Keeper>} */
const keepers = new WeakMap();

/** The keeper of a client. @param {Client} client */
export function keeperOf(client) {
  const keeper = keepers.get(client) ?? new Keeper();
  keepers.set(client, keeper);
  return keeper;
}
