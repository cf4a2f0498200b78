"""Which files a pipeline reads, makes and removes, by owner and mode."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.errors import ConfigError, PipelineError
from headwater.pipeline import permissions
from headwater.pipeline.spark import shared_session
from headwater.pipeline.spark.doctor import examine
from headwater.pipeline.spark.shared_session import FILE, PipelineService
from headwater.pipeline.stream.checkpoints import LakeLock
from tests.support.databases import passable_folder

ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not ROOT, reason="gives files to another user")
OTHER_USER = 65534


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def answered(tmp_path: Path) -> Iterator[PipelineService]:
    """A socket that answers, as a pipeline of this user has it."""
    folder = tmp_path / "headwater-socket"
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "pipeline"))
        listening.listen()
        yield PipelineService(1, str(folder / "pipeline"), "sc://localhost:15002", "token")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[PipelineService]:
    with answered(tmp_path) as found:
        yield found


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    path = tmp_path / "lake"
    with LakeLock(str(path)):
        pass
    return path


def plant(lake: Path, service: PipelineService) -> Path:
    path = lake / FILE
    path.write_text(json.dumps({n: getattr(service, n) for n in service.__struct_fields__}))
    return path


def test_a_lake_is_readable_by_its_owner_only(lake: Path) -> None:
    assert (mode(lake), mode(lake / "_lock")) == (0o700, 0o600)
    with LakeLock(str(lake / "a" / "b")):
        assert (mode(lake / "a"), mode(lake / "a" / "b")) == (0o700, 0o700)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others can reach: no folder above is closed to them."""
    with passable_folder() as folder:
        yield folder / "shared"


def test_a_folder_that_was_there_keeps_its_mode_and_doctor_says_so(shared: Path) -> None:
    for given, who in ((0o755, "every user of this machine"), (0o750, "the group "), (0o700, "")):
        shared.mkdir(exist_ok=True)
        shared.chmod(given)
        with LakeLock(str(shared)):
            assert mode(shared) == given
        (found,) = (each for each in examine(str(shared)) if each.topic == "lake")
        assert (found.level == "warn", f"can be read by {who}" in found.detail) == (
            (True, True) if who else (False, False)
        )
        (shared / "_lock").unlink()


def test_files_are_created_with_the_permissions_of_the_lake(lake: Path) -> None:
    for given, file in ((0o700, 0o600), (0o750, 0o640), (0o755, 0o644)):
        lake.chmod(given)
        with permissions.umask_of(lake):
            (lake / "x").write_text("")
        assert mode(lake / "x") == file
        (lake / "x").unlink()
    assert os.umask(0o022) == 0o022


def test_the_lock_follows_no_link(lake: Path, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.write_text("dear")
    (lake / "_lock").unlink()
    (lake / "_lock").symlink_to(diary)
    with pytest.raises(PipelineError, match="_lock"), LakeLock(str(lake)):
        pass
    assert diary.read_text() == "dear"


def test_a_service_of_this_user_is_found(lake: Path, service: PipelineService) -> None:
    with shared_session.announced(str(lake), service):
        assert mode(lake / FILE) == 0o600
        assert shared_session.find(str(lake)) == service
        assert service.remote == "sc://localhost:15002/;token=token"
    assert shared_session.find(str(lake)) is None


def test_a_file_that_others_can_write_is_not_trusted(lake: Path, service: PipelineService) -> None:
    path = plant(lake, service)
    assert shared_session.find(str(lake)) == service
    path.chmod(0o664)
    assert shared_session.find(str(lake)) is None
    path.chmod(0o600)
    lake.chmod(0o770)
    assert shared_session.find(str(lake)) is None
    lake.chmod(0o1777)  # as /tmp: files can be replaced by their owner only
    assert shared_session.find(str(lake)) == service


def test_neither_a_link_nor_a_long_file_is_trusted(
    lake: Path, service: PipelineService, tmp_path: Path
) -> None:
    path = plant(lake, service)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert shared_session.find(str(lake)) is None
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert shared_session.find(str(lake)) == service
    path.write_text(path.read_text() + " " * 10_000)
    assert shared_session.find(str(lake)) is None
    path.unlink()
    os.mkfifo(path)
    assert shared_session.find(str(lake)) is None


@only_root
def test_a_file_or_socket_of_another_user_is_not_trusted(
    lake: Path, service: PipelineService
) -> None:
    path = plant(lake, service)
    os.chown(path, OTHER_USER, OTHER_USER)
    assert shared_session.find(str(lake)) is None
    os.chown(path, 0, 0)
    os.chown(service.socket, OTHER_USER, OTHER_USER)
    assert shared_session.find(str(lake)) is None
    os.chown(service.socket, 0, 0)
    os.chown(Path(service.socket).parent, OTHER_USER, OTHER_USER)
    assert shared_session.find(str(lake)) is None


def test_a_socket_that_others_may_reach_is_not_trusted(
    lake: Path, service: PipelineService
) -> None:
    plant(lake, service)
    Path(service.socket).parent.chmod(0o755)
    assert shared_session.find(str(lake)) is None


@pytest.mark.parametrize(
    "address",
    ["sc://evil.example:15002", "sc://localhost:15002/;x=", "sc://localhost:1@evil.example:2", ""],
)
def test_an_address_elsewhere_is_not_used(address: str) -> None:
    assert PipelineService(1, "/nowhere", address, "token").remote is None


def test_no_more_is_removed_than_a_socket_and_its_folder(lake: Path, tmp_path: Path) -> None:
    with answered(tmp_path) as left:
        pass
    folder = Path(left.socket).parent
    diary = folder / "diary"
    diary.write_text("dear")
    plant(lake, left)
    shared_session.clear(str(lake))
    assert diary.read_text() == "dear"
    diary.unlink()
    shared_session.clear(str(lake))
    assert not folder.exists()

    for named in (tmp_path / "headwater-photos" / "2026", tmp_path / "photos" / "pipeline"):
        named.parent.mkdir(0o700)
        named.write_text("a picture")
        plant(lake, PipelineService(1, str(named)))
        shared_session.clear(str(lake))
        assert named.read_text() == "a picture"


def test_spark_is_not_started_from_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "spark"
    permissions.make_private(folder / "new")
    assert (mode(folder), mode(folder / "new")) == (0o700, 0o700)
    folder.chmod(0o755)
    permissions.make_private(folder)
    assert mode(folder) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to") as caught:
        permissions.make_private(folder)
    assert "XDG_CACHE_HOME" in str(caught.value.hint)
