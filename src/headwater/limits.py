"""The bounds that a program can meet, each with its unit and what happens at it.

docs/reference/limits.md shows them with their values. Constants that only tune a module are beside
their use.
"""

from __future__ import annotations

# Log and reader
VALUE_DEPTH_MAX = 200
"""How deep JSON in a row may be nested. What is deeper stays text: a later reader could not follow
it."""

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
"""Characters in a position. A longer text is refused; the longest that we give out lists each
transaction that was running."""

LOG_TABLES_SECONDS = 10.0
"""How long the log is asked which tables a backlog changed. If it takes longer, all are read."""

TRANSACTION_PART_CHANGES = 200_000
"""A transaction with more changes is delivered in parts (`Transaction.complete`)."""

SERVER_VERSION_MIN = 140_000
"""The oldest PostgreSQL: 14, for `create function … return` and multirange types."""

CONNECT_TIMEOUT_SECONDS = 10
"""How long opening a connection may take before it counts as unreachable."""

DEAD_PEER_SECONDS = 30
"""A database that does not acknowledge for this long counts as gone, and we reconnect."""

RECONNECT_SECONDS = (0.05, 5.0)
"""First and longest pause between attempts to reach a lost database; doubled in between."""

# Maintenance
MAINTENANCE_SECONDS = 60.0
"""How often retention is applied and altered tables get new capture functions."""

MIGRATION_LOCK_TIMEOUT = "60s"
"""How long installing waits for another process that installs; then it is an error."""

ENABLE_LOCK_TIMEOUT = "1s"
"""How long enabling may wait for a table at a time: writers queue behind it meanwhile."""

ENABLE_ATTEMPTS_MAX = 20
"""How often enabling tries; then it is an error that names the table."""

UNINSTALL_ATTEMPTS_MAX = 5
"""How often uninstalling tries that readers of the log come across; then the deadlock is raised."""

CURSOR_SAVE_SECONDS = 0.5
"""A cursor is saved at most this often while its consumer is busy."""

CURSOR_WARNING_SHARE = 0.2
"""Warn when less than this share of the retention is left to a cursor."""

# Settings
DURATION_SECONDS_MAX = 100 * 365 * 86_400
"""The longest length of time that a setting may give: a hundred years. A longer one is refused."""

# Embedded PostgreSQL
EMBEDDED_START_SECONDS = 120.0
"""How long a start waits for the server to answer, crash recovery included. Then the start fails,
retryable: the server goes on recovering, and the next start attaches to it."""

EMBEDDED_STOP_SECONDS = 30.0
"""How long a fast stop may take. Then the server is stopped at once; its next start recovers."""

EMBEDDED_COMMAND_SECONDS = 120.0
"""How long `initdb` may take. Then it is killed and the start fails."""

EMBEDDED_LOG_BYTES_MAX = 8 * 1024 * 1024
"""A larger server log is set aside when the server starts; the one set aside before is dropped."""

EMBEDDED_LOG_TAIL_BYTES = 4_096
"""How much of the end of a log or of `initdb`'s output an error shows."""

EMBEDDED_SOCKET_PATH_BYTES_MAX = 103
"""Longest path of a Unix socket that every system takes (macOS; Linux takes 107). A server whose
data folder is deeper has its socket in a private folder below /tmp."""

# Live queries
FILTER_DEPTH_MAX = 16
"""Groups within groups in a filter. A deeper one is refused."""

FILTER_CONDITIONS_MAX = 256
"""Conditions in a filter. A larger one is refused."""

FILTER_GROUPS_MAX = 256
"""Groups (`and`, `or`, plain lists) in a filter, empty ones too. A filter with more is refused."""

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
"""Numbers in one `in` list that have the same hash as another of them. With more the list is
refused: such numbers do not come by chance."""

NUMERIC_DIGITS_MAX = 131_072
NUMERIC_SCALE_MAX = 16_383
"""Digits before and behind the point of a number in a filter or cursor: as many as PostgreSQL's
`numeric` can have. A larger or finer number is refused."""

ORDER_COLUMNS_MAX = 8
"""Order columns a query may name, before the primary key is appended. More are refused."""

WINDOW_ROWS_DEFAULT = 100
"""Rows in a window when the query names no limit."""

WINDOW_ROWS_MAX = 1_000
"""The largest limit a query may name unless its table allows another. A larger one is refused."""

WINDOW_ASK_KEYS_MAX = 2_000
"""Keys put to the database in one question. Where more are in doubt, the window is read anew."""

