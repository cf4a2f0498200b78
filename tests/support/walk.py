"""The walks of docs/design/006-a-walk.md: the functions they name, and the files of these."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "006-a-walk.md"
SQL = ROOT / "src" / "headwater" / "capture" / "postgres" / "sql"


class Passed(NamedTuple):
    """A function that a walk passes: `module:Qualified.name`."""

    place: str
    name: str

    @property
    def file(self) -> Path:
        if self.place.endswith(".sql"):
            return SQL / self.place
        if self.place.endswith(".js"):
            return ROOT / self.place
        return ROOT / "src" / f"{self.place.replace('.', '/')}.py"

    @property
    def exists(self) -> bool:
        text = self.file.read_text()
        match self.file.suffix:
            case ".py":
                return self.name in _functions(ast.parse(text))
            case ".sql":
                return re.search(rf"function {re.escape(self.name)}\(", text) is not None
            case _:
                return all(_declares(text, part) for part in self.name.split("."))


class Walk(NamedTuple):
    title: str
    files: int
    """As the page says."""
    passed: tuple[Passed, ...]

    @property
    def python(self) -> list[Passed]:
        return [each for each in self.passed if each.file.suffix == ".py"]


def walks() -> list[Walk]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    return [_walk(*pair) for pair in zip(parts[1::2], parts[2::2], strict=True)]


def _walk(title: str, text: str) -> Walk:
    (files,) = re.findall(r"\b(\d+) files\.", text)
    steps = re.findall(r"^(\d+)\. `([^`:]+):([^`]+)`: ", text, re.M)
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1)), title
    assert len(steps) == len(re.findall(r"^\d+\. ", text, re.M)), title
    return Walk(title, int(files), tuple(Passed(place, name) for _, place, name in steps))


def _functions(tree: ast.AST, within: str = "") -> set[str]:
    found = set[str]()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(f"{within}{node.name}")
        elif isinstance(node, ast.ClassDef):
            found |= _functions(node, f"{within}{node.name}.")
    return found


def _declares(text: str, name: str) -> bool:
    """A class, a function or a method of JavaScript."""
    name = re.escape(name)
    return (
        re.search(rf"\b(?:class|function) {name}\b|^  (?:async )?{name}\(", text, re.M) is not None
    )
