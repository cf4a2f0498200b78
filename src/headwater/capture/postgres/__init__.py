"""Capture with triggers in PostgreSQL.

`schema` installs and upgrades the SQL in `sql/`, `triggers` enables and disables tables,
`functions` has who may execute which function, `doctor` checks a database.
"""
