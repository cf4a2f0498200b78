"""Writes columns of values as PostgreSQL's text of an array. This is how many rows travel in one
statement, so it is written for speed: a few passes over one long string instead of one for each
value.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from headwater.errors import SourceRefused

_NULL = f"null-{secrets.token_hex(16)}"
"""Stands for NULL until the end. It cannot be guessed, so no value equals it."""


def array_text(values: Sequence[str | None]) -> str:
    r"""The text of an array with these elements.

    >>> print(array_text(["a", None, 'say "x"', "\\", ""]))
    {"a",NULL,"say \"x\"","\\",""}
    >>> array_text([])
    '{}'
    """
    if not values:
        return "{}"
    # PostgreSQL's texts have no NUL character, so it separates the values.
    try:
        joined = "\0".join(values)  # type: ignore[arg-type]
        has_null = False
    except TypeError:
        joined = "\0".join([_NULL if value is None else value for value in values])
        has_null = True
    if joined.count("\0") != len(values) - 1:
        raise SourceRefused(
            "a value contains the character NUL, which no text of PostgreSQL can hold",
            hint="Leave the column out (exclude), or remove the character at the source.",
        )
    if "\\" in joined:
        joined = joined.replace("\\", "\\\\")
    if '"' in joined:
        joined = joined.replace('"', '\\"')
    text = '{"' + joined.replace("\0", '","') + '"}'
    return text.replace(f'"{_NULL}"', "NULL") if has_null else text
