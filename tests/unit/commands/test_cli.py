"""What holds for every command: `--json`, an example in the help, and errors as JSON.

The commands come from the command line itself, so a command that is added is tested here. Those
that need a database are run in tests/integration/commands; the others are run here, with fakes
of Spark and of the files of a lake.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from headwater.commands import program
from headwater.commands.lake import pipeline, queries, tables, typed_tables
from headwater.commands.lake.typed_tables import TypedTableStatus
from headwater.model import Table
from headwater.pipeline.compaction import tables as compaction
from headwater.pipeline.compaction.tables import Compacted
from headwater.pipeline.jobs import trim
from headwater.pipeline.jobs.trim import Trimmed
from headwater.pipeline.lake import maintenance
from headwater.pipeline.lake.maintenance import Vacuumed
from headwater.pipeline.spark import class_archive
from headwater.pipeline.spark.class_archive import Archive
from headwater.pipeline.tables import choice, requests
from headwater.pipeline.tables.catalog import Catalog
from headwater.pipeline.tables.requests import TableRequest
from tests.support.command_tree import COMMANDS, options_of


class Done(NamedTuple):
    code: int
    out: list[Any]
    """Each line of standard output, which must be JSON."""
    err: list[Any]


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs the program in this process. Every line that it prints must be JSON."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
        with pytest.raises(SystemExit) as ended:
            program.main()
        printed = capsys.readouterr()
        out, err = (
            [json.loads(line) for line in text.splitlines()] for text in (printed.out, printed.err)
        )
        return Done(ended.value.code or 0, out, err)  # type: ignore[arg-type]

    yield run
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("command", COMMANDS)
def test_it_accepts_json_and_has_an_example(command: str) -> None:
    assert "--json" in options_of(command)
    assert f"Example: `headwater {command}" in (COMMANDS[command].help or "").replace(
        'Example: `psql "$(headwater url', "Example: `headwater url"
    )
    for parameter in COMMANDS[command].params:
        assert parameter.help, f"{command}: {parameter.name} is not explained"


def test_every_command_has_one_name() -> None:
    """No command of the lake exists both alone and in a group, as `asof` and `lake asof` would. A
    source has a `status` and a `run` of its own; sources, views and typed tables have a `list`."""
    own = ("source ", "pipeline table ")
    names = [command.split()[-1] for command in COMMANDS if not command.startswith(own)]
    assert sorted(names) == sorted(set(names))
    groups = {command.split()[0] for command in COMMANDS if " " in command}
    assert groups == {"pipeline", "view", "source"}


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_json_too(command: str, run: Run) -> None:
    done = run(*command.split(), "--no-such-option", "--json")
    assert (done.code, done.out) == (2, [])
    (document,) = done.err
    assert document["error"]["code"] == "config"
    assert "No such option: --no-such-option" in document["error"]["message"]
    assert document["error"]["hint"] == f"headwater {command} --help shows what it accepts."


NEEDS_ARGUMENTS = [name for name, each in COMMANDS.items() if any(p.required for p in each.params)]


@pytest.mark.parametrize("command", NEEDS_ARGUMENTS)
def test_a_missing_argument_is_json_too(command: str, run: Run) -> None:
    done = run(*command.split(), "--json")
    assert (done.code, done.out) == (2, [])
    assert "Missing argument" in done.err[0]["error"]["message"]


@pytest.mark.parametrize("arguments", [("nothing",), ("pipeline", "nothing"), ("view",), ()])
def test_a_command_that_does_not_exist(arguments: tuple[str, ...], run: Run) -> None:
    done = run(*arguments, "--json")
    assert (done.code, done.out, done.err[0]["error"]["code"]) == (2, [], "config")


@pytest.mark.parametrize("command", ["uninstall", "view drop", "source remove"])
def test_no_question_is_asked_of_a_program(command: str, run: Run) -> None:
    arguments = ["revenue"] * (" " in command)
    done = run(*command.split(), *arguments, "--json", "--url", "postgresql://nowhere")
    assert (done.code, done.err[0]["error"]["hint"]) == (2, "Confirm with --yes.")


ROWS = pa.table({"id": [1, 2], "note": ["a\nb", None]})
AS_JSON = [{"id": 1, "note": "a\nb"}, {"id": 2, "note": None}]

LISTED: dict[str, Any] = {
    "table": "orders", "state": "ready", "rows": 2, "versions": 3, "position": None, "at": None,
    "folder": "tables/public/orders",
}  # fmt: skip

WITHOUT_A_DATABASE: dict[str, tuple[list[str], list[Any]]] = {
    "asof": (["orders", "2026-11-15"], AS_JSON),
    "history": (["orders", "1"], AS_JSON),
    "audit": ([], AS_JSON),
    "pipeline compact": ([], [{"table": "events", "files_before": 9, "files_after": 1}]),
    "pipeline vacuum": ([], [{"table": "events", "removed": 3}]),
    "pipeline trim": (
        ["--keep", "90 days"],
        [{"since": "2026-08-17", "days": 2, "snapshots": 1, "held": ["orders"]}],
    ),
    "pipeline table list": ([], [[LISTED]]),
    "pipeline table pause": (["orders"], [{"table": "orders", "paused": True, "fill": None}]),
    "pipeline table resume": (["orders"], [{"table": "orders", "paused": False, "fill": None}]),
    "pipeline table backfill": (["orders"], [{"table": "orders", "paused": False, "fill": "f1"}]),
    "pipeline table register": (["orders"], [{"table": "orders", "registered": ["`lake`.`o`"]}]),
    "pipeline warm": ([], [{"archive": "ARCHIVE", "bytes": 7}]),
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fakes of Spark, and of a lake with tables."""
    (tmp_path / "archive").write_text("classes")
    trimmed = Trimmed(date(2026, 8, 17), 2, 1, ("orders",))
    monkeypatch.setattr(queries, "_answer", lambda *_: ROWS)
    monkeypatch.setattr(compaction, "compact", lambda *_: [Compacted("events", 9, 1)])
    monkeypatch.setattr(maintenance, "vacuum", lambda *_: [Vacuumed("events", 3)])
    monkeypatch.setattr(pipeline, "open_lake", lambda *_: nullcontext())
    monkeypatch.setattr(trim, "trim", lambda *_: trimmed)
    monkeypatch.setattr(typed_tables, "typed_tables", lambda *_: [TypedTableStatus(**LISTED)])
    monkeypatch.setattr(choice, "find", lambda *_: Table(1, "public", "orders", (), ("id",)))
    monkeypatch.setattr(requests, "pause", lambda *_, paused: TableRequest(paused))
    monkeypatch.setattr(requests, "backfill", lambda *_: TableRequest(fill="f1"))
    monkeypatch.setattr(
        tables, "open_lake", lambda *_: nullcontext(SimpleNamespace(spark=None, root="lake"))
    )
    monkeypatch.setattr(Catalog, "register", lambda *_: ["`lake`.`o`"])
    monkeypatch.setenv("HEADWATER_LAKE_TABLES_CATALOG", "lake")
    monkeypatch.setattr(class_archive, "warm", lambda *_: Archive(tmp_path / "archive", True))


