"""Headwater turns a database into live data."""

__version__ = "0.1.0.dev0"
