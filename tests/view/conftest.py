"""A viewer in a process of its own, and a headless Chromium that looks at it. `make test-view` installs what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="make test-view installs it")
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

CHROMIUM = (
    os.environ.get("MIDFLIGHT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE = 60_000
"""Milliseconds for whatever must come to be seen: a busy machine takes long to begin."""


@contextmanager
def viewing(*folders: Path, arguments: tuple[str, ...] = ()) -> Generator[str]:
    """The address of `midflight view` over the folders."""
    command = [sys.executable, "-c", "import sys; from midflight.cli import main; sys.exit(main())", "view", *map(str, folders)]
    process = subprocess.Popen([*command, "--port", "0", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("viewer: "), said
        yield said.removeprefix("viewer: ").strip().rstrip("/")
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium: make test-view installs it, or MIDFLIGHT_CHROMIUM names one")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def look(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page. A request to any other host, or an error in the page, fails the test."""
    opened: list[Page] = []
    trouble: list[str] = []

    def opens(address: str, *, size: dict[str, int] = WIDE, dark: bool = False) -> Page:
        page = chromium.new_page(viewport=size, color_scheme="dark" if dark else "light")  # pyright: ignore[reportArgumentType]
        page.set_default_timeout(PATIENCE)
        page.on(
            "request", lambda asked: trouble.append(asked.url) if not asked.url.startswith(("http://127.0.0.1", "data:", "blob:")) else None
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(address)
        opened.append(page)
        return page

    yield opens
    for page in opened:
        page.close()
    assert trouble == []
