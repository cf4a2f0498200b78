"""What is imported from `headwater`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import headwater


@pytest.mark.parametrize("name", headwater.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(headwater, name) is not None
    assert name in dir(headwater)


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Hub'"):
        headwater.Hub  # type: ignore[attr-defined]  # noqa: B018


def test_names_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, headwater\n"
        "assert not {'pyspark', 'pyarrow', 'psycopg', 'starlette'} & set(sys.modules)\n"
        "from headwater import Position, spark_session\n"
        "assert 'pyspark' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_the_packages_of_the_pipeline() -> None:
    program = (
        "import sys, headwater; sys.modules['pyarrow'] = None\n"
        "from headwater.pipeline import packages; packages.missing = lambda: ['pyarrow']\n"
        "from headwater import *\n"
        "assert 'Lake' not in {*globals(), *dir(headwater)}\n"
        "try: from headwater import Lake\n"
        "except ConfigError as error: print(error, error.hint, sep=': ')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    expected = "the pipeline needs pyarrow, which is not installed: pip install 'headwater[spark]'"
    assert run.stdout.decode().strip() == expected
