"""How much the generators make, and from which seed.

`make test` takes a little of each, `make fuzz` much. `HEADWATER_FUZZ_<NAME>=…` is another number
for one of them, and `SEED=…` another first seed for all: a failure names the seed it began with.
"""

from __future__ import annotations

import os


def size(name: str, small: int, *, large: int) -> int:
    """How many of something to generate."""
    usual = large if os.environ.get("HEADWATER_FUZZ") else small
    return int(os.environ.get(f"HEADWATER_FUZZ_{name.upper()}") or usual)


def first_seed(usual: int) -> int:
    return int(os.environ.get("SEED") or usual)
