"""The documentation does what it says, and leaves nothing out.

A page marks what is to be run by the second word after a code fence:

    ```python watch.py    a program, page or setting: saved under that name in an empty folder
    ```sh start           a command that follows the log: started, and left running
    ```sh client          one that does not: started once all that runs has begun, and left running
    ```sql run            typed into psql in another terminal, once all that runs has begun
    ```text shows         all that the command started last has printed (text or json lines)
    ```text shows in …    the same of that command
    ```text page          what a browser shows of the page saved last
    ```python run         a snippet: run in order in one namespace, with `hw` and `await`

Programs and commands use the embedded PostgreSQL, as a new user would; HEADWATER_DATA_DIR makes it
that of the tests. Ports are others than those shown, which may be in use. Of JSON lines, what
differs from run to run (times, positions) is not compared; in texts `…` stands for anything.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest
import yaml  # type: ignore[import-untyped]

import headwater
from headwater import Forbidden, Headwater, HeadwaterError, Refused, connect, limits
from headwater.embedded import EmbeddedPostgres
from headwater.embedded.binaries import _find_package
from headwater.metrics import Metrics, PipelineMetrics
from headwater.pipeline.compaction.measure import MEASURED
from headwater.pipeline.compaction.tables import JOINED
from headwater.settings.names import GROUPS, SETTINGS
from headwater.testing.gateway_process import serving
from tests.support.command_tree import COMMANDS, options_of
from tests.support.node import node
from tests.support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WAIT_SECONDS = 30.0
DIFFERS_EACH_TIME = ("position", "seq", "xid", "at")


class Block(NamedTuple):
    language: str
    mark: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\S+)(?: ([^\n]+))?\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(*parts) for parts in found]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


class Started:
    """A command in a terminal of its own."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self.command = command
        self.printed = folder / f"{time.monotonic_ns()}.out"
        self.complained = self.printed.with_suffix(".err")
        with self.printed.open("wb") as out, self.complained.open("wb") as err:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def lines(self) -> list[str]:
        return self.printed.read_text().splitlines()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


GATEWAY_SHOWN, PAGES_SHOWN = "8484", "8000"
PORTS_SHOWN = (GATEWAY_SHOWN, PAGES_SHOWN, "8485")

# What a page needs of a browser. Node has the rest: EventSource, JSON, encodeURIComponent.
BROWSER = """
const element = { set textContent(text) { console.log(JSON.stringify(text)); } };
const document = { querySelector: () => element };
setInterval(() => {}, 1000);  // an EventSource that waits does not keep Node alive
"""


