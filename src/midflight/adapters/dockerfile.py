"""What a box gets of a Dockerfile: with docker all of it, elsewhere what takes no container: the
files that it copies, and where one starts.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from midflight.environments.sandboxes.port import Furnished
from midflight.errors import ConfigError

SYSTEM = (
    "bin",
    "boot",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "proc",
    "run",
    "sandbox",
    "sbin",
    "sys",
    "tmp",
    "usr",
)
"""Folders that programs of a sandbox on this machine do not write to, or have already."""
REMEDY = 'play it with sandbox = { kind = "docker" } in the source\'s options, or leave it out.'


def furnished_by(
    context: Path, said: str, *, image: str, kind: str, beside: Sequence[str]
) -> Furnished:
    """What a box of this kind is to begin with, for an environment of that folder, or of an image.
    `beside` are folders that are written to too. `ConfigError` for what would have to be built
    where nothing builds, or lies where nothing can be put."""
    if kind == "docker" and (image or (context / "Dockerfile").exists()):
        return Furnished(image=image, build=None if image else context)
    if image and kind in ("daytona", "modal"):
        return Furnished(image=image)
    read = copied_by(context)
    if line := f"docker_image = {image}" if image else read.beyond:
        raise ConfigError(
            f"{said} has {line[:80]!r} in its environment, which takes a container: {REMEDY}"
        )
    written = [read.start, *read.files, *beside]
    folders = list(dict.fromkeys(PurePosixPath(path, "x").parts[1] for path in written))
    if kind == "bubblewrap" and (taken := [name for name in folders if name in SYSTEM]):
        raise ConfigError(
            f"{said} puts files into /{taken[0]}, which is the system's here: {REMEDY}"
        )
    return Furnished(folders=[f"/{name}" for name in folders], start=read.start, files=read.files)


@dataclass(slots=True)
class Dockerfile:
    start: str = "/app"
    """The folder that its last `WORKDIR` names."""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """By the path at which they are to lie."""
    beyond: str = ""
    """The first line that needs a container; empty if none does."""


def copied_by(context: Path) -> Dockerfile:
    """Of the Dockerfile in that folder; where there is none, of an empty one. `FROM` is passed
    over.
    """
    found = Dockerfile()
    path = context / "Dockerfile"
    for line in re.sub(r"\\\n", " ", path.read_text() if path.exists() else "").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        word, *rest = line.split(maxsplit=1)
        words = shlex.split(rest[0]) if word.upper() in ("COPY", "WORKDIR") and rest else []
        if word.upper() == "WORKDIR" and len(words) == 1:
            found.start = str(PurePosixPath(found.start, words[0]))
        elif word.upper() == "COPY" and len(words) > 1 and words[0][:1] not in ("-", "["):
            found.files |= _copied(context, words[:-1], found.start, words[-1])
        elif word.upper() != "FROM":
            found.beyond = found.beyond or line.strip()
    return found


def _copied(context: Path, sources: list[str], start: str, to: str) -> Iterator[tuple[str, bytes]]:
    """A folder's content, or a file: into a folder where several are copied, or the name says that
    it is one.
    """
    target = PurePosixPath(start, to)
    into = len(sources) > 1 or to.endswith(("/", "."))
    for pattern in sources:
        name = str(PurePosixPath("/", pattern))[1:]
        if not (matching := sorted(context.glob(name)) if name else [context]):
            raise ConfigError(
                f"{context / 'Dockerfile'} copies {pattern!r}, which is not there; correct it."
            )
        for source in matching:
            for file in files_in(source) if source.is_dir() else [source]:
                below = file.relative_to(source) if source.is_dir() else file.name if into else ""
                yield str(target / below), file.read_bytes()


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())
