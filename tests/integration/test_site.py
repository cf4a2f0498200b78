"""`make docs` builds a site without a warning, and its pages load nothing from another host.

MkDocs itself reports a page outside the navigation, and a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?([^\"' >]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert not built.stderr
    return folder


def test_every_page_is_in_the_site_and_can_be_searched(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    pages += [Path("CONTRIBUTING.md"), Path("CHANGELOG.md")]
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    searched = {entry["location"].partition("#")[0] for entry in found}
    for page in pages:
        assert (site / page.with_suffix(".html")).is_file()
        assert str(page.with_suffix(".html")) in searched


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        loaded = LOADED.findall(page.read_text())
        assert loaded
        assert not [address for address in loaded if "//" in address], page


def test_marks_of_code_blocks_are_understood(site: Path) -> None:
    """What a page says to the tests after a fence is not shown, and a file has its name."""
    tutorial = (site / "tutorial.html").read_text()
    assert "```" not in tutorial
    assert '<span class="filename">' in tutorial