class Reader:
    """A person who works through a page with several terminals."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        self.folder = folder
        self.url = server.url
        self.started: list[Started] = []
        self.clients: list[Started] = []
        self.browser: Started | None = None
        self.ports = {shown: str(free_port()) for shown in PORTS_SHOWN}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
        self.environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HEADWATER_DATA_DIR": str(server.data_dir),
            "HEADWATER_GATEWAY_PORT": self.ports[GATEWAY_SHOWN],
            "NO_PROXY": "*",
            "PYTHONUNBUFFERED": "1",
        }

    def does(self, block: Block) -> None:
        for shown, free in self.ports.items():
            block = block._replace(text=block.text.replace(shown, free))
        match block:
            case Block(language, mark, text) if mark.startswith("shows"):
                program = self._running(mark.removeprefix("shows in "))
                self._sees(program, text.splitlines(), as_json=language == "json")
            case Block(_, name, text) if "." in name:
                (self.folder / name).write_text(text)
            case Block("sh", "start", text):
                self.started.append(self._starts(text.strip()))
            case Block("sh", "client", text):
                assert wait_until(self._everything_has_begun), self._complaints()
                self.clients.append(self._starts(text.strip()))
            case Block("sql", "run", text):
                self._types_into_psql(text)
            case Block("text", "page", text):
                self._sees_page(text.splitlines())

    def _starts(self, command: str) -> Started:
        self.latest = Started(command, self.folder, self.environment)
        return self.latest

    def _types_into_psql(self, text: str) -> None:
        assert wait_until(self._everything_has_begun), self._complaints()
        psql = _find_package() / "pginstall18" / "bin" / "psql"
        command = [str(psql), "-X", "-q", "-v", "ON_ERROR_STOP=1", self.url]
        subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)

    def _everything_has_begun(self) -> bool:
        return self._everything_follows() and all(client.lines() for client in self.clients)

    def _everything_follows(self) -> bool:
        """Each running program has read the log once, so it will see what is written now. A gateway
        reports that itself."""
        gateways = [p for p in self.started if p.command.startswith("headwater serve")]
        if not all(gateway.lines() for gateway in gateways):
            return False
        with psycopg.connect(self.url) as connection:
            row = connection.execute(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and application_name = 'headwater reader' and query like '%page as%'"
            ).fetchone()
        readers = sum(p.is_running for p in self.started if p not in gateways)
        return row is not None and row[0] >= readers

    def _running(self, command: str) -> Started:
        """The one with that command, or else the latest."""
        found = [each for each in self.clients if each.command == command]
        return found[0] if found else self.latest

    def _sees(self, program: Started, expected: list[str], *, as_json: bool) -> None:
        expected = _said(expected)
        wait_until(lambda: len(_said(program.lines())) >= len(expected))
        lines = _said(program.lines())
        if as_json:
            assert [_steady(line) for line in lines] == [_steady(line) for line in expected]
        elif not _fits(lines, expected):
            assert lines == expected, self._complaints()

    def _sees_page(self, expected: list[str]) -> None:
        assert wait_until(self._everything_has_begun), self._complaints()
        if self.browser is None:
            self.browser = self._opens(max(self.folder.glob("*.html"), key=os.path.getmtime))
        browser = self.browser
        wait_until(lambda: _shown_by(browser) == expected)
        assert _shown_by(browser) == expected, browser.complained.read_text()

    def _opens(self, page: Path) -> Started:
        """As a browser would, which also asks the gateway whether pages from there may use it."""
        gateway, origin = (
            f"http://localhost:{self.ports[port]}" for port in (GATEWAY_SHOWN, PAGES_SHOWN)
        )
        allowed = httpx.get(f"{gateway}/healthz", headers={"origin": origin}, trust_env=False)
        assert allowed.headers["access-control-allow-origin"] == origin
        text = httpx.get(f"{origin}/{page.name}", trust_env=False).text
        script = "".join(re.findall(r"<script>(.*?)</script>", text, re.S))
        (self.folder / "page.js").write_text(BROWSER + script)
        return self._starts(f"{node()} --experimental-eventsource --no-warnings page.js")

    def _complaints(self) -> str:
        running = [*self.started, *self.clients]
        return "\n".join(program.complained.read_text() for program in running)

    def leaves(self) -> None:
        for program in [*self.clients, *filter(None, [self.browser]), *self.started]:
            program.stop()
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("drop schema if exists headwater cascade")
            connection.execute("drop table if exists orders, stock")


def _shown_by(browser: Started) -> list[str]:
    lines = browser.lines()
    return str(json.loads(lines[-1])).splitlines() if lines else []


def _said(lines: list[str]) -> list[str]:
    """Without what a stream says to keep alive, and without the blank lines between events."""
    return [line for line in lines if line and not line.startswith(": ")]


def _fits(lines: list[str], expected: list[str]) -> bool:
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in expected]
    return len(lines) == len(patterns) and all(map(re.fullmatch, patterns, lines))


def _steady(line: str) -> dict[str, Any]:
    return {name: v for name, v in json.loads(line).items() if name not in DIFFERS_EACH_TIME}


@pytest.fixture
def reader(tmp_path: Path, postgres: EmbeddedPostgres) -> Iterator[Reader]:
    reader = Reader(tmp_path, postgres)
    yield reader
    reader.leaves()


FOR_NEW_USERS = ["README.md", "docs/tutorial.md", "docs/howto/terminal.md"]


@pytest.mark.parametrize("page", FOR_NEW_USERS)
def test_a_new_user_works_through(page: str, reader: Reader) -> None:
    for block in blocks(ROOT / page):
        reader.does(block)
    assert reader.started


@pytest.mark.parametrize("page", FOR_NEW_USERS)
def test_every_program_for_new_users_is_run(page: str) -> None:
    started = " ".join(b.text for b in blocks(ROOT / page) if b.mark in ("start", "client"))
    for block in blocks(ROOT / page):
        if block.language == "python":
            ways = (f"python {block.mark}", f"serve {block.mark.removesuffix('.py')}:hw")
            assert block.mark == "run" or any(way in started for way in ways), block.text


SNIPPETS = [page for page in PAGES if any(b[:2] == ("python", "run") for b in blocks(page))]


@pytest.mark.parametrize("page", SNIPPETS, ids=name_of)
async def test_snippets(page: Path, url: str) -> None:
    namespace: dict[str, Any] = {name: getattr(headwater, name) for name in headwater.__all__}
    async with asyncio.timeout(WAIT_SECONDS), Headwater(url) as hw, hw.connection() as db:
        await db.execute("create table orders (id int primary key, status text, amount numeric)")
        await hw.enable("orders")
        namespace["hw"] = hw
        for block in blocks(page):
            if block[:2] == ("python", "run"):
                await run_snippet(block.text, name_of(page), namespace)


async def run_snippet(text: str, name: str, namespace: dict[str, Any]) -> None:
    code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        await result


QUERIES = ROOT / "docs" / "howto" / "queries-and-mutations.md"

# What the page expects to exist.
QUERIES_TABLES = """
    create table customers (id int primary key, name text);
    create table orders (
      id int generated always as identity primary key, region int not null, amount numeric,
      status text default 'open', owner text, customer int default 1 references customers,
      placed timestamptz default now());
    create table prices (item text primary key, price numeric);
    create table sales (year int, month int, total numeric, primary key (year, month));
    create table names (name text primary key);
    insert into customers values (1, 'Ann');
    insert into prices values ('cup', 9);
