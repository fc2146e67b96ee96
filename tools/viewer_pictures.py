"""The pictures of the viewer in docs/images, taken of a run by a headless Chromium.

    make test-view
    midflight train configs/demo.toml
    python tools/viewer_pictures.py runs/demo docs/images
    python tools/viewer_pictures.py runs/pretrained/calculator-0 docs/images 7
        the rollouts of step 7 and a conversation of it, of `make pretrained`: its rollouts have
        several turns, and some go on over a version

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


def opened(browser: Browser, address: str) -> Page:
    page = browser.new_page(viewport=WIDE, color_scheme="light")
    page.goto(address)
    page.wait_for_timeout(SETTLE_MILLISECONDS)
    return page


def write(page: Page, path: Path, *, whole: bool = False) -> None:
    picture = Image.open(io.BytesIO(page.screenshot(full_page=whole)))
    few = picture.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    few.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB")


def take(browser: Browser, address: str, out: Path) -> None:
    write(opened(browser, f"{address}/run"), out / "viewer-run.png")
    write(opened(browser, f"{address}/time"), out / "viewer-time.png")
    write(opened(browser, f"{address}/groups?{TRAINED}"), out / "viewer-groups.png")


def take_step(browser: Browser, address: str, out: Path, step: int) -> None:
    """The groups of the step, and a conversation of it that went on over a version."""
    page = opened(browser, f"{address}/groups?step={step}")
    page.wait_for_selector('[data-test="chart rollouts"] .point')
    write(page, out / "viewer-step.png")
    origin = address.partition("/run/")[0]
    for right in page.locator('.cells a[style*="--r: 1.00"]').all():
        said = right.get_attribute("href")
        conversation = opened(browser, f"{origin}{said}&color=version")
        conversation.wait_for_selector('[data-test="chart turns"] .point')
        if conversation.locator('[data-test="sampled by"]').inner_text().startswith("versions"):
            write(conversation, out / "viewer-conversation.png", whole=True)
            return
        conversation.close()


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