VERIFY_VALUES_MAX = 20_000
"""Values (rows, those beyond the window too, times columns) in a result whose messages carry a hash
for a client that verifies. Messages of a larger one carry none."""

VERIFY_CHARS_MAX = 4_000_000
"""Characters in the texts of such a result. Messages of a longer one carry no hash."""

# Gateway
SESSION_QUEUE_BYTES_MAX = 1024 * 1024
"""Bytes that may wait for one client, beside the frame that exceeds it. Then its subscriptions fall
behind, each by its own policy."""

SESSION_BEHIND_SECONDS_MAX = 60.0
"""A client that stays behind for this long is disconnected."""

SESSION_IDLE_SECONDS_MAX = 300.0
"""A connection without a subscription is closed after this long."""

SUBSCRIPTION_ID_CHARS_MAX = 200
"""Characters in the id that a client gives a subscription; a topic's name fits. A longer one is
refused."""

SESSION_CHANNEL_SUBSCRIPTIONS_MAX = 16
"""Subscriptions of one session to the same channel: each is sent every message. More are refused
(`subscriptions_per_channel`)."""

SESSION_REQUESTS_MAX = 64
"""Queries, mutations, waits and messages to channels that one session has under way. More are
refused, to be asked again when one has been answered."""

WAIT_SECONDS_MAX = 30.0
"""How long a client may wait for a position to be sent. Then it is told to try again."""

BEHIND_SECONDS_MAX = 5.0
"""How long a subscription waits for its gateway to read the log up to a position that the client
has. Then it is refused (`behind`), so that the client tries again or another gateway."""

FEED_TABLES_MAX = 100
"""Tables one change feed may name. More are refused."""

REQUEST_BYTES_MAX = 1024 * 1024
"""Bytes in the body of a request or in a WebSocket message. A larger one is refused."""

MESSAGE_CONTAINERS_MAX = 50_000
"""Lists and objects in such a body or message. One with more is refused: decoding it would take
long."""

REQUEST_HEAD_BYTES_MAX = 64 * 1024
"""Bytes in a request's line and headers. A larger head is answered with 431."""

REQUEST_HEAD_SECONDS = 20.0
"""How long a client may take to send a request's line and headers. Then it is disconnected."""

REQUEST_BODY_SECONDS = 20.0
"""How long a client may take to send a request's body. Then it is answered with 408."""

KEEP_ALIVE_SECONDS = 60
"""How long a connection without a request stays open for the next one."""

ACCEPT_BACKLOG = 2048
"""Connections that may wait to be accepted. More are refused by the operating system."""

DEAD_CLIENT_SECONDS = 60.0
"""A client whose machine does not acknowledge for this long what it was sent counts as gone."""

SOCKET_PING_SECONDS = 20.0
"""How often a WebSocket is pinged, and how long a client may take to answer. Then it is gone."""

SINK_BYTES_MAX = 64 * 1024 * 1024
"""A sink that holds more when it is given yet another frame is aborted. Sessions stop far below
it; only one enormous frame leads there."""

COMPRESS_BYTES_AT_ONCE = 256 * 1024
"""Bytes of a stream that are compressed in one turn of the event loop. Of a larger message each
part waits for its turn."""

SINK_CLOSE_SECONDS = 5.0
"""How long a closed sink waits for its client to take what is buffered. Then it is cut off."""

# Authentication
SECRET_BYTES_MIN = 32
"""Bytes in a shared secret, at least. A shorter one is refused at the start."""

RSA_BITS_MIN = 2_048
"""Bits of an RSA key, at least. A smaller one is refused at the start, and ignored in a key set."""

TOKEN_BYTES_MAX = 8_192
"""Bytes in a token. A longer one is refused before any of it is looked at."""

CLAIM_BYTES_MAX = 256
"""Bytes in the name of a user or tenant. A token with a longer one is refused."""

ROLE_BYTES_MAX = 63
"""Bytes in the name of a database role, as in PostgreSQL. A token with a longer one is refused."""

JWKS_BYTES_MAX = 1_048_576
"""Bytes in a key set. A larger one counts as a failed fetch."""

JWKS_KEYS_MAX = 32
"""Keys taken from a key set. Those beyond are ignored, with a warning in the log."""

JWKS_TIMEOUT_SECONDS = 5.0
"""How long fetching a key set may take before it counts as failed."""

