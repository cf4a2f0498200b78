"""PostgreSQL through triggers: the SQL lives in `sql/`, one idea a file, applied by `schema`."""
