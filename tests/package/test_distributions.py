"""The wheel in an environment of its own, and the source distribution: each has what the pages speak of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from email.parser import Parser
from pathlib import Path

import pytest

import midflight

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
ENVIRON = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def wheel() -> Path:
    (made,) = DIST.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel. What it needs is taken from the environment of the tests; the checkout is not seen."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(place / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, env=ENVIRON)
    return place


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_says_its_version_and_its_types(installed: Path, tmp_path: Path) -> None:
    commit = r" \(commit [0-9a-f]{12}\)" if (ROOT / ".git").exists() else ""
    said = run(installed / "bin" / "midflight", "--version", cwd=tmp_path)
    assert re.fullmatch(rf"midflight {re.escape(midflight.__version__)}{commit}\n", said)
    package = Path(run(installed / "bin" / "python", "-c", "import midflight; print(midflight.__file__)", cwd=tmp_path)).parent
    assert package.is_relative_to(installed) and (package / "py.typed").exists()
    ours = {path.relative_to(ROOT / "src" / "midflight") for path in (ROOT / "src" / "midflight").rglob("*.py")}
    assert ours == {path.relative_to(package) for path in package.rglob("*.py")}


def test_the_metadata_has_licence_and_pythons(installed: Path) -> None:
    (folder,) = installed.rglob("midflight-*.dist-info")
    said = Parser().parsestr((folder / "METADATA").read_text())
    assert (said["Version"], said["License-Expression"], said["Requires-Python"]) == (midflight.__version__, "Apache-2.0", ">=3.11")
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_what_the_pages_speak_of_is_where_help_says_and_the_demo_can_be_run_from_there(installed: Path, tmp_path: Path) -> None:
    shared = installed / "share" / "midflight"
    assert str(shared) in "".join(run(installed / "bin" / "midflight", "--help", cwd=tmp_path).split())
    assert "effective loss" in run(installed / "bin" / "midflight", "train", shared / "configs" / "demo.toml", "--dry-run", cwd=tmp_path)
    assert {"README.md", "Makefile", "locks", "engines"} <= {path.name for path in shared.iterdir()}  # `make engines` holds there too
    for folder in ("configs", "docs", "engines", "examples"):
        theirs = {path.relative_to(shared) for path in (shared / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert theirs == {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_the_source_distribution_is_a_checkout() -> None:
    (made,) = DIST.glob("*.tar.gz")
    with tarfile.open(made) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert {"LICENSE", "Makefile", "locks/midflight.txt", "tests/conftest.py", *tracked} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "runs/"))]
