"""The limits that a program can reach, each with its unit and what happens at the limit.

docs/reference/limits.md shows them with their values. Constants that only tune a module are defined
in that module.
"""

from __future__ import annotations

# Log and reader
VALUE_DEPTH_MAX = 200
"""How deep JSON in a row may be nested. Deeper JSON is sent as text, because clients could not
decode it."""

MARK_ROWS = 1_000
"""The newest rows of the log that the mark of a position covers, and trimmed rows that the log
remembers by number and time. A transaction that a restored snapshot lost, and that began before
this many newer rows, is not noticed by a mark that does not list it; a position whose mark covers
more trimmed rows than are remembered is accepted as it is."""

MARK_LATE_MAX = 1_000
"""Transactions that a mark lists in all, most because they were running at the position before. Of
more, those with the highest ids are listed."""

MARK_COVERED_MAX = MARK_ROWS + MARK_LATE_MAX
"""Rows that a mark covers in all. A mark that would cover more begins at a later row; one from a
client that claims more is checked against this many."""

POSITION_CHARS_MAX = 100_000
"""Characters in a position. A longer text is refused. The longest positions that Headwater makes
list every transaction that was running."""

LOG_TABLES_SECONDS = 10.0
"""How long finding the tables that a backlog changed may take. If it takes longer, every table
counts as changed."""

TRANSACTION_PART_CHANGES = 200_000
"""A transaction with more changes is delivered in parts (`Transaction.complete`)."""

SERVER_VERSION_MIN = 140_000
"""The oldest supported PostgreSQL: 14, for `create function … return` and multirange types."""

CONNECT_TIMEOUT_SECONDS = 10
"""How long connecting may take before the server counts as unreachable."""

DEAD_PEER_SECONDS = 30
"""A database that acknowledges nothing for this long counts as lost, and is connected to again."""

RECONNECT_SECONDS = (0.05, 5.0)
"""The first and the longest pause between attempts to reach a lost database; each is twice the one
before."""

# Maintenance
MAINTENANCE_SECONDS = 60.0
"""How often the log is trimmed and altered tables get new capture functions."""

MIGRATION_LOCK_TIMEOUT = "60s"
"""How long an installation waits for another one; then it is an error."""

ENABLE_LOCK_TIMEOUT = "1s"
"""How long one attempt to enable a table waits for its lock: writers queue behind it meanwhile."""

ENABLE_ATTEMPTS_MAX = 20
"""Attempts to enable a table; then it is an error that names the table."""

UNINSTALL_ATTEMPTS_MAX = 5
"""Attempts to uninstall that end in a deadlock with readers of the log; then the deadlock is an
error."""

CURSOR_SAVE_SECONDS = 0.5
"""A cursor is saved at most this often while its consumer is busy."""

CURSOR_WARNING_SHARE = 0.2
"""Warn when less than this share of the retention is left to a cursor."""

# Settings
DURATION_SECONDS_MAX = 100 * 365 * 86_400
"""The longest time in a setting: a hundred years. A longer one is refused."""

# Embedded PostgreSQL
EMBEDDED_START_SECONDS = 120.0
"""How long a start waits for the server to answer, including crash recovery. Then the start fails
with a retryable error: the server continues to recover, and the next start attaches to it."""

EMBEDDED_STOP_SECONDS = 30.0
"""How long a fast stop may take. Then the server is stopped immediately, and recovers at its next
start."""

EMBEDDED_COMMAND_SECONDS = 120.0
"""How long `initdb` may take. Then it is killed and the start fails."""

EMBEDDED_LOG_BYTES_MAX = 8 * 1024 * 1024
"""A larger server log is renamed to `….old` when the server starts, which replaces the one
before."""

EMBEDDED_LOG_TAIL_BYTES = 4_096
"""How much of the end of a log or of `initdb`'s output an error shows."""

EMBEDDED_SOCKET_PATH_BYTES_MAX = 103
"""The longest path of a Unix socket on every system (that of macOS; Linux allows 107). With a
longer path, the socket is in a private folder below /tmp."""

# Live queries
FILTER_DEPTH_MAX = 16
"""Groups within groups in a filter. A deeper one is refused."""

FILTER_CONDITIONS_MAX = 256
"""Conditions in a filter. A filter with more is refused."""

FILTER_GROUPS_MAX = 256
"""Groups (`and`, `or`, plain lists) in a filter, also empty ones. A filter with more is refused."""

FILTER_VALUES_MAX = 1_000
"""Values in one `in` list. A longer one is refused."""

FILTER_VALUES_TOTAL_MAX = 10_000
"""Values in all `in` lists of a filter together; a statement can bind 65,535. More are refused."""

FILTER_TEXT_CHARS_MAX = 10_000
"""Characters in a text or number of a filter or cursor. A longer one is refused."""

