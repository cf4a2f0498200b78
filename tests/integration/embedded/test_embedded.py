"""The embedded PostgreSQL with real servers, real processes and real kills.

What runs in another process is a few lines of Python below, started with this interpreter. Data
folders lie directly below /tmp: pytest's own are closed to the account that runs the server when
the tests run as root.
"""

from __future__ import annotations

import errno
import functools
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.embedded import EmbeddedPostgres, default_data_dir
from headwater.embedded.account import Account, account_for
from headwater.embedded.binaries import _find_package
from headwater.embedded.locks import wait_until
from headwater.embedded.server import StopMode
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_LOG_BYTES_MAX

IS_ROOT = os.geteuid() == 0
only_root = pytest.mark.skipif(not IS_ROOT, reason="is about what root must do")

PROLOGUE = """
import os, sys
from headwater.embedded import EmbeddedPostgres
from headwater.errors import EmbeddedError
server = EmbeddedPostgres(sys.argv[1])
def say(*words): print(*words, flush=True)
def wait(): sys.stdin.readline()
"""
USE = "server.start(); say(server.pid); wait(); server.close()"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter. Servers left in it are stopped, and it is removed."""
    path = Path(tempfile.mkdtemp(prefix="headwater-test-"))
    path.chmod(0o711)
    yield path
    for locks in path.rglob("run/start.lock"):
        EmbeddedPostgres(locks.parent.parent).stop_now()
    shutil.rmtree(path)


@pytest.fixture
def new_dir(place: Path) -> Path:
    """A data folder that does not exist yet."""
    return place / "data"


@pytest.fixture(scope="module")
def used_dir() -> Iterator[Path]:
    # An empty private folder at first, which root must open for the account of the server.
    with tempfile.TemporaryDirectory(prefix="headwater-test-") as path:
        with EmbeddedPostgres(path):
            pass
        yield Path(path)


@pytest.fixture
def data_dir(used_dir: Path) -> Iterator[Path]:
    """A data folder that other tests have used before. No server runs; none is left running."""
    yield used_dir
    server = EmbeddedPostgres(used_dir)
    if server.pid is not None:
        server.stop_now()


class Process:
    """Another process. It prints one word a line, and continues when its input ends."""

    def __init__(self, code: str, *arguments: object, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROLOGUE + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (env or {}),
        )

    def read_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def finish(self) -> None:
        self.popen.communicate("\n", timeout=60)
        assert self.popen.returncode == 0

    def kill(self) -> None:
        self.popen.kill()
        with self.popen:
            self.popen.wait(60)


@pytest.fixture
def run() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*arguments: object, env: dict[str, str] | None = None) -> Process:
        code, *rest = arguments
        started.append(Process(str(code), *rest, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return False
        return True


def soon_gone(pid: int | None) -> bool:
    # A process releases its locks a moment before it has ended.
    assert pid is not None
    return wait_until(lambda: is_gone(pid), 5)


def query(server: EmbeddedPostgres, statement: str) -> object:
    with psycopg.connect(server.url) as connection:
        cursor = connection.execute(statement.encode())
        row = cursor.fetchone() if cursor.description else None
    return row[0] if row else None


def test_data_survives_a_restart(new_dir: Path) -> None:
    with EmbeddedPostgres(new_dir) as server:
        query(server, "create table orders as select 42 as id")
        first = server.pid
    assert soon_gone(first)
    assert server.pid is None
    with EmbeddedPostgres(new_dir) as again:
        assert again.url == server.url
        assert again.pid != first
        assert query(again, "select id from orders") == 42


@pytest.fixture
def server(data_dir: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(data_dir, settings={"work_mem": "5MB"}) as server:
        yield server


def test_settings(server: EmbeddedPostgres) -> None:
    expected = {
        "wal_level": "logical",
        "track_commit_timestamp": "on",
        "max_connections": "200",
        "server_encoding": "UTF8",
        "listen_addresses": "",
        "work_mem": "5MB",
    }
    assert {name: query(server, f"show {name}") for name in expected} == expected


def test_text_is_ordered_by_code_point(server: EmbeddedPostgres) -> None:
    ordered = "select string_agg(v, '' order by v) from unnest(array['é','z','B','a','€']) v"
    assert query(server, ordered) == "Bazé€"
    assert query(server, "select upper('é')") == "É"


def test_the_url_is_good_for_psql_whatever_the_environment(server: EmbeddedPostgres) -> None:
    psql = _find_package() / "pginstall18" / "bin" / "psql"
    answer = subprocess.run(
        [psql, "-XAtc", "select 1", server.url],
        env={"PGPORT": "1", "PGHOST": "nowhere", "PGUSER": "unknown", "PGDATABASE": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.stdout.strip(), answer.stderr) == ("1", "")


def test_only_the_owner_reaches_the_data_and_the_socket(server: EmbeddedPostgres) -> None:
    for name in ("postgres", "run"):
        assert (server.data_dir / name).stat().st_mode & 0o777 == 0o700
    assert server.data_dir.stat().st_mode & 0o077 in (0, 0o011)


def test_two_processes_share_and_the_last_one_stops(
    new_dir: Path, run: Callable[..., Process]
) -> None:
    first, second = run(USE, new_dir), run(USE, new_dir)
    pid = first.read_line()
    assert second.read_line() == pid
    first.finish()
    assert EmbeddedPostgres(new_dir).pid == int(pid)
    second.finish()
    assert soon_gone(int(pid))


def test_two_objects_in_one_process_are_two_users(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as first:
        with EmbeddedPostgres(data_dir) as second:
            assert second.pid == first.pid
        assert query(first, "select 1") == 1
        pid = first.pid
    assert soon_gone(pid)


def test_many_processes_start_and_stop_at_once(data_dir: Path, run: Callable[..., Process]) -> None:
    code = """