"""
QUERIES_NAMES = """
import datetime as dt, logging, msgspec, psycopg
from decimal import Decimal
from headwater import *

logger, draw = logging.getLogger("shop"), str
Day = msgspec.defstruct("Day", [("day", dt.date), ("count", int)])
Price = msgspec.defstruct("Price", [("item", str), ("price", Decimal)])
Dashboard = msgspec.defstruct("Dashboard", [("orders", list), ("prices", list)])
"""
QUERIES_CALLS: list[tuple[str, dict[str, Any], Any]] = [
    ("orders_of", {"region": 7, "ids": [1, 5]}, [[1], [1]]),
    ("orders_by_day", {"region": 8}, []),
    ("chart", {"year": 2026}, "[]"),
    ("prices", {}, [{"item": "cup", "price": "9"}]),
    ("dashboard", {"region": 8}, {"orders": [], "prices": [{"item": "cup", "price": "9"}]}),
]


async def test_the_page_about_queries_and_mutations(url: str, tmp_path: Path) -> None:
    """Its functions, in one program, served; and its clients."""
    functions = [b.text for b in blocks(QUERIES) if b[:2] == ("python", "app")]
    clients = [b.text for b in blocks(QUERIES) if b[:2] == ("python", "client")]
    program = re.sub(r'Headwater\("[^"]+"\)', "Headwater()", "\n".join(functions))
    for table in ("prices", "sales", "names"):
        program += f"\nhw.table({table!r})"
    (tmp_path / "shop.py").write_text(QUERIES_NAMES + program)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(QUERIES_TABLES.encode())
    with serving(url, tmp_path, program="shop:hw") as gateway:
        async with asyncio.timeout(WAIT_SECONDS), connect(gateway.url) as client:
            await client.mutate("place_order", region=7, amount=1)
            for text in clients:
                here = {"client": client, "connect": connect}
                await run_snippet(text.replace("http://localhost:8484", gateway.url), "page", here)
            for name, args, expected in QUERIES_CALLS:
                assert await client.query(name, args) == expected
            await client.mutate("take_name", name="ann")
            with pytest.raises(Refused, match="ann is taken"):
                await client.mutate("take_name", name="ann")
            with pytest.raises(Forbidden, match="only for admins"):
                await client.mutate("close_region", region=7)


TOPICS = ROOT / "docs" / "howto" / "topics.md"

TOPICS_TABLES = """
    create table messages (
      id int generated always as identity primary key, chat_id int, body text, state text);
    create table members (chat_id int, name text);
    create table people (id int primary key, name text);
    create table tasks (id int primary key, project int, done bool, assignee int);
    insert into members values (42, 'anybody');
    insert into people values (1, 'Ann');
    insert into tasks values (12, 7, false, 1);
"""
TOPICS_MORE = """
@hw.query
async def messages(ctx, chat: int) -> list:
    return await ctx.fetch("select * from messages where chat_id = %s order by id", chat)

