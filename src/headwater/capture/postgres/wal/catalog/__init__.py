"""What a source's catalog says about its tables and types, and what is made in it: the publication.

Nothing here reads the log. `describe` reads tables, `mirror_types` maps types, `filtering` writes
filters, `publication` makes the publication, and `checks` lists what is wrong.
"""