JWKS_REFRESH_SECONDS = 300.0
"""An older key set is fetched again when next needed; until that succeeds the old one holds."""

JWKS_COOLDOWN_SECONDS = 10.0
"""A key set is fetched no more often, however many tokens name keys that are not in it."""

TICKET_SECONDS = 30
"""How long a ticket holds. A later one is refused; the client asks for another."""

TICKETS_PER_USER_MAX = 20
"""Tickets of one user that are given out and not used. More are answered with 429."""

TICKET_DATABASE_SECONDS = 5.0
"""How long the database may take over a ticket before the gateway answers with 503."""

AUTHORIZE_SECONDS_MAX = 10.0
"""How long the application's authorize hook may take. Then access is denied and the log says it."""

# Requests
ACCEPT_ENCODING_ITEMS_MAX = 32
"""Encodings looked at in a request's `Accept-Encoding`. Those beyond do not count."""

RATE_BURST_SECONDS = 2.0
"""Of requests that come at once, as many are let through as the rate allows in this time. More are
answered with 429 and when to try again."""

SUBSCRIBE_BYTES_PER_REQUEST = 1024
"""A live query counts as one request more against `[limits] requests_per_second` for each so many
bytes of it, but never as more than a full burst."""

QUOTA_RETRY_SECONDS = 5.0
"""When to try again after too many sessions or subscriptions, as told to clients."""

# Python client
CLIENT_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""The largest message a client takes. A larger one ends the connection for good, with an error that
says to ask for less."""

CLIENT_BACKOFF_SECONDS = (1.0, 30.0)
"""First and longest pause before a client connects again; doubled in between, with jitter."""

CLIENT_FAILURES_MAX = 10
"""A client gives up after so many failures in a row; any message begins the count again."""

CLIENT_ANSWER_SECONDS = 10.0
"""How long a client whose stream has ended waits for the answers to its mutations. Then it does not
know what has become of them, and connects again."""

CLIENT_REQUESTS_AT_ONCE = 16
"""Requests that a client over SSE has under way; more wait for one to be answered."""

CLIENT_CALLS_AT_ONCE = 32
"""Queries, mutations and waits that a client has under way; more wait for one to be answered."""

CLIENT_CALL_ATTEMPTS_MAX = 10
"""How often a query or wait is asked whose connection is lost each time; then that is raised."""

CLIENT_MUTATION_ATTEMPTS_MAX = 30
"""How often a mutation is sent whose connection is lost each time; then its outcome is unknown, and
that is raised."""

CLIENT_MUTATION_SECONDS = 3_600
"""How long after it was sent first a mutation is repeated. Later the gateway may have forgotten its
key: its outcome is unknown, and that is raised."""

CLIENT_PUBLISH_SECONDS = 300
"""The same for a message on a channel, whose key is stored for `PUBLISH_KEY_SECONDS`."""

CLIENT_SUBSCRIBE_ATTEMPTS_MAX = 3
"""How often a new subscription is asked for that is refused for now; then the refusal is raised."""

CLIENT_BATCHES_MAX = 1_000
"""Batches of deltas that wait for their reader. At the bound they give way to one reset."""

CLIENT_TRANSACTIONS_MAX = 1_000
"""Transactions of a feed that wait for their reader. At the bound the connection is not read; while
something else is waited for, the feed is left instead, and gone on with later."""

CLIENT_MESSAGES_MAX = 1_000
"""Messages of a channel that wait for their reader. At the bound the oldest are dropped."""

CLIENT_DIVERGED_MAX = 3
"""A live query that diverges so often in a row, each time from a fresh snapshot, has failed."""

# Hub
VIEWS_MAX = 100_000
"""Live queries that one process maintains, shared ones once. Further ones are refused."""

VIEW_BYTES = 6 * 1024
"""Bytes of memory that a live query takes beside its rows and its text, as `[limits]
bytes_per_user` counts it."""

OPENING_SECONDS = 30
"""How long reading a first result may take. Then the subscription fails, with a hint at indexes."""

OPENING_LOCK_SECONDS = 20
"""How long reading a first result may wait for a lock on its table. Then the subscription fails
(`table_locked`)."""

OPENING_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of a first result, or of a part of it, as the database sends its rows. A larger one is
refused (`result_too_large`), and what is beyond is not sent."""

FLUSH_SECONDS_MAX = 60.0
"""A flush that takes longer has met a database that hangs: the hub is not ready, and connects
again."""