hw.table("tasks")
"""


async def test_the_page_about_topics(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its topics and functions, in one program, served; its client, and its text stream."""
    parts = [b.text for b in blocks(TOPICS) if b[:2] == ("python", "app")]
    (client_text,) = [b.text for b in blocks(TOPICS) if b[:2] == ("python", "client")]
    program = re.sub(r'Headwater\("[^"]+"\)', "Headwater()", "\n".join(parts)) + TOPICS_MORE
    (tmp_path / "chat.py").write_text(program)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TOPICS_TABLES.encode())
    with serving(url, tmp_path, program="chat:hw") as gateway:
        async with asyncio.timeout(WAIT_SECONDS), connect(gateway.url) as client:
            asked = await client.mutate("ask", chat=42, question="why?")
            here: dict[str, Any] = {}
            exec(program.replace("Headwater()", f"Headwater({url!r})"), here)

            async def tokens() -> AsyncIterator[str]:
                yield "because"

            async with (
                here["hw"],
                client.topic("chat:42") as chat,
                client.topic("project:7") as project,
                client.topic("board:7") as board,
                client.topic("org:7") as org,
            ):
                viewing = asyncio.create_task(run_snippet(client_text, "page", {"client": client}))
                await here["answer"](asked.value, tokens())
                await viewing
                async for _ in chat:
                    if [row["state"] for row in chat.rows("messages")] == ["done"]:
                        break
                await client.mutate("finish_task", id=12)
                for topic in (project, board):
                    ops = await anext(topic.__aiter__())
                    assert ("tasks", (12,)) in [(op.entity, op.key) for op in ops]
                assert board.rows("people") == [{"id": 1, "name": "Ann"}]
                await here["hw"].signal("org:7")
                assert (await anext(org.__aiter__())).pull
                with pytest.raises(Forbidden):
                    async with client.topic("chat:1"):
                        pass
    shown = capsys.readouterr().out
    assert "'why?'" in shown


CHANNELS = ROOT / "docs" / "howto" / "channels.md"


async def test_the_page_about_channels(url: str, tmp_path: Path) -> None:
    functions = [b.text for b in blocks(CHANNELS) if b[:2] == ("python", "app")]
    clients = [b.text for b in blocks(CHANNELS) if b[:2] == ("python", "client")]
    program = re.sub(r'Headwater\("[^"]+"\)', "Headwater()", "\n".join(functions))
    (tmp_path / "rooms.py").write_text(program)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table rooms (id int primary key, is_open boolean)")
        connection.execute("insert into rooms values (1, true), (2, false)")
    with serving(url, tmp_path, program="rooms:hw") as gateway:
        async with asyncio.timeout(WAIT_SECONDS), connect(gateway.url) as client:
            for text in clients:
                await run_snippet(text, "page", {"client": client})
            with pytest.raises(Forbidden, match="you may not join channel room:2"):
                await client.channel("room:2").__aenter__()
            async with client.channel("room:1") as room:
                await client.mutate("close_room", id=1)
                async for message in room:
                    if message.data == {"closed": True}:
                        break


def test_there_are_snippets() -> None:
    assert REFERENCE / "python.md" in SNIPPETS


# The code compared with the reference -------------------------------------------------


def sections(page: Path, level: str = "## ") -> dict[str, str]:
    """The text below each heading, by heading."""
    parts = re.split(rf"^{level}(.+)$", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str) -> list[str]:
    """What stands in `code` in the first column of the tables."""
    rows = re.findall(r"^\|([^|]+)\|", text, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


CLI = sections(REFERENCE / "cli.md")
COMMON_OPTIONS = set(re.findall(r"--[a-z][a-z-]*", CLI["Options of every command"]))


def test_every_command_has_a_section_and_the_reverse() -> None:
    documented = {
        title.removeprefix("headwater ") for title in CLI if title.startswith("headwater ")
    }
    assert documented == set(COMMANDS)
    assert COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command(command: str) -> None:
    """A command without one of the common options says so: "no `--url`"."""
    section, options = CLI[f"headwater {command}"], options_of(command)
    documented = {cell.split()[0] for cell in first_cells(section) if cell.startswith("--")}
    said = " ".join(section.split())  # Lines end anywhere.
    missing = {option for option in COMMON_OPTIONS if f"no `{option}`" in said}
    assert options == (documented | COMMON_OPTIONS) - missing
    assert set(re.findall(r"--[a-z][a-z-]*", section)) <= options | missing


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_in_the_table_and_has_an_example(command: str) -> None:
    assert any(
        f"{cell} ".startswith(f"headwater {command} ") for cell in first_cells(CLI["Commands"])
    )
    assert "```sh" in CLI[f"headwater {command}"]


def test_public_names() -> None:
    """The reference has every public name, and no other."""
    page, client = sections(REFERENCE / "python.md"), sections(REFERENCE / "client.md")
    titles = {title.replace("\\", "") for title in (*page, *client)} - {"Errors", "Deltas"}
    listed = {*first_cells(page["Errors"]), *first_cells(client["Deltas"])}
    assert titles | listed == set(headwater.__all__)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))], ids=name_of)