FILTER_PATTERN_CHARS_MAX = 1_000
"""Characters in a pattern of `like` or `ilike`. A longer one is refused."""

FILTER_PATTERNS_CHARS_MAX = 10_000
"""Characters in all patterns of a filter together. More are refused."""

FILTER_HASHES_MAX = 100
"""Numbers in one `in` list that have the same hash as another number in it. A list with more is
refused: it was made to be slow."""

NUMERIC_DIGITS_MAX = 131_072
NUMERIC_SCALE_MAX = 16_383
"""Digits before and after the point of a number in a filter or cursor: as many as PostgreSQL's
`numeric` can have. A number with more is refused."""

ORDER_COLUMNS_MAX = 8
"""Columns in the order of a query, before the primary key is appended. More are refused."""

WINDOW_ROWS_DEFAULT = 100
"""Rows in a window when the query names no limit."""

WINDOW_ROWS_MAX = 1_000
"""The largest limit of a query, unless its table is declared with another. A larger one is
refused."""

WINDOW_ASK_KEYS_MAX = 2_000
"""Keys in one query to the database. If more keys are undecided, the window is read again."""

VERIFY_VALUES_MAX = 20_000
"""Values (rows, also those behind the window, times columns) in a result whose messages have a hash
for clients that verify. Messages of a larger result have none."""

VERIFY_CHARS_MAX = 4_000_000
"""Characters in the texts of such a result. Messages of a result with more have no hash."""

# Gateway
SESSION_QUEUE_BYTES_MAX = 1024 * 1024
"""Bytes that may wait for one client, and one frame that exceeds it. Then its subscriptions fall
behind, each by its own policy."""

SESSION_BEHIND_SECONDS_MAX = 60.0
"""A client that stays behind for this long is disconnected."""

SESSION_IDLE_SECONDS_MAX = 300.0
"""A connection without a subscription is closed after this long."""

SUBSCRIPTION_ID_CHARS_MAX = 200
"""Characters in the id of a subscription; the name of a topic fits. A longer id is refused."""

SESSION_CHANNEL_SUBSCRIPTIONS_MAX = 16
"""Subscriptions of one session to the same channel, each of which gets every message. More are
refused (`subscriptions_per_channel`)."""

SESSION_REQUESTS_MAX = 64
"""Unanswered queries, mutations, waits and messages to channels of one session. More are refused
until one is answered."""

WAIT_SECONDS_MAX = 30.0
"""How long a `wait` for a position may take. Then the client gets a retryable error."""

BEHIND_SECONDS_MAX = 5.0
"""How long a subscription waits until its gateway has read the log up to the client's position.
Then it is refused (`behind`), and the client tries again or tries another gateway."""

FEED_TABLES_MAX = 100
"""Tables one change feed may name. More are refused."""

REQUEST_BYTES_MAX = 1024 * 1024
"""Bytes in the body of a request or in a WebSocket message. A larger one is refused."""

MESSAGE_CONTAINERS_MAX = 50_000
"""Lists and objects in such a body or message. A body with more is refused, because decoding it
would take long."""

REQUEST_HEAD_BYTES_MAX = 64 * 1024
"""Bytes in a request's line and headers. A larger head is answered with 431."""

REQUEST_HEAD_SECONDS = 20.0
"""How long a client may take to send a request's line and headers. Then it is disconnected."""

REQUEST_BODY_SECONDS = 20.0
"""How long a client may take to send a request's body. Then it is answered with 408."""

KEEP_ALIVE_SECONDS = 60
"""How long an HTTP connection stays open without a request."""

ACCEPT_BACKLOG = 2048
"""Connections that may wait to be accepted. More are refused by the operating system."""

DEAD_CLIENT_SECONDS = 60.0
"""A client whose machine does not acknowledge data for this long is disconnected."""

SOCKET_PING_SECONDS = 20.0
"""How often a WebSocket is pinged, and how long a client may take to answer. Then it is
disconnected."""

