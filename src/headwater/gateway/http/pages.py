"""Files for browsers: the JavaScript client at `/client/`, the console at `/console/`.

They contain no data and no secret, so every client may read them; the data is requested with the
visitor's own token. The client's files are those of `clients/js`: there is no build step.
"""

from __future__ import annotations

import os
from pathlib import Path

from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import headwater

PACKAGE = Path(headwater.__file__).parent

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The pages may load files from this gateway only."""


def routes() -> list[BaseRoute]:
    """The routes of the client and the console."""
    return [folder("/client", PACKAGE / "javascript"), folder("/console", PACKAGE / "console")]


def folder(path: str, files: Path) -> BaseRoute:
    """A folder of files under a path; `index.html` is its page."""
    return Mount(path, Files(directory=files, html=True))


class Files(StaticFiles):
    """Files that browsers revalidate on each request; the answer is 304 if a file has not
    changed."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response


_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
