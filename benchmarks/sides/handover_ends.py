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
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness.models import small_model, write_model
from harness.processes import free_port, running, wait_for
from harness.rounds import Cost, timed
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from midflight.config.load import load_config
from midflight.engines.remote import RemoteEngine
from midflight.engines.servers.server import ServerClient
from midflight.models.load import load_model
from midflight.models.names import named_tensors
from midflight.ports import Engine
from midflight.run.engine.server_process import started
from midflight.types import GenerateRequest, SamplingParams, Version, WeightManifest
from midflight.types.facts import record_nothing
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher


def _python_of(kind: str) -> Path:
    """The interpreter of a server of other people, whether it is there or not."""
    default = f".venv-{kind}/bin/python"
    return Path(os.environ.get(f"MIDFLIGHT_{kind.upper()}_PYTHON", default)).absolute()


PYTHONS = {kind: _python_of(kind) for kind in ("vllm", "sglang")}
HEAD_DIM = 64
PROMPT_TOKENS = 16
Window = tuple[float, float]
"""Beginning and end, on the clock of `time.perf_counter`."""


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    context: int
    folder: Path | None = None
    """The folder of a model that is there, instead of a made one."""

    def write(self, folder: Path) -> None:
        """The model of seed 0 and its tokenizer."""
        if self.folder is not None:
            folder.symlink_to(self.folder.absolute())
            return
        write_model(self.model(seed=0), folder)

    def model(self, seed: int) -> PreTrainedModel:
        if self.folder is not None:
            return _moved(load_model(self.folder, dtype="float32"), seed)
        heads = max(2, self.hidden // HEAD_DIM)
        return small_model(
            self.hidden, layers=self.layers, heads=heads, context=self.context, seed=seed
        )


@torch.no_grad()
def _moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Moves all weights, as a step does, by so little that it stays the same model; with seed 0 not
    at all.
    """
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-5 * seed)
    return model


# --- The trainer ----------------------------------------------------------------------------------


class Trainer:
    """Two sets of weights, for even and for odd versions, so that an engine never gets what it
    serves. CPU seconds are those of the thread that waits.
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
        """A plain copy of all tensors to memory that is there already, to compare with."""

        def copy_all() -> None:
            for name, tensor in self._weights[0].items():
                self._into[name].copy_(tensor.detach())

        return timed(copy_all, cpu=time.thread_time)[1]

    def publish(self, kind: str, version: Version) -> tuple[WeightManifest, Cost]:
        if kind not in self._publishers:
            made = publisher(kind, name="midflight-benchmark", folder=self._folder / "published")
            self._publishers[kind] = self._open.enter_context(made)
        weights = self._weights[version % 2]
        publish = self._publishers[kind].publish
        return timed(lambda: publish(version, weights), cpu=time.thread_time)

    def release(self, versions: tuple[Version, ...]) -> None:
        for sender in self._publishers.values():
            for version in versions:
                sender.release(version)

    def save(self, version: Version) -> tuple[str, Cost]:
        """Saves a model folder on disk, as a user would. Two folders take turns; nothing is
        synced, and the page cache stays.
        """
        folder = self._folder / f"saved-{version % 2}"
        model = self._models[version % 2]
        _, cost = timed(lambda: model.save_pretrained(folder), cpu=time.thread_time)
        return str(folder), cost

    def close(self) -> None:
        self._open.close()


_trainer: Trainer
"""The one of the worker process."""


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
        request = GenerateRequest(str(number), prompt, PROMPT_TOKENS, sampling)
        while True:
            times: list[float] = []
            self._answers[number].append(times)
            async with aclosing(engine.generate(request)) as chunks:  # pyright: ignore[reportArgumentType]
                async for _ in chunks:
                    times.append(time.perf_counter())
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
        """Median of the gaps that do not touch the window; 0 where nothing streams."""
        found: list[float] = []
        for gaps in self._gaps():
            for began, ended in gaps:
                if ended < without[0] or began > without[1]:
                    found.append(ended - began)
        return statistics.median(found) if found else 0.0

    def largest_gap(self, window: Window) -> float:
        """Finds each stream's largest gap that touches the window, and returns their median; 0
        where nothing streams.
        """
        largest: list[float] = []
        for gaps in self._gaps():
            touching: list[float] = []
            for began, ended in gaps:
                if ended >= window[0] and began <= window[1]:
                    touching.append(ended - began)
            if touching:
                largest.append(max(touching))
        return statistics.median(largest) if largest else 0.0

    def _counts(self) -> list[int]:
        return [sum(map(len, answers)) for answers in self._answers]

    def _gaps(self) -> list[list[Window]]:
        """Returns, for each stream, the gaps between two tokens of one answer."""
        found: list[list[Window]] = []
        for answers in self._answers:
            gaps: list[Window] = []
            for times in answers:
                gaps += pairwise(times)
            found.append(gaps)
        return found


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
        requests = KEEPING if keeps and self.kind == "sglang" else RELOADS[self.kind]
        for path, body in requests:
            named = json.dumps(body).replace("FOLDER", folder)
            await self.server.post(path, json.loads(named))


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
"""The mode is that of our own commit on that server: keys stay in vLLM, and are made anew in
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
            settings = [
                f"engine.kind={kind}",
                f"engine.python={PYTHONS[kind]}",
                f"engine.max_running={max_running}",
                "engine.start_seconds=600",
                f"run.folder={folder}",
                f"model.path={model}",
                f"model.max_context={size.context}",
            ]
            config = load_config(None, settings)
            process = await stack.enter_async_context(started(config, model, name=kind, version=0))
            server = await stack.enter_async_context(
                ServerClient(kind, process.url, patience_seconds=600)
            )
            more = ["--engine", kind, "--engine-url", process.url]
            if straight:
                more += ["--set", "weights.transport=direct"]
        port = free_port()
        command = [sys.executable, "-m", "midflight", "engine", "--model", model, "--port", port]
        command += ["--max-running", max_running, "--max-context", size.context, *more]
        log = stack.enter_context((folder / f"{kind}.log").open("wb"))
        companion = stack.enter_context(running(command, log=log))
        await asyncio.to_thread(wait_for, port, companion)
        engine = RemoteEngine(kind, f"http://127.0.0.1:{port}", token=None, record=record_nothing)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        connection = tasks.create_task(engine.run())
        await engine.connect(seconds=60)
        try:
            yield Side(kind, engine, server)
        finally:
            connection.cancel()
