"""BSON values as texts that PostgreSQL reads: whole documents, single values of a declared type,
keys and dates.

Everything here is pure. Which value becomes which column is decided in `columns`.
"""
