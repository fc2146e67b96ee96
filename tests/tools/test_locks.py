"""What is installed is what was locked: the locks, what they are made from, and the Makefile that uses them agree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lock import (
    ENVIRONMENTS,
    JAVASCRIPT,
    PYTHONS,
    ROOT,
    TORCH,
    Lock,
    keyed,
    pinned,
    pins,
    requirements,
    requirements_of_project,
    with_release,
)
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

of_each = pytest.mark.parametrize("lock", ENVIRONMENTS, ids=lambda lock: lock.name)
CUDA = re.compile(r"^(nvidia|cuda|cupy|nccl)")


def asked(lock: Lock) -> Iterator[Requirement]:
    """What the lock is made from."""
    for source in lock.sources:
        yield from requirements_of_project(lock.extras) if source == "pyproject.toml" else requirements(ROOT / source)


@of_each
def test_every_lock_fits_what_it_is_made_from(lock: Lock) -> None:
    for (python, machine), environment in keyed().items():
        chosen = {one.name: str(one.specifier)[2:] for one in pins(lock.path) if one.marker is None or one.marker.evaluate(environment)}
        for one in asked(lock):
            if one.marker is not None and not one.marker.evaluate(environment):
                continue
            version = chosen.get(canonicalize_name(one.name))
            assert version is not None, f"{lock.path.name} has no {one.name} for Python {python} on {machine}; run `make locks`"
            assert one.specifier.contains(version, prereleases=True), (
                f"{lock.path.name} has {one.name} {version}, {one} is asked for; run `make locks`"
            )


@of_each
def test_a_lock_names_each_package_once_and_no_cuda(lock: Lock) -> None:
    found = pins(lock.path)
    for environment in keyed().values():
        names = [one.name for one in found if one.marker is None or one.marker.evaluate(environment)]
        assert sorted(names) == sorted(set(names))
    assert not [one.name for one in found if CUDA.match(one.name)]
    assert {str(one) for one in found if one.name == "torch"} <= {TORCH}
    assert "://" not in lock.path.read_text()


def test_the_makefile_constrains_by_locks_and_installs_none_of_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert not re.findall(r"-r \S*locks/", makefile)
    assert re.findall(r"\$\(call locked,([\w$()-]+)\)", makefile)
    for line in makefile.splitlines():
        if "$(PIP_INSTALL)" in line and not line.startswith("PIP_INSTALL"):
            assert (
                "locked," in line or "-c " in line or "$(VENV)-locks" in line or "$(@D)/bin/python $(PIP_INSTALL) packaging uv" in line
            ), line
    environments = set(re.findall(r"\$\(eval \$\(call environment,([\w-]+),", makefile))
    assert environments == {lock.name for lock in ENVIRONMENTS} - {"midflight", "trl", "vllm", "sglang", "sglang-oldest"}


@pytest.mark.parametrize("folder", JAVASCRIPT)
def test_what_comes_from_npm_is_locked_without_addresses(folder: str) -> None:
    assert "resolved" not in (ROOT / folder / "package-lock.json").read_text()


def test_a_marker_is_left_out_where_it_holds_everywhere_and_its_package_where_nowhere() -> None:
    assert PYTHONS == ("3.11", "3.12", "3.13")
    assert pinned(Requirement("six==1.17.0 ; sys_platform == 'linux' and python_version < '3.14'")) == "six==1.17.0"
    assert pinned(Requirement("pywin32==312 ; sys_platform == 'win32'")) is None
    assert pinned(Requirement("networkx==3.6.1 ; python_full_version < '3.12'")) == "networkx==3.6.1 ; python_version == '3.11'"
    split = pinned(Requirement("numpy==2.3.5 ; python_full_version < '3.13' and platform_machine == 'aarch64'"))
    assert split == "numpy==2.3.5 ; (python_version == '3.11' or python_version == '3.12') and (platform_machine == 'aarch64')"


def test_the_page_of_what_is_needed_names_the_lock() -> None:
    assert "locks/midflight.txt" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_newest_release_of_a_server_is_none_before_the_one_that_is_locked(name: str, tmp_path: Path) -> None:
    lock = next(one for one in ENVIRONMENTS if one.name == name)
    (source,) = lock.sources
    copied = requirements(with_release(ROOT / source, "newest", tmp_path / "lock.txt"))
    bounds = {one.name: str(one.specifier) for one in copied if one.specifier and one.name != "torch"}
    locked = {one.name: str(one.specifier)[2:] for one in pins(lock.path)}
    (server,) = bounds
    assert bounds == {server: f">={locked[server]}"}
