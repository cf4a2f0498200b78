/**
 * Keeps the cache of TanStack Query up to date, so that an application goes on with `useQuery`.
 * Each function gives what ends it.
 *
 * @typedef {import("@tanstack/query-core").QueryClient} QueryClient
 * @typedef {import("@tanstack/query-core").QueryKey} QueryKey
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./topic-state.js").TopicOp} TopicOp
 * @typedef {import("./protocol.js").Upsert | import("./protocol.js").Remove} RowOp
 */

import { keyText } from "./replica.js";

/**
 * Keep the rows of a live query under a query key. `useQuery({ queryKey })` needs no function of
 * its own: it waits for the first rows, and is never out of date.
 *
 * @param {QueryClient} queryClient
 * @param {QueryKey} queryKey
 * @param {Client} hw
 * @param {import("./protocol.js").LiveQuery | string} query
 */
export function syncLive(queryClient, queryKey, hw, query) {
  const live = hw.live(query);
  const queryFn = async () => (await live.ready, live.value);
  // Rows that did not change are the same objects already.
  const options = { queryFn, staleTime: Infinity, retry: false, structuralSharing: false };
  queryClient.setQueryDefaults(queryKey, options);
  live.onValue((rows) => void queryClient.setQueryData(queryKey, rows));
  return () => {
    live.close();
    queryClient.setQueryDefaults(queryKey, {});
  };
}

/**
 * Fold what a topic tells into the rows that were fetched under a query key: rows are replaced,
 * added at the end and removed by their key. What the topic cannot tell as rows (a poke, a gap) has
 * them fetched again.
 *
 * @param {QueryClient} queryClient
 * @param {QueryKey} queryKey
 * @param {Client} hw
 * @param {string} topic
 * @param {{entity?: string, key?: readonly string[]}} [options] of which table the rows are, if the
 *   topic tells of several; the columns of their key
 */
export function syncTopic(queryClient, queryKey, hw, topic, { entity, key = ["id"] } = {}) {
  /** What was told during a fetch, whose result may be older. @type {Map<string, RowOp>} */
  const meanwhile = new Map();
  const isFetching = () => queryClient.getQueryState(queryKey)?.fetchStatus === "fetching";
  const fold = (/** @type {readonly RowOp[]} */ ops) => {
    if (!ops.length) return;
    const isInvalidated = queryClient.getQueryState(queryKey)?.isInvalidated;
    queryClient.setQueryData(queryKey, (/** @type {readonly Row[] | undefined} */ rows) =>
      rows && folded(rows, ops, key),
    );
    // What is set counts as fresh, but what was to be fetched again still is.
    const refetchType = /** @type {const} */ ("none");
    if (isInvalidated) void queryClient.invalidateQueries({ queryKey, exact: true, refetchType });
  };
  /** Whether what is being fetched may lack what the topic did not tell as rows. */
  let isOld = false;
  const refetch = () => {
    // A fetch that is under way is not repeated by itself: it goes on, and then there is another.
    isOld = isFetching();
    if (!isOld) void queryClient.invalidateQueries({ queryKey, exact: true });
  };
  const handle = hw.topic(topic, (all) => {
    if (all.some(({ op }) => op === "poke" || op === "gap")) refetch();
    const ops = all.filter(isRow).filter((op) => !entity || op.entity === entity);
    if (isFetching()) for (const op of ops) meanwhile.set(keyText(op.key), op);
    fold(ops);
  });
  // What happened after a fetch and before the topic began, it does not tell.
  const isAsked = () => isFetching() || queryClient.getQueryData(queryKey) !== undefined;
  handle.ready.then(
    () => handle.status !== "closed" && isAsked() && refetch(),
    () => {}, // `onError` has heard of it
  );
  const stop = queryClient.getQueryCache().subscribe(({ query, type }) => {
    if (type !== "updated" || !(meanwhile.size || isOld) || isFetching()) return;
    if (query !== queryClient.getQueryCache().find({ queryKey, exact: true })) return;
    if (isOld) queueMicrotask(refetch);
    isOld = false;
    const ops = [...meanwhile.values()];
    meanwhile.clear();
    fold(ops);
  });
  return () => {
    stop();
    handle.close();
  };
}

/** @param {TopicOp} op @returns {op is RowOp} */
const isRow = (op) => op.op === "upsert" || op.op === "remove";

/** @param {readonly Row[]} rows @param {Iterable<RowOp>} ops @param {readonly string[]} columns */
function folded(rows, ops, columns) {
  const byKey = new Map(rows.map((row) => [keyText(columns.map((column) => row[column])), row]));
  for (const op of ops) {
    if (op.op === "upsert") byKey.set(keyText(op.key), op.row);
    else byKey.delete(keyText(op.key));
  }
  return [...byKey.values()];
}
