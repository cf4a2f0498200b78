"""A real Chromium: Debian's, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

# Milliseconds, on a busy machine.
expect.set_options(timeout=60_000)

SIZES = {"desk": (1280, 800), "phone": (390, 844)}


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("this machine has no Chromium (Debian: apt-get install chromium)")
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc"],
        )
        yield opened
        await opened.close()


@pytest.fixture
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    """A browser context. Its tabs share what the tabs of a browser share."""
    width, height = SIZES["desk"]
    opened = await browser.new_context(viewport={"width": width, "height": height})
    yield opened
    await opened.close()


@pytest.fixture
async def page(context: BrowserContext) -> AsyncIterator[Page]:
    """A tab. An error in its console, or an uncaught exception, fails the test."""
    complaints: list[str] = []
    opened = await context.new_page()
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    yield opened
    assert complaints == []


async def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    return int(
        await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
    )
