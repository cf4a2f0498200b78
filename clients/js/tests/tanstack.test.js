/** Updates of the cache of TanStack Query. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { QueryClient, QueryObserver } from "@tanstack/query-core";

import { client, reset, sql, until, written } from "./stage.js";
import { wired } from "./wire.js";
import { syncLive, syncTopic } from "../src/tanstack.js";

/**
 * An observer, which gets what a component would get.
 *
 * @param {import("node:test").TestContext} t
 * @param {QueryClient} cache
 * @param {any} options
 */
function observed(t, cache, options) {
  /** @type {QueryObserver<any>} */
  const observer = new QueryObserver(cache, options);
  t.after(observer.subscribe(() => {}));
  return { get: () => observer.getCurrentResult() };
}

test("a live query's rows are the data, without a function to fetch them", async (t) => {
  const url = await reset();
  await written("insert into orders (region, amount) values (1, 10), (1, 20)");
  const cache = new QueryClient();
  const query = { table: "orders", order: [["id", "asc"]] };
  const stop = syncLive(cache, ["orders"], client(t, url), query);
  const shown = observed(t, cache, { queryKey: ["orders"] });
  assert.equal(shown.get().status, "pending");
  await until(() => shown.get().status === "success");
  const [first] = shown.get().data;
  await sql("update orders set amount = 21 where id = 2");
  await until(() => shown.get().data[1].amount === "21.00");
  assert.equal(shown.get().data[0], first, "what did not change is the same object");
  assert.equal(shown.get().isStale, false);
  stop();
  await sql("update orders set amount = 22 where id = 2");
  assert.equal(shown.get().data[1].amount, "21.00");
});

test("the error of a refused live query is that of the query", async (t) => {
  const cache = new QueryClient();
  const hw = client(t, await reset());
  t.after(syncLive(cache, ["nothing"], hw, "nowhere"));
  const shown = observed(t, cache, { queryKey: ["nothing"] });
  await until(() => shown.get().status === "error");
  assert.equal(/** @type {any} */ (shown.get().error).code, "capture");
});

const upsert = (/** @type {number} */ id, /** @type {string} */ text, entity = "messages") => ({
  op: "upsert",
  entity,
  key: [id],
  row: { id, text },
});
const remove = (/** @type {number} */ id) => ({ op: "remove", entity: "messages", key: [id] });

/**
 * Messages that are fetched, and a topic that sends their changes.
 *
 * @param {import("node:test").TestContext} t
 * @param {{isFollowed?: boolean}} [options] whether the topic begins before anything is fetched
 */
async function chat(t, { isFollowed = true } = {}) {
  const { hw, next, deliver } = wired(t);
  const cache = new QueryClient();
  /** @type {((rows: any[]) => void)[]} */
  const fetches = [];
  const queryFn = () => new Promise((resolve) => fetches.push(resolve));
  const show = () => observed(t, cache, { queryKey: ["chat"], queryFn });
  let shown = isFollowed ? undefined : show();
  t.after(syncTopic(cache, ["chat"], hw, "chat:1", { entity: "messages" }));
  const { id } = await next("subscribe");
  const begin = () => deliver({ type: "subscribed", id, view: 1 });
  if (isFollowed) {
    begin();
    await hw.topic("chat:1").ready;
    shown = show();
  }
  const at = "2026-01-31T12:00:00Z";
  const tell = (/** @type {any[]} */ ...ops) =>
    deliver({ type: "topic", view: 1, position: "1-9:9:", at, ops });
  const texts = () => shown?.get().data?.map((/** @type {any} */ row) => row.text).join(" ");
  const poke = () => deliver({ type: "poke", view: 1, position: "1-9:9:", at });
  return { fetches, begin, tell, poke, texts };
}

test("rows of a topic are replaced, added and removed in what was fetched", async (t) => {
  const { fetches, tell, texts } = await chat(t);
  fetches[0]([{ id: 1, text: "a" }, { id: 2, text: "b" }, { id: 3, text: "c" }]);
  await until(() => texts() === "a b c");
  tell(upsert(2, "B"), upsert(4, "d"), remove(1), upsert(5, "e", "others"));
  await until(() => texts() === "B c d");
});

test("operations during a fetch are applied to its result", async (t) => {
  const { fetches, tell, texts } = await chat(t);
  tell(upsert(1, "A"), upsert(2, "b"));
  tell(remove(3));
  fetches[0]([{ id: 1, text: "a" }, { id: 3, text: "c" }]);
  await until(() => texts() === "A b");
});

test("after a poke the rows are fetched again", async (t) => {
  const { fetches, poke, texts } = await chat(t);
  fetches[0]([{ id: 1, text: "a" }]);
  await until(() => texts() === "a");
  poke();
  await until(() => fetches.length === 2);
  fetches[1]([{ id: 1, text: "A" }]);
  await until(() => texts() === "A");
});

test("a poke during a fetch causes one more fetch", async (t) => {
  const { fetches, poke, texts } = await chat(t);
  poke();
  fetches[0]([{ id: 1, text: "a" }]);
  await until(() => fetches.length === 2);
  fetches[1]([{ id: 1, text: "A" }]);
  await until(() => texts() === "A");
});

test("data that is to be fetched again still is after operations arrive", async (t) => {
  const { hw, next, deliver } = wired(t);
  const cache = new QueryClient();
  const queryKey = ["chat"];
  cache.setQueryData(queryKey, [{ id: 1, text: "a" }]);
  t.after(syncTopic(cache, queryKey, hw, "chat:1"));
  const { id } = await next("subscribe");
  const isInvalidated = () => cache.getQueryState(queryKey)?.isInvalidated;
  deliver({ type: "subscribed", id, view: 1 });
  await until(isInvalidated);
  const at = "2026-01-31T12:00:00Z";
  deliver({ type: "topic", view: 1, position: "1-9:9:", at, ops: [upsert(2, "b")] });
  await until(() => /** @type {any} */ (cache.getQueryData(queryKey)).length === 2);
  assert.ok(isInvalidated());
  // As a fetch would.
  cache.setQueryData(queryKey, [{ id: 1, text: "a" }]);
  assert.ok(!isInvalidated());
  deliver({ type: "gap", view: 1, position: "1-9:9:", since: null, reason: "resync" });
  await until(isInvalidated);
});

test("changes between a fetch and the start of the topic are fetched", async (t) => {
  const { fetches, begin, texts } = await chat(t, { isFollowed: false });
  fetches[0]([{ id: 1, text: "a" }]);
  await until(() => texts() === "a");
  begin();
  await until(() => fetches.length === 2);
  fetches[1]([{ id: 1, text: "A" }]);
  await until(() => texts() === "A");
});

test("a topic that begins during a fetch causes one more fetch", async (t) => {
  const { fetches, begin, texts } = await chat(t, { isFollowed: false });
  begin();
  await until(() => fetches.length === 1);
  fetches[0]([{ id: 1, text: "a" }]);
  await until(() => fetches.length === 2);
  fetches[1]([{ id: 1, text: "A" }]);
  await until(() => texts() === "A");
});
