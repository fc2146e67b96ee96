"""The tensors that the run's model must have: other weights are refused before any engine sees
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from midflight.errors import RequestRejected, nearest
from midflight.models.adapters import served_weights
from midflight.types import TensorSpec
from midflight.weights.transports.posted_files import read_specs

_TIED = "lm_head.weight"
"""The output layer, by the name that `transformers` gives it in most models."""


class ModelTensors:
    """Names and shapes of the tensors that are handed over, as the model has them that the engines
    started with.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """With `tied`, the output layer is the embedding, so engines have it once, and a file may
        have it twice.
        """
        self._tied = tied
        self._shapes = {
            name: shape for name, shape in shapes.items() if not self._is_in_twice(name)
        }

    @classmethod
    def of(cls, folder: Path) -> ModelTensors:
        """Reads the model's headers, and nothing else. It blocks."""
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
        shapes: dict[str, tuple[int, ...]] = {}
        for path in served_weights(folder):
            for spec in read_specs(path):
                shapes[spec.name] = spec.shape
        return cls(shapes, tied=config.tie_word_embeddings)

    def _is_in_twice(self, name: str) -> bool:
        return self._tied and name == _TIED

    def fitting(self, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The tensors to serve. Raises `RequestRejected` with the first that does not fit."""
        kept = tuple(spec for spec in specs if not self._is_in_twice(spec.name))
        for spec in kept:
            self._check(spec)
        missing = sorted(self._shapes.keys() - {spec.name for spec in kept})
        if missing:
            raise RequestRejected(
                f"tensor {missing[0]!r} is missing: publish every tensor of the model.",
                param="file",
            )
        return kept

    def _check(self, spec: TensorSpec) -> None:
        if spec.name not in self._shapes:
            similar = nearest(spec.name, self._shapes)
            raise RequestRejected(
                f"the model has no tensor {spec.name!r}.{similar} Leave it out.", param="file"
            )
        needed = self._shapes[spec.name]
        if spec.shape != needed:
            raise RequestRejected(
                f"tensor {spec.name!r} has shape {spec.shape}, the model needs {needed}.",
                param="file",
            )


class _ModelConfig(msgspec.Struct, frozen=True):
    tie_word_embeddings: bool = True
    """`transformers` assumes this default too."""
