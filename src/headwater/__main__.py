"""`python -m headwater` is `headwater`."""

from headwater.command import main

main()
