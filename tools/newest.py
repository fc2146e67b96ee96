"""The tests with the newest of everything: says by name what has changed since the lock, and which
of it breaks which tests.

    make newest        # a new environment without the lock, and this in it

A package whose newest release breaks tests is found by trying: the tests that failed are run again
with each changed package taken back, one at a time, to the version of the lock.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from lock import ENVIRONMENTS, ROOT, pins, requirements_of_project
from packaging.utils import canonicalize_name

LOCK = next(lock for lock in ENVIRONMENTS if lock.name == "midflight")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[| - |$)", re.MULTILINE)


def main() -> None:
    changed = drift()
    for name, (locked, found) in changed.items():
        print(f"{name}: {locked} in the lock, {found} is the newest")
    if not changed:
        print(
            "nothing has had a release since the lock: `make test` tries the newest of everything "
            "already"
        )
        return
    failed = run_tests(["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "tests"])
    if not failed:
        print("all tests pass with the newest of everything; `make locks LOCKS=--upgrade` takes it")
        return
    blamed = culprits(changed, failed)
    for name, mended in blamed.items():
        locked, found = changed[name]
        print(
            f"{name} {found} breaks these tests, which pass with {locked}:\n"
            + "".join(f"  {test}\n" for test in mended)
        )
    if unexplained := failed - {test for tests in blamed.values() for test in tests}:
        print(
            "these fail with each changed package taken back alone:\n"
            + "".join(f"  {test}\n" for test in sorted(unexplained))
        )
    sys.exit(1)


def drift() -> dict[str, tuple[str, str]]:
    """The packages of this environment that are not as the lock has them, with both versions; those
    that we ask for by name come first.
    """
    found = {
        canonicalize_name(one.metadata["Name"]): one.version.partition("+")[0]
        for one in distributions()
    }
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    locked = {
        one.name: str(one.specifier)[2:]
        for one in pins(LOCK.path)
        if one.marker is None or one.marker.evaluate({"python_version": here})
    }
    ours = {canonicalize_name(one.name) for one in requirements_of_project(LOCK.extras)}
    changed = {
        name: (version, found[canonicalize_name(name)])
        for name, version in locked.items()
        if found.get(canonicalize_name(name), version) != version
    }
    return dict(sorted(changed.items(), key=lambda one: (one[0] not in ours, one[0])))


def run_tests(arguments: Sequence[str]) -> set[str]:
    """The tests that failed. Waits for pytest, whose words are shown."""
    command = [sys.executable, "-m", "pytest", "-rfE", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        said: list[str] = []
        for line in tests.stdout:
            sys.stdout.write(line)
            said.append(line)
    failed = set(FAILED.findall("".join(said)))
    if tests.returncode not in (0, 1) or (tests.returncode == 1 and not failed):
        raise SystemExit(f"pytest ended with status {tests.returncode}")
    return failed


def culprits(changed: dict[str, tuple[str, str]], failed: set[str]) -> dict[str, list[str]]:
    """By package, the tests that pass once it alone is as the lock has it. The environment is left
    as it was.
    """
    blamed: dict[str, list[str]] = {}
    for name, (locked, newest) in changed.items():
        install(f"{name}=={locked}")
        mended = failed - run_tests(sorted(failed))
        install(f"{name}=={newest}")
        if mended:
            blamed[name] = sorted(mended)
    return blamed


def install(what: str) -> None:
    """This one alone: what it wants stays as it is. A release that cannot be had is passed over."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        what,
    ]
    subprocess.run(command, cwd=Path.cwd(), check=False)


if __name__ == "__main__":
    main()
