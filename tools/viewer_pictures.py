"""The pictures of the viewer in docs/images, taken of a run by a headless Chromium.

    make test-view
    midflight train configs/demo.toml
    python tools/viewer_pictures.py runs/demo docs/images
    python tools/viewer_pictures.py runs/pretrained/calculator-0 docs/images 7
        only the rollouts of step 7, of `make pretrained`: of the demo's few go on over a version

`MIDFLIGHT_CHROMIUM` names the browser if it is not `chromium`.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

# `make test-view` installs it; without it nothing here can be typed
playwright: Any = import_module("playwright.sync_api")
Browser: TypeAlias = Any
Page: TypeAlias = Any

WIDE = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
TRAINED = "fate=trained&sort=spread"
SETTLE_MILLISECONDS = 2_000
COLOURS = 256
"""A picture of a page needs no more, and takes half of the bytes."""


@contextmanager
def viewing(folder: Path) -> Generator[str]:
    """The address of a viewer of the run."""
    command = [sys.executable, "-m", "midflight", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            yield viewer.stdout.readline().removeprefix("viewer: ").strip().rstrip("/")
        finally:
            viewer.terminate()


def opened(browser: Browser, address: str, *, dark: bool = False, phone: bool = False) -> Page:
    scheme = "dark" if dark else "light"
    size = PHONE if phone else WIDE
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.goto(address)
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    return page


def write(page: Page, path: Path) -> None:
    picture = Image.open(io.BytesIO(page.screenshot()))
    few = picture.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


def take(browser: Browser, address: str, out: Path) -> None:
    write(opened(browser, f"{address}/run"), out / "viewer-run.png")
    write(opened(browser, f"{address}/run", dark=True), out / "viewer-run-dark.png")
    write(opened(browser, f"{address}/time"), out / "viewer-time.png")
    write(opened(browser, f"{address}/groups?{TRAINED}", phone=True), out / "viewer-phone.png")
    groups = opened(browser, f"{address}/groups?{TRAINED}")
    write(groups, out / "viewer-groups.png")
    said = groups.locator(".cells a").first.get_attribute("href")
    origin = address.partition("/run/")[0]
    conversation = opened(browser, f"{origin}{said}&color=logprob")
    conversation.wait_for_selector(".tokens")
    write(conversation, out / "viewer-conversation.png")


def take_step(browser: Browser, address: str, out: Path, step: int) -> None:
    page = opened(browser, f"{address}/groups?step={step}")
    page.wait_for_selector('[data-test="chart rollouts"] .point')
    write(page, out / "viewer-step.png")


def main(folder: Path, out: Path, step: int | None = None) -> None:
    chromium = os.environ.get("MIDFLIGHT_CHROMIUM") or shutil.which("chromium")
    with viewing(folder) as address, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        of_run = f"{address}/run/{folder.name}"
        if step is None:
            take(browser, of_run, out)
        else:
            take_step(browser, of_run, out, step)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
