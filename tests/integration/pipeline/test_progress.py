"""The progress of streams, as `headwater status` shows it."""

from __future__ import annotations

import msgspec

from headwater.database import connect
from headwater.pipeline.stream import progress
from headwater.pipeline.stream.owner import owner_name
from headwater.pipeline.stream.progress import Reports, StreamProgress
from tests.support.lake.tables import execute

RUNNING = StreamProgress("events", "running", owner_name(), behind_changes=3, behind_seconds=1.0)


async def shown(url: str) -> dict[str, tuple[str, str | None, int | None]]:
    connection = await connect(url, purpose="cli")
    try:
        found = await progress.list_all(connection)
    finally:
        await connection.close()
    return {each.name: (each.state, each.error, each.behind_changes) for each in found}


async def test_a_killed_pipeline_is_not_shown_as_running(url: str) -> None:
    reports = Reports(url)
    failed = msgspec.structs.replace(RUNNING, name="view.a", state="failed", error="why")
    waiting = msgspec.structs.replace(RUNNING, name="view.b", state="waiting", error="lost")
    reports.write([RUNNING, failed, waiting])
    alive = await shown(url)
    assert alive["events"] == ("running", None, 3)
    assert alive["view.a"][:2] == ("failed", "why")
    # The connection ends as that of a killed process does: without a last report.
    execute(
        url,
        "select pg_terminate_backend(pid) from pg_stat_activity where pid in (select pid from"
        f" pg_locks where locktype = 'advisory' and classid = {progress.LEASE_CLASS})"
        " and datname = current_database()",
    )
    ended = await shown(url)
    assert ended["view.a"][:2] == ("failed", "why")
    for name, error in (("events", ""), ("view.b", "; last error: lost")):
        text = f"its pipeline ({owner_name()}) ended without a last report{error}"
        assert ended[name] == ("not running", text, None)
    # Another one takes over.
    reports.close()
    reports.write([msgspec.structs.replace(RUNNING, changes=5)])
    assert (await shown(url))["events"][0] == "running"
    reports.close()
