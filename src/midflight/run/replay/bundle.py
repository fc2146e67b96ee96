"""One step in one file: what it takes to make it again elsewhere, and to look into it."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from midflight.config.dump import as_toml
from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.errors import ConfigError, NoRun
from midflight.observe.lines import StepLine, encode_line
from midflight.run.replay.recorded_steps import RecordedBatches, StoredBatches, line_of, lines_of
from midflight.run.replay.step import checkpoint_before
from midflight.trainer.folders import verified
from midflight.trajectories.packing import from_bytes, to_bytes
from midflight.types import PackedBatch

CONTENTS = "bundle.json"
CONFIG = "config.toml"
JOURNAL = "metrics.jsonl"
BATCHES = "batches"
FORMAT = 1


class Contents(msgspec.Struct, frozen=True):
    """What a bundle says of itself."""

    step: int
    run: str
    checkpoint: str
    """The path of the checkpoint in the bundle, or where it was if it is not in it."""
    has_weights: bool
    format: int = FORMAT


def write_bundle(folder: Path, step: int, file: Path, *, with_weights: bool) -> int:
    """Packs a step of a run. Returns the size of the file in bytes. Without weights the file names
    the place of the run's checkpoint and first model. Refuses a file that is there. Raises `NoRun`
    if something of the step is gone.
    """
    if file.exists():
        raise ConfigError(f"{file} is there already; name another file, or remove it.")
    config = past_config(folder / CONFIG)
    line_of(folder, step)
    checkpoint, state = checkpoint_before(folder, step)
    verified(checkpoint)
    lines = lines_of(folder)
    needed = [lines[number] for number in range(state.num_steps + 1, step + 1) if number in lines]
    batch_of = StoredBatches(folder, config)
    place = checkpoint.relative_to(folder) if with_weights else checkpoint.resolve()
    contents = Contents(step, config.run.name, str(place), with_weights)
    draft = file.with_name(f".{file.name}.writing")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED) as packed:
            packed.writestr(CONTENTS, msgspec.json.encode(contents))
            packed.writestr(CONFIG, as_toml(_without_secrets(config)))
            journal = b"".join(encode_line(line) + b"\n" for line in needed)
            packed.writestr(JOURNAL, journal)
            for line in needed:
                packed.writestr(_batch_name(line.step), to_bytes(batch_of(line)))
            if with_weights:
                for path in _weights(folder, checkpoint):
                    packed.write(path, str(path.relative_to(folder)))
        draft.chmod(0o600)  # it has the conversations of the run
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
    return file.stat().st_size


def _without_secrets(config: Config) -> Config:
    """The configuration without the variables of servers of tools, which often are keys."""
    environment = config.environment
    servers = tuple(server.model_copy(update={"env": {}}) for server in environment.mcp)
    return config.model_copy(
        update={"environment": environment.model_copy(update={"mcp": servers})}
    )


def _batch_name(step: int) -> str:
    return f"{BATCHES}/step-{step}.safetensors"


def _weights(folder: Path, checkpoint: Path) -> Iterator[Path]:
    """Yields the files of the checkpoint, of the first model, and of the reference."""
    for part in (checkpoint, folder / "start", folder / "reference"):
        yield from sorted(path for path in part.rglob("*") if path.is_file())


@contextmanager
def opened(file: Path) -> Generator[tuple[Path, int]]:
    """Unpacks a bundle into a folder that is removed afterwards. Yields the folder, which is like
    that of a run, and the number of the step. Raises `NoRun` if the weights are not where the
    bundle says.
    """
    try:
        packed = zipfile.ZipFile(file)
        contents = msgspec.json.decode(packed.read(CONTENTS), type=Contents)
    except (OSError, KeyError, zipfile.BadZipFile, msgspec.MsgspecError) as error:
        raise NoRun(
            f"{file} is no bundle ({error}); `midflight replay RUN --step N --bundle FILE` makes "
            "one."
        ) from error
    if contents.format != FORMAT:
        raise NoRun(
            f"{file} is a bundle of format {contents.format}, and this Midflight reads {FORMAT}; "
            "use the version that wrote it."
        )
    with packed, tempfile.TemporaryDirectory(prefix="midflight-bundle-") as place:
        folder = Path(place)
        broken = packed.testzip()
        if broken is not None:
            raise NoRun(f"{file}: {broken} is damaged; get the bundle again.")
        packed.extractall(folder)
        if not contents.has_weights:
            _link_weights(file, Path(contents.checkpoint), folder)
        yield folder, contents.step


def _link_weights(file: Path, checkpoint: Path, folder: Path) -> None:
    if len(checkpoint.parents) < 2 or not checkpoint.is_dir():
        raise NoRun(
            f"{file} has no weights, and {checkpoint} is not there. Mount the run's folder at that "
            "path, or ask for a bundle with weights (without --no-weights)."
        )
    run = checkpoint.parents[1]
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    for name in ("start", "reference"):
        if (run / name).is_dir():
            (folder / name).symlink_to(run / name)


class BundledBatches:
    """The batches of a bundle's steps."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder

    def __call__(self, line: StepLine) -> PackedBatch:
        return from_bytes((self._folder / _batch_name(line.step)).read_bytes())


def batches_of(folder: Path, config: Config) -> RecordedBatches:
    """The batches of a run, or of an unpacked bundle."""
    if (folder / BATCHES).is_dir():
        return BundledBatches(folder, config)
    return StoredBatches(folder, config)
