"""Following a result from afar."""
