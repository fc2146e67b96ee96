"""The weights that a server loads next: a model folder of our own in memory, written while the
server generates.

A server loads whole weights, by the names and shapes of the folder that it started from. Versions
come as the trainer and the embedded engine have them in memory, which for mixtures of experts is
another form. They are converted here, at the last moment, and not where a version is published. So
one version serves engines of every kind, and the embedded engine takes it by assignment without a
copy. The fingerprint covers the weights that were trained, and the work is done beside the steps of
the trainer. Versions that are adapters stay adapters, as PEFT writes them, or are merged into their
base here. Conversion and merging import torch. A version whose names are those of the folder is
written without torch.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator, Iterable, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import safe_open

from midflight.errors import EngineUnavailable, RunFailed, WeightsCorrupt, nearest
from midflight.models.adapters import CONFIG, FOLDER, WEIGHTS, Adapter, adapter_of, served_weights
from midflight.ports import WeightReceiver
from midflight.types import TensorSpec, Version, WeightManifest

if TYPE_CHECKING:
    from midflight.models.conversion import FileNames

_ALIGNMENT = 8
"""The header of a safetensors file is as long as a multiple of so many bytes."""
REST = "model-rest.safetensors"
"""The file of the tensors that no version holds."""
ADAPTER_PREFIX = "policy-v"


@dataclass(frozen=True, slots=True)
class StagedFolder:
    version: Version
    fingerprint: str
    folder: Path | None
    """A Hugging Face model folder with these weights, or a folder of adapters. `None` if the
    server's workers have the weights already.
    """
    adapter: str = ""
    """The server's name for the weights, where they are adapters."""