def test_users_import_public_names_only(page: Path) -> None:
    text = page.read_text()
    assert (
        re.findall(r"^ *(?:from headwater\.[\w.]+ import|import headwater\.).*$", text, re.M) == []
    )
    imported = re.findall(r"^ *from headwater import (?:\(([^)]*)\)|(.*))$", text, re.M)
    names = {name for either in imported for name in re.findall(r"\w+", "".join(either))}
    assert names <= {*headwater.__all__, "views"}  # `views` is a module


def test_settings() -> None:
    """Every group has a table, and every setting a row, with its names and its default."""
    tables = sections(REFERENCE / "settings.md")
    groups = {"In no group": None} | {f"`[{name}]`": group for name, group in GROUPS.items()}
    assert list(tables) == list(groups)
    for heading, group in groups.items():
        own = [setting for setting in SETTINGS.values() if setting.group is group]
        assert first_cells(tables[heading]) == [setting.name for setting in own]
        for setting in own:
            as_json = setting.is_list or setting.type is bool
            default = json.dumps(setting.default) if as_json else setting.default
            shown = "" if default is None else f" `{default}` |"
            assert f"| `{setting.name}` | `{setting.variable}` |{shown}" in tables[heading]


def test_limits() -> None:
    """Every limit has a row, with its value, and the page names no other constant."""
    public = [name for name in vars(limits) if name.isupper()]
    page = (REFERENCE / "limits.md").read_text()
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", page)) == set(public)
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", page, re.M)
    documented = {name: value for name, value in rows if re.match(r"`[A-Z]", name)}
    names = [re.findall(r"`(\w+)`", cell) for cell in documented]
    assert sorted(name for each in names for name in each) == sorted(public)
    for each, value in zip(names, documented.values(), strict=True):
        assert value == ", ".join(map(shown_limit, each)), each