SINK_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait on one connection when another frame is added. With more the connection is
cut off. Sessions stop far below this: only one enormous frame exceeds it."""

SINK_CLOSE_SECONDS = 5.0
"""How long a connection that is being closed waits for its client to read. Then it is cut off."""

# Authentication
SECRET_BYTES_MIN = 32
"""Bytes in a shared secret, at least. A shorter one is refused at the start."""

RSA_BITS_MIN = 2_048
"""Bits of an RSA key, at least. A smaller one is refused at the start, and ignored in a key set."""

TOKEN_BYTES_MAX = 8_192
"""Bytes in a token. A longer one is refused before it is decoded."""

CLAIM_BYTES_MAX = 256
"""Bytes in the name of a user or tenant. A token with a longer one is refused."""

ROLE_BYTES_MAX = 63
"""Bytes in the name of a database role, as in PostgreSQL. A token with a longer one is refused."""

JWKS_BYTES_MAX = 1_048_576
"""Bytes in a key set. A larger one counts as a failed fetch."""

JWKS_KEYS_MAX = 32
"""Keys that are used of a key set. Further keys are ignored, with a warning in the gateway's
log."""

JWKS_TIMEOUT_SECONDS = 5.0
"""How long fetching a key set may take before it counts as failed."""

JWKS_REFRESH_SECONDS = 300.0
"""An older key set is fetched again when it is next needed; until that succeeds the old one is
used."""

JWKS_COOLDOWN_SECONDS = 10.0
"""The shortest time between two fetches of a key set, also if tokens name unknown keys."""

TICKET_SECONDS = 30
"""How long a ticket is valid. Later it is refused, and the client must request another."""

TICKETS_PER_USER_MAX = 20
"""Unused tickets of one user. Requests for more are answered with 429."""

TICKET_DATABASE_SECONDS = 5.0
"""How long storing or finding a ticket in the database may take. Then the gateway answers with
503."""

AUTHORIZE_SECONDS_MAX = 10.0
"""How long the application's authorize hook may take. Then access is denied, with an entry in the
gateway's log."""

# Requests
ACCEPT_ENCODING_ITEMS_MAX = 32
"""Encodings that are read from a request's `Accept-Encoding`. Further ones are ignored."""

RATE_BURST_SECONDS = 2.0
"""As many requests may arrive at once as the rate allows in this time. More are answered with 429
and the time to try again."""

SUBSCRIBE_BYTES_PER_REQUEST = 1024
"""A live query counts as one more request against `[limits] requests_per_second` for each part of
this many bytes, but never as more than a full burst."""

QUOTA_RETRY_SECONDS = 5.0
"""The time after which clients should try again that had too many sessions or subscriptions."""

# Python client
CLIENT_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""The largest message that a client accepts. A larger one ends the connection with an error that is
not retryable."""

CLIENT_BACKOFF_SECONDS = (1.0, 30.0)
"""The first and the longest pause before a client connects again; each is twice the one before,
with jitter."""

CLIENT_FAILURES_MAX = 10
"""Failures in a row after which a client gives up. Any received message resets the count."""

CLIENT_ANSWER_SECONDS = 10.0
"""How long a client whose stream has ended waits for the answers to its mutations. Then it connects
again and repeats them."""

CLIENT_REQUESTS_AT_ONCE = 16
"""Unanswered requests of a client over SSE; further ones wait."""

CLIENT_CALLS_AT_ONCE = 32
"""Unanswered queries, mutations and waits of a client; further ones wait."""

CLIENT_CALL_ATTEMPTS_MAX = 10
"""Attempts at a query or wait whose connection is lost each time; then ConnectionFailed is
raised."""

CLIENT_MUTATION_ATTEMPTS_MAX = 30
"""Attempts at a mutation whose connection is lost each time; then its outcome is unknown, which is
an error."""

CLIENT_MUTATION_SECONDS = 3_600
"""How long after its first attempt a mutation is repeated. Later the gateway may have forgotten its
key: then its outcome is unknown, which is an error."""

CLIENT_PUBLISH_SECONDS = 300
"""The same for a message on a channel, whose key is stored for `PUBLISH_KEY_SECONDS`."""

CLIENT_SUBSCRIBE_ATTEMPTS_MAX = 3
"""Attempts at a new subscription that is refused with a retryable error; then the error is
raised."""

CLIENT_BATCHES_MAX = 1_000
"""Batches of deltas that wait for their reader. At the limit one reset replaces them."""

CLIENT_TRANSACTIONS_MAX = 1_000
"""Transactions of a feed that wait for their reader. At the limit the connection is not read; while
the program waits for something else, the feed is paused instead, and resumed later."""

CLIENT_MESSAGES_MAX = 1_000
"""Messages of a channel that wait for their reader. At the limit the oldest are dropped."""

CLIENT_DIVERGED_MAX = 3
"""A live query that diverges this often in a row, each time after a new snapshot, fails."""

# Hub
VIEWS_MAX = 100_000
"""Live queries that one process maintains; a shared one counts once. Further ones are refused."""

VIEW_BYTES = 6 * 1024
"""Bytes of memory that are counted for a live query in addition to its rows and its text (`[limits]
bytes_per_user`)."""

OPENING_SECONDS = 30
"""How long reading the first result of a live query may take. Then the subscription fails, with a
hint about indexes."""

OPENING_LOCK_SECONDS = 20
"""How long reading the first result of a live query may wait for a lock on its table. Then the
subscription fails (`table_locked`)."""

OPENING_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of the first result of a live query, or of a part of it, as the database sends its rows. A
larger one is refused (`result_too_large`), and the rest is not read."""

