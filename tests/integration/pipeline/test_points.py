"""Single rows of the past without Spark, against copies that PostgreSQL made at the time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headwater import limits
from headwater.errors import ResyncRequired
from headwater.pipeline.lake.moments import Moment
from headwater.pipeline.lake.schemas import split
from headwater.pipeline.reading import choice, points
from headwater.pipeline.reading.points import PointReader
from headwater.pipeline.reading.requests import AsOfRequest, RowHistoryRequest
from tests.support.generators.row_histories import KeyedTable, RowHistory, Truth
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.truth import opened, position, take_in, take_snapshot

SEED = first_seed(1900)


@pytest.mark.parametrize("seed", range(SEED, SEED + size("points", 2, large=300)))
def test_rows_are_as_they_were(url: str, tmp_path: Path, seed: int) -> None:
    """Each row that is answered is the one that PostgreSQL had; the others are refused. The newest
    changes are in the log only."""
    with opened(url) as database, opened(url) as other:
        history = RowHistory(seed, database, other, url, str(tmp_path / "lake"))
        history.play(20)
    with points.opened(str(tmp_path / "lake"), url) as reader:
        assert reader.has_log
        sampled = history.rng.sample(history.truths, 12)
        checked = [check_state(reader, truth, history) for truth in sampled]
        assert any(checked), "every moment was refused"
        for truth in sampled * 2:
            check_filter(reader, truth, history)
        for table in history.tables:
            quiet = [t for t in history.truths if t.quiet and t.table == table]
            for key in {history.a_key(table) for _ in range(6)}:
                check_history(reader, table, key, quiet)
    # Without snapshots, rows are known by their own changes.
    shutil.rmtree(tmp_path / "lake" / "snapshots", ignore_errors=True)
    with points.opened(str(tmp_path / "lake"), url) as reader:
        for truth in sampled * 3:
            check_filter(reader, truth, history)


COMMAND = """
import json, sys
from headwater.commands.program import main

sys.argv = ["headwater", *json.loads(sys.argv[1])]
try:
    main()
