"""From `/`, by links alone, on a run of the demo with a planted fault: what fails and why, in which step, what the model said, what to turn."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.view.conftest import PATIENCE, viewing

expect.set_options(timeout=PATIENCE)
pytestmark = pytest.mark.timeout(600)  # half a minute on quiet cores; on busy ones its run took five
ROOT = Path(__file__).parents[2]
OPTIONS = ("run.steps=6", "warm_start.target_accuracy=0.05", "environment.entry=tests.view.planted:answer")


def test_a_planted_fault_is_found_by_following_links(tmp_path: Path, look: Callable[..., Page]) -> None:
    command = [sys.executable, "-c", "import sys; from midflight.cli import main; sys.exit(main())", "train", "configs/demo.toml"]
    command += ["--folder", str(tmp_path / "demo"), *(word for option in OPTIONS for word in ("--set", option))]
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with viewing(tmp_path / "demo") as address:
        page = look(address + "/")
        row = page.locator('table[data-test="failures"] tbody tr').first
        expect(row).to_contain_text("chain_sum")  # which environment
        expect(row).to_contain_text("ZeroDivisionError")  # and why
        expect(row).to_contain_text("step ")  # which step
        expect(page.locator(".page")).to_contain_text("mend the environment")  # and what to do
        expect(page.locator('[data-test="who was busy"]')).to_contain_text("engines busy")
        expect(page.locator('[data-test="advice"]')).not_to_be_empty()  # which knob
        row.locator("a").first.click()
        expect(page.locator(".page")).to_contain_text("chain_sum")
        page.locator('.page a[href*="/conversation?"]').first.click()
        expect(page.locator(".page")).to_contain_text("the planted fault: there is no unit to divide by")
