"""Spark itself: its Java, its session, its log file, and how other programs use the Spark of a
running pipeline.

Nothing here knows what the pipeline computes.
"""
