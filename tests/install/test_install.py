"""The package as a stranger installs it: a new environment, empty caches, the lock, by pip and by uv. `MIDFLIGHT_PYTHONS` names the
interpreters, by default this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lock import ROOT, pins

PYTHONS = os.environ.get("MIDFLIGHT_PYTHONS", sys.executable).split()
LOCK = ROOT / "locks" / "midflight.txt"
LOOK = """
import importlib.metadata, json, sys, torch
found = {one.metadata["Name"].lower().replace("_", "-").replace(".", "-"): one.version for one in importlib.metadata.distributions()}
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "cuda": torch.version.cuda, "found": found}))
"""


def run(*command: str | Path, environ: dict[str, str]) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_lock_is_what_is_installed_with_the_cpu_build_of_torch(tmp_path: Path, installer: str, python: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ |= {"PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": str(tmp_path / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run(python, "-m", "venv", tmp_path / "venv", environ=environ)
    inside = tmp_path / "venv" / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "-c", LOCK]
    if installer == "pip":
        run(*pip, "setuptools", environ=environ)
        run(*pip, "--no-build-isolation", "-e", f"{ROOT}[demo,test]", environ=environ)
    else:  # torch by pip, because uv takes the CUDA build of the registry where no index of CPU builds is named
        run(*pip, "setuptools", "torch", "uv", environ=environ)
        uv = [inside, "-m", "uv", "pip", "install", "--quiet", "--python", inside, "-c", LOCK]
        run(*uv, "--no-build-isolation", "-e", f"{ROOT}[demo,test]", environ=environ)
    seen = json.loads(run(inside, "-c", LOOK, environ=environ))
    locked = {
        one.name: str(one.specifier)[2:]
        for one in pins(LOCK)
        if one.marker is None or one.marker.evaluate({"python_version": seen["python"]})
    }
    found = {name: version.partition("+")[0] for name, version in seen["found"].items() if name not in ("midflight", "pip", "wheel")}
    assert {name: version for name, version in found.items() if locked.get(name) != version} == {}
    assert seen["cuda"] is None
    assert not [name for name in found if name.startswith("nvidia")]
    assert "midflight" in run(tmp_path / "venv" / "bin" / "midflight", "--version", environ=environ)
