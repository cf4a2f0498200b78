/**
 * Keeps the cache of TanStack Query up to date, so that an application can keep using `useQuery`.
 * Each function returns the function that stops it.
 *
 * @typedef {import("@tanstack/query-core").QueryClient} QueryClient
 * @typedef {import("@tanstack/query-core").QueryKey} QueryKey
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./state/topic.js").TopicOp} TopicOp
 * @typedef {import("./protocol.js").Upsert | import("./protocol.js").Remove} RowOp
 */

import { keyText } from "./state/replica.js";

/**
 * Store the rows of a live query as the data of a query key. `useQuery({ queryKey })` needs no
 * `queryFn`: it waits for the first rows, and is never out of date.
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
 * Apply the operations of a topic to the rows that were fetched for a query key: rows are replaced,
 * added at the end and removed by their key. After a poke or a gap, which have no rows, they are
 * fetched again.
 *
 * @param {QueryClient} queryClient
 * @param {QueryKey} queryKey
 * @param {Client} hw
 * @param {string} topic
 * @param {{entity?: string, key?: readonly string[]}} [options] `entity`: the table of the rows, if
 *   the topic has several; `key`: the columns of their key
 */
export function syncTopic(queryClient, queryKey, hw, topic, { entity, key = ["id"] } = {}) {
  /** Received during a fetch, whose result may be older. @type {Map<string, RowOp>} */
  const duringFetch = new Map();
  const isFetching = () => queryClient.getQueryState(queryKey)?.fetchStatus === "fetching";
  const apply = (/** @type {readonly RowOp[]} */ ops) => {
    if (!ops.length) return;
    const isInvalidated = queryClient.getQueryState(queryKey)?.isInvalidated;
    queryClient.setQueryData(queryKey, (/** @type {readonly Row[] | undefined} */ rows) =>
      rows && applied(rows, ops, key),
    );
    // Setting data marks it as fresh; data that was to be fetched again must still be.
    const refetchType = /** @type {const} */ ("none");
    if (isInvalidated) void queryClient.invalidateQueries({ queryKey, exact: true, refetchType });
  };
  /** Whether a poke or a gap came during the fetch, so that its result may be out of date. */
  let mustRefetch = false;
  const refetch = () => {
    // TanStack does not repeat a fetch that is under way: wait for it, then fetch again.
    mustRefetch = isFetching();
    if (!mustRefetch) void queryClient.invalidateQueries({ queryKey, exact: true });
  };
  const handle = hw.topic(topic, (all) => {
    if (all.some(({ op }) => op === "poke" || op === "gap")) refetch();
    const ops = all.filter(isRow).filter((op) => !entity || op.entity === entity);
    if (isFetching()) for (const op of ops) duringFetch.set(keyText(op.key), op);
    apply(ops);
  });
  // The topic does not send what was written after a fetch and before the topic began.
  const wasFetched = () => isFetching() || queryClient.getQueryData(queryKey) !== undefined;
  handle.ready.then(
    () => handle.status !== "closed" && wasFetched() && refetch(),
    () => {}, // `onError` was called with it
  );
  const stop = queryClient.getQueryCache().subscribe(({ query, type }) => {
    if (type !== "updated" || !(duringFetch.size || mustRefetch) || isFetching()) return;
    if (query !== queryClient.getQueryCache().find({ queryKey, exact: true })) return;
    if (mustRefetch) queueMicrotask(refetch);
    mustRefetch = false;
    const ops = [...duringFetch.values()];
    duringFetch.clear();
    apply(ops);
  });
  return () => {
    stop();
    handle.close();
  };
}

/** @param {TopicOp} op @returns {op is RowOp} */
const isRow = (op) => op.op === "upsert" || op.op === "remove";

/** @param {readonly Row[]} rows @param {Iterable<RowOp>} ops @param {readonly string[]} columns */
function applied(rows, ops, columns) {
  const byKey = new Map(rows.map((row) => [keyText(columns.map((column) => row[column])), row]));
  for (const op of ops) {
    if (op.op === "upsert") byKey.set(keyText(op.key), op.row);
    else byKey.delete(keyText(op.key));
  }
  return [...byKey.values()];
}
