"""Sources: what brings a database's changes into the log."""
