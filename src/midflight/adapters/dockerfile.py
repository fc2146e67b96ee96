"""Reads a Dockerfile for a box. With docker a box gets everything from it; elsewhere it gets only
the files that are copied, and the folder in which a program starts.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from midflight.environments.sandboxes.port import BoxSetup
from midflight.errors import ConfigError

SYSTEM = (
    "bin",
    "boot",
    "dev",
    "devices",
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
"""Folders that programs of a sandbox on this machine cannot write to, or have already."""
REMEDY = 'play it with sandbox = { kind = "docker" } in the source\'s options, or leave it out.'


def furnished_by(
    context: Path, said: str, *, image: str, kind: str, beside: Sequence[str]
) -> BoxSetup:
    """Finds the contents with which a box of this kind begins, for an environment of that folder or
    of an image. `beside` are further writable folders. Raises `ConfigError` if the environment has
    to be built and nothing can build it here, or if files have to be put where nothing can be put.
    """
    if kind == "docker" and (image or (context / "Dockerfile").exists()):
        return BoxSetup(image=image, build=None if image else context)
    if image and kind in ("daytona", "modal"):
        return BoxSetup(image=image)
    read = copied_by(context)
    line = f"docker_image = {image}" if image else read.beyond
    if line:
        raise ConfigError(
            f"{said} has {line[:80]!r} in its environment, which takes a container: {REMEDY}"
        )
    written = [read.start, *read.files, *beside]
    folders = list(dict.fromkeys(PurePosixPath(path, "x").parts[1] for path in written))
    taken = [name for name in folders if name in SYSTEM]
    if kind == "bubblewrap" and taken:
        raise ConfigError(
            f"{said} puts files into /{taken[0]}, which is the system's here: {REMEDY}"
        )
    return BoxSetup(folders=[f"/{name}" for name in folders], start=read.start, files=read.files)


@dataclass(slots=True)
class Dockerfile:
    """The parts of a Dockerfile that need no container."""

    start: str = "/app"
    """The folder that its last `WORKDIR` names."""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Its files by the path at which they are put."""
    beyond: str = ""
    """The first line that needs a container; empty if none does."""


def copied_by(context: Path) -> Dockerfile:
    """The parts of the Dockerfile in that folder, or of an empty one if there is none. `FROM` is
    passed over.
    """
    found = Dockerfile()
    path = context / "Dockerfile"
    text = path.read_text() if path.exists() else ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
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
    """The content of a folder, or a file. A file is put into a folder if several are copied, or if
    the name of the target is that of a folder.
    """
    target = PurePosixPath(start, to)
    into = len(sources) > 1 or to.endswith(("/", "."))
    for pattern in sources:
        name = str(PurePosixPath("/", pattern))[1:]
        matching = sorted(context.glob(name)) if name else [context]
        if not matching:
            raise ConfigError(
                f"{context / 'Dockerfile'} copies {pattern!r}, which is not there; correct it."
            )
        for source in matching:
            if source.is_dir():
                for file in files_in(source):
                    yield str(target / file.relative_to(source)), file.read_bytes()
            else:
                place = target / source.name if into else target
                yield str(place), source.read_bytes()


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())
