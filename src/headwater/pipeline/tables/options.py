"""What the user set for a typed table: which columns it has, and which of them are masked, hashed
or read as text.

A column that is left out, masked or hashed never reaches the files of the typed tables. So a table
whose options differ from those it was filled with is filled again in an empty folder.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal, TypeAlias

import msgspec

from headwater.errors import ConfigError
from headwater.model import Table

MASKED = "***"
"""What a masked column has instead of a value. NULL stays NULL."""

Treatment: TypeAlias = Literal["exclude", "mask", "hash", "value"]

_STRICTEST: tuple[Treatment, ...] = ("exclude", "mask", "hash", "value")


def strictest(*treatments: Treatment) -> Treatment:
    """Of several treatments the one that shows least."""
    return min(treatments, key=_STRICTEST.index)


class TableOptions(msgspec.Struct, frozen=True):
    """The options of one table, by the names of its columns."""

    include: tuple[str, ...] = ()
    """None for all."""
    exclude: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()
    as_text: tuple[str, ...] = ()
    secret: str = ""
    """Of hashed values."""
    inherited: tuple[tuple[str, Treatment], ...] = ()
    """Columns that may be hidden ones under another name, by `renames`."""

    def named(self, column: str) -> Treatment:
        """What the settings say about a column of this name."""
        if column in self.exclude:
            return "exclude"
        if column in self.mask:
            return "mask"
        return "hash" if column in self.hash else "value"

    def treatment(self, column: str) -> Treatment:
        """How the values of a column are written."""
        found = self.named(column)
        return dict(self.inherited).get(column, found) if found == "value" else found

    def includes(self, column: str, table: Table) -> bool:
        """Whether the typed tables have a column. `include` need not name the columns of the key.

        >>> table = Table(1, "public", "orders", (), ("id",))
        >>> options = TableOptions(include=("note",))
        >>> [options.includes(name, table) for name in ("id", "note", "card")]
        [True, True, False]
        """
        wanted = not self.include or column in self.include or column in table.key
        return wanted and self.treatment(column) != "exclude"

    def hides_key_of(self, table: Table) -> bool:
        """Whether the key must not be readable in `_key`."""
        return any(self.treatment(column) != "value" for column in table.key)

    def check(self, table: Table) -> None:
        """ConfigError where a hash needs a secret, because it could be guessed without one."""
        if not self.secret and (self.hash or self.hides_key_of(table)):
            raise ConfigError(
                f"the typed tables of {table.label} need a secret: a column is hashed, or a column"
                " of the key is not to be readable",
                hint="Set [lake] tables_secret: openssl rand -base64 48",
            )

    def hashed(self, text: str) -> str:
        """The hash of a value as PostgreSQL prints it: the same for equal texts."""
        return hmac.new(self.secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    def fingerprint(self) -> str:
        """Differs where the settings ask for other contents of the files.

        >>> TableOptions().fingerprint() == TableOptions(secret="unused").fingerprint()
        True
        """
        secret = self.secret if self.exclude or self.mask or self.hash else ""
        names = [sorted(set(each)) for each in (self.exclude, self.mask, self.hash, self.as_text)]
        if self.include:
            names.append(sorted(set(self.include)))
        text = msgspec.json.encode([names, hashlib.sha256(secret.encode()).hexdigest()])
        return hashlib.sha256(text).hexdigest()[:16]
