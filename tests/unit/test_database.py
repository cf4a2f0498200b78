"""Driver errors become ours, with the way out."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from headwater.database import translate
from headwater.errors import ConfigError, DatabaseError, NotInstalled, PermissionMissing

TRANSLATED: list[tuple[psycopg.Error, type[Exception], str]] = [
    (errors.InsufficientPrivilege("denied"), PermissionMissing, "doctor"),
    (errors.UndefinedFunction("no function headwater.x()"), NotInstalled, "headwater init"),
    (psycopg.OperationalError("connection refused"), DatabaseError, "server runs"),
    (psycopg.ProgrammingError("missing ="), ConfigError, "postgresql://"),
]


@pytest.mark.parametrize(("error", "kind", "hint"), TRANSLATED)
def test_translate(error: psycopg.Error, kind: type[Exception], hint: str) -> None:
    found = translate(error, "postgresql://ann:secret@db/shop")
    assert type(found) is kind
    assert hint in (found.hint or "")
    assert "secret" not in str(found)


def test_another_undefined_table_is_not_ours() -> None:
    assert type(translate(errors.UndefinedTable("no relation x"))) is DatabaseError