WAL_CAPTURE_SECONDS = 10.0
"""How long a reader of the log waits for capture from the WAL while that makes no progress. Then
the reader has lost the database, and tries again."""

WAL_DRAIN_SECONDS = 30.0
"""How long disabling the last table that is captured from the WAL takes at most to append what is
unread, where no other process does it. Then a gateway does the rest."""

WAL_CAPTURE_BEHIND_BYTES = 64 * 1024 * 1024
"""`headwater doctor` warns of capture from the WAL that is further behind."""

WAL_APPEND_CHANGES = 5_000
WAL_APPEND_BYTES = 8_000_000
"""Changes that capture from the WAL holds in memory before it sends them to the log. A transaction
may have more: they are sent in parts, in one transaction."""

WAL_IMAGE_BYTES_MAX = 100_000_000
"""Bytes of a row as JSON, before and after its change together. A larger one is not appended to the
log by capture from the WAL; its table is read again."""

FLUSH_SECONDS_MAX = 60.0
"""A flush that takes longer is cancelled, because the database does not respond: the gateway is not
ready, and connects again."""

LOOKUP_SECONDS = 10.0
"""How long a query about tables or rights may take. Then the client gets a retryable error."""

FLUSH_QUESTION_SECONDS = 0.5
"""How long a query of a flush may take: for topics, or for several live queries together as
Headwater's own role. Then a topic gets a gap, and a live query is read again. Also how long a
connection may take to import the snapshot of a flush."""

FLUSH_BUDGET_SECONDS = 0.05
"""How long a flush waits for the database queries of its live queries. Then it sends what it has:
the other live queries lag, and get their changes when their queries are answered."""

FLUSH_BUDGET_PAUSE_SECONDS = 1.0
"""After a flush has waited for its whole budget, no flush waits for this long: live queries that
need the database get their changes when their queries are answered."""

APPLY_QUICK_SECONDS = 0.001
"""A live query that takes longer to apply the changes of a flush counts as slow."""

QUESTION_CONNECTIONS = 8
"""Connections that query the database for live queries outside the flushes: this many with users'
roles, and this many with Headwater's own role. While all are busy, live queries that need one
lag."""

QUESTION_SECONDS_MAX = 30.0
"""How long a database query outside the flushes may take. Then the live query is read again, and
fails with `slow_query` if that happens three times in a row."""

LAG_CHANGES_MAX = 10_000
"""Changes that wait for a lagging live query. With more it is read again, and reset."""

LAG_BYTES_MAX = 16 * 1024 * 1024
"""The same in bytes, approximately."""

LAG_SHOWN_SECONDS = 1.0
"""A live query that lags for longer is counted in the metrics and listed by `headwater status`."""

RECONCILE_ROWS_MAX = 2_000
"""Rows that one flush reads to compare results with the database. A streamed query with more is
read outside the flush."""

RECONCILE_STREAMED_ROWS_MAX = 100_000
"""A streamed query with more rows is not compared, and counted as skipped."""

RECONCILE_SECONDS = 0.1
"""After this long, a flush begins no further comparison."""

FLUSH_QUESTIONS_SECONDS = 0.5
"""How long queries that were sent together may take one by one after one of them failed; the rest
is sent later."""

FEED_POSITION_SECONDS = 60.0
"""How often a change feed gets its position while there are no changes."""

FEED_ROOM_SECONDS = 10.0
"""How long a feed that catches up waits for its client. Then other feeds may catch up, and it
continues when the client has read what was sent."""

# ------------------------------------------------------------------------ reactive queries

GROUPS_MAX = 100_000
"""Different reactive queries (by function, arguments and user) with subscribers; more are
refused."""

QUERY_RETRY_SECONDS = (1.0, 60.0)
"""The first and the longest pause between two attempts at a subscribed query that fails."""

QUERY_SHARE = 4
"""Queries of a flush that one connection executes, if there are enough of them."""

QUERY_USER_SHARE = 0.25
"""The largest part of `[query] concurrency` for the queries of one user, or of one address without
a user; at least one. Further ones wait, and those of others run before them."""

ROW_DELTA_BYTES_MAX = 4 * 1024 * 1024
ROW_DELTA_ROWS_MAX = 10_000
"""Bytes as JSON and rows of a result that is compared with the one before row by row. A
subscription with deltas to a larger result fails (`result_too_large`)."""

FUNCTION_NAME_CHARS_MAX = 100
"""Characters in the name of a query or mutation. A longer one is refused when it is registered."""

ARGUMENT_DEPTH_MAX = 100
"""How deep an argument of a query or mutation may be nested. A deeper one is refused, because it
could not be compared with others."""

