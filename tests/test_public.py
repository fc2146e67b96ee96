"""The public names: there, documented, and free until they are used."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import midflight


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
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'.*load_config"):
        midflight.Trainer  # noqa: B018
    assert dir(midflight) == sorted(midflight.__all__)
