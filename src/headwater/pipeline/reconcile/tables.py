"""Compares tables one after the other, each in a snapshot of the database of its own.

The state of the lake is read up to exactly the position of that snapshot; what the lake does not
have yet is read from the log. So writers that are at work make no difference. A problem of one
table does not end the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from headwater import limits
from headwater.database import connect_blocking, translated
from headwater.errors import ConfigError, ResyncRequired, Unavailable
from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile import comparison, drift
from headwater.pipeline.reconcile.drift import TableOutcome
from headwater.pipeline.reconcile.repair import read_again, repair
from headwater.pipeline.snapshots.chunks import chunks_of
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, database_snapshot
from headwater.pipeline.spark_errors import explain


def reconcile(
    lake: Lake,
    url: str,
    names: Sequence[str | tuple[int, str]] = (),
    *,
    repairing: bool = False,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Iterator[TableOutcome]:
    """Compare tables, or all captured ones, and save each outcome in the lake. A table is given by
    its name, or as `captured` has it: then a failed outcome has that name too. With `repairing`,
    tables that differ, or whose state the lake does not know, are read again."""
    if delta.open_table(lake.events_path) is None:
        raise ConfigError(
            f"there is no lake at {lake.root}", hint="headwater pipeline run creates one."
        )
    given = [(each, each) if isinstance(each, str) else each for each in names]
    for name, label in given or captured(url):
        if is_stopping():
            return
        found = _outcome(lake, url, name, label, repairing)
        drift.save(lake.drift_path, [found])
        yield found


def _outcome(lake: Lake, url: str, name: str | int, label: str, repairing: bool) -> TableOutcome:
    at = datetime.now(UTC)
    found = TableOutcome(at, name if isinstance(name, int) else None, label, "failed")
    try:
        with database_snapshot(url, (name,)) as now:
            found = _identified(found, now, name)
            found = _compared(lake, url, now, name, found)
        if repairing and found.is_open:
            found = _repaired(lake, url, found, (now.position, now.at))
    except Exception as error:  # of Spark or Delta too: none may end the other tables
        text = str(explain(error, "the comparison"))[: limits.PIPELINE_ERROR_CHARS_MAX]
        return msgspec.structs.replace(found, error=text)
    return found


def _identified(found: TableOutcome, now: DatabaseSnapshot, name: str | int) -> TableOutcome:
    table = now.tables[name].table
    return msgspec.structs.replace(
        found, relation=table.oid, table=table.label, position=str(now.position)
    )


def _compared(
    lake: Lake, url: str, now: DatabaseSnapshot, name: str | int, found: TableOutcome
) -> TableOutcome:
    table, source = now.tables[name].table, now.tables[name].source
    try:
        with_log = Lake(lake.root, lake.spark, url=url)
        state = with_log.state_of(table.oid, now.position)
        if len(state.passed) > 1 or state.table.id != table.id:
            raise ResyncRequired(
                f"{table.label} was altered since its last snapshot",
                hint="The pipeline makes another one soon, or: headwater pipeline snapshot"
                f" {table.label}",
            )
    except (ResyncRequired, Unavailable) as error:
        return msgspec.structs.replace(found, outcome="unknown", error=str(error))
    compared = comparison.compare(lake.spark, now.exported, chunks_of(source), state.rows)
    outcome: drift.Outcome = "equal" if compared.is_equal else "drift"
    return msgspec.structs.replace(found, outcome=outcome, **msgspec.structs.asdict(compared))


def _repaired(
    lake: Lake, url: str, found: TableOutcome, moment: tuple[Position, datetime]
) -> TableOutcome:
    assert found.relation is not None
    if found.outcome == "drift":
        repair(lake, url, found.relation, moment)
    else:
        read_again(lake, url, found.relation, moment[0])
    return msgspec.structs.replace(found, repaired=True)


def captured(url: str) -> list[tuple[int, str]]:
    """The captured tables by their relation, and their names."""
    with translated(url), connect_blocking(url, purpose="pipeline") as database:
        found = database.execute(_CAPTURED).fetchall()
        return [(relation, label) for relation, label in found]


_CAPTURED = """
    select t.relid::bigint,
           case n.nspname when 'public' then c.relname else n.nspname || '.' || c.relname end
    from headwater.tables t join pg_class c on c.oid = t.relid
    join pg_namespace n on n.oid = c.relnamespace
    where t.enabled and n.nspname <> 'headwater' order by 2
"""
