"""The two ends of a handover, as `handover.py` runs them: a trainer in a process of its own, and an
engine behind our wire with its streams.

The trainer's functions run in a `ProcessPoolExecutor` of one worker, so that what it does takes
nothing from the streams but cores.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from gateway import cpu_of, family, free_port, running, wait_for
from midflight.config.load import load_config
from midflight.engines.remote import RemoteEngine
from midflight.engines.servers.server import ServerClient
from midflight.models.creation import make_model
from midflight.models.load import load_model
from midflight.models.names import named_tensors
from midflight.ports import Engine
from midflight.run.engine.server_process import started
from midflight.text.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from midflight.types import GenerateRequest, SamplingParams, Version, WeightManifest
from midflight.types.facts import unheard
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher

PYTHONS = {
    kind: Path(
        os.environ.get(f"MIDFLIGHT_{kind.upper()}_PYTHON", f".venv-{kind}/bin/python")
    ).absolute()
    for kind in ("vllm", "sglang")
}
HEAD_DIM = 64
T = TypeVar("T")
PROMPT_TOKENS = 16
Window = tuple[float, float]
"""Beginning and end, on the clock of `time.perf_counter`."""


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    context: int
    folder: Path | None = None
    """Of a model that is there, instead of a made one."""

    def write(self, folder: Path) -> None:
        """The model of seed 0 and its tokenizer."""
        if self.folder is not None:
            folder.symlink_to(self.folder.absolute())
            return
        self.model(seed=0).save_pretrained(folder)
        write_byte_tokenizer(folder)

    def model(self, seed: int) -> PreTrainedModel:
        if self.folder is not None:
            return _moved(load_model(self.folder, dtype="float32"), seed)
        heads = max(2, self.hidden // HEAD_DIM)
        return make_model(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=heads // 2,
            max_context=self.context,
            seed=seed,
            dtype="float32",
        )


@torch.no_grad()
def _moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """As a step moves all weights, and as little as makes no other model of it; with seed 0 not at
    all.
    """
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-5 * seed)
    return model


# --- The trainer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    seconds: float
    cpu: float
    """Seconds of the thread that waits."""


class Trainer:
    """Two sets of weights: even and odd versions. What an engine is given is always something else
    than what it serves.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        torch.set_num_threads(1)
        disable_progress_bar()
        self._folder = folder
        self._open = ExitStack()
        self._models = [size.model(seed) for seed in (0, 1)]
        self._weights = [named_tensors(model) for model in self._models]
        self._into = {name: torch.empty_like(t) for name, t in self._weights[0].items()}
        self._publishers: dict[str, Publisher] = {}

    def copy(self) -> Cost:
        """A plain copy of all tensors to memory that stands: the yardstick."""
        return timed(
            lambda: [self._into[name].copy_(t.detach()) for name, t in self._weights[0].items()]
        )[1]

    def publish(self, kind: str, version: Version) -> tuple[WeightManifest, Cost]:
        if kind not in self._publishers:
            made = publisher(kind, name="midflight-benchmark", folder=self._folder / "published")
            self._publishers[kind] = self._open.enter_context(made)
        return timed(lambda: self._publishers[kind].publish(version, self._weights[version % 2]))

    def release(self, versions: tuple[Version, ...]) -> None:
        for sender in self._publishers.values():
            for version in versions:
                sender.release(version)

    def save(self, version: Version) -> tuple[str, Cost]:
        """As a user would: a model folder on disk. Two folders in turn; nothing is synced, and the
        page cache stays.
        """
        folder = self._folder / f"saved-{version % 2}"
        _, cost = timed(lambda: self._models[version % 2].save_pretrained(folder))
        return str(folder), cost

    def close(self) -> None:
        self._open.close()


def timed(deed: Callable[[], T]) -> tuple[T, Cost]:
    began = time.perf_counter()
    cpu = time.thread_time()
    result = deed()
    return result, Cost(time.perf_counter() - began, time.thread_time() - cpu)


_trainer: Trainer
"""Of the worker process."""


def begin(size: Size, folder: Path) -> None:
    global _trainer
    _trainer = Trainer(size, folder)


class RemoteTrainer:
    """Calls the one in its process. Each call waits until it is done there."""

    def __init__(self, size: Size, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            1, mp_context=spawn, initializer=begin, initargs=(size, folder)
        )

    async def copy(self) -> Cost:
        return await self._call("copy")

    async def publish(self, kind: str, version: Version) -> tuple[WeightManifest, Cost]:
        return await self._call("publish", kind, version)

    async def release(self, versions: tuple[Version, ...]) -> None:
        await self._call("release", versions)

    async def save(self, version: Version) -> tuple[str, Cost]:
        return await self._call("save", version)

    async def close(self) -> None:
        await self._call("close")
        self._pool.shutdown()

    async def _call(self, name: str, *given: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, _call, name, *given)


def _call(name: str, *given: object) -> object:
    return getattr(_trainer, name)(*given)


# --- Streams --------------------------------------------------------------------------------------


@asynccontextmanager
async def streaming(engine: Engine, num: int, *, max_tokens: int) -> AsyncGenerator[Streams]:
    """`num` answers under way. They are aborted at the end; one that ends before is asked again."""
    streams = Streams(num)
    async with asyncio.TaskGroup() as tasks:
        reading = [
            tasks.create_task(streams.read(engine, i, max_tokens=max_tokens)) for i in range(num)
        ]
        yield streams
        for task in reading:
            task.cancel()


