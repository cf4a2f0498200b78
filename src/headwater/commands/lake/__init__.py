"""Commands of the data pipeline and its lake. Queries have short names, because people type them
daily: `asof`, `history`, `audit`, `replay`. Commands that write or maintain the lake are `pipeline
…`, and those for streaming views are `view …`.
"""
