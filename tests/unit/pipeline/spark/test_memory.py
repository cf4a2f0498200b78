"""The heap of Spark's Java, on machines and in containers made of files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater import limits
from headwater.pipeline.spark import memory

MB = 2**20
GB = 2**30
LEAST, MOST = limits.SPARK_HEAP_BYTES


class Machine:
    """A machine with this memory, whose control groups are files in a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._groups = folder / "cgroup"
        self._own = folder / "own"
        self._patch = patch
        patch.setattr(memory, "_CGROUPS", self._groups)
        patch.setattr(memory, "_OWN_GROUPS", self._own)
        self.memory(16 * GB)

    def memory(self, size: int) -> None:
        found = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": size // 4096}
        self._patch.setattr(memory, "os", SimpleNamespace(sysconf=found.__getitem__))

    def process(self, *groups: str) -> None:
        """The groups of this process, as `/proc/self/cgroup` has them."""
        self._own.write_text("".join(f"{each}\n" for each in groups))

    def limit(self, group: str, limit: int | str) -> None:
        path = self._groups / group
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("size", "heap"),
    [(512 * MB, LEAST), (2 * GB, LEAST), (4 * GB, GB), (16 * GB, 4 * GB), (32 * GB, 8 * GB),
     (1024 * GB, MOST)],
)  # fmt: skip
def test_a_quarter_of_the_machine_within_bounds(machine: Machine, size: int, heap: int) -> None:
    machine.memory(size)
    assert memory.heap_bytes() == heap
    assert memory.heap_setting() == f"{heap // MB}m"


@pytest.mark.parametrize(
    ("chosen", "setting"),
    [(1, "512m"), (600 * MB, "600m"), (3 * GB + 1, "3072m"), (100 * GB, "102400m")],
)
def test_the_setting_comes_first(machine: Machine, chosen: int, setting: str) -> None:
    """It may be more than the share and than the machine has, but no less than Spark accepts."""
    machine.process("0::/")
    machine.limit("memory.max", GB)
    assert memory.heap_setting(chosen) == setting


def test_without_control_groups(machine: Machine) -> None:
    assert memory.machine_bytes() == 16 * GB
    machine.process("0::/user.slice")  # of which no folder exists
    assert memory.machine_bytes() == 16 * GB


V2 = "0::/system.slice/shop.service"
V1 = ("12:cpu,cpuacct:/", "4:memory:/docker/abc", "1:name=systemd:/docker/abc", "0::/")


@pytest.mark.parametrize(
    ("groups", "limits_of", "found"),
    [
        # Version 2: the group of the process, and those around it.
        ([V2], {"system.slice/shop.service/memory.max": 8 * GB}, 8 * GB),
        ([V2], {"system.slice/memory.max": 6 * GB}, 6 * GB),
        ([V2], {"memory.max": 5 * GB}, 5 * GB),
        (
            [V2],
            {
                "system.slice/shop.service/memory.max": 8 * GB,
                "system.slice/memory.max": 3 * GB,
                "memory.max": 7 * GB,
            },
            3 * GB,
        ),
        ([V2], {"system.slice/shop.service/memory.max": "max", "memory.max": "max"}, 16 * GB),
        ([V2], {"system.slice/shop.service/memory.max": "max", "memory.max": 2 * GB}, 2 * GB),
        ([V2], {"system.slice/shop.service/memory.max": 99 * GB}, 16 * GB),
        ([V2], {"system.slice/other.service/memory.max": GB}, 16 * GB),
        (["0::/../other.slice"], {"memory.max": 4 * GB}, 4 * GB),
        # A name with the sign that separates.
        (["0::/a:b"], {"a:b/memory.max": 4 * GB}, 4 * GB),
        # Version 1: a folder for each controller. Without a limit, it has a very large number.
        (V1, {"memory/docker/abc/memory.limit_in_bytes": 6 * GB}, 6 * GB),
        (V1, {"memory/memory.limit_in_bytes": 4 * GB}, 4 * GB),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": 9223372036854771712}, 16 * GB),
        (V1, {"cpu,cpuacct/memory.limit_in_bytes": GB}, 16 * GB),
        (["4:hugetlb,memory:/a"], {"memory/a/memory.limit_in_bytes": 3 * GB}, 3 * GB),
        # Both at once: the smaller one.
        (V1, {"memory/docker/abc/memory.limit_in_bytes": 6 * GB, "memory.max": 5 * GB}, 5 * GB),
    ],
)
def test_the_least_limit_of_the_groups_counts(
    machine: Machine, groups: list[str], limits_of: dict[str, int | str], found: int
) -> None:
    machine.process(*groups)
    for name, limit in limits_of.items():
        machine.limit(name, limit)
    assert memory.machine_bytes() == found
    assert memory.heap_bytes() == max(LEAST, min(found // 4, MOST))


def test_this_machine() -> None:
    assert memory.machine_bytes() > 0
    assert LEAST <= memory.heap_bytes() <= MOST
