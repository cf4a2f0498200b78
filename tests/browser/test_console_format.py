"""How the console formats values: its module `format.js`, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import headwater
from tests.support.node import node

SOURCES = Path(headwater.__file__).parent

BIG = 2**53 + 1

SAID: list[tuple[str, list[Any], Any]] = [
    ("count", [0], "0"),
    ("count", [99_999], "99,999"),
    ("count", [1_234_567], "1.2M"),
    ("count", [None], "–"),
    ("rate", [0], "0"),
    ("rate", [0.25], "0.3"),
    ("rate", [1234.4], "1,234"),
    ("rate", [None], "–"),
    ("bytes", [0], "0 B"),
    ("bytes", [999], "999 B"),
    ("bytes", [1500], "1.5 kB"),
    ("bytes", [250_000_000], "250 MB"),
    ("seconds", [0], "0 ms"),
    ("seconds", [0.00004], "40 µs"),
    ("seconds", [0.0042], "4.2 ms"),
    ("seconds", [0.25], "250 ms"),
    ("seconds", [2], "2 s"),
    ("seconds", [59.94], "59.9 s"),
    ("seconds", [3599], "59 min"),
    ("seconds", [90_000], "25 h"),
    ("seconds", [172_800], "2 days"),
    ("seconds", [None], "–"),
    ("period", ["P30D"], "30 days"),
    ("period", ["PT90M"], "1 h"),
    ("value", [None], "null"),
    ("value", ["text"], "text"),
    ("value", ["2026-11-15T23:56:26.8+00:00"], "2026-11-15T23:56:26.8Z"),
    ("value", [{"a": [1, None]}], '{"a":[1,null]}'),
    ("key", [{"year": 7, "month": 2026}], "7,2026"),
    ("key", [{"at": "2026-11-15T23:56:26.8+00:00"}], "2026-11-15T23:56:26.8+00:00"),
    ("key", [None], ""),
    ("sameKey", ["7,2026-11-15T23:56:26.8+00:00", "7,2026-11-15T23:56:26.800000Z"], True),
    ("sameKey", ["2026-11-15T23:56:26", "2026-11-15T23:56:26.0"], True),
    ("sameKey", ["2026-11-15T23:56:26", "2026-11-15T23:56:26Z"], False),
    ("sameKey", ["2026-11-15T23:56:26.8Z,1", "2026-11-15T23:56:26.9Z,1"], False),
    ("sameKey", ["Z", "z"], False),
    ("value", [[BIG]], f"[{BIG}]"),
    ("pretty", [{"id": BIG}], f'{{\n  "id": {BIG}\n}}'),
    ("short", ["abcdef", 4], "abc…"),
    ("short", ["abcd", 4], "abcd"),
]

SCRIPT = """
import { readFileSync } from "node:fs";
import { parse } from "./client/json.js";
import * as words from "./console/format.js";
const asked = parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(asked.map(([name, given]) => words[name](...given))));
"""


def test_words(tmp_path: Path) -> None:
    shutil.copytree(SOURCES / "console", tmp_path / "console")
    shutil.copytree(SOURCES / "javascript", tmp_path / "client")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "ask.js").write_text(SCRIPT)
    asked = json.dumps([(name, given) for name, given, _ in SAID])
    done = subprocess.run(
        [str(node()), "ask.js"], cwd=tmp_path, input=asked, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = zip(SAID, json.loads(done.stdout), strict=True)
    assert [(name, given, said) for (name, given, _), said in results] == SAID
