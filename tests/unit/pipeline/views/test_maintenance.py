"""How far the build of a view is, and how long it takes yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headwater import limits
from headwater.pipeline.snapshots import reader
from headwater.pipeline.snapshots.chunks import RowSource, StoredRelation
from headwater.pipeline.views import maintenance, weighted
from headwater.pipeline.views.maintenance import BuildProgress, _Build
from headwater.pipeline.views.plans import Weighted
from headwater.pipeline.views.results import ViewResult


@pytest.mark.parametrize(
    ("done", "total", "seconds", "left"),
    [
        (0, 100, 5.0, None),  # nothing is known before the first part
        (0, 0, 1.0, None),
        (1, 100, 1.0, 99.0),
        (25, 100, 10.0, 30.0),
        (50, 100, 10.0, 10.0),
        (99, 100, 99.0, 1.0),
        (100, 100, 60.0, 0.0),
    ],
)
def test_the_rest_takes_as_long_as_the_part_before(
    done: int, total: int, seconds: float, left: float | None
) -> None:
    assert BuildProgress(done, total, seconds).seconds_left == left


class Building:
    """A build over tables of ten blocks each, which reads 100 bytes a second."""

    def __init__(
        self, sizes: dict[str, int], partners: dict[str, frozenset[str]], patch: pytest.MonkeyPatch
    ) -> None:
        self.seconds = 50.0
        self.progress: list[BuildProgress] = []
        self.read: list[str] = []
        patch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        patch.setattr(reader, "frame", self._frame)
        patch.setattr(weighted, "present", lambda images, source: images)
        patch.setattr(limits, "VIEW_BUILD_CHUNK_BYTES", 1)  # a block is a chunk
        patch.setattr(limits, "VIEW_BUILD_CHUNKS", 4)
        tables = {
            name: SimpleNamespace(
                source=RowSource(
                    oid, 1, "image", ("id",), (), (StoredRelation(oid, name, 7, 10, size),)
                )
            )
            for oid, (name, size) in enumerate(sizes.items(), 1)
        }
        view = SimpleNamespace(tables=tuple((name, name) for name in sizes))
        combined = Weighted(partners, ()) if partners else None
        self._build = _Build(
            SimpleNamespace(view=view, building=None),  # type: ignore[arg-type]
            SimpleNamespace(tables=tables, exported=None),  # type: ignore[arg-type]
            SimpleNamespace(result=ViewResult((), (), combined)),  # type: ignore[arg-type]
            {name: SimpleNamespace(empty=lambda *_: "empty") for name in sizes},  # type: ignore[misc]
        )
        patch.setattr(self._build, "_whole", self._whole)

    def _frame(self, spark: object, exported: object, portion: Any) -> int:
        return sum(chunk.bytes for chunk in portion)

    @contextmanager
    def _whole(self, spark: object, tables: dict[str, str]) -> Iterator[dict[str, str]]:
        yield dict.fromkeys(tables, "whole")

    def run(self) -> None:
        self._note()
        for frames in self._build._portions(None):  # type: ignore[arg-type]
            self._note()  # the progress while the portion is computed
            (portion,) = (each for each in frames.values() if isinstance(each, int))
            self.read += [name for name, each in frames.items() if each == portion]
            self.seconds += portion / 100
        self._note()

    def _note(self) -> None:
        building = self._build._owner.building
        if building is not None:
            self.progress.append(building)


@pytest.mark.parametrize(
    ("sizes", "partners", "read"),
    [
        ({"a": 1000}, {}, {"a": 1000}),
        # Of a join, one table is read in portions: the others are read whole, each time.
        (
            {"a": 1000, "b": 9000},
            {"a": frozenset("b"), "b": frozenset("a")},
            {"a": 1000},
        ),
        # Of a union, each.
        ({"a": 1000, "b": 500, "c": 3000}, {}, {"a": 1000, "b": 500, "c": 3000}),
    ],
)
def test_the_progress_of_a_build(
    sizes: dict[str, int],
    partners: dict[str, frozenset[str]],
    read: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    building, total = Building(sizes, partners, monkeypatch), sum(read.values())
    building.run()
    first, last = building.progress[0], building.progress[-1]
    assert (first.done, first.total, first.seconds_left) == (0, total, None)
    assert (last.done, last.total, last.seconds_left) == (total, total, 0)
    assert dict.fromkeys(building.read) == dict.fromkeys(read)
    assert len(building.progress) > len(building.read) >= 3 * len(read)
    for each in building.progress[1:]:
        assert each.seconds == pytest.approx(each.done / 100)
        if each.done:
            assert each.seconds_left == pytest.approx((total - each.done) / 100)
