"""Model folders of GGUF files. A file is converted once, into a folder beside it, by a process that
has torch (`midflight.models.from_gguf`).
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec
import xxhash
from packaging.version import Version

from midflight.errors import ConfigError, ModelNotFound
from midflight.models.atomic import atomic_folder

PACKAGES = ("gguf", "accelerate")
"""Packages that `transformers` needs to read such a file."""
OLDEST_TRANSFORMERS = "5.23"
"""The oldest version whose reader of GGUF files was looked at."""
_CHUNK = 16 * 2**20


class GgufContents(msgspec.Struct, frozen=True):
    """The contents of a GGUF file, which is a model."""

    architecture: str
    num_weights: int
    num_bytes: int
    """The size of its weights in the file."""
    tensors: Mapping[str, int]
    """The number of tensors in each type, such as `Q4_1`."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights

    @property
    def described(self) -> str:
        """A clause about the weights: how exactly the file keeps them, and their size as
        float32.
        """
        most_first = sorted(self.tensors.items(), key=lambda item: -item[1])
        types = [f"{count} {name}" for name, count in most_first]
        return (
            f"{self.num_weights:,} weights of {self.bits_per_weight:.1f} bits each "
            f"({self.num_bytes / 1e6:,.0f} MB; tensors: {', '.join(types)}), now float32 "
            f"({4 * self.num_weights / 1e6:,.0f} MB): what was rounded away for the file stays lost"
        )


def model_folder(path: Path) -> Path:
    """The folder of a model that is given as a folder or as a GGUF file. A file is converted unless
    it was converted before.

    The folder's name holds a hash of the file: a changed file gets another folder, and a run keeps
    the one that it began with. This reads the whole file, and waits for the conversion. Raises
    `ModelNotFound` with the reason if the file cannot be converted.
    """
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return path
    if not path.is_file():
        raise ModelNotFound(
            f"loading a model: there is no file {str(path)!r}; give a GGUF file or a Hugging Face "
            "model folder."
        )
    folder = path.with_name(f"{path.name}.folder-{_hash(path)}")
    if not folder.is_dir():
        sys.stderr.write(f"midflight: converting {path} into the model folder {folder}, once\n")
        try:
            convert(path, folder)
        except ConfigError:
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


def convert(file: Path, folder: Path) -> GgufContents:
    """Makes `folder`, which is empty or not there, of a GGUF file: complete or not at all. It waits
    for a process that does so.
    """
    check_packages()
    with atomic_folder(folder) as (building, lock):
        return write_folder(file, building, lock)


def write_folder(file: Path, folder: Path, lock: int) -> GgufContents:
    """Writes the model of a GGUF file into an existing folder. It waits for a process that does so.
    Raises `ModelNotFound` with the reason if it cannot be done.
    """
    command = [sys.executable, "-m", "midflight.models.from_gguf", str(file), str(folder)]
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, capture_output=True, check=False, env=environ, pass_fds=(lock,))
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "without a word"
        raise ModelNotFound(
            f"converting {str(file)!r} ended with status {done.returncode}: {last}; free some "
            "memory, or give a model folder."
        )
    found = msgspec.json.decode(done.stdout, type=GgufContents | str)
    if isinstance(found, str):
        raise ModelNotFound(found)
    return found


def check_packages() -> None:
    """Raises `ConfigError` unless the packages that read GGUF files are installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading GGUF files needs {' and '.join(missing)}, which {sys.executable} lacks: pip "
            "install 'midflight[gguf]'"
        )
    found = version("transformers")
    if Version(found) < Version(OLDEST_TRANSFORMERS):
        raise ConfigError(
            f"reading GGUF files needs transformers {OLDEST_TRANSFORMERS}, and {found} is here: "
            "pip install -U 'midflight[gguf]'"
        )


def _hash(path: Path) -> str:
    """A hash of the contents. It is not for secrecy."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
