"""What differences between versions cost and spare: real AdamW steps, served in float32 and in
bfloat16.

A small model is trained in float32 on the bytes of this repository's sources, first for a while,
then a few steps at each learning rate; after each step it is published, as it is or converted to
bfloat16. Rows are medians over those steps. Times are CPU seconds of one thread, so that other work
on the machine counts less; each ratio is to a plain copy, or to plain shared memory, measured
between them.

    python benchmarks/delta.py [--rates 1e-6 1e-5 1e-4 3e-4] [--steps 8] [--pretrain 150]

| column | means |
|---|---|
| changed | share of words of which any bit changed |
| bytes | payload / whole version |
| encode, apply | MB of whole version per second: comparing and packing; unpacking and adding |
| x copy | times of a plain copy of the whole version |
| publish, fetch | the whole way with fingerprints, through shared memory: times of the same without differences |
| pays below | MB/s of a link below which encode, transfer and apply are quicker than the transfer of the whole |
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from smoke import options_of
from torch import Tensor, nn

from midflight.models.creation import make_model
from midflight.models.names import named_tensors
from midflight.models.sizes import element_bytes
from midflight.weights.difference_codec import Frames, encode
from midflight.weights.transports.publisher import named_shapes
from midflight.weights.transports.select import publisher, receiver

SOURCES = Path(__file__).parents[1] / "src"
PRETRAIN_RATE = 1e-3
Tensors = dict[str, Tensor]
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 3e-4])
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="published, after as many that let AdamW's averages settle",
    )
    parser.add_argument("--pretrain", type=int, default=150)
    options = options_of(parser, rates=[1e-4], steps=3, pretrain=2)
    torch.manual_seed(0)
    model = make_model(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        max_context=256,
        seed=0,
        dtype="float32",
    )
    data = batches()
    loss = train(model, data, rate=PRETRAIN_RATE, steps=options.pretrain)[-1]
    start = deepcopy(model.state_dict())
    print(
        f"{sum(t.numel() for t in named_tensors(model).values()) / 1e6:.1f} million parameters, "
        f"loss {loss:.2f} after {options.pretrain} steps\n"
    )
    print(
        "| served | rate | changed | bytes | encode MB/s | x copy | apply MB/s | x copy | publish "
        "| fetch | pays below MB/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for rate in options.rates:
            model.load_state_dict(start)
            print(row(versions(model, data, rate, options.steps, dtype), dtype, rate), flush=True)


# --- Training -------------------------------------------------------------------------------------


def batches() -> Iterator[Tensor]:
    text = np.frombuffer(
        b"\n".join(p.read_bytes() for p in sorted(SOURCES.rglob("*.py"))), np.uint8
    )
    while True:
        starts = torch.randint(0, len(text) - 129, (8,))
        yield torch.stack(
            [torch.from_numpy(text[s : s + 129].astype(np.int64)) for s in starts.tolist()]
        )


def train(
    model: nn.Module,
    data: Iterator[Tensor],
    *,
    rate: float,
    steps: int,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Losses. `after` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for _ in range(steps):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def versions(
    model: nn.Module, data: Iterator[Tensor], rate: float, steps: int, dtype: torch.dtype
) -> list[Tensors]:
    made: list[Tensors] = []
    train(
        model,
        data,
        rate=rate,
        steps=2 * steps,
        after=lambda: made.append(
            {n: t.to(dtype, copy=True) for n, t in named_tensors(model).items()}
        ),
    )
    return made[-steps - 1 :]


# --- Measuring ------------------------------------------------------------------------------------


def row(made: list[Tensors], dtype: torch.dtype, rate: float) -> str:
    full = sum(t.nbytes for t in made[0].values())
    codec = [codec_step(old, new) for old, new in pairwise(made)]
    changed, size, packing, adding, copying = (
        statistics.median(column) for column in zip(*codec, strict=True)
    )
    publish, fetch = (statistics.median(column) for column in zip(*ring(made), strict=True))
    pays = (1 - size / full) * full / (packing + adding) / 1e6
    return (
        f"| {str(dtype).removeprefix('torch.')} | {rate:g} | {changed:.1%} | {size / full:.3f} | "
        f"{full / packing / 1e6:.0f} | {packing / copying:.0f} | {full / adding / 1e6:.0f} | "
        f"{adding / copying:.0f} | {publish:.1f} | {fetch:.1f} | {pays:.0f} |"
    )


def codec_step(old: Tensors, new: Tensors) -> tuple[float, float, float, float, float]:
    """Share of words changed, bytes of the payload, seconds to encode, to apply, and to copy."""
    changed = sum(int((words(old[n]) != words(t)).sum()) for n, t in new.items()) / sum(
        t.numel() for t in new.values()
    )
    widths = {name: element_bytes(dtype) for name, dtype, _ in named_shapes(new)}
    payload, packing = timed(
        lambda: b"".join(
            f for n, t in new.items() for f in encode(raw(old[n]), raw(t), width=widths[n])
        )
    )
    target = {n: t.clone() for n, t in old.items()}
    frames = Frames(memoryview(payload))
    _, adding = timed(lambda: [frames.apply(raw(t), width=widths[n]) for n, t in target.items()])
    assert all(torch.equal(words(target[n]), words(t)) for n, t in new.items())
    _, copying = timed(lambda: [target[n].copy_(t) for n, t in new.items()])
    return changed, float(len(payload)), packing, adding, copying


def ring(made: list[Tensors]) -> Iterator[tuple[float, float]]:
    """Publishing and fetching each version with differences, in times of the same without them."""
    name = "midflight-benchmark"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            publisher("shared_memory", name=name, folder=place) as plain,
            publisher("shared_memory", name=name, folder=place, full_every=len(made) + 1) as small,
        ):
            ends = (receiver(), receiver())
            for version, tensors in enumerate(made):
                manifests = [timed(lambda s=s: s.publish(version, tensors)) for s in (plain, small)]  # noqa: B023
                fetched = [
                    timed(lambda e=e, m=m: e.fetch(m))[1]
                    for e, (m, _) in zip(ends, manifests, strict=True)
                ]
                plain.release(version - 1)
                small.release(version - 1)
                # the first makes the receiver fetch the whole once more
                if manifests[1][0].deltas and version > 1:
                    yield manifests[1][1] / manifests[0][1], fetched[1] / fetched[0]


def timed(deed: Callable[[], T]) -> tuple[T, float]:
    started = time.thread_time()
    result = deed()
    return result, time.thread_time() - started


def raw(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def words(tensor: Tensor) -> Tensor:
    """As integers, so that a NaN equals itself and -0 does not equal 0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


if __name__ == "__main__":
    main()