ARGUMENT_VALUES_MAX = 10_000
"""Values in the arguments of a query, also in lists and objects. More are refused, because results
are found by comparing all of them. A mutation may have more."""

ARGUMENT_LARGE_INTEGERS_MAX = 100
"""Integers of more than 64 bits in the arguments of a query or mutation. More are refused: they can
be chosen to have the same hash."""

FUNCTION_THREADS = 32
"""Threads for queries and mutations that are not async. Further ones wait, and the wait counts
towards their timeout."""

QUERY_ROWS_MAX = 200_000
"""Rows that one statement of a query or mutation may return. With more it fails, and the rest is
not read."""

QUERY_RESULT_BYTES_MAX = 32 * 1024 * 1024
"""Bytes in a result as JSON. A larger one is an error."""

FETCH_BYTES_MAX = 256 * 1024 * 1024
"""Bytes that one statement of a query or mutation may return, by a sample of its rows. With more it
fails, and the rest is not read."""

EVENT_HANDLERS_AT_ONCE = 100
"""Async event handlers that run at the same time. Further events are dropped, with a warning in the
gateway's log."""

COMMIT_SECONDS = 60.0
"""How long the commit of a mutation may take. Then the caller gets an error: the outcome is
unknown."""

MUTATION_USER_SHARE = 0.5
"""The largest part of `[mutation] connections` for the mutations of one user, or of one address
without a user; at least one. Further ones wait, and those of others run before them."""

IDEMPOTENCY_KEY_CHARS_MAX = 128
"""Characters of an idempotency key. A longer one is refused."""

REQUEST_RESULT_BYTES_MAX = 1024 * 1024
"""Bytes of a mutation's result, as JSON, that are stored with its idempotency key. Of a larger one
only the key is stored: a repetition does nothing and gets an error."""

REQUEST_BEGIN_ATTEMPTS_MAX = 10
"""How often a transaction is begun again whose snapshot is older than an attempt with the same
idempotency key; above READ COMMITTED the second one sees it. Then the mutation gets a retryable
error."""

REQUEST_LOOKUP_SECONDS = 10.0
"""How long a gateway that lost the database during a commit tries to find the outcome. Then it is
unknown; with an idempotency key the caller may repeat the mutation."""

REQUEST_SECONDS_MIN = 2 * CLIENT_MUTATION_SECONDS
"""The shortest time that the idempotency key of a mutation is stored: twice as long as a client
repeats it. A shorter `[mutation] retention` is refused, and no younger key is removed when a user
has too many."""

REQUESTS_PER_USER_MAX = 100_000
"""Idempotency keys of one user that are stored. Beyond, the oldest are removed if no client repeats
them any more; a repetition of theirs would run again."""

REQUESTS_TRIM_BATCH = 10_000
"""Idempotency keys that are removed in one transaction."""

PUBLISH_KEY_SECONDS = 600.0
"""How long the idempotency key of a message on a channel is stored. A later repetition is published
again."""

# Topics
TOPIC_CHARS_MAX = 200
"""Characters in the name of a topic or channel. `headwater.signal` has the same bound. Longer ones
are refused."""

TOPIC_VALUE_CHARS_MAX = 100
"""Characters for one `{place}` of a pattern. A name with more does not match."""

TOPIC_NUMBER_MAX = 2**63 - 1
"""The largest integer in the name of a topic or channel: the largest bigint. A name with a larger
one is refused."""

TOPIC_PATTERNS_MAX = 1_000
"""Topics that an application may declare. More are refused."""

SIGNAL_IDS_MAX = 10_000
"""Ids in one signal. `headwater.signal` refuses more."""

TOPIC_ROWS_MAX = 10_000
"""Rows that a topic sends at once. With more its clients get a gap, and read the rows again."""

TOPIC_PAUSE_SECONDS = 5.0
"""For this long after a table took too long to be read for topics, no flush reads it for topics:
they get gaps."""

STREAM_TOPICS_MAX = 100
"""Topics in one `GET /v1/stream`. More are refused; they can be added one by one."""

TEXT_STREAM_CHARS_MAX = 1_000_000
"""Characters in a text stream, which is written as a whole each time. More are refused."""

TEXT_STREAM_END_SECONDS = 30.0
"""How long the last write of a text stream is tried while the database cannot be reached; then the
error is raised."""

CLIENT_TOPIC_ROWS_MAX = 10_000
"""Rows of a topic that a client stores, and rows that wait for its reader. At the limit the oldest
are removed, and a reader gets `pull` instead."""

# Channels
CHANNEL_PATTERNS_MAX = 1_000
"""Channels that an application may declare. More are refused."""