LOOKUP_SECONDS = 10.0
"""How long a question about tables or rights may take. Then who asked is told to try again."""

FLUSH_QUESTION_SECONDS = 0.5
"""How long a question may take that a flush asks itself, for topics; or that is asked beside it for
several live queries together, as Headwater's own role. Then a topic gets a gap, and a live query is
read again. Also how long a connection may take to import the snapshot of a flush."""

FLUSH_BUDGET_SECONDS = 0.05
"""How long a flush waits for the questions of its live queries. Then it hands out what it has: the
other live queries lag, and are sent their changes when the questions are answered."""

FLUSH_BUDGET_PAUSE_SECONDS = 1.0
"""After a flush has waited for its whole budget, no flush waits for this long: live queries that
ask are sent their changes when the questions are answered."""

APPLY_QUICK_SECONDS = 0.001
"""A live query that takes longer over the changes of a flush is slow."""

QUESTION_CONNECTIONS = 8
"""Connections that ask for live queries beside the flushes: this many as users' roles, and this
many as Headwater's own. With all of them busy, live queries that must ask lag."""

QUESTION_SECONDS_MAX = 30.0
"""How long a question beside the flushes may take. Then the live query is read again, and fails
with `slow_query` if that happens three times in a row."""

LAG_CHANGES_MAX = 10_000
"""Changes that wait for a live query that lags. With more it is read again, and reset."""

LAG_BYTES_MAX = 16 * 1024 * 1024
"""The same in bytes, about."""

LAG_SHOWN_SECONDS = 1.0
"""A live query that lags for longer is counted in the metric and named in `headwater status`."""

RECONCILE_ROWS_MAX = 2_000
"""Rows that are read for comparing in one flush. A streamed query with more is read beside it."""

RECONCILE_STREAMED_ROWS_MAX = 100_000
"""A streamed query with more members is not compared, and counted as skipped."""

RECONCILE_SECONDS = 0.1
"""After this long, a flush begins no further comparison."""

FLUSH_QUESTIONS_SECONDS = 0.5
"""How long questions that travelled together may take one by one once one has failed; the others
are asked later."""

FEED_POSITION_SECONDS = 60.0
"""A change feed is told this often, also without a change, where to resume from."""

FEED_ROOM_SECONDS = 10.0
"""How long a feed that catches up waits for its client. Then others may catch up instead, and it
goes on when the client has taken what it was sent."""

# ------------------------------------------------------------------------ reactive queries

GROUPS_MAX = 100_000
"""Different queries (by function, arguments and user) with subscribers; more are refused."""

QUERY_RETRY_SECONDS = (1.0, 60.0)
"""Between two attempts at a subscribed query that fails: the first, and the longest."""

QUERY_SHARE = 4
"""Queries of a flush that one connection takes, if there are enough of them."""

QUERY_USER_SHARE = 0.25
"""The part of `[query] concurrency` that queries of one user, or of one address without a user,
have at most, but one at least. Further ones wait, and those of others pass them."""

ROW_DELTA_BYTES_MAX = 4 * 1024 * 1024
ROW_DELTA_ROWS_MAX = 10_000
"""Bytes of a result, as JSON, and its rows, that is compared with the one before row by row. A
subscription to a larger one with deltas fails (`result_too_large`)."""

FUNCTION_NAME_CHARS_MAX = 100
"""Characters in the name of a query or mutation. A longer one is refused when it is registered."""

ARGUMENT_DEPTH_MAX = 100
"""Lists and objects within each other in an argument of a query or mutation. Deeper ones are
refused: they could not be told from others."""

ARGUMENT_VALUES_MAX = 10_000
"""Values in the arguments of a query, those in lists and objects too. More are refused: results are
found by comparing all of them. A mutation may have more."""

ARGUMENT_LARGE_INTEGERS_MAX = 100
"""Integers of more than 64 bits in the arguments of a query or mutation. More are refused: they can
be chosen to have the same hash."""

FUNCTION_THREADS = 32
"""Queries and mutations that are not async run in so many threads at once. Further ones wait, and
the wait counts towards their timeout."""

QUERY_ROWS_MAX = 200_000
"""Rows that one statement of a query or mutation may return. With more it fails, and the rest is
not read."""

QUERY_RESULT_BYTES_MAX = 32 * 1024 * 1024
"""Bytes in a result as JSON. A larger one is an error."""

FETCH_BYTES_MAX = 256 * 1024 * 1024
"""Bytes that one statement of a query or mutation may return, by a sample of its rows. With more it
fails, and the rest is not read."""

