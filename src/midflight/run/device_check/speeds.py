"""Speeds of the device, each beside the bound that memory or arithmetic sets, which is measured on
the same device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from midflight.engines.embedded.weights import EngineWeights
from midflight.models.names import in_dtype, named_tensors
from midflight.run.device_check.bench import (
    GROUP,
    PROMPT,
    REAL,
    Bench,
    BenchSize,
    Found,
    batch,
    change,
    not_tried,
    policy_trainer,
    requests,
    tried,
)
from midflight.run.device_check.kernels import ON_CPU, OTHER_ENGINE
from midflight.run.device_check.report import DeviceTrial
from midflight.weights.transports.kinds import PULL, SHARED_MEMORY
from midflight.weights.transports.select import publisher, receiver

T = TypeVar("T")
_COPIED = 2**28
"""Bytes of a copy that measures a memory: more than any cache."""
_SIDE = 4096
"""Rows and columns of the matrices whose product measures the arithmetic of a GPU."""
_SMALL_SIDE = 512
"""The same elsewhere."""
DECODED = 64
"""The most tokens of an answer whose speed is measured: in real size our engine makes about 20 a
second on a GPU.
"""
VERSIONS = 3
"""The versions that are handed over one after the other. The first does not count."""


def limits(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields what the device could do at most."""
    yield tried("memory", lambda: _memory(bench), remedy=ON_CPU)
    yield tried(
        "a copy within its memory, read and written",
        lambda: _rate(copied_bytes(bench)),
        remedy=ON_CPU,
    )
    if bench.device.type == "cpu":
        yield not_tried("copies to and from the host", "its memory is the host's")
    else:
        yield tried("a copy to the host", lambda: _rate(_to_host(bench)), remedy=ON_CPU)
        yield tried("a copy from the host", lambda: _rate(_from_host(bench)), remedy=ON_CPU)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        yield tried(
            f"a product of matrices in {name}",
            lambda dtype=dtype: f"{product_rate(bench, dtype) / 1e12:.3g} TFLOP/s",
            remedy=ON_CPU,
        )


def speeds(bench: Bench) -> Iterator[DeviceTrial]:
    """Yields what generation, a step and a version take."""
    for size in bench.sizes:
        dtype = "bfloat16" if size is REAL else "float32"
        for running in size.running:
            yield tried(
                f"the embedded engine decodes {running} together in {dtype} ({size.name})",
                lambda size=size, running=running, dtype=dtype: _decoding(
                    bench, size, running, dtype=dtype
                ),
                remedy=OTHER_ENGINE,
            )
        yield tried(
            f"a step of {size.groups} groups of {GROUP} ({size.name})",
            lambda size=size: _step(bench, size),
            remedy="lower trainer.micro_batch_tokens",
        )
        for transport in (SHARED_MEMORY, PULL):
            yield tried(
                f"a version by {transport} in bfloat16 ({size.name})",
                lambda size=size, transport=transport: _version(bench, size, transport),
                remedy=f'set weights.transport = "{PULL if transport == SHARED_MEMORY else SHARED_MEMORY}"',
            )
    if bench.why_not_real:
        yield not_tried("speeds in real size", bench.why_not_real)


# --- Bounds ---------------------------------------------------------------------------------------


def _memory(bench: Bench) -> str:
    if bench.is_cuda:
        free, total = torch.cuda.mem_get_info(bench.device)
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * page
        total = os.sysconf("SC_PHYS_PAGES") * page
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GB are free"


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:,.1f} GB/s"


@cache
def copied_bytes(bench: Bench) -> float:
    """Bytes that a copy within the device's memory reads and writes in a second."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * _COPIED / bench.seconds(lambda: target.copy_(source))


@cache
def _to_host(bench: Bench) -> float:
    """Bytes that go from the device to the host's pageable memory in a second."""
    source = torch.ones(_COPIED, dtype=torch.uint8, device=bench.device)
    target = torch.empty(_COPIED, dtype=torch.uint8)
    return _COPIED / bench.seconds(lambda: target.copy_(source))


