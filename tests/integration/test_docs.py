"""The documentation does what it says, and leaves nothing out.

A page marks what is to be run by the second word after a code fence:

    ```python watch.py    a program: saved under that name in an empty folder
    ```sh start           a command of the first terminal: started, and left running
    ```sql run            typed into psql in the second terminal, once all that runs follows the log
    ```text shows         all that the command started last has printed (text or json lines)
    ```python run         a snippet: run in order in one namespace, with `hw` and `await`

Programs and commands use the embedded PostgreSQL, as a new user would; HEADWATER_DATA_DIR makes it
that of the tests. Of JSON lines, what differs from run to run (times, positions) is not compared.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from typer.main import get_command

import headwater
from headwater import Headwater, HeadwaterError, limits
from headwater.cli import app
from headwater.embedded import EmbeddedPostgres
from headwater.embedded.binaries import _find_package
from headwater.metrics import Metrics
from headwater.settings import Settings

ROOT = Path(__file__).parents[2]
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


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


class Started:
    """A command in the first terminal."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
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


class Reader:
    """Somebody who works through a page at two terminals."""

    def __init__(self, folder: Path, server: EmbeddedPostgres) -> None:
        self.folder = folder
        self.url = server.url
        self.started: list[Started] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
        self.environment = inherited | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HEADWATER_DATA_DIR": str(server.data_dir),
        }

    def does(self, block: Block) -> None:
        match block:
            case Block("python", name, text) if name.endswith(".py"):
                (self.folder / name).write_text(text)
            case Block("sh", "start", text):
                self.started.append(Started(text.strip(), self.folder, self.environment))
            case Block("sql", "run", text):
                self._types_into_psql(text)
            case Block(language, "shows", text):
                self._sees(text.splitlines(), as_json=language == "json")

    def _types_into_psql(self, text: str) -> None:
        assert wait_until(self._everything_follows), self._complaints()
        psql = _find_package() / "pginstall18" / "bin" / "psql"
        command = [str(psql), "-X", "-q", "-v", "ON_ERROR_STOP=1", self.url]
        subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)

    def _everything_follows(self) -> bool:
        """Each program still running has read the log once: what is written now it will see."""
        with psycopg.connect(self.url) as connection:
            row = connection.execute(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and application_name = 'headwater reader' and query like '%page as%'"
            ).fetchone()
        return row is not None and row[0] >= sum(p.is_running for p in self.started)

    def _sees(self, expected: list[str], *, as_json: bool) -> None:
        program = self.started[-1]
        wait_until(lambda: len(program.lines()) >= len(expected))
        lines = program.lines()
        if as_json:
            assert [_steady(line) for line in lines] == [_steady(line) for line in expected]
        else:
            assert lines == expected, self._complaints()

    def _complaints(self) -> str:
        return "\n".join(program.complained.read_text() for program in self.started)

    def leaves(self) -> None:
        for program in self.started:
            program.stop()
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("drop schema if exists headwater cascade")
            connection.execute("drop table if exists orders")


def _steady(line: str) -> dict[str, Any]:
    return {name: v for name, v in json.loads(line).items() if name not in DIFFERS_EACH_TIME}


@pytest.fixture
def reader(tmp_path: Path, postgres: EmbeddedPostgres) -> Iterator[Reader]:
    reader = Reader(tmp_path, postgres)
    yield reader
    reader.leaves()


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_a_new_user_works_through(page: str, reader: Reader) -> None:
    for block in blocks(ROOT / page):
        reader.does(block)
    assert len(reader.started) >= 2


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_every_program_for_new_users_is_run(page: str) -> None:
    started = " ".join(b.text for b in blocks(ROOT / page) if b[:2] == ("sh", "start"))
    for block in blocks(ROOT / page):
        if block.language == "python":
            assert block.mark == "run" or f"python {block.mark}" in started, block.text


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


def test_there_are_snippets() -> None:
    assert REFERENCE / "python.md" in SNIPPETS


# What the code has and what the reference says -------------------------------------------------


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
COMMANDS: dict[str, Any] = getattr(get_command(app), "commands", {})


def options_of(command: str) -> set[str]:
    parameters = COMMANDS[command].params
    return {name for p in parameters for name in p.opts if name.startswith("--")} | {"--help"}


def test_every_command_has_a_section_and_the_reverse() -> None:
    documented = {title.split()[1] for title in CLI if title.startswith("headwater ")}
    assert documented == set(COMMANDS)
    assert COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command(command: str) -> None:
    """A command without one of the common options says so: "no `--url`"."""
    section, options = CLI[f"headwater {command}"], options_of(command)
    documented = {cell.split()[0] for cell in first_cells(section) if cell.startswith("--")}
    missing = {option for option in COMMON_OPTIONS if f"no `{option}`" in section}
    assert options == (documented | COMMON_OPTIONS) - missing
    assert set(re.findall(r"--[a-z][a-z-]*", section)) <= options | missing


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_in_the_readme_and_has_an_example(command: str) -> None:
    if command != "demo":  # there it is `make demo`
        assert f"`headwater {command}" in (ROOT / "README.md").read_text()
    assert "```sh" in CLI[f"headwater {command}"]
    assert "Example: `" in (COMMANDS[command].help or "")


@pytest.mark.parametrize("name", headwater.__all__)
def test_public_names(name: str) -> None:
    page = sections(REFERENCE / "python.md")
    titles = {title.replace("\\", "") for title in page}
    assert name in titles or name in first_cells(page["Errors"])


def test_the_python_page_names_nothing_that_is_not_public() -> None:
    page = sections(REFERENCE / "python.md")
    titles = {title.replace("\\", "") for title in page} - {"Errors", "headwater.embedded"}
    assert titles | set(first_cells(page["Errors"])) == set(headwater.__all__)


def test_settings() -> None:
    text = (REFERENCE / "settings.md").read_text()
    assert first_cells(text) == list(Settings.__struct_fields__)
    for name, default in zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True):
        assert f"| `{name}` | `HEADWATER_{name.upper()}` |" in text
        shown = json.dumps(default) if isinstance(default, tuple) else default
        assert default is None or f"| `{shown}` |" in text


def test_limits() -> None:
    public = [name for name in vars(limits) if name.isupper()]
    assert sorted(first_cells((REFERENCE / "limits.md").read_text())) == sorted(public)


def errors(base: type[HeadwaterError] = HeadwaterError) -> Iterator[type[HeadwaterError]]:
    yield base
    for child in base.__subclasses__():
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
    metrics = Metrics()
    kinds = {family.name: family.type for family in metrics.registry.collect()}
    page = sections(REFERENCE / "metrics.md", "# ")["Metrics"]
    rows = re.findall(r"^\| `headwater_(\w+)(?:\{(\w+)\})?` \| (\w+) \|", page, re.M)
    documented = {
        f"headwater_{name.removesuffix('_total')}": (labels, kind) for name, labels, kind in rows
    }
    assert documented == {
        metric._name: (",".join(metric._labelnames), kinds[metric._name])
        for name, metric in vars(metrics).items()
        if name != "registry"
    }


def test_every_metric_is_kept() -> None:
    modules = [path for path in (ROOT / "src").rglob("*.py") if path.name != "metrics.py"]
    source = "\n".join(path.read_text() for path in modules)
    for name in vars(Metrics()):
        assert name == "registry" or re.search(rf"metrics\.{name}\b", source), name


# Links -----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names GitHub gives to headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_can_be_reached_from_the_map() -> None:
    reached, todo = set[Path](), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        todo += [page.parent / link for link in links if "://" not in link]
    assert reached == {page.resolve() for page in PAGES}