import psycopg
for turn in range(5):
    with server:
        with psycopg.connect(server.url) as connection:
            connection.execute("select 1")
say("done")
"""
    processes = [run(code, data_dir) for _ in range(4)]
    assert [process.read_line() for process in processes] == ["done"] * 4
    for process in processes:
        process.finish()
    assert EmbeddedPostgres(data_dir).pid is None


def test_a_killed_user_leaves_a_server_to_attach_to(
    data_dir: Path, run: Callable[..., Process]
) -> None:
    process = run(USE, data_dir)
    pid = int(process.read_line())
    process.kill()
    with EmbeddedPostgres(data_dir) as server:
        assert server.pid == pid
    assert soon_gone(pid)


def test_a_killed_user_does_not_count(data_dir: Path, run: Callable[..., Process]) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pid = server.pid
        process = run(USE, data_dir)
        assert process.read_line() == str(pid)
        process.kill()
    assert soon_gone(pid)


def test_a_process_that_just_ends_stops_the_server(
    data_dir: Path, run: Callable[..., Process]
) -> None:
    process = run("server.start(); say(server.pid)", data_dir)
    pid = int(process.read_line())
    process.finish()
    assert soon_gone(pid)


def test_a_server_started_to_stay_outlives_its_users_until_it_is_stopped(data_dir: Path) -> None:
    EmbeddedPostgres(data_dir).start().close(keep_running=True)
    with EmbeddedPostgres(data_dir) as server:
        pid = server.pid
    assert EmbeddedPostgres(data_dir).pid == pid is not None
    server.restart()
    server.close()
    again = EmbeddedPostgres(data_dir).pid
    assert again not in (None, pid)
    assert EmbeddedPostgres(data_dir).stop()
    assert soon_gone(again)
    assert not EmbeddedPostgres(data_dir).stop()
    with EmbeddedPostgres(data_dir) as server:
        pid = server.pid
    assert soon_gone(pid)


def test_a_server_stays_only_until_it_ends(data_dir: Path) -> None:
    """As after a restart of the machine."""
    EmbeddedPostgres(data_dir).start().close(keep_running=True)
    EmbeddedPostgres(data_dir).stop_now()
    assert (data_dir / "run" / "stays").exists()
    with EmbeddedPostgres(data_dir) as server:
        pid = server.pid
    assert soon_gone(pid)


def test_a_server_in_use_is_stopped_by_force_only(
    data_dir: Path, run: Callable[..., Process]
) -> None:
    user = run(USE, data_dir)
    pid = int(user.read_line())
    with pytest.raises(EmbeddedError, match="in use: a process of Headwater") as caught:
        EmbeddedPostgres(data_dir).stop()
    assert "--force" in str(caught.value.hint)
    assert EmbeddedPostgres(data_dir).pid == pid
    assert EmbeddedPostgres(data_dir).stop(force=True)
    assert soon_gone(pid)
    user.finish()


def test_nothing_is_stopped_in_a_folder_that_does_not_exist(new_dir: Path) -> None:
    assert not EmbeddedPostgres(new_dir).stop()
    assert not new_dir.exists()


def test_a_forked_child_is_not_a_user(data_dir: Path, run: Callable[..., Process]) -> None:
    code = """
