/**
 * The streams of tests/vectors: after each step the client shows the true rows, as the Python client
 * does. The transport is a fake that the test controls.
 */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { connectionFailed } from "../src/errors.js";
import { connect } from "../src/index.js";
import { parse } from "../src/json.js";
import { settled } from "./stage.js";

const HELLO = /** @type {const} */ ({ type: "hello", session: "s", version: 1, keepalive: 15 });

/** A fake gateway that the test controls: the messages that it received, and a client of it. */
function playing() {
  /** @type {any[]} */
  const sent = [];
  /** @type {import("../src/transports/transport.js").TransportHandlers | undefined} */
  let handlers;
  const hw = connect("http://vectors", {
    transport: (_url, _token, given) => {
      handlers = given;
      return { send: (message) => void sent.push(message) };
    },
    backoff: { seconds: [0, 0] },
    tabs: false,
    onError: () => {},
  });
  return {
    hw,
    sent,
    /** The last message that subscribed. */
    asked: () => sent.findLast((message) => message.type === "subscribe"),
    receive: (/** @type {any} */ message) => handlers?.onMessage(message),
    async greet() {
      await settled(() => handlers && !handlers.signal.aborted);
      handlers?.onMessage(HELLO);
    },
    async lose() {
      const before = handlers;
      handlers?.onClose(connectionFailed("lost"));
      await settled(() => handlers !== before);
      await this.greet();
    },
  };
}

/** @param {any} vector @param {string} name */
async function playLive(vector, name) {
  const game = playing();
  const live = game.hw.live(vector.live, undefined, { verify: vector.verify });
  await game.greet();
  try {
    for (const [number, step] of vector.steps.entries()) {
      const where = `${name}, step ${number}`;
      await take(game, step, where);
      if ("move" in step) {
        const before = game.sent.length;
        live.reanchor(step.move).catch(() => {});
        await settled(() => game.sent.length > before);
      }
      if (!step.rows) continue;
      const shown = live.keys.map((key, i) => [key, live.value?.[i]]);
      assert.deepEqual(shown, step.rows, where);
    }
    assert.equal(game.hw.diverged, vector.diverged, name);
  } finally {
    game.hw.close();
  }
}

/** @param {any} vector @param {string} name */
async function playFeed(vector, name) {
  const game = playing();
  /** @type {number[]} */
  const seqs = [];
  game.hw.changes(
    vector.changes,
    ({ changes }) => void seqs.push(...changes.map(({ seq }) => seq)),
  );
  await game.greet();
  try {
    for (const [number, step] of vector.steps.entries()) {
      const where = `${name}, step ${number}`;
      await take(game, step, where);
      if (step.seqs) assert.deepEqual(seqs, step.seqs, where);
    }
  } finally {
    game.hw.close();
  }
}

/** @param {ReturnType<typeof playing>} game @param {any} step @param {string} where */
async function take(game, step, where) {
  if (step.lost) await game.lose();
  if ("since" in step) {
    const asked = game.asked();
    assert.equal((asked.changes ?? asked).since ?? null, step.since, where);
  }
  if (!step.receive) return;
  const { id } = step.receive;
  game.receive({ ...step.receive, ...(id === "$" && { id: game.asked().id }) });
}

test("every stream leads to the true rows", async () => {
  const path = process.env.HEADWATER_VECTORS;
  assert.ok(path, "run `pytest tests/vectors`");
  const lines = readFileSync(path, "utf8").trimEnd().split("\n");
  assert.ok(lines.length);
  for (const [number, line] of lines.entries()) {
    const vector = parse(line);
    await (vector.live ? playLive : playFeed)(vector, `vector ${number}`);
  }
});