class Streams:
    """`answers[stream]` are the times of the tokens of its answers; between answers there is no
    gap.
    """

    def __init__(self, num: int) -> None:
        self._answers: list[list[list[float]]] = [[] for _ in range(num)]
        self._moved = asyncio.Event()

    async def read(self, engine: Engine, number: int, *, max_tokens: int) -> None:
        """One answer after the other, until cancelled."""
        prompt = tuple((7 * number + i) % 256 for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(
            max_tokens=max_tokens - PROMPT_TOKENS, ignore_eos=True, seed=number
        )
        while True:
            self._answers[number].append([])
            async with aclosing(
                engine.generate(GenerateRequest(str(number), prompt, PROMPT_TOKENS, sampling))  # pyright: ignore[reportArgumentType]
            ) as chunks:
                async for _ in chunks:
                    self._answers[number][-1].append(time.perf_counter())
                    self._moved.set()

    async def each_has(self, more: int) -> None:
        """Waits until each stream has moved so many times more; ended by that, or by an error of a
        stream, which raises.
        """
        goals = [count + more for count in self._counts()]
        while any(count < goal for count, goal in zip(self._counts(), goals, strict=True)):
            self._moved.clear()
            await self._moved.wait()

    def normal_gap(self, without: Window) -> float:
        """Median of the gaps that do not touch the window."""
        return statistics.median(
            b - a for gaps in self._gaps() for a, b in gaps if b < without[0] or a > without[1]
        )

    def largest_gap(self, window: Window) -> float:
        """Of each stream the largest gap that touches the window; their median."""
        largest = (
            max((b - a for a, b in gaps if b >= window[0] and a <= window[1]), default=None)
            for gaps in self._gaps()
        )
        return statistics.median(gap for gap in largest if gap is not None)

    def _counts(self) -> list[int]:
        return [sum(map(len, answers)) for answers in self._answers]

    def _gaps(self) -> list[list[Window]]:
        return [[gap for times in answers for gap in pairwise(times)] for answers in self._answers]


# --- The engine -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """An engine as the rollout process has it. `server`: its own HTTP interface, where it is other
    people's.
    """

    kind: str
    engine: RemoteEngine
    server: ServerClient | None

    async def reload(self, folder: str, *, keeps: bool) -> None:
        """The server's own way to new weights in its running requests: pause, read the folder, go
        on. `keeps`: with their keys.
        """
        assert self.server is not None
        for path, body in KEEPING if keeps and self.kind == "sglang" else RELOADS[self.kind]:
            await self.server.post(
                path, body and json.loads(json.dumps(body).replace("FOLDER", folder))
            )


RELOADS: Mapping[str, tuple[tuple[str, object], ...]] = {
    "vllm": (
        ("/pause?mode=keep&clear_cache=false", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "FOLDER"}}),
        ("/resume", None),
    ),
    "sglang": (
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", {"model_path": "FOLDER"}),
        ("/continue_generation", {}),
    ),
}
"""In the mode that our own commit uses on that server: keys stay in vLLM, and are made anew in
SGLang.
"""
KEEPING: tuple[tuple[str, object], ...] = (
    ("/pause_generation", {"mode": "in_place"}),
    ("/update_weights_from_disk", {"model_path": "FOLDER", "flush_cache": False}),
    ("/continue_generation", {}),
)
"""SGLang, where keys stay."""


@asynccontextmanager
async def engine_side(
    kind: str, size: Size, folder: Path, *, max_running: int, straight: bool = False
) -> AsyncGenerator[Side]:
    """A server, where it is other people's, and `midflight engine`, each a process of its own; our
    connection to both.

    `straight`: the run's weights come to its workers, so it commits as such an engine does."""
    model = folder / "model"
    disable_progress_bar()
    size.write(model)
    async with AsyncExitStack() as stack:
        server = None
        more = []
        if kind != "embedded":
            given = {
                "engine.kind": kind,
                "engine.python": PYTHONS[kind],
                "engine.max_running": max_running,
                "engine.start_seconds": 600,
                "run.folder": folder,
            }
            given |= {"model.path": model, "model.max_context": size.context}
            config = load_config(None, [f"{key}={value}" for key, value in given.items()])
            process = await stack.enter_async_context(started(config, model, name=kind, version=0))
            server = await stack.enter_async_context(
                ServerClient(kind, process.url, patience_seconds=600)
            )
            more = [
                "--engine",
                kind,
                "--engine-url",
                process.url,
                *(["--set", "weights.transport=direct"] if straight else []),
            ]
        port = free_port()
        command = [sys.executable, "-m", "midflight", "engine", "--model", model, "--port", port]
        command += ["--max-running", max_running, "--max-context", size.context, *more]
        log = stack.enter_context((folder / f"{kind}.log").open("wb"))
        companion = stack.enter_context(running(command, stdout=log, stderr=log))
        await asyncio.to_thread(wait_for, port, companion)
        engine = RemoteEngine(kind, f"http://127.0.0.1:{port}", token=None, record=unheard)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        connection = tasks.create_task(engine.run())
        await engine.connect(seconds=60)
        try:
            yield Side(kind, engine, server)
        finally:
            connection.cancel()


def cpu_seconds() -> float:
    """Of all processes of the benchmark so far."""
    return sum(cpu_of(pid) for pid in family(os.getpid()))
