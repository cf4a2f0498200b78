"""What a view has in PostgreSQL, and how it is written: its record, the tables of its groups or its
rows, the table that users read, and the staging tables of Spark's tasks. What is written is decided
in the folder above.
"""