CHANNEL_MESSAGE_BYTES_MAX = 64 * 1024
"""Bytes of a message on a channel, as JSON. A larger one is refused."""

CHANNEL_STATE_BYTES_MAX = 4 * 1024
"""Bytes of a member's state, as JSON. A larger one is refused."""

CHANNEL_MEMBERS_MAX = 1_000
"""Members that may be present on one channel. More are refused; they can still follow it."""

CHANNEL_HISTORY_MAX = 1_000
"""Messages that a channel may be declared to remember. More are refused."""

CHANNEL_HISTORY_BYTES_MAX = 256 * 1024
"""Bytes of messages that a gateway remembers of one channel. The oldest are forgotten first."""

CHANNEL_RECALL_SECONDS = 2.0
"""How long the first follower of a channel at a gateway waits for its history from another gateway.
Then the next gateway is asked; if none answers, the history is empty."""

BUS_NOTE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one message between gateways, in all its parts. A larger one is ignored."""

BUS_QUEUE_BYTES_MAX = 16 * 1024 * 1024
"""Bytes that wait to be sent to other gateways. With more, publishing fails with a retryable
error."""

BUS_SECONDS = 5.0
"""How long the database may take to deliver a message. Then the publisher gets a retryable
error."""

# ------------------------------------------------------------------------ the pipeline

SPARK_BATCH_CHANGES = 200_000
"""Changes in one batch of the data source `headwater`, unless `maxRows` sets another number."""

SPARK_HEAP_BYTES = (1024 * 1024 * 1024, 8 * 1024 * 1024 * 1024)
"""The least and the most memory that Spark's Java may take for its heap, unless `[lake] memory`
sets it: within these, a quarter of the memory of the machine or of its container. Without memory
Java ends, and the pipeline starts it again."""

SPARK_PLANNING_PATIENCE_SECONDS = 30.0
"""How long the data source tries to reach a lost database before the stream fails."""

DELTA_COMMIT_ATTEMPTS_MAX = 10
"""Attempts at a commit to a Delta table that conflicts with others; then it is an error."""

DELTA_HISTORY_COMMITS = 10_000
"""Commits of a Delta table that are searched for the position that the table reaches. Headwater's
commits have it, those of other programs do not. If the checkpoint is lost and no commit has it, the
stream does not start."""

LAKE_COMPACT_SECONDS = 10.0
"""How often a running pipeline checks whether the lake has many small files, and joins them."""

LAKE_VACUUM_SECONDS = 86_400.0
"""How often a running pipeline removes files that no longer belong to the lake."""

PIPELINE_REPORT_SECONDS = 2.0
"""How often a pipeline saves its progress, if it has changed."""

PIPELINE_RESTART_SECONDS = (1.0, 60.0)
"""The first and the longest pause before a failed stream of the pipeline is started again; each is
twice the one before."""

PIPELINE_ONCE_RETRY_SECONDS = 60.0
"""How long `headwater pipeline run --once` tries a view again whose error may pass, such as that of
a locked table. Then the command fails with that error."""

PIPELINE_STOP_SECONDS = 60.0
"""How long a stopping pipeline waits for the batch that is being written. Then the batch is
abandoned, and written at the next start."""

PIPELINE_ERROR_CHARS_MAX = 2_000
"""Characters of an error in the progress of the pipeline. The rest is cut off."""

LAKE_ROWS_SHOWN = 1_000
"""Rows that `headwater asof` shows as a table. The other formats print them all."""

LAKE_SNAPSHOT_EVENTS = 100_000
"""The pipeline makes another snapshot of a table after this many changes, unless `[lake] snapshots`
sets another number."""

SNAPSHOT_CHUNK_BYTES = 32 * 1024 * 1024
"""A table is read in ranges of blocks of about this size, including its large values. Finished ones
are not read again after a crash."""

SNAPSHOT_READERS_MAX = 8
"""Connections over which a snapshot or the build of a view reads at a time. Further ranges wait."""

VIEW_BUILD_CHUNK_BYTES = 16 * 1024 * 1024
"""The build of a streaming view reads its tables in chunks of about this size."""

VIEW_BUILD_CHUNKS = 4
"""Chunks that one job of a build reads, aggregates and writes. Its progress is known after each."""

VIEW_TOUCHED_VALUES_MAX = 10_000
"""Different values of a column that changes of a batch may touch in a streaming view that reads its
tables by them. With more, the view is built again, which is faster."""

VIEW_DRIVER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of rows of a streaming view that Spark's tasks return to the driver for a batch, all
together. A task that has more than its share of them writes its rows to PostgreSQL itself."""

VIEW_CONNECTIONS_MAX = 8
"""Connections over which all streaming views of a pipeline write. Further views wait."""

