"""What the site needs beyond Markdown, when MkDocs builds it.

The pages are written for a code host as well: they name what the tests run after a code fence, and
CONTRIBUTING.md and CHANGELOG.md are in the root of the repository. Here the fences become what
the highlighter understands, and the two files become pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FROM_THE_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^```(\w+) ([^\n]+)$", re.M)


def on_files(files: Files, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    for name in FROM_THE_ROOT:
        files.append(File.generated(config, name, content=(root / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in FROM_THE_ROOT:
        markdown = markdown.replace("](docs/", "](")
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # It would list this one page.
    return FENCE.sub(_fence, markdown)


def _fence(found: re.Match[str]) -> str:
    """The mark of a file becomes the title of the block; other marks are only for the tests."""
    language, mark = found.groups()
    is_file = re.fullmatch(r"[\w-]+\.\w+", mark)
    return f'```{language} title="{mark}"' if is_file else f"```{language}"
