/**
 * Hooks for React. A component names what it shows, and is rendered again when that changes and
 * not otherwise. Questions are compared by value, so they may be written where they are used. What
 * several components ask for is asked for once. Hooks cannot be called conditionally: for something
 * that is not to be asked for yet, give them null.
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
 * @typedef {import("./questions.js").Question} Question
 * @typedef {import("./source.js").Status} Status
 * @typedef {import("./topic-state.js").TopicOp} TopicOp
 * @typedef {import("./topic-state.js").TopicValue} TopicValue
 * @typedef {null | undefined | false} Nothing
 * @typedef {() => void} Tell what React gives a store to be called after a change
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
import { NOTHING } from "./kept.js";
import { mutateWith } from "./optimism.js";
import {
  channelQuestion,
  liveQuestion,
  queryQuestion,
  tellState,
  topicQuestion,
} from "./questions.js";
import { View } from "./view.js";

const Context = createContext(/** @type {Client | undefined} */ (undefined));

/** Gives the components below it their client. @param {{client: Client, children?: any}} props */
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

/** How the connection is: "connecting", "open", "closed" or "failed". */
export function useStatus() {
  const { status } = useHeadwater();
  const subscribe = useCallback((/** @type {Tell} */ tell) => status.subscribe(tell), [status]);
  return useSyncExternalStore(subscribe, () => status.value, () => CONNECTING);
}

/**
 * The rows of a live query, in order; undefined before the first. Rows that have not changed are
 * the same objects as before: `memo` keeps what shows them from being rendered again. With `keep`,
 * the rows of the query before are shown until those of another are there.
 *
 * @param {LiveQuery | string | Nothing} query
 * @param {{keep?: boolean}} [options]
 * @returns {{rows: readonly Row[] | undefined, status: Status, error: HeadwaterError | undefined}}
 */
export function useLiveQuery(query, { keep = false } = {}) {
  const { value, status, error } = useSnapshot(useKept(query && liveQuestion(query)));
  return { rows: useLast(value, keep), status, error };
}

/**
 * Only the keys of a live query's rows: rendered again when one enters, leaves or moves.
 *
 * @param {LiveQuery | string | Nothing} query
 * @returns {readonly Key[]}
 */
export function useLiveKeys(query) {
  const view = useKept(query && liveQuestion(query));
  return useSyncExternalStore(view.subscribe, () => view.kept?.keys ?? NONE, () => NONE);
}

/**
 * One row of a live query; undefined while it has none of that key. Rendered again when that row
 * changes, and not when others do.
 *
 * @param {LiveQuery | string | Nothing} query
 * @param {Key | string | number | bigint} key
 * @returns {Row | undefined}
 */
export function useLiveRow(query, key) {
  const view = useKept(query && liveQuestion(query));
  const whole = useSame(Array.isArray(key) ? key : [key]);
  const subscribe = useCallback(
    (/** @type {Tell} */ tell) => view.during((kept) => kept.row(whole).subscribe(tell)),
    [view, whole],
  );
  return useSyncExternalStore(subscribe, () => view.kept?.row(whole).value, () => undefined);
}

/**
 * The value of a reactive query; undefined before the first. With `keep`, the value before is shown
 * until that of another is there.
 *
 * @param {string | Nothing} name
 * @param {Record<string, any>} [args]
 * @param {{keep?: boolean}} [options]
 * @returns {{value: any, status: Status, error: HeadwaterError | undefined}}
 */
export function useQuery(name, args, { keep = false } = {}) {
  const { value, status, error } = useSnapshot(useKept(name && queryQuestion(name, args)));
  return { value: useLast(value, keep), status, error };
}

/**
 * What a topic has told since it was begun, by table. `onOps` is called with each of its flushes.
 *
 * @param {string | Nothing} name
 * @param {{onOps?: (ops: TopicOp[]) => void}} [options]
 * @returns {{value: TopicValue | undefined, status: Status, error: HeadwaterError | undefined}}
 */
export function useTopic(name, { onOps } = {}) {
  const view = useKept(name && topicQuestion(name));
  const call = useLatest(onOps);
  useEffect(() => view.during(({ handle }) => handle.onOps(call)), [view, call]);
  return useSnapshot(view);
}

/**
 * Be on a channel. With a state one is seen by the others, as the one of the members that `member`
 * names; without, one sees them. `onMessage` is called with what is published.
 *
 * @param {string | Nothing} channel
 * @param {any} [state]
 * @param {{onMessage?: (message: ChannelMessage) => void}} [options]
 */
export function usePresence(channel, state, { onMessage } = {}) {
  const view = useKept(channel && channelQuestion(channel, state));
  const call = useLatest(onMessage);
  const mine = useSame(state);
  useEffect(() => view.during(({ handle }) => handle.onMessage(call)), [view, call]);
  useEffect(() => {
    if (mine !== undefined && view.kept) void tellState(view.kept.handle, mine);
  }, [view, mine]);
  const { subscribe, publish, setState } = useMemo(
    () => ({
      subscribe: (/** @type {Tell} */ tell) =>
        view.during(({ handle }) => handle.members.subscribe(tell)),
      publish: (/** @type {any} */ data) => view.kept?.handle.publish(data),
      setState: (/** @type {any} */ other) => view.kept && tellState(view.kept.handle, other),
    }),
    [view],
  );
  const present = () => view.kept?.handle.members.value ?? NONE;
  /** @type {readonly Member[]} */
  const members = useSyncExternalStore(subscribe, present, () => NONE);
  const { status, error } = useSnapshot(view);
  return { members, member: view.kept?.handle.member, publish, setState, status, error };
}

/**
 * A mutation: the function that runs it, and how that stands. With `optimistic`, components show
 * what it is expected to change at once: until the server's rows are there, or it fails.
 *
 * The function gives a promise of `{value, position}`. Whoever does not wait for it finds what went
 * wrong in `error`, until the next call.
 *
 * @param {string} name
 * @param {{optimistic?: import("./optimism.js").Optimistic}} [options]
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
      const over = (/** @type {HeadwaterError | undefined} */ failure) =>
        setState((before) => ({ running: before.running - 1, error: failure ?? before.error }));
      const done = mutateWith(client, name, args, isOptimistic ? call : undefined);
      done.then(() => over(undefined), over);
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

/** @param {Question | Nothing | ""} question */
function useKept(question) {
  const client = useHeadwater();
  const asked = question || undefined;
  // The text stands for all of the question.
  return useMemo(() => new View(client, asked), [client, asked?.text]);
}

/** @param {View} view */
function useSnapshot(view) {
  return useSyncExternalStore(view.subscribe, () => view.kept?.snapshot ?? NOTHING, () => NOTHING);
}

/** The last value that there was, if it is to be kept. @param {any} value @param {boolean} keep */
function useLast(value, keep) {
  const [last, setLast] = useState(value);
  if (keep && value !== undefined && value !== last) setLast(() => value);
  return value === undefined && keep ? last : value;
}

/** The value as it was, while it equals that. @template T @param {T} value @returns {T} */
function useSame(value) {
  return useMemo(() => value, [value === undefined ? undefined : stringify(value, true)]);
}

/**
 * A function that is always the same, and calls the one that was rendered last.
 *
 * @template {any[]} A
 * @param {((...args: A) => void) | undefined} callback
 */
function useLatest(callback) {
  const latest = useRef(callback);
  useInsertionEffect(() => void (latest.current = callback));
  return useCallback((/** @type {A} */ ...args) => latest.current?.(...args), []);
}
