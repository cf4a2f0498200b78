"""The conditions exist once. What they select is tested in tests/property/test_between.py, how
PostgreSQL finds it in tests/integration/log/test_between.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwater

SOURCE = Path(headwater.__file__).parent


@pytest.mark.parametrize(
    ("text", "home"),
    [("pg_visible_in_snapshot", "log/between.py"), ("headwater.log_floor", "log/reach.py")],
)
def test_only_one_module_decides(text: str, home: str) -> None:
    found = [path for path in SOURCE.rglob("*.py") if text in path.read_text()]
    assert [str(path.relative_to(SOURCE)) for path in found] == [home]