def test_every_other_command_needs_a_database() -> None:
    without = {command for command in COMMANDS if "--embedded" not in options_of(command)}
    assert without == WITHOUT_A_DATABASE.keys() | {"demo"}  # test_cli.py runs the demo


@pytest.mark.parametrize("command", WITHOUT_A_DATABASE)
def test_it_prints_json_and_nothing_else(
    command: str, run: Run, fakes: None, tmp_path: Path
) -> None:
    arguments, expected = WITHOUT_A_DATABASE[command]
    done = run(*command.split(), *arguments, "--json")
    assert (done.code, done.err) == (0, [])
    text = json.dumps(expected).replace("ARCHIVE", str(tmp_path / "archive"))
    assert done.out == json.loads(text)


@pytest.mark.parametrize("command", ["asof", "history", "audit"])
def test_rows_go_to_a_file(command: str, run: Run, fakes: None, tmp_path: Path) -> None:
    arguments, file = WITHOUT_A_DATABASE[command][0], tmp_path / "rows"
    done = run(command, *arguments, "--json", "--output", str(file))
    assert (done.code, done.out) == (0, [])
    assert [json.loads(line) for line in file.read_text().splitlines()] == AS_JSON
    refused = run(command, *arguments, "--json", "--output", str(tmp_path / "nowhere" / "rows"))
    assert refused.code == 2
    assert "No such file or directory" in refused.err[0]["error"]["message"]
    refused = run(command, *arguments, "--json", "--format", "csv")
    assert (refused.code, refused.err[0]["error"]["hint"]) == (2, "Give one of them.")
