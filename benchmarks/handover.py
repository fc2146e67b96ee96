"""What a version costs on its way: publishing (the trainer waits), staging (in the background), committing (the swap).

Every row is measured in this run beside a plain memory copy of the same tensors; ratios are times of that copy. `hash` is the
fingerprint alone, which publishing and staging each contain once.

    python benchmarks/handover.py [--megabytes 4 64 512] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from midflight.models.fingerprint import fingerprint_views
from midflight.models.names import as_tensors, assign, named_tensors
from midflight.weights.transports.select import publisher, receiver

TENSORS = 46
"""As many as a decoder of four layers has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 64, 512])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(
        f"{'MB':>5} {'transport':14} {'copy':>9} {'hash':>9} {'publish':>9} {'ratio':>6} {'GB/s':>6} {'stage':>9} {'ratio':>6} {'GB/s':>6} {'commit':>9}"
    )
    for megabytes in options.megabytes:
        for kind in ("shared_memory", "file"):
            print(row(kind, megabytes, options.repeats), flush=True)


def row(kind: str, megabytes: int, repeats: int) -> str:
    model = made(megabytes)
    tensors = {name: t.clone() for name, t in named_tensors(model).items()}
    into = {name: torch.empty_like(t) for name, t in tensors.items()}
    times: dict[str, list[float]] = {name: [] for name in ("copy", "hash", "publish", "stage", "commit")}
    with tempfile.TemporaryDirectory() as folder, publisher(kind, name="midflight-benchmark", folder=Path(folder)) as sender:
        for version in range(repeats + 1):
            times["copy"].append(seconds(lambda: [into[n].copy_(t) for n, t in tensors.items()]))
            published = time.perf_counter()
            manifest = sender.publish(version, tensors)
            times["publish"].append(time.perf_counter() - published)
            fetched = time.perf_counter()
            views = receiver().fetch(manifest)
            times["stage"].append(time.perf_counter() - fetched)
            times["hash"].append(seconds(lambda: fingerprint_views(manifest.tensors, views)))  # noqa: B023
            new = as_tensors(manifest.tensors, views)
            swapped = time.perf_counter()
            replaced = assign(model, new)
            times["commit"].append(time.perf_counter() - swapped)
            del replaced  # Giving memory back is no part of the swap.
            sender.release(version)
    # The first round makes files and touches fresh memory: standing slots are what later ones meet.
    copy, hashing, publish, stage, commit = (statistics.median(t[1:]) for t in times.values())
    gigabytes = megabytes / 1000
    return (
        f"{megabytes:5} {kind:14} {copy * 1e3:7.2f}ms {hashing * 1e3:7.2f}ms {publish * 1e3:7.2f}ms {publish / copy:6.1f} {gigabytes / publish:6.2f} "
        f"{stage * 1e3:7.2f}ms {stage / copy:6.1f} {gigabytes / stage:6.2f} {commit * 1e3:7.2f}ms"
    )


def made(megabytes: int) -> nn.Module:
    model = nn.Module()
    for i in range(TENSORS):
        model.register_parameter(f"w{i}", nn.Parameter(torch.rand(megabytes * 250_000 // TENSORS)))
    return model


def seconds(deed: Callable[[], object]) -> float:
    started = time.perf_counter()
    deed()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
