"""The log: reading it in commit-safe order, following it, cursors, retention."""
