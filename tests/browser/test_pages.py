"""What a gateway serves to browsers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page

from headwater.testing.gateway_process import Served, serving


@pytest.fixture
def served(url: str, tmp_path: Path) -> Iterator[Served]:
    with serving(url, tmp_path) as gateway:
        yield gateway


async def test_a_page_of_the_gateway_imports_the_client(served: Served, page: Page) -> None:
    await page.goto(f"{served.url}/console/")
    names = await page.evaluate("async () => Object.keys(await import('/client/index.js'))")
    assert names


async def test_a_cell_that_cannot_be_shown_does_not_affect_others(
    served: Served, context: BrowserContext
) -> None:
    page = await context.new_page()  # The error goes to the browser's console.
    await page.goto(f"{served.url}/console/")
    assert await page.evaluate(GRID) == [False, ["cannot be shown", "2"]]


GRID = """async () => {
    const { Grid } = await import("/console/grid.js");
    const id = { name: "Id", show: (row) => row.detail.id };
    const grid = new Grid("Rows", [id], { key: (row) => row.key });
    grid.update([{ key: "1" }, { key: "2", detail: { id: 2 } }]);
    return [grid.table.hidden, [...grid.table.querySelectorAll("td")].map((td) => td.textContent)];
}"""


def test_unchanged_files_are_answered_with_304(served: Served) -> None:
    first = served.get("/client/index.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert first.headers["cache-control"] == "no-cache"
    assert "default-src 'none'" in first.headers["content-security-policy"]
    again = served.get("/client/index.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("path", ["/console/%2e%2e/app.py", "/client/nothing"])
def test_nothing_else_is_served(served: Served, path: str) -> None:
    answer = served.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "path"
