"""The fingerprint of a model as it is served, and those that the journal of a run has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from midflight.config.derived import served_dtype
from midflight.config.sections import Config
from midflight.models.names import in_dtype, named_tensors, torch_dtype
from midflight.models.sizes import fingerprint_views
from midflight.observe.history import read_journal
from midflight.types import Version
from midflight.weights.manifest import layout
from midflight.weights.transports.publisher import named_shapes


def served_fingerprint(model: nn.Module, config: Config) -> str:
    """The fingerprint of a model's weights as they would be served."""
    tensors = in_dtype(named_tensors(model), torch_dtype(served_dtype(config)))
    views: dict[str, memoryview] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        views[name] = flat.numpy().data
    return fingerprint_views(layout(named_shapes(tensors)), views)


def recorded_fingerprints(folder: Path) -> Mapping[Version, str]:
    """The fingerprint of each version that the digests of the steps have."""
    found: dict[Version, str] = {}
    for line in read_journal(folder / "metrics.jsonl").steps:
        if line.digests is None:
            continue
        if not found:
            found[line.version - 1] = line.digests.weights_before
        found[line.version] = line.digests.weights_after
    return {version: fingerprint for version, fingerprint in found.items() if fingerprint}