VIEW_LOCK_SECONDS = 10.0
"""How long the write of a view waits for a lock, while the tables that it reads stay locked. It is
then tried again: a migration that has locked the view may be waiting for these tables, and writers
behind the migration."""

VIEWS_AT_ONCE = 4
"""Streaming views that apply a batch at a time. Others wait."""

VIEWS_BEHIND_AT_ONCE = 2
"""Streaming views that are built, or catch up, at a time. Others wait."""

VIEW_BATCH_SECONDS = 5.0
"""How long the stream of all views waits for the slowest. A slower view catches up by itself."""

VIEW_POSITION_SECONDS = 60.0
"""How often the position of a streaming view that did not change is stored."""

SNAPSHOT_LOCK_SECONDS = 2.0
"""How long the read of a table waits for a lock. A table that is being altered is read later."""

SNAPSHOT_WATCH_SECONDS = 10.0
"""How often a running pipeline looks in the catalog for tables that were altered. A table with
other files, columns or triggers than its last snapshot is read again."""

SNAPSHOT_GROUP_TABLES = 200
"""Tables that are read in one snapshot of the database, and locked at a time. Further ones are read
in the next."""

TABLES_MERGE_CHANGES_MAX = 100_000
"""Changes of a table that the driver merges into its typed tables. More of them are written by
Spark's tasks, which write the table's open versions again."""

TABLES_MERGE_BYTES_MAX = 64 * 1024 * 1024
"""Characters of the rows in these changes. More are written by Spark's tasks."""

RECONCILE_READERS_MAX = 2
"""Connections over which `headwater pipeline reconcile` reads a table at a time, so that the
database has little load. Further parts of the table wait."""

RECONCILE_CHECK_SECONDS = 60.0
"""How often a running pipeline checks which tables are due to be compared with the lake."""

RECONCILE_STATEMENT_SECONDS = 300.0
"""How long the server may take for one part of a table that is compared with the lake. Then the
comparison of this table fails."""

RECONCILE_BUCKETS_LISTED_MAX = 4_096
"""Buckets of rows that differ and are read alone. Where more of them differ, all rows of the table
are compared by key."""

RECONCILE_KEYS_MAX = 1_000
"""Keys of rows that differ which are reported for a table. The others are counted."""

RECONCILE_OUTCOMES_DAYS = 90
"""A running pipeline removes older rows of the table `drift`, apart from the last one of each table
and the last one that found it equal."""

LAKE_SNAPSHOTS_DENSE_DAYS = 7
"""Of snapshots older than this, only the last one of each day stays, if it was computed from
events: it could be computed again."""

LAKE_POINT_BYTES_MAX = 2 * 1024**3
"""Bytes of the files in which a request about single rows may find something, by the statistics of
the Delta tables. Spark answers a larger one."""

LAKE_SMALL_TABLE_BYTES = 4 * 1024 * 1024
"""The same for a request for all rows of a table. Spark answers a larger one."""

LAKE_SMALL_LOG_CHANGES = 20_000
"""Changes of a table that wait in the log and not yet in the lake. If there are more, Spark answers
a request for all its rows."""

LAKE_POINT_KEYS_MAX = 20
"""Rows that a request may name by a filter over the key to be answered without Spark."""

LAKE_REQUESTS_AT_ONCE = 4
"""Requests about the lake that a running pipeline handles at a time. Further ones wait."""

LAKE_REQUEST_BYTES_MAX = 1_000_000
"""Bytes of a request to a running pipeline. A longer one is refused."""

PIPELINE_PROCESS_RESTART_SECONDS = (1.0, 60.0)
"""The first and the longest pause before `headwater serve --with-pipeline` starts a pipeline again
that ended; each is twice the one before."""

PIPELINE_PROCESS_STOP_SECONDS = 90.0
"""How long a pipeline process may take to stop. Then it is killed, and the next start repairs the
lake."""

SPARK_LOG_BYTES_MAX = 8 * 1024 * 1024
"""The size at which the file with the output of Spark is renamed to `….old`, which replaces the one
before."""

CLASS_ARCHIVE_UNUSED_SECONDS = 30 * 86_400.0
"""An archive of Spark's classes that no Spark has used for this time is removed by the next
pipeline that has run for a minute."""

CLASS_ARCHIVE_SECONDS = 600.0
"""How long making an archive of Spark's classes may take. Then `headwater pipeline warm` fails."""

ACTIVITY_ROWS_MAX = 200
"""Sessions, and as many views, that a gateway reports for the console: the costliest ones."""

ACTIVITY_DETAIL_CHARS_MAX = 2_000
"""Characters of the details of one session or view. The rest is cut off."""

ACTIVITY_VIEWS_SHOWN_MAX = 50
"""Views that are listed for one session."""

