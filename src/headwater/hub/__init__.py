"""The flush loop: reads the log, drives `live`, and hands frames to subscribers."""
