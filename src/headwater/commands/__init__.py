"""The command line: `headwater …`. Each module has the commands of one subject, with their options,
their output and their help; `lake/` has those of the data pipeline and its lake.

`program` is the entry point, `cli` the list of all commands; `options`, `execution` and `output`
are shared. Commands are the top of the tree: only the entry point imports them. The work of a
command, apart from reading options and printing, belongs in the part that it uses.
"""