EVENT_HANDLERS_AT_ONCE = 100
"""Async event handlers at work at the same time. Events beyond are dropped, and the log says so."""

COMMIT_SECONDS = 60.0
"""How long committing a mutation may take. Then its outcome is unknown, and the caller is told."""

MUTATION_USER_SHARE = 0.5
"""The part of `[mutation] connections` that mutations of one user, or of one address without a
user, have at most, but one at least. Further ones wait, and those of others pass them."""

IDEMPOTENCY_KEY_CHARS_MAX = 128
"""Characters of an idempotency key. A longer one is refused."""

REQUEST_RESULT_BYTES_MAX = 1024 * 1024
"""Bytes of a mutation's result, as JSON, that are stored with its idempotency key. Of a larger one
only the key is stored: a repetition does nothing and is answered with an error that says so."""

REQUEST_BEGIN_ATTEMPTS_MAX = 10
"""How often a transaction is begun whose snapshot is older than an attempt with the same
idempotency key; above READ COMMITTED the second sees it. Then the mutation is refused for now."""

REQUEST_LOOKUP_SECONDS = 10.0
"""How long a gateway that lost the database during a commit looks for the outcome. Then it is
unknown; with an idempotency key the caller may repeat the mutation."""

REQUEST_SECONDS_MIN = 2 * CLIENT_MUTATION_SECONDS
"""How long the idempotency key of a mutation is stored at least: twice as long as a client repeats
it. A shorter `[mutation] retention` is refused, and of a user's keys beyond the bound no younger
one is removed."""

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
"""Characters that stand for one `{place}` of a pattern. A name with more does not match."""

TOPIC_NUMBER_MAX = 2**63 - 1
"""The largest whole number in the name of a topic or channel, which a bigint can hold. A name with
a larger one is refused."""

TOPIC_PATTERNS_MAX = 1_000
"""Topics that an application may declare. More are refused."""

SIGNAL_IDS_MAX = 10_000
"""Ids in one signal. `headwater.signal` refuses more."""

TOPIC_ROWS_MAX = 10_000
"""Rows that a topic sends at once. With more its viewers are told a gap, and pull."""

TOPIC_PAUSE_SECONDS = 5.0
"""For this long after rows of a table took too long to be read for topics, no flush reads it for
them: its topics get gaps."""

STREAM_TOPICS_MAX = 100
"""Topics that `GET /v1/stream` is opened with. More are refused; they can be added one by one."""

TEXT_STREAM_CHARS_MAX = 1_000_000
"""Characters in a text stream, which is written whole each time. More are refused."""

TEXT_STREAM_END_SECONDS = 30.0
"""How long the last writing of a text stream is tried while the database is away; then that is
raised."""

CLIENT_TOPIC_ROWS_MAX = 10_000
"""Rows that a client keeps of a topic, and rows that wait for its reader. At the bound the oldest
are forgotten; a reader is told to pull instead."""

# Channels
CHANNEL_PATTERNS_MAX = 1_000
"""Channels that an application may declare. More are refused."""

CHANNEL_MESSAGE_BYTES_MAX = 64 * 1024
"""Bytes of a message on a channel, as JSON. A larger one is refused."""

CHANNEL_STATE_BYTES_MAX = 4 * 1024
"""Bytes of a member's state, as JSON. A larger one is refused."""

CHANNEL_MEMBERS_MAX = 1_000
"""Members that may be present on one channel. More are refused; to follow it is not."""

CHANNEL_HISTORY_MAX = 1_000
"""Messages that a channel may be declared to remember. More are refused."""

CHANNEL_HISTORY_BYTES_MAX = 256 * 1024
"""Bytes of messages that a gateway remembers of one channel. The oldest are forgotten first."""

CHANNEL_RECALL_SECONDS = 2.0
"""How long the first who follows a channel at a gateway waits for what another one remembers of it.
Then the next is asked; if none answers, it begins with what is said from now on."""