def shown_limit(name: str) -> str:
    """The value of a limit as people write it."""
    value = getattr(limits, name)
    if name == "SERVER_VERSION_MIN":
        return str(value // 10_000)
    if isinstance(value, str):
        return value
    values = value if isinstance(value, tuple) else (value,)
    if "SECONDS" in name.split("_"):
        return " to ".join(map(shown_seconds, values))
    if "BYTES" in name.split("_"):
        return " to ".join(map(shown_bytes, values))
    return f"{value:.0%}" if isinstance(value, float) and value <= 1 else f"{value:,}"


def shown_seconds(value: float) -> str:
    units = {"year": 365 * 86_400, "day": 86_400, "hour": 3_600, "minute": 60, "second": 1}
    for unit, seconds in units.items():
        if value >= seconds and value % seconds == 0 and (value, unit) != (60, "minute"):
            count = round(value / seconds)
            return f"{count:,} {unit}{'' if count == 1 else 's'}"
    return f"{value:g} seconds" if value > 1 else f"{value * 1000:g} ms"


def shown_bytes(value: int) -> str:
    for unit, size in (("MB", 1024 * 1024), ("KB", 1024)):
        if value % size == 0:
            return f"{value // size:,} {unit}"
    return f"{value:,} bytes"


def errors(base: type[HeadwaterError] = HeadwaterError) -> Iterator[type[HeadwaterError]]:
    """The public ones: a module may have others, with the code of their parent."""
    yield base
    for child in base.__subclasses__():
        if child.__module__ == base.__module__:
            yield from errors(child)


@pytest.mark.parametrize("error", list(errors()))
def test_error_codes(error: type[HeadwaterError]) -> None:
    text = (REFERENCE / "errors.md").read_text()
    assert f"| `{error.code}` | `{error.__name__}` |" in text


def test_no_error_code_is_made_up() -> None:
    text = (REFERENCE / "errors.md").read_text()
    documented = re.findall(r"^\| `([a-z_]+)` \| `", text, re.M)
    assert sorted(documented) == sorted(error.code for error in errors())


def test_codes_that_errors_are_given() -> None:
    documented = first_cells((REFERENCE / "errors.md").read_text())
    for module in (ROOT / "src").rglob("*.py"):
        for code in re.findall(r'\bcode="([a-z_]+)"', module.read_text()):
            assert code in documented, f"{module.name}: {code}"


def test_metrics() -> None:
    registries: list[Any] = [Metrics(), PipelineMetrics()]
    kinds = {family.name: family.type for each in registries for family in each.registry.collect()}
    page = sections(REFERENCE / "metrics.md", "# ")["Metrics"]
    rows = re.findall(r"^\| `headwater_(\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", page, re.M)
    documented = {
        f"headwater_{name.removesuffix('_total')}": (labels, kind) for name, labels, kind in rows
    }
    assert documented == {
        metric._name: (",".join(metric._labelnames), kinds[metric._name])
        for metrics in registries
        for name, metric in vars(metrics).items()
        if name != "registry"
    }


def alert_rules(page: str) -> list[dict[str, Any]]:
    (text,) = [
        b.text
        for b in blocks(ROOT / "docs" / "howto" / f"{page}.md")
        if b.language == "yaml" and "alert:" in b.text
    ]
    rules: list[dict[str, Any]] = yaml.safe_load(text)["groups"][0]["rules"]
    return rules


def test_the_rule_of_small_files_leaves_out_what_is_not_joined() -> None:
    (rule,) = (r for r in alert_rules("pipeline") if r["alert"] == "HeadwaterLakeSmallFiles")
    left_out = re.findall(r'small_files\{table!="(.+)"\}', rule["expr"])
    assert left_out == [each for each in MEASURED if each not in JOINED]


@pytest.mark.parametrize(
    ("page", "metrics"), [("sources", Metrics()), ("pipeline", PipelineMetrics())]
)
def test_alert_rules(page: str, metrics: Any) -> None:
    """They name metrics, and only labels that these have."""
    rules = alert_rules(page)
    labels = {m._name: m._labelnames for name, m in vars(metrics).items() if name != "registry"}
    assert rules
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "annotations"}, rule
        assert re.fullmatch(r"Headwater\w+", rule["alert"])
        for metric in re.findall(r"headwater_\w+", rule["expr"]):
            assert metric in labels, metric
        for names, metric in re.findall(r"by \(([\w, ]+)\) \((headwater_\w+)", rule["expr"]):
            assert set(names.split(", ")) <= set(labels[metric]), metric
            used = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
            assert set(used) <= set(names.split(", ")), rule["alert"]
        for metric, chosen in re.findall(r"(headwater_\w+)\{([^}]*)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)!?=", chosen)) <= set(labels[metric]), metric


def test_every_metric_is_used() -> None:
    modules = [path for path in (ROOT / "src").rglob("*.py") if path.name != "metrics.py"]
    source = "\n".join(path.read_text() for path in modules)
    for name in (*vars(Metrics()), *vars(PipelineMetrics())):
        assert name == "registry" or re.search(rf"metrics\.{name}\b", source), name


# Links -----------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names GitHub gives to headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_tree_in_contributing() -> None:
    """Every folder has a line, and the tests that it names exist."""
    page = sections(ROOT / "CONTRIBUTING.md")["The tree"]
    source = ROOT / "src" / "headwater"
    folders = {f"{path.name}/" for path in source.iterdir() if path.is_dir()} - {"__pycache__/"}
    assert set(first_cells(page)) - {"src/headwater"} == folders
    for name in re.findall(r"`((?:tests|clients)/[\w/]*)`", page):
        assert (ROOT / name).is_dir(), name


SOURCES = (ROOT, ROOT / "src", ROOT / "src" / "headwater", ROOT / "src" / "headwater" / "demo")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`(\w[\w.-]*/[\w./-]*\w\.(?:py|js|jsx|sql|md))`", prose(page)):
        assert any((folder / name).is_file() for folder in SOURCES), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_whole(page: Path) -> None:
    """Every line of a table has as many cells as its head."""
    for table in re.findall(r"(?:^\|.*\n)+", prose(page), re.M):
        rows = [re.sub(r"`[^`]*`", "", row) for row in table.splitlines()]
        assert all(row.endswith("|") for row in rows), table
        assert len({row.count("|") for row in rows}) == 1, table


def test_every_page_can_be_reached_from_the_map() -> None:
    reached, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page))
        todo += [page.parent / link for link in links if "://" not in link]
    assert reached == {page.resolve() for page in PAGES}