class StagingArea:
    """Two folders that only this object writes to: the served one, to go back to, and the next one.

    If a publisher changes its bytes after they were verified, the change cannot reach a server
    (I7). On tmpfs a server loads at the speed of memory. Calls block, and any thread may write. A
    write goes on even if its caller has left, and the next waits for it.
    """

    def __init__(
        self, place: Path, *, model: Path, receiver: WeightReceiver, merges: bool = True
    ) -> None:
        """`model` is the folder that the server's weights are from. Every version has the names and
        shapes of its served tensors. With `merges` adapters are merged into their base. Otherwise
        they stay adapters, and the server starts from the base.
        """
        self._place = place
        self._model = model
        self._receiver = receiver
        self._adapter = adapter_of(model)
        self.first = first_folder(model, place) if merges else model
        """The folder that the server starts with."""
        self._merges = merges
        self._shapes = tensor_shapes(model)
        self._names: FileNames | None = None
        """Set after the first version, if names in memory are not those in files."""
        self._writing = threading.Lock()

    def write(self, manifest: WeightManifest, *, beside: Path | None) -> StagedFolder:
        """Fetches and verifies a version and writes its folder, but not over the folder `beside`.
        Raises `WeightsCorrupt` if the version does not fit.
        """
        folder = self._place / "0"
        if folder == beside:
            folder = self._place / "1"
        self._check(manifest)
        tensors = manifest.tensors
        with self._writing:
            views = self._receiver.fetch(manifest)
            with _room_for(manifest.version, folder):
                _fresh_copy(self._model, folder)
                if self._adapter is not None:
                    _write_merged(self._model, self._adapter, folder, given=(tensors, views))
                elif self._names is not None:
                    self._write_converted(self._names, folder, tensors, views)
                else:
                    path = folder / "model.safetensors"
                    _write_tensors(path, ((spec, views[spec.name]) for spec in tensors))
        return StagedFolder(manifest.version, manifest.fingerprint, folder)

    def begin(self, version: Version) -> StagedFolder:
        """The weights that the server starts with, as those of `version`."""
        if self._merges or self._adapter is None:
            return StagedFolder(version, "", self.first)
        return StagedFolder(version, "", self._adapter.folder, adapter_version(version))

    def write_adapter(self, manifest: WeightManifest) -> StagedFolder:
        """Fetches and verifies a version of adapters and writes it as PEFT does, beside the
        versions before it. Raises `WeightsCorrupt` if the version does not fit.
        """
        assert self._adapter is not None
        name = adapter_version(manifest.version)
        folder = self._place / name
        self._check(manifest)
        with self._writing:
            views = self._receiver.fetch(manifest)
            with _room_for(manifest.version, folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                shutil.copy(self._adapter.folder / CONFIG, folder)
                pairs = ((spec, views[spec.name]) for spec in manifest.tensors)
                _write_tensors(folder / WEIGHTS, pairs)
        return StagedFolder(manifest.version, manifest.fingerprint, folder, name)

    def remove_adapters(self, *, but: Set[str]) -> None:
        """Removes the folders of versions that no server will read again. Only those with a name in
        `but` are kept.
        """
        for folder in self._place.glob(f"{ADAPTER_PREFIX}*"):
            if folder.name not in but:
                shutil.rmtree(folder, ignore_errors=True)

    def is_in_files(self, manifest: WeightManifest) -> bool:
        """True if a version has exactly the tensors of the server's model folder. Raises
        `WeightsCorrupt` if it has them in other shapes.
        """
        if self._adapter is not None:
            return False
        names = {spec.name for spec in manifest.tensors}
        if names != self._shapes.keys():
            return False
        self._check(manifest)
        return True

    def remove(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def _check(self, manifest: WeightManifest) -> None:
        """Checks names and shapes before anything is fetched, so that a load in a pause cannot fail
        half way because of them.
        """
        deed = f"staging version {manifest.version}"
        given = {spec.name: spec.shape for spec in manifest.tensors}
        needed = self._shapes.keys()
        if self._adapter is None and given.keys() != needed:
            given, needed = self._converted(given)
        for name, shape in given.items():
            if name not in self._shapes:
                raise WeightsCorrupt(
                    f"{deed}: the server's model has no tensor "
                    f"{name!r}.{nearest(name, self._shapes)} Trainer and engine must load the same "
                    "model."
                )
            if shape != self._shapes[name]:
                raise WeightsCorrupt(
                    f"{deed}: tensor {name!r} has shape {shape}, the server's model needs "
                    f"{self._shapes[name]}. Trainer and engine must load the same model."
                )
        missing = sorted(needed - given.keys())
        if missing:
            raise WeightsCorrupt(
                f"{deed}: tensor {missing[0]!r} is missing. Publish every tensor of the model."
            )

    def _converted(
        self, given: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, tuple[int, ...]], Set[str]]:
        """The names and shapes in files of tensors in memory, and the names that are required."""
        from midflight.models.conversion import FileNames

        if self._names is None:
            self._names = FileNames(self._model, self._shapes)
        return self._names.shapes(given), self._shapes.keys() - self._names.unread

    def _write_converted(
        self,
        names: FileNames,
        folder: Path,
        specs: tuple[TensorSpec, ...],
        views: Mapping[str, memoryview],
    ) -> None:
        """Writes a version whose names in memory are not those in files. The tensors of a
        multimodal model that are not trained lie beside it, in one file for all versions.
        """
        from midflight.models.names import as_bytes, as_tensors

        tensors = names.tensors(as_tensors(specs, views))
        _write_tensors(folder / "model.safetensors", as_bytes(tensors))
        untrained = frozenset(self._shapes.keys() - tensors.keys())
        if not untrained:
            return
        rest = self._place / REST
        if not rest.exists():
            _write_rest(self._model, rest, untrained)
        (folder / REST).hardlink_to(rest)


@contextmanager
def _room_for(version: Version, folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise EngineUnavailable(
            f"staging version {version} in {str(folder)!r}: {error}; make room there (containers: "
            "--shm-size)."
        ) from error


def adapter_version(version: Version) -> str:
    """The name by which a server knows a version of adapters."""
    return f"{ADAPTER_PREFIX}{version}"


def first_folder(model: Path, place: Path) -> Path:
    """The folder that a server starts with. It is the model's own. If the model has adapters, it is
    a folder at `place`, which `write_first` writes.
    """
    return model if adapter_of(model) is None else place / "first"


def write_first(model: Path, place: Path) -> Path:
    """Writes `first_folder` where the model has adapters, and returns it. Blocking. Raises
    `RunFailed` if there is no room.
    """
    folder = first_folder(model, place)
    adapter = adapter_of(model)
    if adapter is None:
        return folder
    try:
        _fresh_copy(model, folder)
        _write_merged(model, adapter, folder)
    except OSError as error:
        raise RunFailed(
            f"writing the first weights in {str(folder)!r}: {error}; make room there "
            "(containers: --shm-size)."
        ) from error
    return folder


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that are handed over of a model folder. Reads headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in served_weights(folder):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def _fresh_copy(model: Path, folder: Path) -> None:
    """Copies a model folder without its weights and adapters."""
    shutil.rmtree(folder, ignore_errors=True)
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json", "*.bin", FOLDER)
    shutil.copytree(model, folder, ignore=weights)


def _write_tensors(path: Path, tensors: Iterable[tuple[TensorSpec, memoryview]]) -> None:
    """Writes a safetensors file of bytes as they lie in memory: an 8-byte length, a JSON header,
    the tensors one after the other.
    """
    given = list(tensors)
    entries = dict[str, object]()
    end = 0
    for spec, _ in given:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (end, end + spec.num_bytes),
        }
        end += spec.num_bytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, view in given:
            file.write(view)


def _write_rest(model: Path, path: Path, names: frozenset[str]) -> None:
    """Writes the tensors of these names in a model folder to one file."""
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for source in sorted(model.glob("*.safetensors")):
        with safe_open(source, "pt") as file:
            for name in names.intersection(file.keys()):
                tensors[name] = file.get_tensor(name)
    save_file(tensors, path, metadata={"format": "pt"})


_Given = tuple[tuple[TensorSpec, ...], Mapping[str, memoryview]]


def _write_merged(
    model: Path, adapter: Adapter, folder: Path, *, given: _Given | None = None
) -> None:
    """Writes to `folder` the base of `model` with adapters merged into it, in the base's dtype: the
    `given` adapters, or without any the model's own.

    It imports torch, which a companion without adapters does not need.
    """
    from safetensors.torch import load_file, save_file

    from midflight.models.lora import merged
    from midflight.models.names import as_tensors

    adapters = load_file(adapter.weights) if given is None else as_tensors(*given)
    base: dict[str, Any] = {}
    for path in sorted(model.glob("*.safetensors")):
        base |= load_file(path)
    whole = merged(base, adapters, scale=adapter.scale)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