BUS_NOTE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of all parts of what one gateway says to others. A longer one is left out."""

BUS_QUEUE_BYTES_MAX = 16 * 1024 * 1024
"""Bytes that wait to be sent to other gateways. Beyond, publishing is refused for now."""

BUS_SECONDS = 5.0
"""How long the database may take to pass a message on. Then whoever publishes is told to try
again."""

# ------------------------------------------------------------------------ the pipeline

SPARK_BATCH_CHANGES = 200_000
"""Changes in one batch of the data source `headwater`, unless `maxRows` says otherwise."""

SPARK_PLANNING_PATIENCE_SECONDS = 30.0
"""For how long the data source tries to reach a database that it has lost, before the stream
fails."""

DELTA_COMMIT_ATTEMPTS_MAX = 10
"""How often a commit to a Delta table is tried that others come before; then it is an error."""

DELTA_HISTORY_COMMITS = 10_000
"""How many commits of a Delta table are looked through for how far it goes. Each commit of ours
says so; only those of others do not. Where a checkpoint is gone and none says, the stream does not
begin."""

LAKE_VACUUM_SECONDS = 86_400.0
"""How often a running pipeline removes files that no longer belong to the lake."""

PIPELINE_LOOK_SECONDS = 0.2
"""How often the streams of the pipeline are looked at."""

PIPELINE_REPORT_SECONDS = 2.0
"""How often a pipeline writes down its progress, where there is any."""

PIPELINE_RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before a failed stream of the pipeline is started again; doubled in
between."""

PIPELINE_STOP_SECONDS = 60.0
"""How long a pipeline that is to stop waits for a batch that is being written. Then the batch is
left, and written by the next start."""

PIPELINE_ERROR_CHARS_MAX = 2_000
"""Characters of an error that the progress of the pipeline keeps."""

LAKE_ROWS_SHOWN = 1_000
"""Rows that `headwater asof` shows as a table. The other formats print them all."""

LAKE_SNAPSHOT_EVENTS = 100_000
"""After so many changes of a table the pipeline keeps another snapshot of it, unless
`[lake] snapshots` says otherwise."""

LAKE_SNAPSHOTS_DENSE_DAYS = 7
"""Of snapshots older than this, only the last one of each day is kept, where it was made from
events: it could be made again."""

ANSWERS_AT_ONCE = 4
"""Questions about the lake that a running pipeline answers at a time. Others wait."""

QUESTION_BYTES_MAX = 1_000_000
"""A longer question to a running pipeline is refused."""

CHILD_RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before a pipeline that ended is started again by `headwater serve
--with-pipeline`; doubled in between."""

CHILD_STOP_SECONDS = 90.0
"""How long a pipeline that was told to stop may take to end. Then it is killed: the next start
repairs what it left."""

SPARK_LOG_BYTES_MAX = 8 * 1024 * 1024
"""Size at which the file with what Spark prints is set aside; the one set aside before is
dropped."""

WARM_SECONDS = 600.0
"""How long making an archive of Spark's classes may take. Then it is given up."""

VIEW_GROUPS_AT_ONCE = 10_000
"""Groups of a view that one statement writes. All those of a batch are one transaction."""

VIEW_BUILD_ROWS = 50_000
"""Rows of a table that are read, aggregated and kept at a time when a view is built."""

ACTIVITY_ROWS_MAX = 200
"""Sessions, and as many views, that a gateway writes down for those who look: the costliest."""

ACTIVITY_DETAIL_CHARS_MAX = 2_000
"""Of what is written down of one of them. The rest is cut off."""

ACTIVITY_VIEWS_SHOWN_MAX = 50
"""Views that are named of one session."""

ADMIN_REQUESTS_AT_ONCE = 4
"""Questions of admins that a gateway puts to the database at a time; others wait."""

ADMIN_SECONDS_MAX = 5.0
"""How long such a question may take. A search in the log says how far it came."""

ADMIN_LOG_ROWS_MAX = 500
"""Changes that one search in the log answers with."""

ADMIN_LOG_BYTES_MAX = 4_000_000
"""Of the rows that one search in the log answers with; the answer says how to go on."""

ADMIN_RATE_ROWS_MAX = 50_000
"""The newest changes, among which those of the last minute are counted for each table."""

ADMIN_TABLES_MAX = 1_000
"""Tables that are listed."""

ADMIN_HISTORY_ROWS_MAX = 500
"""Versions of a record that are told, from the log or from the lake: the newest."""

ADMIN_IMAGE_CHARS_MAX = 50_000
"""The largest row that a search in the log shows. Of larger ones it says that they are."""

ADMIN_LAKE_REQUESTS_AT_ONCE = 1
"""Questions of admins that a gateway puts to the lake at a time; others wait."""

ADMIN_LAKE_SECONDS_MAX = 60.0
"""How long the lake may take to tell a record's history."""
