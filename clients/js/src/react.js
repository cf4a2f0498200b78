/**
 * Hooks for React. A component names what it shows, and is rendered again only when that changes.
 * Queries are compared by value, so they may be written inline. Components with the same query share
 * one subscription. Hooks cannot be called conditionally: pass null while there is nothing to
 * subscribe to.
 *
 * ```jsx
 * import { connect } from "headwater";
 * import { HeadwaterProvider, useLiveQuery, useMutation } from "headwater/react";
 *
 * const client = connect();
 * root.render(<HeadwaterProvider client={client}><Board /></HeadwaterProvider>);
 *
 * function Board() {
 *   const { rows = [], status, error } = useLiveQuery({ table: "orders", limit: 20 });
 *   const [place, { pending }] = useMutation("place_order");
 *   …
 * }
 * ```
 *
 * @typedef {import("./client.js").Client} Client
 * @typedef {import("./errors.js").HeadwaterError} HeadwaterError
 * @typedef {import("./protocol.js").ChannelMessage} ChannelMessage
 * @typedef {import("./protocol.js").Key} Key
 * @typedef {import("./protocol.js").LiveQuery} LiveQuery
 * @typedef {import("./protocol.js").Member} Member
 * @typedef {import("./protocol.js").Row} Row
 * @typedef {import("./hooks/subscription-requests.js").SubscriptionRequest} SubscriptionRequest
 * @typedef {import("./subscriptions/source.js").Status} Status
 * @typedef {import("./state/topic.js").TopicOp} TopicOp
 * @typedef {import("./state/topic.js").TopicValue} TopicValue
 * @typedef {null | undefined | false} Nothing
 * @typedef {() => void} Listener what React has a store call after a change
 */

import {
  createContext,
  createElement,
  useCallback,
  useContext,
  useEffect,
  useInsertionEffect,
  useMemo,
  useRef,
  useState,
  useSyncExternalStore,
} from "react";

import { configError } from "./errors.js";
import { stringify } from "./json.js";
import { ComponentSubscription } from "./hooks/component-subscription.js";
import { mutateOptimistically } from "./hooks/optimistic-updates.js";
import { WAITING } from "./hooks/subscription-cache.js";
import {
  channelRequest,
  liveRequest,
  queryRequest,
  sendState,
  topicRequest,
} from "./hooks/subscription-requests.js";

const Context = createContext(/** @type {Client | undefined} */ (undefined));

/** Provides the client to the components below. @param {{client: Client, children?: any}} props */
export function HeadwaterProvider({ client, children }) {
  return createElement(Context.Provider, { value: client }, children);
}

/** The client of the nearest HeadwaterProvider. */
export function useHeadwater() {
  const client = useContext(Context);
  if (!client) {
    throw configError(
      "there is no HeadwaterProvider above this component",
      "Wrap the application: <HeadwaterProvider client={connect()}>…</HeadwaterProvider>",
    );
  }
  return client;
}

/** The status of the connection: "connecting", "open", "closed" or "failed". */
export function useStatus() {
  const { status } = useHeadwater();
  const subscribe = useCallback((/** @type {Listener} */ listener) => status.subscribe(listener), [
    status,
  ]);
  return useSyncExternalStore(subscribe, () => status.value, () => CONNECTING);
}

/**
 * The rows of a live query, in order; undefined until they have arrived. Rows that have not changed
 * are the same objects as before, so that `memo` skips the components that show them. With `keep`,
 * the rows of the previous query are shown until those of a new one have arrived.
 *
 * @param {LiveQuery | string | Nothing} query
 * @param {{keep?: boolean}} [options]
 * @returns {{rows: readonly Row[] | undefined, status: Status, error: HeadwaterError | undefined}}
 */
export function useLiveQuery(query, { keep = false } = {}) {
  const { value, status, error } = useShown(useSubscription(query && liveRequest(query)));
  return { rows: useLast(value, keep), status, error };
}

/**
 * Only the keys of a live query's rows: rendered again when one enters, leaves or moves.
 *
 * @param {LiveQuery | string | Nothing} query
 * @returns {readonly Key[]}
 */
export function useLiveKeys(query) {
  const live = useSubscription(query && liveRequest(query));
  return useSyncExternalStore(live.subscribe, () => live.cached?.keys ?? NONE, () => NONE);
}

/**
 * One row of a live query; undefined while no row has that key. Rendered again only when that row
 * changes.
 *
 * @param {LiveQuery | string | Nothing} query
 * @param {Key | string | number | bigint} key
 * @returns {Row | undefined}
 */
export function useLiveRow(query, key) {
  const live = useSubscription(query && liveRequest(query));
  const whole = useSame(Array.isArray(key) ? key : [key]);
  const subscribe = useCallback(
    (/** @type {Listener} */ listener) =>
      live.use((cached) => cached.row(whole).subscribe(listener)),
    [live, whole],
  );
  return useSyncExternalStore(subscribe, () => live.cached?.row(whole).value, () => undefined);
}

/**
 * The value of a reactive query; undefined until it has arrived. With `keep`, the value of the
 * previous query is shown until that of a new one has arrived.
 *
 * @param {string | Nothing} name
 * @param {Record<string, any>} [args]
 * @param {{keep?: boolean}} [options]
 * @returns {{value: any, status: Status, error: HeadwaterError | undefined}}
 */
