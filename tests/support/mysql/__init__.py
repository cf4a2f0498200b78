"""Reading a MySQL source in tests, and random histories to read."""
