"""The tests of `make test`, and the result of each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from recording import ROOT, Found, surroundings

PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
"""As in the Makefile."""
RESULTS = ("passed", "skipped", "failure", "error")
"""From good to bad. A test that pytest reports twice has the worse result: it may pass and be torn down badly."""
SOME_FAILED = 1
"""pytest's status when tests failed; above it, not all of them ran."""


def results(junit: Path | None = None) -> Found:
    """The results in a JUnit file, else those of a new run. A run waits for every test: many minutes."""
    if junit is not None:
        return read(junit)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        _run(file)
        return read(file)


def read(junit: Path) -> Found:
    """The tests of a file that pytest wrote with `--junit-xml`."""
    found: Found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = max(found.get(name, "passed"), _result(case), key=RESULTS.index)
    return found


def _result(case: ElementTree.Element) -> str:
    tags = [part.tag for part in case if part.tag in RESULTS]
    return max(tags, key=RESULTS.index, default="passed")


def _run(junit: Path) -> None:
    command = [sys.executable, "-m", "pytest", *PARALLEL, "tests", f"--junit-xml={junit}"]
    status = subprocess.run(command, cwd=ROOT, env=surroundings()).returncode
    if status > SOME_FAILED:
        raise SystemExit(
            f"pytest ended with status {status}, so not every test has a result; what it printed is above."
        )
