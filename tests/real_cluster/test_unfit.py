"""Machines that a run cannot be on, in one cluster with one where it can: each is named with what it lacks, before anything is started."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from midflight.version import __version__

from .machines import missing
from .rays import CHECK, ROOT, cluster

pytestmark = [pytest.mark.skipif(missing() is not None, reason=missing() or ""), pytest.mark.timeout(1200)]
pytest.importorskip("ray", reason="Ray is not here (pip install 'midflight[ray]')")


def without_package(folder: Path) -> Path:
    """A command that is Ray's, in a Python that has all packages of this one but ours."""
    packages, ray = folder / "packages", folder / "ray"
    packages.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            if "midflight" not in path.name and path.suffix != ".pth" and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    base = getattr(sys, "_base_executable", sys.executable)
    ray.write_text(f'#!/bin/sh\nexport PYTHONPATH={packages}\nexec {base} -m ray.scripts.scripts "$@"\n')
    ray.chmod(0o755)
    return ray


def of_another_version(folder: Path) -> Path:
    shutil.copytree(ROOT / "src", folder / "older", ignore=shutil.ignore_patterns("__pycache__"))
    version = folder / "older" / "midflight" / "version.py"
    assert f'"{__version__}"' in version.read_text()
    version.write_text(version.read_text().replace(f'"{__version__}"', '"0.0.7"'))
    return folder / "older"


def test_machines_that_lack_the_package_its_version_or_the_shared_folder_are_named(tmp_path: Path) -> None:
    with cluster(tmp_path) as made:
        made.add("head")
        made.join("bare", made.net.boot(), {}, RAY=str(without_package(tmp_path)))
        made.join("older", made.net.boot(), {}, PYTHONPATH=str(of_another_version(tmp_path)))
        apart = made.net.boot(shares=False)
        apart.run("mkdir", "-p", "/tmp/own")
        apart.run("tee", "/tmp/own/token", input=made.token.read_text())
        apart.run("chmod", "600", "/tmp/own/token")
        made.join("apart", apart, {}, RAY_AUTH_TOKEN_PATH="/tmp/own/token")
        options = (
            "cluster.kind=ray",
            f"cluster.address={made.address}",
            f"cluster.token_file={made.token}",
            f"run.folder={tmp_path / 'run'}",
        )
        done = made.members["head"].run(sys.executable, "-c", CHECK, *options, env=made.environ, check=False)
        at = {name: machine.address for name, machine in made.members.items()}
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert sorted(done.stdout.splitlines()) == sorted(
        (
            f"{at['bare']} has no midflight {__version__} in the Python that runs Ray there; install it.",
            f"{at['older']} has midflight 0.0.7, and this machine has {__version__}; install the same on all.",
            f"run.folder is below {tmp_path}, and what {at['apart']} writes there is not seen here; put it on a file system that all machines share.",
        )
    )
    assert not (tmp_path / "run").exists()