finally:
    print(*sorted({"pandas", "pyspark", "py4j"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def notes(url: str, tmp_path: Path) -> list[str]:
    """Options of commands that read a lake with two notes."""
    with opened(url) as database:
        database.execute("create table notes (id int primary key, note text)")
        database.execute("select headwater.enable_reactivity('notes')")
        database.execute("insert into notes values (1, 'a')")
        take_in(str(tmp_path), url)
        database.execute("insert into notes values (2, 'b'), (3, 'c')")
    return ["--lake", str(tmp_path), "--url", url, "--json"]


def run(*arguments: str) -> tuple[list[dict[str, Any]], str]:
    """What a command printed, and which large packages it imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.strip()


def test_commands_start_no_spark(notes: list[str]) -> None:
    far = "2100-01-01"
    second, third = {"id": 2, "note": "b"}, {"id": 3, "note": "c"}
    assert run("asof", "notes", far, "--key", "2", *notes) == ([second], "")
    assert run("asof", "notes", far, "--where", "id in 3, 2", *notes) == ([third, second], "")
    versions, imported = run("history", "notes", "2", *notes)
    assert ([version["row"] for version in versions], imported) == ([second], "")


@pytest.mark.parametrize(
    ("arguments", "engine", "reason", "reads"),
    [
        (["history", "notes", "2"], "datafusion", "single rows", ["events"]),
        (["asof", "notes", "2100-01-01", "--key", "2"], "datafusion", "single rows", ["events"]),
        (["asof", "notes", "2100-01-01", "--where", "id = 2"], "datafusion", "single", ["events"]),
        (["asof", "notes", "2100-01-01"], "datafusion", "a small table", ["events"]),
        (["asof", "notes", "2100-01-01", "--where", "id > 2"], "spark", "whole key", []),
    ],
)
def test_the_choice_is_explained(
    notes: list[str], arguments: list[str], engine: str, reason: str, reads: list[str]
) -> None:
    ((plan,), imported) = run(*arguments, "--explain", *notes)
    assert (plan["engine"], [read["table"] for read in plan["reads"]]) == (engine, reads)
    assert reason in plan["reason"]
    assert (plan["by"], imported) == ("this command", "")
    # The file of the lake has no change of this row: it is skipped.
    files = 1 if reason == "a small table" else 0
    assert [(read["files"], read["of_files"]) for read in plan["reads"]] == [
        (files, 1) for _ in reads
    ]


def test_large_reads_are_left_to_spark(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LAKE_POINT_BYTES_MAX", 100)
    monkeypatch.setattr(limits, "LAKE_SMALL_TABLE_BYTES", 100)
    far = datetime(2100, 1, 1, tzinfo=UTC)
    with points.opened(notes[1], notes[3]) as reader:
        for request in (
            RowHistoryRequest("notes", ("1",)),
            AsOfRequest("notes", far, key=("1",)),
            AsOfRequest("notes", far),
        ):
            chosen = choice.plan(reader, request)
            assert (chosen.engine, chosen.log) == ("spark", True)
            assert "more than the 0 KiB" in chosen.reason


def test_many_changes_in_the_log_are_left_to_spark(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = datetime(2100, 1, 1, tzinfo=UTC)
    everything, one = AsOfRequest("notes", far), AsOfRequest("notes", far, key=("1",))
    with points.opened(notes[1], notes[3]) as reader:
        assert reader.log is not None
        relation = reader.resolver.relation(reader.resolver.shapes("notes"), "notes", far)
        changes, size = reader.log.measured(relation, 10)
        assert (changes, size > 0) == (2, True)
        assert reader.log.measured(relation, 1)[0] == 1
        assert reader.log.measured(relation + 1, 10) == (0, 0)
        chosen = choice.plan(reader, everything)
        assert chosen.engine == "datafusion"
        monkeypatch.setattr(limits, "LAKE_SMALL_TABLE_BYTES", chosen.bytes + size - 1)
        assert choice.plan(reader, everything).engine == "spark"
        monkeypatch.setattr(limits, "LAKE_SMALL_TABLE_BYTES", chosen.bytes + size)
        assert choice.plan(reader, everything).engine == "datafusion"
        monkeypatch.setattr(limits, "LAKE_SMALL_LOG_CHANGES", 1)
        assert "more than 1 changes" in choice.plan(reader, everything).reason
        assert choice.plan(reader, one).engine == "datafusion"


@pytest.mark.parametrize(
    ("where", "as_text"),
    [("note = a", ()), ("id > 1", ("id",)), ("extra like '%x%'", ("extra",)), ("extra = x", ())],
)
def test_filters_of_other_shapes_are_left_to_spark(
    url: str, notes: list[str], where: str, as_text: tuple[str, ...]
) -> None:
    """It judges them by the shape of the moment: a column was dropped since, has another type now,
    or is read as text."""
    with opened(url) as database:
        database.execute("alter table notes drop note, add extra jsonb")
        database.execute("insert into notes values (4)")
    request = AsOfRequest("notes", None, "a-5:5:", where=(where,), as_text=as_text)
    with points.opened(notes[1], notes[3]) as reader:
        assert choice.plan(reader, request).engine == "spark"


def test_each_row_is_read_by_its_own_shape(url: str, tmp_path: Path) -> None:
    """Without a snapshot, rows are known by their own changes: some from before a column got
    another name, some from after it, and from after it got its old name again."""
    with opened(url) as database:
        database.execute("create table notes (id int primary key, note text)")
        database.execute("select headwater.enable_reactivity('notes')")
        database.execute("insert into notes values (1, 'a')")
        database.execute("alter table notes rename note to remark")
        database.execute("insert into notes values (2, 'b')")
        renamed = position(database)
        database.execute("alter table notes rename remark to note")
        database.execute("insert into notes values (3, 'c')")
        back = position(database)
        take_in(str(tmp_path), url)
    with points.opened(str(tmp_path), url) as reader:
        for keys in ([1, 2], [2, 1]):
            found = reader.as_of("notes", renamed, keys)
            assert found.schema.names == ["id", "remark"]
            assert found.rows == [{"id": key, "remark": " ab"[key]} for key in keys]
        for keys in ([1], [1, 2, 3], [3, 2, 1]):
            found = reader.as_of("notes", back, keys, limit=2)
            assert found.schema.names == ["id", "note"]
            assert found.rows == [{"id": key, "note": " abc"[key]} for key in keys[:2]]


def test_the_first_and_the_last_moment(url: str, notes: list[str]) -> None:
    """With a snapshot: changes are applied to it, or undone."""
    with opened(url) as database:
        (oid,) = database.execute("select 'notes'::regclass::int8").fetchone() or (0,)
        take_snapshot(notes[1], url, oid)
    with points.opened(notes[1], notes[3]) as reader:
        for at in (datetime.max, datetime.fromisoformat("9999-12-31T23:59:59-05:00")):
            assert len(reader.as_of("notes", at).rows) == 3
            assert reader.as_of("notes", at, [2]).rows == [{"id": 2, "note": "b"}]
            assert choice.plan(reader, AsOfRequest("notes", at)).engine == "datafusion"
        for at in (datetime.min, datetime.fromisoformat("0001-01-01T00:00:00+05:00")):
            with pytest.raises(ResyncRequired, match="is not known"):
                reader.as_of("notes", at)


def check_state(reader: PointReader, truth: Truth, history: RowHistory) -> bool:
    """Whether the moment is answered, and not refused."""
    table, known = truth.table, list(truth.rows)
    keys = [*history.rng.sample(known, min(1, len(known))), history.a_key(table)]
    moments: list[Moment] = [truth.position, *([truth.at] if truth.quiet else [])]
    for when in moments:
        for key in keys:
            try:
                found = reader.as_of(table.name, when, [key]).rows
            except ResyncRequired:
                return False
            assert found == [truth.rows[k] for k in known if k == key], (table, when, key)
    return True


def check_filter(reader: PointReader, truth: Truth, history: RowHistory) -> None:
    """A filter over the key finds the rows that PostgreSQL had, or is refused, or for Spark."""
    table, where = truth.table, history.a_filter(truth.table)
    request = AsOfRequest(table.name, None, str(truth.position), where=where.conditions)
    chosen = choice.plan(reader, request)
    if chosen.engine == "datafusion":
        with suppress(ResyncRequired):
            found = choice.run(reader, request, chosen).rows
            expected = [row for key, row in truth.rows.items() if where.matches(key)]
            assert sorted(found, key=repr) == sorted(expected, key=repr), (table, where)


def check_history(
    reader: PointReader, table: KeyedTable, key: tuple[Any, ...], truths: list[Truth]
) -> None:
    """At each moment, the version that was valid has the row."""
    versions = reader.history(table.name, key).rows
    for truth in truths:
        valid = [
            version
            for version in versions
            if (version["valid_from"] is None or version["valid_from"] <= truth.at)
            and (version["valid_to"] is None or truth.at < version["valid_to"])
            and version["row"] is not None
        ]
        expected = truth.rows.get(key)
        assert len(valid) == (expected is not None), (table, key, truth.at)
        for version in valid:
            # It has the names that the columns had when it was written.
            row, names = version["row"], split(version["after"])
            known = {name: value for name, value in (expected or {}).items() if name in names}
            assert {name: row[name] for name in known} == known, (table, key, truth.at)
