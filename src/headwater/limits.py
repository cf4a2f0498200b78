"""Every bound in one place, with its unit and what happens at it."""

from __future__ import annotations

# Log and reader
LOG_SLOTS = 32
"""Partitions of the log. Retention empties them in turn; see docs/design/001-log.md."""

LOG_PAGE_CHANGES = 50_000
"""Changes read from the log at a time. More new changes than this are read page by page."""

TRANSACTION_PART_CHANGES = 200_000
"""A transaction with more changes is delivered in parts (`Transaction.complete`)."""

POSITION_RUNNING_MAX = 64
"""Running transactions listed in a position. With more, it is rounded down: resuming redelivers."""

NOTIFY_PAYLOAD_BYTES_MAX = 7_000
"""A longer notification leaves out the key and the columns; PostgreSQL's own limit is 8,000."""

IDENTIFIER_BYTES_MAX = 63
"""PostgreSQL's limit on names."""

# Live queries
FILTER_DEPTH_MAX = 16
"""Groups within groups in a filter. A deeper one is refused."""

FILTER_CONDITIONS_MAX = 256
"""Conditions in a filter. A larger one is refused."""

FILTER_VALUES_MAX = 1_000
"""Values in one `in` list. A longer one is refused."""

FILTER_VALUES_TOTAL_MAX = 10_000
"""Values in all `in` lists of a filter together; a statement can bind 65,535. More are refused."""

FILTER_TEXT_CHARS_MAX = 10_000
"""Characters in a text, number or pattern of a filter or cursor. A longer one is refused."""

ORDER_COLUMNS_MAX = 8
"""Order columns a query may name, before the primary key is appended. More are refused."""

WINDOW_ROWS_DEFAULT = 100
"""Rows in a window when the query names no limit."""

WINDOW_ROWS_MAX = 1_000
"""The largest limit a query may name unless its table allows another. A larger one is refused."""

WINDOW_CUSHION_ROWS_MIN = 5
"""Rows kept beyond a window, at least: so many may leave before the database is asked again."""

WINDOW_CUSHION_ROWS_MAX = 100
"""Rows kept beyond a window, at most. Between the two bounds it is a quarter of the window."""

WINDOW_ASK_KEYS_MAX = 2_000
"""Keys put to the database in one question. Where more are in doubt, the window is read anew."""

STREAMED_PAGE_ROWS = 5_000
"""Rows read at a time while a streamed query learns its members."""
