"""Locks: the exact versions that each environment of the Makefile is installed with.

    python tools/lock.py
        every lock again, with the versions that it has where they still fit
    python tools/lock.py midflight site
        these alone
    python tools/lock.py --upgrade
        the newest versions that fit
    python tools/lock.py sglang --release 0.5.22 --into FILE
        of another release of a server, beside the lock

A lock is a file of constraints (`pip install -c`): it says which version a package has if it is
installed, and installs nothing. One lock holds for Python 3.11 to 3.13 on Linux. uv resolves it
(`pyproject.toml`, `[tool.uv]`, says for which machines, and what torch's CPU build needs: resolved
from the registry, torch brings CUDA along).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
TORCH = "torch==2.13.0"
"""The release whose CPU build every environment with torch has."""
HEAD = (
    "# Constraints for `pip install -c`; made by `make locks`, not by hand. Python 3.11 to "
    "3.13 "
    "on Linux.\n"
)


@dataclass(frozen=True, slots=True)
class Lock:
    """One environment: what is asked for, from which its lock is resolved."""

    name: str
    sources: tuple[str, ...]
    """Files of requirements, or `pyproject.toml`, relative to the root."""
    extras: tuple[str, ...] = ()
    """Of `pyproject.toml`."""
    python: str = PYTHONS[0]
    """The oldest Python that it is installed with."""
    server: bool = False
    """Its source names every package that is installed, without what those want: a server's CPU
    build pins or wants what a CPU has no use for.
    """

    @property
    def path(self) -> Path:
        return LOCKS / f"{self.name}.txt"


ENVIRONMENTS = (
    Lock(
        "midflight",
        ("pyproject.toml", "tools/requirements-tools.txt"),
        extras=("demo", "test", "lint", "ray"),
    ),
    Lock("site", ("tools/requirements-site.txt",)),
    Lock("ops", ("ops/requirements.txt",)),
    Lock("clients", ("tests/clients/requirements.txt",)),
    Lock("clients-openai2", ("tests/clients/requirements-openai2.txt",)),
    Lock("clients-frameworks", ("tests/clients/requirements-frameworks.txt",)),
    Lock("clients-frameworks-openai2", ("tests/clients/requirements-frameworks-openai2.txt",)),
    Lock("clients-crewai", ("tests/clients/requirements-crewai.txt",)),
    Lock("aider", ("tests/coding_agents/requirements.txt",)),
    Lock("openhands", ("tests/coding_agents/requirements-openhands.txt",), python="3.12"),
    Lock("agents", ("tests/agents/requirements.txt",)),
    Lock("agents-openai2", ("tests/agents/requirements-openai2.txt",)),
    Lock("verifiers", ("tests/real_adapters/requirements-verifiers.txt",)),
    Lock("openenv", ("tests/real_adapters/requirements-openenv.txt",)),
    Lock("sandboxes", ("tests/real_sandboxes/requirements.txt",)),
    Lock("trackers", ("tests/real_trackers/requirements.txt",)),
    Lock("trl", ("benchmarks/requirements-trl.txt",)),
    Lock("vllm", ("engines/vllm-cpu.in",), server=True),
    Lock("sglang", ("engines/sglang-cpu.in",), server=True),
)
JAVASCRIPT = ("tests/clients/javascript", "tests/coding_agents")
"""Folders with a `package.json`, whose lock is `package-lock.json` beside it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the locks of the Makefile's environments.")
    parser.add_argument("names", nargs="*", help="of locks; all of them by default")
    parser.add_argument(
        "--upgrade",
        action="store_true",
        help="take the newest versions that fit, not those that stand in the lock",
    )
    parser.add_argument(
        "--release",
        default="",
        help=(
            "of the server whose lock is named, in the place of the one in its source; `newest` "
            "is one"
        ),
    )
    parser.add_argument(
        "--into", type=Path, help="the file that is written in the place of the lock"
    )
    given = parser.parse_args()
    names = [lock.name for lock in ENVIRONMENTS] + list(JAVASCRIPT)
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no lock {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for lock in ENVIRONMENTS:
        if not given.names or lock.name in given.names:
            into = given.into or lock.path
            make(lock, into, upgrade=given.upgrade, release=given.release)
            print(f"{into}: {len(pins(into))} pins")
    for folder in JAVASCRIPT:
        if not given.names or folder in given.names:
            make_javascript(ROOT / folder, upgrade=given.upgrade)
            print(f"{folder}/package-lock.json")


def make(lock: Lock, into: Path, *, upgrade: bool, release: str = "") -> None:
    """Writes the lock again. `release` is of a server. Waits for uv; `SystemExit` with its words
    where nothing fits.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "lock.txt"
        torch = Path(folder) / "torch.txt"
        torch.write_text(TORCH + "\n")
        if lock.path.exists() and not upgrade and not release:
            shutil.copy(lock.path, written)
        command = [
            uv(),
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            lock.python,
            "--no-annotate",
            "--no-header",
        ]
        command += ["--strip-extras", "--no-emit-index-url", "--output-file", str(written)]
        command += ["--override" if lock.server else "--constraint", str(torch)]
        command += [word for extra in lock.extras for word in ("--extra", extra)]
        sources = [with_release(ROOT / source, release, into) for source in lock.sources]
        done = subprocess.run(
            [*command, *map(str, sources)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"locking {lock.name}: uv found nothing that fits.\n{done.stderr}")
        found = [
            Requirement(line)
            for line in written.read_text().splitlines()
            if line and not line.startswith("#")
        ]
    if lock.server:
        wanted = {
            canonicalize_name(one.name)
            for source in lock.sources
            for one in requirements(ROOT / source)
        }
        found = [one for one in found if canonicalize_name(one.name) in wanted]
    lines = [line for one in found if (line := pinned(one)) is not None]
    into.write_text(HEAD + "".join(f"{line}\n" for line in lines))


def with_release(source: Path, release: str, into: Path) -> Path:
    """The source, or a copy beside the lock whose server, the one package besides torch that is
    pinned there, has another release.
    """
    if not release:
        return source
    lines: list[str] = []
    for one in requirements(source):
        if one.name == "torch" or not one.specifier:
            lines.append(str(one))
        elif release == "newest":
            # With no bound, uv may go back to a release of years ago whose own requirements are
            # fewer.
            lines.append(str(one).replace("==", ">="))
        else:
            lines.append(f"{one.name}=={release}")
    copied = into.with_suffix(".in")
    copied.write_text("".join(f"{line}\n" for line in lines))
    return copied


def uv() -> str:
    """The program that belongs to this interpreter's environment."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else "uv"


def pinned(found: Requirement) -> str | None:
    """A line of a lock: without a marker where it holds on every machine and Python that we speak
    of, none where on no one.
    """
    where = [
        found.marker is None or found.marker.evaluate(environment) for environment in environments()
    ]
    if not any(where):
        return None
    pin = f"{canonicalize_name(found.name)}{found.specifier}"
    return pin if all(where) else f"{pin} ; {short(found.marker)}"


def short(marker: Marker | None) -> str:
    """The shortest marker by Python and machine that holds where this one does."""
    holds = {
        key: marker is None or marker.evaluate(environment) for key, environment in keyed().items()
    }
    pythons = [python for python in PYTHONS if any(holds[python, machine] for machine in MACHINES)]
    machines = [
        machine for machine in MACHINES if any(holds[python, machine] for python in PYTHONS)
    ]
    said: list[str] = []
    if len(pythons) < len(PYTHONS):
        said.append(" or ".join(f"python_version == '{python}'" for python in pythons))
    if len(machines) < len(MACHINES):
        said.append(" or ".join(f"platform_machine == '{machine}'" for machine in machines))
    return said[0] if len(said) == 1 else " and ".join(f"({one})" for one in said)


def environments() -> Sequence[dict[str, str]]:
    """What markers are judged by: each Python on each machine."""
    return [*keyed().values()]


def keyed() -> dict[tuple[str, str], dict[str, str]]:
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return {
        (python, machine): {
            **linux,
            **cpython,
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.9",
            "extra": "",
        }
        for python in PYTHONS
        for machine in MACHINES
    }


def requirements(source: Path) -> list[Requirement]:
    """Of a file of requirements."""
    lines = (line.split("#")[0].strip() for line in source.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def requirements_of_project(extras: Sequence[str]) -> list[Requirement]:
    """What `pyproject.toml` asks for with these extras; an extra that stands for others is replaced
    by what it stands for.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_extra = {
        name: [Requirement(line) for line in lines]
        for name, lines in project["optional-dependencies"].items()
    }
    waiting = [Requirement(line) for line in project["dependencies"]]
    for name in extras:
        waiting += by_extra[name]
    found: list[Requirement] = []
    while waiting:
        one = waiting.pop()
        if one.name != project["name"]:
            found.append(one)
        for name in one.extras if one.name == project["name"] else ():
            waiting += by_extra[name]
    return found


def pins(path: Path) -> list[Requirement]:
    """Of a lock."""
    return requirements(path)


def make_javascript(folder: Path, *, upgrade: bool) -> None:
    """Writes `package-lock.json` again, without the registry's addresses. Waits for npm."""
    lock = folder / "package-lock.json"
    if upgrade:
        lock.unlink(missing_ok=True)
    command = [
        "npm",
        "install",
        "--package-lock-only",
        "--omit-lockfile-registry-resolved",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
    ]
    subprocess.run([*command, "--loglevel=error"], cwd=folder, check=True, env={**os.environ})
    if re.search(r"https?://[^\"]*\.tgz", lock.read_text()):
        raise SystemExit(f"{lock}: it names addresses of a registry")


if __name__ == "__main__":
    main()