export function useQuery(name, args, { keep = false } = {}) {
  const { value, status, error } = useShown(useSubscription(name && queryRequest(name, args)));
  return { value: useLast(value, keep), status, error };
}

/**
 * The rows that a topic has sent since it was first mounted, by table. `onOps` is called with the
 * operations of each flush.
 *
 * @param {string | Nothing} name
 * @param {{onOps?: (ops: TopicOp[]) => void}} [options]
 * @returns {{value: TopicValue | undefined, status: Status, error: HeadwaterError | undefined}}
 */
export function useTopic(name, { onOps } = {}) {
  const topic = useSubscription(name && topicRequest(name));
  const call = useLatest(onOps);
  useEffect(() => topic.use(({ handle }) => handle.onOps(call)), [topic, call]);
  return useShown(topic);
}

/**
 * Follow a channel. With a state the client is a member that the other clients see; `member` is its
 * id. Without, it only sees the members. `onMessage` is called with every published message.
 *
 * @param {string | Nothing} channel
 * @param {any} [state]
 * @param {{onMessage?: (message: ChannelMessage) => void}} [options]
 */
export function usePresence(channel, state, { onMessage } = {}) {
  const presence = useSubscription(channel && channelRequest(channel, state));
  const call = useLatest(onMessage);
  const ownState = useSame(state);
  useEffect(() => presence.use(({ handle }) => handle.onMessage(call)), [presence, call]);
  useEffect(() => {
    if (ownState !== undefined && presence.cached) {
      void sendState(presence.cached.handle, ownState);
    }
  }, [presence, ownState]);
  const { subscribe, publish, setState } = useMemo(
    () => ({
      subscribe: (/** @type {Listener} */ listener) =>
        presence.use(({ handle }) => handle.members.subscribe(listener)),
      publish: (/** @type {any} */ data) => presence.cached?.handle.publish(data),
      setState: (/** @type {any} */ other) =>
        presence.cached && sendState(presence.cached.handle, other),
    }),
    [presence],
  );
  const current = () => presence.cached?.handle.members.value ?? NONE;
  /** @type {readonly Member[]} */
  const members = useSyncExternalStore(subscribe, current, () => NONE);
  const { status, error } = useShown(presence);
  return { members, member: presence.cached?.handle.member, publish, setState, status, error };
}

/**
 * A mutation: the function that runs it, and its state. With `optimistic`, components show at once
 * what the mutation is expected to change, until the rows that it wrote arrive or it fails.
 *
 * The function returns a promise of `{value, position}`. The error of the last call that failed is
 * also in `error`, until the next call.
 *
 * @param {string} name
 * @param {{optimistic?: import("./hooks/optimistic-updates.js").Optimistic}} [options]
 * @returns {[(args?: Record<string, any>) => Promise<{value: any, position: string}>,
 *   {pending: boolean, error: HeadwaterError | undefined}]}
 */
export function useMutation(name, { optimistic } = {}) {
  const client = useHeadwater();
  const call = useLatest(optimistic);
  const isOptimistic = optimistic !== undefined;
  const [{ running, error }, setState] = useState(IDLE);
  const mutate = useCallback(
    (/** @type {Record<string, any>} */ args = {}) => {
      setState((before) => ({ running: before.running + 1, error: undefined }));
      const finished = (/** @type {HeadwaterError | undefined} */ failure) =>
        setState((before) => ({ running: before.running - 1, error: failure ?? before.error }));
      const done = mutateOptimistically(client, name, args, isOptimistic ? call : undefined);
      done.then(() => finished(undefined), finished);
      return done;
    },
    [client, name, call, isOptimistic],
  );
  return [mutate, { pending: running > 0, error }];
}

// ---------------------------------------------------------------------- below the hooks

const CONNECTING = /** @type {const} */ ("connecting");

/** @type {readonly never[]} */
const NONE = Object.freeze([]);

/** @type {{running: number, error: HeadwaterError | undefined}} */
const IDLE = Object.freeze({ running: 0, error: undefined });

/** @param {SubscriptionRequest | Nothing | ""} request */
function useSubscription(request) {
  const client = useHeadwater();
  const given = request || undefined;
  // Requests with the same key are the same.
  return useMemo(() => new ComponentSubscription(client, given), [client, given?.key]);
}

/** @param {ComponentSubscription} subscription */
function useShown(subscription) {
  const shown = () => subscription.cached?.shown ?? WAITING;
  return useSyncExternalStore(subscription.subscribe, shown, () => WAITING);
}

/** With `keep`, the last value while there is none. @param {any} value @param {boolean} keep */
function useLast(value, keep) {
  const [last, setLast] = useState(value);
  if (keep && value !== undefined && value !== last) setLast(() => value);
  return value === undefined && keep ? last : value;
}

/** The same object while the value is equal. @template T @param {T} value @returns {T} */
function useSame(value) {
  return useMemo(() => value, [value === undefined ? undefined : stringify(value, true)]);
}

/**
 * A function with a stable identity that calls the callback of the last render.
 *
 * @template {any[]} A
 * @param {((...args: A) => void) | undefined} callback
 */
function useLatest(callback) {
  const latest = useRef(callback);
  useInsertionEffect(() => void (latest.current = callback));
  return useCallback((/** @type {A} */ ...args) => latest.current?.(...args), []);
}
