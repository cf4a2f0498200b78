"""What the user set for a typed table: which columns it has, and which of them are masked, hashed
or read as text.

A column that is left out, masked or hashed never reaches the files of the typed tables. So a table
whose options differ from those it was filled with is filled again in an empty folder.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from headwater.errors import ConfigError
from headwater.model import Table

MASKED = "***"
"""What a masked column has instead of a value. NULL stays NULL."""


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

    def includes(self, column: str, table: Table) -> bool:
        """Whether the typed tables have a column. `include` need not name the columns of the key.

        >>> table = Table(1, "public", "orders", (), ("id",))
        >>> options = TableOptions(include=("note",))
        >>> [options.includes(name, table) for name in ("id", "note", "card")]
        [True, True, False]
        """
        wanted = not self.include or column in self.include or column in table.key
        return wanted and column not in self.exclude

    def hides_key_of(self, table: Table) -> bool:
        """Whether the key must not be readable in `_key`."""
        return bool({*self.exclude, *self.mask, *self.hash}.intersection(table.key))

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
        """Differs where the files would have other contents.

        >>> TableOptions().fingerprint() == TableOptions(secret="unused").fingerprint()
        True
        """
        secret = self.secret if self.exclude or self.mask or self.hash else ""
        names = [sorted(set(each)) for each in (self.exclude, self.mask, self.hash, self.as_text)]
        if self.include:
            names.append(sorted(set(self.include)))
        text = msgspec.json.encode([names, hashlib.sha256(secret.encode()).hexdigest()])
        return hashlib.sha256(text).hexdigest()[:16]