server.start()
pid = server.pid
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(writer)
    os.read(reader, 1)
    os._exit(server.is_open)
server.close()
say(pid, server.pid)
os.close(writer)
say(os.waitpid(child, 0)[1])
"""
    process = run(code, data_dir)
    pid, after = process.read_line().split()
    assert after == "None"
    assert soon_gone(int(pid))
    assert process.read_line() == "0"


def test_a_killed_server_is_started_again(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        query(server, "create table killed as select 42 as id")
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        server.start()
        assert server.pid not in (None, first)
        assert query(server, "select id from killed") == 42


def test_a_killed_server_is_started_again_by_another(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pid = server.pid
        assert pid is not None
        # A connection that is busy outlives the postmaster for a moment, and must be waited for.
        with psycopg.connect(server.url) as busy:
            busy.execute("select 1")
            os.kill(pid, signal.SIGKILL)
            with EmbeddedPostgres(data_dir) as another:
                assert query(another, "select 1") == 1
            busy.close()
        assert query(server, "select 1") == 1


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_keeps_the_url(data_dir: Path, mode: StopMode) -> None:
    with EmbeddedPostgres(data_dir) as server:
        first, url = server.pid, server.url
        log_before = (data_dir / "postgres.log").read_text()
        server.restart(mode)
        assert server.url == url
        assert server.pid not in (None, first)
        log = (data_dir / "postgres.log").read_text().removeprefix(log_before)
        recovered = "not properly shut down" in log
        assert recovered == (mode == "immediate")


def test_a_stale_process_id_that_belongs_to_another_process(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir).start()
    lock_of_socket = data_dir / "run" / ".s.PGSQL.5432.lock"
    files = {
        path: path.read_text() for path in (data_dir / "postgres/postmaster.pid", lock_of_socket)
    }
    account = account_for(data_dir, data_dir / "postgres")
    server.close()
    # PostgreSQL itself ignores processes of other users, so it must be one of its own.
    user = account.uid if IS_ROOT else None
    unrelated = subprocess.Popen(["sleep", "1000"], user=user)
    try:
        for path, text in files.items():
            _, *rest = text.splitlines()
            path.write_text("\n".join([str(unrelated.pid), *rest, ""]))
            if IS_ROOT:
                os.chown(path, account.uid, account.gid)
        with EmbeddedPostgres(data_dir):
            assert query(server, "select 1") == 1
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


def test_a_path_too_long_for_a_socket(place: Path, run: Callable[..., Process]) -> None:
    deep = place / ("d" * 60) / ("e" * 60)
    with EmbeddedPostgres(deep) as server:
        assert query(server, "select 1") == 1
        sockets = Path(psycopg.conninfo.conninfo_to_dict(server.url)["host"])  # type: ignore[arg-type]
        assert not sockets.is_relative_to(deep)
        assert sockets.stat().st_mode & 0o777 == 0o700
        other = run(USE, deep, env={"TMPDIR": str(place)})
        assert other.read_line() == str(server.pid)
        other.finish()
    assert not sockets.exists()


def test_a_socket_folder_that_others_can_write_to_is_refused(place: Path) -> None:
    server = EmbeddedPostgres(place / ("d" * 120))
    sockets = Path(psycopg.conninfo.conninfo_to_dict(server.url)["host"])  # type: ignore[arg-type]
    sockets.mkdir()
    try:
        sockets.chmod(0o777)
        with pytest.raises(EmbeddedError, match=str(sockets)) as caught:
            server.start()
        assert "Remove it" in str(caught.value.hint)
        if IS_ROOT:
            os.chown(sockets, 65534, 65534)
            sockets.chmod(0o700)
            with pytest.raises(EmbeddedError, match="not a private folder"):
                server.start()
    finally:
        sockets.rmdir()


@pytest.mark.parametrize("name", ["a 'b' \"c\" %20 $HOME `d` \\ é€", "com,ma"])
def test_a_path_with_odd_characters(place: Path, name: str) -> None:
    with EmbeddedPostgres(place / name) as server:
        assert query(server, "select 1") == 1


def test_a_folder_reached_by_a_link_is_the_same(place: Path) -> None:
    (place / "link").symlink_to(place / "real")
    assert EmbeddedPostgres(place / "link").url == EmbeddedPostgres(place / "real").url


def test_data_of_another_version_is_refused(data_dir: Path) -> None:
    version = data_dir / "postgres" / "PG_VERSION"
    try:
        version.write_text("16\n")
        with pytest.raises(EmbeddedError, match=r"PostgreSQL 16.*PostgreSQL 18") as caught:
            EmbeddedPostgres(data_dir).start()
        assert "pg_upgrade" in str(caught.value.hint)
    finally:
        version.write_text("18\n")
    with EmbeddedPostgres(data_dir) as server:
        assert query(server, "select 1") == 1


def test_a_folder_with_other_files_is_refused(new_dir: Path) -> None:
    (new_dir / "postgres").mkdir(parents=True)
    (new_dir / "postgres" / "recipes.txt").write_text("soup")
    with pytest.raises(EmbeddedError, match="no PostgreSQL data"):
        EmbeddedPostgres(new_dir).start()
    assert (new_dir / "postgres" / "recipes.txt").read_text() == "soup"


def test_an_interrupted_initdb_does_not_block(new_dir: Path, run: Callable[..., Process]) -> None:
    process = run("server.start()", new_dir)
    begun = new_dir / "postgres.new" / "PG_VERSION"
    assert wait_until(begun.exists, 20)
    process.kill()
    assert not (new_dir / "postgres").exists()
    with EmbeddedPostgres(new_dir) as server:
        assert query(server, "select 1") == 1
    assert not (new_dir / "postgres.new").exists()


def test_no_room_for_a_cluster(new_dir: Path, run: Callable[..., Process]) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try: server.start()
except EmbeddedError as error: say(repr(str(error)), error.hint)
"""
    said = run(code, new_dir).read_line()
    assert "initdb could not make a cluster" in said
    assert "child process" in said, "the end of initdb's own output"
    assert "disk is not full" in said
    with EmbeddedPostgres(new_dir) as server:
        assert query(server, "select 1") == 1


