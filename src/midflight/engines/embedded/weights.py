"""The second set of weights. It is brought in while decoding goes on, and made live between two
steps (I7).
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.packed_layers import PackedLayers, Packs
from midflight.errors import EngineError, WeightsCorrupt
from midflight.models.device_memory import in_host_memory
from midflight.models.names import as_bytes, as_tensors, assign, named_tensors
from midflight.models.sizes import fingerprint_views
from midflight.ports import WeightReceiver
from midflight.types import Attestation, Version, WeightManifest

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _StagedTensors:
    version: Version
    fingerprint: str
    tensors: Tensors | None
    """`None` if the version has the tensors that are served already, under another number."""
    packs: Packs = field(default_factory=dict[str, Tensor])
    """Copies of these tensors that layers multiply with."""


class EngineWeights:
    """The weights served and the weights staged. `stage` runs in any one thread, `commit` on the
    decode thread only.

    At most one version is staged: a later stage replaces it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        receiver: WeightReceiver,
        *,
        version: Version,
        packed: PackedLayers | None = None,
    ) -> None:
        """`packed` are the model's layers that multiply with copies of their weights."""
        self._model = model
        self._packed = packed
        self._receiver = receiver
        self._served = Attestation(version=version, fingerprint=model_fingerprint(model))
        self._shapes = {
            name: (t.shape, t.dtype, t.device) for name, t in named_tensors(model).items()
        }
        self._staged: _StagedTensors | None = None
        self._replaced: tuple[Tensors, Packs] = {}, {}
        """Weights of the version before, kept until the next stage, because giving memory back
        takes longer than a swap may.
        """
        self._staging = threading.Lock()
        self._on_host: list[tuple[Tensor, Tensor]] = []
        """While the engine sleeps: parameters and buffers without numbers, with their numbers."""

    @property
    def served(self) -> Attestation:
        return self._served

    @torch.no_grad()
    def leave_device(self) -> None:
        """Moves the weights to host memory, and drops what is staged and what was replaced. On the
        decode thread, in a pause. Idempotent.
        """
        with self._staging:
            self._staged = None
            self._replaced = {}, {}
            moved = {id(tensor) for tensor, _ in self._on_host}
            for tensor in _all_tensors(self._model):
                if tensor.device.type != "cpu" and id(tensor) not in moved:
                    self._on_host.append((tensor, in_host_memory(tensor)))
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @torch.no_grad()
    def take_device(self) -> None:
        """Moves the weights back to the device, bit for bit. On the decode thread. Idempotent."""
        with self._staging:
            for tensor, numbers in self._on_host:
                tensor.data = numbers.to(tensor.device)
            self._on_host = []

    def stage(self, manifest: WeightManifest) -> None:
        """Fetches a version, which the receiver verifies. Blocking. After any failure the weights
        served stay as they are.

        Nothing is fetched if the version has the same weights as those served. This holds for the
        first version, and for the version of a step that changed nothing.
        """
        with self._staging:
            self._replaced = {}, {}
            if manifest.fingerprint == self._served.fingerprint:
                self._staged = _StagedTensors(manifest.version, manifest.fingerprint, None)
                return
            tensors = self._received(manifest)
            self._check_shapes(manifest, tensors)
            converted = self._converted(tensors)
            packs = {} if self._packed is None else self._packed.packs(converted)
            self._staged = _StagedTensors(manifest.version, manifest.fingerprint, converted, packs)

    def commit(self, version: Version) -> Attestation:
        """Makes the staged version live without copying. Committing the version already served
        changes nothing, unless it was staged under another fingerprint: several trainer ranks cut
        tensors in other places than the folder that an engine starts from.
        """
        waiting = self._staged
        staged = waiting if waiting is not None and waiting.version == version else None
        is_another_set = staged is not None and staged.fingerprint != self._served.fingerprint
        if version == self._served.version and not is_another_set:
            return self._served
        if staged is None:
            has = "nothing is staged" if waiting is None else f"version {waiting.version} is staged"
            raise EngineError(
                f"committing version {version}: {has}. Stage version {version} first."
            )
        if staged.tensors is not None:
            self._make_live(staged.tensors, staged.packs)
        self._staged = None
        self._served = Attestation(version=version, fingerprint=staged.fingerprint)
        return self._served

    def _make_live(self, tensors: Tensors, packs: Packs) -> None:
        replaced = assign(self._model, tensors)
        before = {} if self._packed is None else self._packed.use(packs)
        self._replaced = replaced, before

    def _received(self, manifest: WeightManifest) -> dict[str, Tensor]:
        views = self._receiver.fetch(manifest)
        missing = [s.name for s in manifest.tensors if s.name not in views]
        if missing:
            raise WeightsCorrupt(
                f"staging version {manifest.version}: tensor {missing[0]!r} was not received. "
                "Publish the version again."
            )
        return as_tensors(manifest.tensors, views)

    def _check_shapes(self, manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> None:
        """Checks at staging that the tensors fit the model, so that the commit cannot fail half
        way.
        """
        different = sorted(tensors.keys() ^ self._shapes.keys())
        if different:
            raise WeightsCorrupt(
                f"staging version {manifest.version}: tensor {different[0]!r} is in only one of "
                "manifest and model. Trainer and engine must load the same model."
            )
        for name, tensor in tensors.items():
            if tensor.shape != self._shapes[name][0]:
                raise WeightsCorrupt(
                    f"staging version {manifest.version}: tensor {name!r} has shape "
                    f"{tuple(tensor.shape)}, the model needs {tuple(self._shapes[name][0])}. "
                    "Trainer and engine must load the same model."
                )

    def _converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            _, dtype, device = self._shapes[name]
            converted[name] = tensor.to(device=device, dtype=dtype)
        return converted


def _all_tensors(model: PreTrainedModel) -> list[Tensor]:
    """Each parameter and buffer once. Tied parameters are one."""
    return [*model.parameters(), *model.buffers()]


def model_fingerprint(model: PreTrainedModel) -> str:
    return tensors_fingerprint(named_tensors(model))


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint of tensors as they are in memory."""
    pairs = list(as_bytes(tensors))
    return fingerprint_views((spec for spec, _ in pairs), {spec.name: view for spec, view in pairs})
