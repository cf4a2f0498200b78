/**
 * Show what a mutation is expected to change before it has: patches on the values that components
 * see. They are taken back if the mutation fails, and make way for the server's own rows in the
 * step in which those are shown.
 *
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {(local: Local, args: any) => void} Optimistic
 */

import { HOLD_SECONDS } from "./limits.js";
import { keeperOf } from "./kept.js";
import { liveQuestion, queryQuestion } from "./questions.js";

/** What components see, to be patched. What none of them shows needs no patch, and gets none. */
export class Local {
  #keeper;
  /** @type {{kept: import("./kept.js").Kept, patch: import("./kept.js").Patch}[]} */
  #laid = [];

  /** @param {Client} client */
  constructor(client) {
    this.#keeper = keeperOf(client);
  }

  /**
   * Change the rows of a live query. The function gives other rows for those it is given, and is
   * called again whenever they change.
   *
   * @param {LiveQuery | string} query
   * @param {(rows: readonly Row[]) => readonly Row[]} change
   */
  live(query, change) {
    this.#patch(this.#keeper.find(liveQuestion(query).text), change);
  }

  /**
   * Change the rows of every live query over a table, in the same way.
   *
   * @param {string} name
   * @param {(rows: readonly Row[]) => readonly Row[]} change
   */
  table(name, change) {
    for (const kept of this.#keeper.over(name)) this.#patch(kept, change);
  }

  /**
   * Change the value of a reactive query.
   *
   * @param {string} name
   * @param {Record<string, any>} args
   * @param {(value: any) => any} change
   */
  query(name, args, change) {
    this.#patch(this.#keeper.find(queryQuestion(name, args).text), change);
  }

  /** @param {import("./kept.js").Kept | undefined} kept @param {(value: any) => any} change */
  #patch(kept, change) {
    if (!kept) return;
    const patch = { change, isLate: false };
    this.#laid.push({ kept, patch });
    kept.patch(patch);
  }

  /** From here on the value below the patches goes on. */
  late() {
    for (const { kept, patch } of this.#laid) {
      patch.isLate = true;
      kept.look();
    }
  }

  /** The mutation has written up to here. @param {string} position */
  written(position) {
    for (const { kept, patch } of this.#laid) {
      patch.position = position;
      kept.look();
    }
  }

  /** The mutation has failed, or its rows are there. */
  lift() {
    for (const { kept, patch } of this.#laid) kept.lift(patch);
  }
}

/**
 * Run a mutation with patches.
 *
 * @param {Client} client
 * @param {string} name
 * @param {Record<string, any>} args
 * @param {Optimistic} [optimistic]
 */
export async function mutateWith(client, name, args, optimistic) {
  if (!optimistic) return client.mutate(name, args);
  const local = new Local(client);
  const timer = setTimeout(() => local.late(), HOLD_SECONDS * 1000);
  const end = () => {
    clearTimeout(timer);
    local.lift();
  };
  try {
    optimistic(local, args);
    const done = await client.mutate(name, args);
    local.written(done.position);
    // A live query that the mutation did not touch never tells of its position: this does.
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