def test_a_server_that_does_not_start_says_why(data_dir: Path) -> None:
    with pytest.raises(EmbeddedError, match="no_such_setting") as caught:
        EmbeddedPostgres(data_dir, settings={"no_such_setting": "1"}).start()
    assert str(data_dir / "postgres.log") in str(caught.value.hint)
    with EmbeddedPostgres(data_dir) as server:
        assert query(server, "select 1") == 1


def test_a_large_log_is_set_aside(data_dir: Path) -> None:
    log = data_dir / "postgres.log"
    log.write_bytes(b"x" * (EMBEDDED_LOG_BYTES_MAX + 1))
    with EmbeddedPostgres(data_dir):
        assert b"ready to accept connections" in log.read_bytes()
        assert log.stat().st_size < EMBEDDED_LOG_BYTES_MAX
        assert log.with_name("postgres.log.old").stat().st_size == EMBEDDED_LOG_BYTES_MAX + 1


def test_closing_after_the_data_folder_was_removed(new_dir: Path) -> None:
    server = EmbeddedPostgres(new_dir).start()
    pid = server.pid
    assert pid is not None
    shutil.rmtree(new_dir)
    server.close()
    os.kill(pid, signal.SIGQUIT)  # It would notice by itself within a minute.
    assert soon_gone(pid)


