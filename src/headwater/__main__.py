"""`python -m headwater` is `headwater`."""

from headwater.commands.program import main

main()