@cache
def _from_host(bench: Bench) -> float:
    source = torch.ones(_COPIED, dtype=torch.uint8)
    target = torch.empty(_COPIED, dtype=torch.uint8, device=bench.device)
    return _COPIED / bench.seconds(lambda: target.copy_(source))


@cache
def product_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Operations a second of a product of two square matrices."""
    side = _SIDE if bench.is_cuda else _SMALL_SIDE
    one = torch.ones(side, side, dtype=dtype, device=bench.device)
    other = torch.ones(side, side, dtype=dtype, device=bench.device)
    return 2 * side**3 / bench.seconds(lambda: one @ other)


# --- What is done ---------------------------------------------------------------------------------


def _decoding(bench: Bench, size: BenchSize, running: int, *, dtype: str) -> Found:
    """Tokens a second, of those that reading all weights once a step allows."""
    model = bench.model(size, dtype=dtype)
    num_bytes = sum(tensor.nbytes for tensor in named_tensors(model).values())
    engine = bench.engine(model, size)
    tokens = min(size.answer, DECODED)
    asked = requests(size, running, answer=tokens)
    taken = bench.seconds(lambda: engine.generate_all(asked), rounds=2)
    at_most = running * copied_bytes(bench) / num_bytes
    return Found(
        f"{running * tokens / taken:,.0f} tokens/s",
        f"{at_most:,.0f} tokens/s that reading the weights allows",
    )


def _step(bench: Bench, size: BenchSize) -> Found:
    """Tokens a second of a step, of those that 6 operations a weight and token allow."""
    compute_dtype = torch.bfloat16 if size is REAL else None
    model = bench.model(size)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    trainer = policy_trainer(model, size, compute_dtype=compute_dtype)
    taken = bench.seconds(lambda: trainer.step(batch(size, trainer.version)), rounds=2)
    num_tokens = size.groups * GROUP * (PROMPT + size.answer)
    at_most = product_rate(bench, compute_dtype or torch.float32) / (6 * num_weights)
    return Found(
        f"{taken:.3f} s, {num_tokens / taken:,.0f} tokens/s",
        f"{at_most:,.0f} tokens/s that products of matrices allow",
    )


@dataclass(slots=True)
class _VersionTimes:
    """Seconds of each version's way."""

    publish: list[float]
    stage: list[float]
    commit: list[float]


def _version(bench: Bench, size: BenchSize, transport: str) -> Found:
    """The seconds of a version, of those that copying its bytes to the host and back takes."""
    source = bench.model(size)
    served = bench.model(size, dtype="bfloat16")
    engine = EngineWeights(served, receiver(), version=0)
    times = _VersionTimes([], [], [])
    num_bytes = 0
    with publisher(transport, name=bench.segment(), folder=bench.scratch / "weights") as outbox:
        for version in range(1, VERSIONS + 1):
            change(source)
            bench.wait()
            tensors = in_dtype(named_tensors(source), torch.bfloat16)
            manifest, taken = _timed(bench, lambda t=tensors, v=version: outbox.publish(v, t))
            times.publish.append(taken)
            times.stage.append(_timed(bench, lambda m=manifest: engine.stage(m))[1])
            times.commit.append(_timed(bench, lambda v=version: engine.commit(v))[1])
            outbox.release(version - 1)
            num_bytes = sum(spec.num_bytes for spec in manifest.tensors)
    parts = [("publish", times.publish), ("stage", times.stage), ("commit", times.commit)]
    said = ", ".join(f"{name} {min(taken[1:]):.4f} s" for name, taken in parts)
    if bench.device.type == "cpu":
        at_least = 2 * num_bytes * 2 / copied_bytes(bench)
    else:
        at_least = num_bytes / _to_host(bench) + num_bytes / _from_host(bench)
    return Found(f"{num_bytes / 1e6:,.1f} MB: {said}", f"{at_least:.4f} s for its two copies")


def _timed(bench: Bench, deed: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = deed()
    bench.wait()
    return found, time.perf_counter() - began