def test_close_and_start_can_be_repeated(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.close()
    for _ in range(2):
        server.start()
        server.start()
        assert query(server, "select 1") == 1
        server.close()
        server.close()
        assert server.pid is None


def test_the_wheel_is_missing(data_dir: Path, run: Callable[..., Process]) -> None:
    code = """
sys.path.clear(); sys.path_importer_cache.clear()
try: server.start()
except EmbeddedError as error: say(error, error.hint)
"""
    said = run(code, data_dir).read_line()
    assert "not installed" in said
    assert "pip install" in said
    assert "headwater[embedded]" in said


def test_a_system_without_posix_locks() -> None:
    code = "import sys; sys.modules['fcntl'] = None; import headwater.embedded"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EmbeddedError: the embedded PostgreSQL runs on Linux and macOS only" in done.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEADWATER_DATA_DIR": "/srv/h"}, "/srv/h"),
        ({"HEADWATER_DATA_DIR": "", "XDG_DATA_HOME": "/x"}, "/x/headwater"),
        ({"XDG_DATA_HOME": "relative"}, "/home/h/.local/share/headwater"),
        ({}, "/home/h/.local/share/headwater"),
    ],
)
def test_the_default_data_folder(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("HEADWATER_DATA_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment | {"HOME": "/home/h"}).items():
        monkeypatch.setenv(name, value)
    if IS_ROOT and not environment.get("HEADWATER_DATA_DIR"):
        expected = "/var/lib/headwater"
    assert default_data_dir() == Path(expected)


def test_a_folder_that_cannot_be_made() -> None:
    with pytest.raises(EmbeddedError, match="/proc/headwater") as caught:
        EmbeddedPostgres("/proc/headwater").start()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno in (errno.ENOENT, errno.EACCES)
    assert "HEADWATER_DATA_DIR" in str(caught.value.hint)


# As root the server runs as another account. These tests show what that needs, and that an ordinary
# user does not need it.


@only_root
def test_as_an_ordinary_user(place: Path, run: Callable[..., Process]) -> None:
    # The interpreter may lie below /root, so it is loaded first and gives up its rights then.
    code = """
import psycopg
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
server.start()
with psycopg.connect(server.url) as connection:
    connection.execute("create table orders as select 42 as id")
    files = os.stat(server.data_dir / "postgres").st_uid, server.data_dir.stat().st_mode & 0o777
    say(server.pid, os.stat(f"/proc/{server.pid}").st_uid, *files)
wait()
server.close()
say(server.pid)
"""
    other_user = pwd.getpwnam("nobody").pw_uid
    place.chmod(0o777)
    mine = place / "home" / "data"
    process = run(code, mine, other_user)
    pid, runs_as, owner, mode = process.read_line().split()
    assert (int(runs_as), int(owner), int(mode)) == (other_user, other_user, 0o700)
    with EmbeddedPostgres(mine) as as_root:  # Root uses the server that is running.
        assert as_root.pid == int(pid)
        as_root.restart()
        assert query(as_root, "select id from orders") == 42
        assert os.stat(f"/proc/{as_root.pid}").st_uid == other_user
    process.finish()
    assert EmbeddedPostgres(mine).pid is None


@only_root
def test_no_program_of_the_system_is_needed_but_a_shell(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small containers have no `kill`."""
    started = set[str]()
    run = Account.run

    def noted(self: Account, command: Sequence[str | Path], **options: Any) -> Any:
        started.add(str(command[0]))
        return run(self, command, **options)

    monkeypatch.setattr(Account, "run", noted)
    with EmbeddedPostgres(data_dir) as server:
        pass
    assert server.pid is None
    assert {name for name in started if Path(name).name not in ("initdb", "postgres")} == {
        "/bin/sh"
    }


@only_root
def test_as_a_user_without_a_name(place: Path, run: Callable[..., Process]) -> None:
    code = """
os.setgroups([]); os.setgid(54321); os.setuid(54321)
try: server.start()
except EmbeddedError as error: say(error.hint)
"""
    place.chmod(0o777)
    assert "add uid 54321 to /etc/passwd" in run(code, place / "data").read_line()


@only_root
def test_a_data_folder_that_the_account_cannot_reach(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir(0o700)
    (closed / "something").touch()
    with pytest.raises(EmbeddedError, match=f"may not enter {closed}, a parent") as caught:
        EmbeddedPostgres(closed / "data").start()
    assert "--data-dir" in str(caught.value.hint)
    assert closed.stat().st_mode & 0o777 == 0o700


@only_root
def test_a_wheel_that_the_account_cannot_reach(place: Path, run: Callable[..., Process]) -> None:
    closed = place / "closed"
    closed.mkdir(0o700)
    wheel = _find_package()
    unneeded = shutil.ignore_patterns("include", "*.a")
    for part in (f"{wheel.name}/pginstall18", f"{wheel.name}.libs"):
        copy = functools.partial(shutil.copytree, symlinks=True, ignore=unneeded)
        try:
            copy(wheel.parent / part, closed / part, copy_function=os.link)
        except shutil.Error:  # Another file system.
            copy(wheel.parent / part, closed / part, dirs_exist_ok=True)
    (closed / wheel.name / "__init__.py").touch()
    home = place / "home"
    environment = {"PYTHONPATH": str(closed), "HEADWATER_DATA_DIR": str(home)}
    code = "server.start(); say(os.readlink(f'/proc/{server.pid}/exe'))"
    copies = []
    for _ in range(2):
        process = run(code, place / "data", env=environment)
        assert process.read_line().startswith(f"{home}/postgresql-18-")
        process.finish()
        copies += [(path.name, path.stat().st_ino) for path in home.glob("postgresql-*")]
    assert copies[0] == copies[1], "copied once"
    assert len(copies) == 2
