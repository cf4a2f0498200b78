/**
 * Every limit of the client; docs/reference/limits.md has those of the Python client.
 */

/** First and longest pause before the next connection, in seconds; doubled in between. */
export const BACKOFF_SECONDS = /** @type {const} */ ([1, 30]);

/** Failures in a row after which the client gives up; any message resets the count. */
export const FAILURES_MAX = 10;

/** How long a gateway may take to accept a connection and to send its hello. */
export const CONNECT_SECONDS = 10;

/** How long the leading tab may take to respond; then another takes over. Below CONNECT_SECONDS. */
export const LEADER_SECONDS = 4;

/** How long a gateway may take to confirm that a WebSocket is closed; then Node disconnects. */
export const CLOSE_SECONDS = 1;

/**
 * Over SSE, a request that is not answered for this many keepalive intervals is sent again (a query
 * or a mutation), or ends the connection.
 */
export const REQUEST_KEEPALIVES = /** @type {const} */ ({ call: 2, session: 4 });

/** Requests under way over SSE; further ones wait. */
export const REQUESTS_AT_ONCE = 16;

/** Queries, mutations and waits under way; further ones wait. */
export const CALLS_AT_ONCE = 32;

/**
 * Calls of all tabs under way on a connection that they share; further ones wait. The gateway
 * accepts 64 of a session.
 */
export const SHARED_CALLS_AT_ONCE = 60;

/** How often a call is sent if the connection is lost each time. */
export const CALL_ATTEMPTS_MAX = 10;

/** How long a mutation that is refused temporarily is repeated. */
export const REFUSED_SECONDS_MAX = 30;

/**
 * How long after its first attempt a mutation is repeated, and a message to a channel. Gateways
 * store their keys longer: at least two hours, and 10 minutes.
 */
export const REPEAT_SECONDS_MAX = 3_600;
export const PUBLISH_SECONDS_MAX = 300;

/** How often a new subscription that is refused temporarily is tried. */
export const SUBSCRIBE_ATTEMPTS_MAX = 3;

/** Deltas that may arrive between the parts of a result. */
export const BATCHES_MAX = 1_000;

/** Transactions that wait for the callback of a feed; with more, the feed is paused. */
export const TRANSACTIONS_MAX = 1_000;

/** Transactions after its position that a feed remembers, so as not to deliver them twice. */
export const DELIVERED_MAX = 100_000;

/** A result that diverges this many times in a row, each time after a new snapshot, has failed. */
export const DIVERGED_MAX = 3;

/** How long before its end a token is renewed; a short one at half of its time. */
export const REFRESH_SECONDS = 30;

/** The largest message over SSE, in characters. */
export const MESSAGE_CHARS_MAX = 64 * 1024 * 1024;

/** Rows of one table that a topic holds; the oldest are removed first. */
export const TOPIC_ROWS_MAX = 10_000;

/** Messages of a channel that are remembered, so as not to deliver them twice. */
export const MESSAGES_SEEN_MAX = 1_000;

/** How long a subscription stays open after its last component was unmounted. */
export const LINGER_SECONDS = 2;

/** How long a value is frozen below an optimistic patch whose mutation is under way. */
export const HOLD_SECONDS = 1;
