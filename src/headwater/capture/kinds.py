"""The kinds of sources: which class reads a URL. Each class is imported when it is needed, because
its driver is an optional dependency.

A URL may contain `${NAME}` in place of a secret. It is stored so, and resolved from the environment
of the process that runs the source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Final
from urllib.parse import quote

import msgspec

from headwater.capture.source import Source, SourceDefinition
from headwater.errors import ConfigError

KINDS: Final[dict[str, str]] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "mongodb": "mongodb",
    "mongodb+srv": "mongodb",
    "sqlite": "sqlite",
}
"""The kind for each scheme of a URL."""

_CLASSES: Final[dict[str, tuple[str, str]]] = {
    "postgresql": ("headwater.capture.postgres.wal.source", "PostgresSource"),
    "mysql": ("headwater.capture.mysql.source", "MysqlSource"),
    "mongodb": ("headwater.capture.mongodb.source", "MongoSource"),
    "sqlite": ("headwater.capture.sqlite.source", "SqliteSource"),
}

ENCODED: Final = (
    "In a user or a password, special characters are percent-encoded: / is %2F, @ is %40, ? is %3F."
    " Or write ${NAME}, whose value may have any characters."
)
"""The hint for a URL that cannot be divided into its parts."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def kind_of(url: str) -> str:
    """The kind of the source that a URL names.

    >>> kind_of("mariadb://headwater@db/shop"), kind_of("sqlite:///var/lib/shop.db")
    ('mysql', 'sqlite')
    """
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in KINDS:
        # Not the URL itself: it may contain a password.
        raise ConfigError(
            "the URL of a source begins with postgresql://, mysql://, mariadb://, mongodb://,"
            " mongodb+srv:// or sqlite:///",
            hint="For example: mysql://headwater:${SHOP_PASSWORD}@db/shop",
        )
    return KINDS[scheme]


def absolute(url: str) -> str:
    """The URL with an absolute path, if it names a file: the process that runs the source may have
    another current folder than the one in which it is declared.

    >>> absolute("sqlite:////var/lib/shop.db"), absolute("sqlite:///${DATA}/shop.db")
    ('sqlite:////var/lib/shop.db', 'sqlite:///${DATA}/shop.db')
    """
    path = url.removeprefix("sqlite:///")
    if path == url or not path or path.startswith(("/", "${", ":memory:")):
        return url
    return f"sqlite:///{quote(os.getcwd())}/{path}"


def has_references(text: str) -> bool:
    """Whether a URL refers to the environment."""
    return _REFERENCE.search(text) is not None


def resolve(url: str, environment: Mapping[str, str] | None = None) -> str:
    """The URL with the values of the environment. A user or password is quoted: it may have
    characters that mean something in a URL.

    >>> resolve("mysql://app:${SHOP_PASSWORD}@${DB}", {"SHOP_PASSWORD": "p@ss", "DB": "db:3307/s"})
    'mysql://app:p%40ss@db:3307/s'
    """
    values = os.environ if environment is None else environment
    host = url.rfind("@")

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1])
        if not found:
            raise ConfigError(
                f"the URL of the source refers to the environment variable {match[1]}, which is"
                " not set",
                hint=f"Set {match[1]} for the process that runs the source.",
            )
        return quote(found, safe="") if match.start() < host else found

    return _REFERENCE.sub(value, url)


def open_source(definition: SourceDefinition) -> Source:
    """The source of a definition. It connects when it is used."""
    url = resolve(definition.url)
    module_name, class_name = _CLASSES[kind_of(url)]
    cls = getattr(import_module(module_name), class_name)
    source: Source = cls(msgspec.structs.replace(definition, url=url))
    return source
