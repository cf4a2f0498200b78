"""Capture from the write-ahead log for tables in Headwater's own database: `capture="wal"`.

`runner` reads the slot and confirms it, `appender` writes transactions to the log, `images` are the
rows in them, `upkeep` sees to it that all changes are sent, and `process` runs all of it beside a
gateway. Databases elsewhere are sources, which belong in the folder above.
"""

from __future__ import annotations

from headwater.capture.postgres.wal.append.runner import WalCapture

__all__ = ["WalCapture"]