ADMIN_REQUESTS_AT_ONCE = 4
"""Requests of admins to the database that a gateway handles at a time; further ones wait."""

ADMIN_SECONDS_MAX = 5.0
"""How long such a request may take. A search in the log returns the place that it reached."""

ADMIN_LOG_ROWS_MAX = 500
"""Changes in the result of one search in the log."""

ADMIN_LOG_BYTES_MAX = 4_000_000
"""Bytes of the rows in the result of one search in the log; the result has the place to continue
from."""

ADMIN_RATE_ROWS_MAX = 50_000
"""Newest changes of the log that are read to count those of the last minute for each table."""

ADMIN_TABLES_MAX = 1_000
"""Tables that the console lists."""

ADMIN_HISTORY_ROWS_MAX = 500
"""Versions in the history of a row, from the log or from the lake: the newest ones."""

ADMIN_IMAGE_CHARS_MAX = 50_000
"""Characters of a row that a search in the log shows. Larger rows are listed without their
values."""

PAST_REQUESTS_AT_ONCE = 4
"""Requests about the past of a row that a gateway handles at a time; further ones wait."""

PAST_REQUESTS_PER_USER = 2
"""The same for one user; further ones are refused (`past_requests_per_user`)."""

PAST_SECONDS_MAX = 10.0
"""How long such a request may take, waiting included."""

PAST_BYTES_MAX = 512 * 1024 * 1024
"""Bytes of the files in which such a request may find something. A larger one is refused."""

PAST_VERSIONS_MAX = 200
"""Versions of a row in one answer; the answer says how to get those before."""

ADMIN_LAKE_REQUESTS_AT_ONCE = 1
"""Requests of admins to the lake that a gateway handles at a time; further ones wait."""

METRICS_SECONDS_MIN = 5.0
"""How old the metrics of sources and cursors may be: they are read from the database at most this
often."""

ADMIN_LAKE_SECONDS_MAX = 60.0
"""How long reading the history of a row from the lake may take."""

# Sources
SOURCE_PART_CHANGES = 2_000
"""Rows of a source's transaction that are in memory at once. A larger transaction passes in parts,
and is still one transaction in the mirror."""

SOURCE_PART_BYTES = 8_000_000
"""Bytes of such a part. A single row may be larger."""

SOURCE_CHUNK_ROWS = 10_000
"""Rows that the copy of a table reads from the source at once."""

SOURCE_CHUNK_BYTES = 16_000_000
"""Bytes of such a chunk. A single row may be larger."""

SOURCE_ROW_CHARS_MAX = 250_000_000
"""Characters of a row of a source: PostgreSQL takes at most 1 GB at once, and a character may have
4 bytes. A source with a larger row is refused."""

SOURCE_PROCESS_RESTART_SECONDS = (1.0, 30.0)
"""First and longest pause before the process that runs the sources is started again."""

SOURCE_PROCESS_STOP_SECONDS = 30.0
"""How long the process that runs the sources may take to stop. Then it is killed, which loses no
change."""

SOURCE_CHECK_SECONDS = 30.0
"""How long a source may take to answer the check before it is added."""

SOURCE_REMOVE_SECONDS = 60.0
"""How long `headwater source remove` waits until the source is removed."""

SOURCE_LOOK_SECONDS = 5.0
"""How often a gateway without sources looks whether one was added."""

SOURCE_QUEUE_CHANGES = 10_000
"""Changes of a source that are read ahead while PostgreSQL applies others."""

SOURCE_QUEUE_BYTES = 24_000_000
"""Bytes of them, about."""

SOURCE_BATCH_CHANGES = 10_000
"""Changes that are sent to PostgreSQL before its answers are read."""

SOURCE_BATCH_TRANSACTIONS = 200
"""Transactions of a source that are sent to PostgreSQL before its answers are read."""

SOURCE_LOCK_SECONDS = 1.0
"""How long a mirror that is to be altered or truncated is waited for, while a session reads it.
Then the source fails, and tries again."""

SOURCE_RETRY_SECONDS_MAX = 30.0
"""The longest pause before a source that cannot be reached, or that is refused, is tried again."""

SOURCE_PROGRESS_SECONDS = 5.0
"""How often the position of a source without changes is saved."""

SOURCE_ACKNOWLEDGE_SECONDS = 1.0
"""How often a source is informed how far its changes are durable."""

SOURCE_STATUS_SECONDS = 1.0
"""How often the state of a source is written to `headwater.sources`, if it has changed."""

SOURCE_HEALTH_SECONDS = 10.0
"""How often a source is asked for its health."""

SOURCE_STOP_SECONDS = 60.0
"""How long a source may take to finish its transaction at hand. It is rolled back then."""

SOURCE_POLL_SECONDS = 5.0
"""How often a supervisor looks for requests that no notification announced."""
