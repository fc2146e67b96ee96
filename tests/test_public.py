"""The public names: there, documented, and free until they are used."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import midflight

ROOT = Path(__file__).parents[1]


def in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_importing_midflight_imports_nothing_heavy_and_takes_no_time() -> None:
    code = """
import sys, time
began = time.process_time()
import midflight
spent = time.process_time() - began
print(spent, *sorted({"torch", "transformers", "numpy", "pydantic", "openai"} & sys.modules.keys()))
"""
    spent, *heavy = in_new_process(code).split()
    assert float(spent) < 0.3 and not heavy


def test_only_the_objective_needs_torch() -> None:
    code = """
import sys, midflight
for name in midflight.__all__:
    if name != "Objective":
        getattr(midflight, name)
print("torch" in sys.modules)
midflight.Objective
print("torch" in sys.modules)
"""
    assert in_new_process(code).split() == ["False", "True"]


@pytest.mark.parametrize("name", midflight.__all__)
def test_every_public_name_is_what_its_home_defines_and_has_a_line_in_the_docstring(name: str) -> None:
    value = getattr(midflight, name)
    assert not isinstance(value, ModuleType)
    assert f"`{name}`" in (midflight.__doc__ or "")
    assert name == "Reward" or callable(value)


def test_an_unknown_name_is_refused_and_the_known_ones_are_said() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainers'.*load_config"):
        midflight.Trainers  # noqa: B018
    assert dir(midflight) == sorted(midflight.__all__)


def test_the_version_is_written_once_and_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == midflight.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["tool"]["setuptools"]["dynamic"] == {
        "version": {"attr": "midflight.version.__version__"}
    }
    said = in_new_process("from midflight.cli import main; main(['--version'])")
    assert re.fullmatch(rf"midflight {re.escape(midflight.__version__)}( \(commit [0-9a-f]+\+?\))?\n", said)


def test_the_package_is_typed_and_licensed() -> None:
    assert (Path(midflight.__file__).parent / "py.typed").exists()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0" in licence and "END OF TERMS AND CONDITIONS" in licence


def test_a_wheel_takes_every_page_configuration_and_example_along() -> None:
    taken = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    for target, patterns in taken.items():
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), target
    files = {path for patterns in taken.values() for pattern in patterns for path in ROOT.glob(pattern)}
    for folder in ("configs", "docs", "engines", "examples"):
        assert {path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts} <= files
