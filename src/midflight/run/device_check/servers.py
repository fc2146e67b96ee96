"""Trials of vLLM and SGLang, where they are installed: what they compute, versions in mid-answer,
taking a version back, sleep and wake, and kernels that do not depend on the batch.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch

from midflight.config.gpu_memory import SHARE_OPTIONS
from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.own_engines import OWN_ENGINES
from midflight.engines.servers.plugin_workers import WORKERS
from midflight.engines.servers.server import Server, ServerClient
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.vllm import VllmServer
from midflight.errors import EngineError, first_error
from midflight.models.names import named_tensors
from midflight.models.sizes import sizes_of
from midflight.run.device_check.bench import (
    PROMPT,
    REAL,
    SMALL,
    TF32_TOLERANCE,
    TOLERANCE,
    Bench,
    BenchSize,
    Found,
    Wrong,
    most,
    not_tried,
    plain_logprobs,
    requests,
    tried,
    within,
)
from midflight.run.device_check.interpreters import NAMES, interpreter
from midflight.run.device_check.report import DeviceTrial, TrialOutcome
from midflight.run.device_check.speeds import copied_bytes
from midflight.run.device_check.swaps import MODES, answered_across, checked_answer
from midflight.run.device_check.table import GIB
from midflight.run.device_check.whole_run import run_training
from midflight.run.engine.server_process import started
from midflight.text.tokenizer import Tokenizer
from midflight.types import GenerateRequest, PauseMode, SamplingParams
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.kinds import DIRECT, SHARED_MEMORY
from midflight.weights.transports.memory_files import shared_places
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher, receiver

START_SECONDS = 180.0
SLEEP = {
    "vllm": ("/sleep?level=1", "/wake_up", ["--enable-sleep-mode"]),
    "sglang": (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        ["--enable-memory-saver", "--enable-weights-cpu-backup"],
    ),
}
"""Routes that give a server's memory back and take it again, and the options that open them."""
SERVER_SHARE = 0.75
"""The share of a part's memory that its server has. Models and trainers beside it have the rest."""
KEYS_SHARE = 1 / 3
"""The share of a server's memory that is for keys and values of its requests. Its weights, its
graphs and its work have the rest.
"""
FREED = 0.5
"""The share of the memory for keys and values that a sleeping server must give back at least."""
SLEEPS = 5
"""A server sleeps so often. What others take or leave meanwhile seldom meets three of them."""
CALL_SECONDS = 60.0
MOST_OF_FREE = 0.9
"""SGLang needs memory beside its share."""


def servers(
    bench: Bench, kind: str, trials: Callable[[ServerBench], Iterator[DeviceTrial]]
) -> Iterator[DeviceTrial]:
    """Yields these trials of the server of that kind, which is here."""
    python = interpreter(kind)
    assert python is not None, "the check tries no server that is not here"
    if bench.device.type not in ("cpu", "cuda"):
        yield not_tried(NAMES[kind], f"it computes on cpu or cuda, not {bench.device.type}")
        return
    yield from trials(ServerBench(bench, kind, python))


def as_they_come(trials: AsyncGenerator[DeviceTrial]) -> Iterator[DeviceTrial]:
    """Yields each trial when it has ended, also if a later one never does."""
    ended = asyncio.Queue[DeviceTrial | None]()

    async def fill() -> None:
        try:
            async for trial in trials:
                ended.put_nowait(trial)
        finally:
            ended.put_nowait(None)

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        filling = loop.create_task(fill())
        while (trial := loop.run_until_complete(ended.get())) is not None:
            yield trial
        loop.run_until_complete(filling)


async def tried_while(
    what: str, deed: Callable[[], Awaitable[str | Found]], *, remedy: str
) -> DeviceTrial:
    """As `tried`, for a deed that waits."""
    began = time.monotonic()
    result: Callable[[], str | Found]
    try:
        found = await deed()
    except Exception as error:  # a server may fail in any way
        result = partial(_raised, error)
    else:
        result = partial(_returned, found)
    seconds = time.monotonic() - began
    return msgspec.structs.replace(tried(what, result, remedy=remedy), seconds=seconds)


def _raised(error: Exception) -> str:
    raise error


def _returned(found: str | Found) -> str | Found:
    return found


@dataclass(frozen=True, slots=True)
class _Attached:
    """A server that was started, and the engine port before it."""

    engine: ServerEngine
    url: str
    staging: Path
    """The folder below which versions are written for it."""
    feed: DirectFeed


@dataclass(frozen=True, slots=True)
class ServerBench:
    """The kind of server that trials start, its interpreter, and the bench that they use."""

    bench: Bench
    kind: str
    python: Path

    @property
    def name(self) -> str:
        return NAMES[self.kind]

    @property
    def tolerance(self) -> float:
        return TF32_TOLERANCE if self.bench.is_cuda else TOLERANCE

    @property
    def other_engine(self) -> str:
        other = "sglang" if self.kind == "vllm" else "vllm"
        return f'set engine.kind to "{other}" or "embedded"'

    def config(
        self,
        *,
        size: BenchSize,
        arguments: Sequence[str] = (),
        tensor_parallel: int = 1,
        more: Sequence[str] = (),
    ) -> Config:
        """The configuration of a run with such a server. `more` are further settings."""
        dtype = "bfloat16" if size is REAL else "float32"
        settings = [
            f"run.folder={self.bench.scratch / 'servers'}",
            f"model.path={self.bench.folder(size)}",
            f"model.max_context={size.context}",
            "model.dtype=float32",
            f"engine.kind={self.kind}",
            f"engine.python={self.python}",
            f"engine.dtype={dtype}",
            f"engine.device={self.bench.device.type}",
            f"engine.max_running={max(size.running)}",
            f"engine.start_seconds={START_SECONDS}",
            f"engine.servers=[{{tensor_parallel={tensor_parallel}}}]",
        ]
        words = [*arguments, *self.memory_words(size)]
        settings.append(f"engine.arguments={json.dumps(words)}")
        return load_config(None, [*settings, *more])

    @property
    def key_bytes(self) -> int:
        """The memory of a GPU that the server has for keys and values."""
        return int(self.bench.room * SERVER_SHARE * KEYS_SHARE)

    def memory_words(self, size: BenchSize) -> Sequence[str]:
        """The options that give a server its share of the part's room on a GPU.

        The memory for keys and values is given in bytes or tokens: else a server measures what is
        free on the GPU, and refuses to start where others take or leave memory meanwhile.
        """
        if not self.bench.is_cuda:
            return ()
        free, total = torch.cuda.mem_get_info(self.bench.device)
        share = self.bench.room * SERVER_SHARE
        if self.kind == "vllm":
            return (
                f"{SHARE_OPTIONS['vllm']}={share / total:.3f}",
                f"--kv-cache-memory-bytes={self.key_bytes}",
            )
        # SGLang's share is one of what is free as it starts
        dtype = "bfloat16" if size is REAL else "float32"
        token_bytes = sizes_of(self.bench.folder(size)).kv_bytes_per_token(dtype)
        return (
            f"{SHARE_OPTIONS['sglang']}={min(share / free, MOST_OF_FREE):.3f}",
            f"--max-total-tokens={self.key_bytes // token_bytes}",
        )

    @asynccontextmanager
    async def attached(
        self, size: BenchSize, config: Config, *, by_own_engine: bool = False
    ) -> AsyncGenerator[_Attached]:
        """A server that ends with the block. If it ends before, its end is raised in the block."""
        folder = self.bench.folder(size)
        name = self.bench.segment()
        staging = shared_places()[0] / name
        feed = DirectFeed()
        async with started(config, folder, name=name, version=0) as running:
            engine = ServerEngine(
                name,
                running.url,
                self._wire(size, swaps=not by_own_engine),
                tokenizer=Tokenizer.load(folder),
                model=folder,
                receiver=receiver(),
                staging=staging,
                direct=DirectLoader(self.kind, feed, by_own_engine=by_own_engine),
                works=running.works,
            )
            async with asyncio.TaskGroup() as tasks:
                loop = tasks.create_task(engine.run())
                watch = tasks.create_task(running.died())
                try:
                    await engine.attached()
                    yield _Attached(engine, running.url, staging, feed)
                finally:
                    loop.cancel()
                    watch.cancel()
        shutil.rmtree(staging, ignore_errors=True)

    def _wire(self, size: BenchSize, *, swaps: bool) -> Server:
        if self.kind == "vllm":
            return VllmServer(vocab_size=size.vocabulary, max_running=max(size.running))
        return SglangServer(
            vocab_size=size.vocabulary,
            max_running=max(size.running),
            max_context=size.context,
            direct=swaps,
        )

    async def trials(self, size: BenchSize) -> AsyncGenerator[DeviceTrial]:
        """Yields all that one server is tried with, and ends the server."""
        at = f"{self.name} ({size.name})"
        what = f"{at}: it starts"
        began = time.monotonic()
        try:
            async with self.attached(size, self.config(size=size)) as server:
                took = time.monotonic() - began
                yield DeviceTrial(what, TrialOutcome.WORKS, f"{took:.0f} s", seconds=took)
                what = f"{at}: it goes on"
                async for trial in self._on(server, size, at):
                    yield trial
        except Exception as error:  # a server may fail in any way
            failed = Wrong(str(first_error(error)))
            yield tried(what, partial(_raised, failed), remedy=self.other_engine)

    async def _on(self, server: _Attached, size: BenchSize, at: str) -> AsyncGenerator[DeviceTrial]:
        engine = server.engine
        yield await tried_while(
            f"{at}: the log-probability of each token, computed again",
            lambda: self.said_and_computed(engine, size),
            remedy=self.other_engine,
        )
        if size is REAL:
            yield await tried_while(
                f"{at}: tokens a second, {max(size.running)} together",
                lambda: self._speed(engine, size),
                remedy=self.other_engine,
            )
            return
        version = 1
        for transport in (SHARED_MEMORY, DIRECT):
            other = SHARED_MEMORY if transport == DIRECT else DIRECT
            with _sender(self.bench, transport) as outbox:
                for mode in MODES:
                    if mode not in engine.capabilities.pause_modes:
                        continue
                    yield await tried_while(
                        f"{at}: a version in mid-answer by {transport}, {mode.value}",
                        lambda v=version, m=mode, out=outbox: self._came(server, out, v, m),
                        remedy=f'set weights.transport = "{other}"',
                    )
                    version += 2
        with _sender(self.bench, SHARED_MEMORY) as outbox:
            yield await tried_while(
                f"{at}: a version that cannot be loaded is taken back",
                lambda: self._taken_back(server, outbox, version),
                remedy=self.other_engine,
            )
        with _sender(self.bench, DIRECT) as outbox:
            yield await tried_while(
                f"{at}: a version that came straight is taken back",
                lambda: self._taken_back_in_workers(server, outbox, version + 2),
                remedy=f'set weights.transport = "{SHARED_MEMORY}"',
            )

    async def _came(
        self, server: _Attached, outbox: Publisher, version: int, mode: PauseMode
    ) -> str:
        """As `swapped`. On a GPU a version that goes straight must stay there."""
        found = await self.swapped(server.engine, outbox, version, mode)
        if server.feed.refusal:
            raise Wrong(f"it came over host memory: {server.feed.refusal}")
        return found

    async def said_and_computed(self, engine: ServerEngine, size: BenchSize) -> Found:
        model = self.bench.model(size)
        differences: list[float] = []
        for request in requests(size, 4, answer=SMALL.answer):
            ids: list[int] = []
            said: list[float] = []
            async for chunk in engine.generate(request):
                ids += chunk.token_ids
                said += chunk.logprobs
            expected = plain_logprobs(model, request.input_ids, ids)
            differences.append(most(said, expected))
        if size is REAL:
            return Found(f"{max(differences):.2g} nats apart at most, in bfloat16")
        return Found(within(max(differences), self.tolerance, "nats apart at most"))

    async def _speed(self, engine: ServerEngine, size: BenchSize) -> Found:
        number = max(size.running)

        async def whole(first: int) -> None:
            async with asyncio.TaskGroup() as tasks:
                for request in requests(size, number, first=first):
                    tasks.create_task(_collected(engine, replace(request, seeded=False)))

        await whole(100)
        began = time.monotonic()
        await whole(200)
        taken = time.monotonic() - began
        model = self.bench.model(size, device=torch.device("cpu"))
        num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
        at_most = number * copied_bytes(self.bench) / num_bytes
        return Found(
            f"{number * size.answer / taken:,.0f} tokens/s",
            f"{at_most:,.0f} tokens/s that reading the weights allows",
        )

    async def swapped(
        self, engine: ServerEngine, outbox: Publisher, version: int, mode: PauseMode
    ) -> str:
        """Hands over the weights of version 0, then in mid-answer others."""
        before = self.bench.model(SMALL)
        after = self.bench.model(SMALL, seed=1)
        manifest = outbox.publish(version, named_tensors(before))
        await engine.stage(manifest)
        await engine.commit(version)
        outbox.release(version - 1)
        request = requests(SMALL, 1, answer=SMALL.context - PROMPT - 1, first=version)[0]
        coming = outbox.publish(version + 1, named_tensors(after))
        answer = await answered_across(engine, request, coming, mode)
        outbox.release(version)
        answer.versions = [each - version for each in answer.versions]
        return checked_answer((before, after), request, answer, mode, tolerance=self.tolerance)

    async def _taken_back(self, server: _Attached, outbox: Publisher, version: int) -> str:
        """Stages a version and damages its file, so that the server fails to load it."""
        engine = server.engine
        await self._serve(engine, outbox, version, seed=0)
        before = await _said(engine)
        weights = named_tensors(self.bench.model(SMALL, seed=1))
        await engine.stage(outbox.publish(version + 1, weights))
        files = server.staging.glob("*/model.safetensors")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        if newest is None:
            raise Wrong("the version was not written into a folder")
        newest.write_bytes(b"damaged")
        try:
            await engine.commit(version + 1)
        except EngineError:
            pass
        else:
            raise Wrong("a damaged file was loaded")
        if await _said(engine) != before:
            raise Wrong("the answer after it is another")
        return "the same answer before and after"

    async def _taken_back_in_workers(
        self, server: _Attached, outbox: Publisher, version: int
    ) -> str:
        """Serves one version after another straight in the workers, then the first again."""
        engine = server.engine
        await self._serve(engine, outbox, version, seed=0)
        before = await _said(engine)
        await self._serve(engine, outbox, version + 1, seed=1)
        if await _said(engine) == before:
            raise Wrong("the new version answers as the one before")
        async with ServerClient(engine.name, server.url, patience_seconds=CALL_SECONDS) as client:
            await engine.pause(PauseMode.RECOMPUTE)
            await WORKERS[self.kind](client).take(version, recompute=True)
            await engine.resume()
            after = await _said(engine)
            await engine.pause(PauseMode.RECOMPUTE)
            await WORKERS[self.kind](client).take(version + 1, recompute=True)
            await engine.resume()
        if after != before:
            raise Wrong("the answer of the version that was taken back is another")
        return "the same answer as before the version"

    async def by_own_engine(self, server: _Attached, outbox: Publisher) -> str:
        """Versions by the server's own transfer engine: one in mid-answer, then another, which is
        taken back.
        """
        engine = server.engine
        found = await self.swapped(engine, outbox, 1, PauseMode.RECOMPUTE)
        before = await _said(engine)
        await self._serve(engine, outbox, 3, seed=2)
        if await _said(engine) == before:
            raise Wrong("the new version answers as the one before")
        async with ServerClient(engine.name, server.url, patience_seconds=CALL_SECONDS) as client:
            await engine.pause(PauseMode.RECOMPUTE)
            await OWN_ENGINES[self.kind](client).take(2, recompute=True)
            await engine.resume()
        if await _said(engine) != before:
            raise Wrong("the answer of the version that was taken back is another")
        return f"{found}; the same answer as before a version that was taken back"

    async def _serve(
        self, engine: ServerEngine, outbox: Publisher, version: int, *, seed: int
    ) -> None:
        weights = named_tensors(self.bench.model(SMALL, seed=seed))
        await engine.stage(outbox.publish(version, weights))
        await engine.pause(PauseMode.RECOMPUTE)
        await engine.commit(version)
        await engine.resume()


async def _collected(engine: ServerEngine, request: GenerateRequest) -> list[int]:
    found: list[int] = []
    async for chunk in engine.generate(request):
        found += chunk.token_ids
    return found


def _sender(bench: Bench, transport: str) -> Publisher:
    """The publisher. On a GPU, which the server shares, `direct` goes by handles of CUDA IPC."""
    return publisher(
        transport,
        name=bench.segment(),
        folder=bench.scratch / "weights",
        device=bench.device,
        by_handles=bench.is_cuda,
    )


async def _said(engine: ServerEngine) -> list[int]:
    """A greedy answer."""
    (request,) = requests(SMALL, 1)
    greedy = SamplingParams(max_tokens=SMALL.answer, ignore_eos=True, temperature=0.0)
    return await _collected(engine, replace(request, sampling=greedy, seeded=False))


# --- Its parts ---------------------------------------------------------------------


def small(at: ServerBench) -> Iterator[DeviceTrial]:
    """Yields the trials of a small server."""
    yield from as_they_come(at.trials(SMALL))


def real(at: ServerBench) -> Iterator[DeviceTrial]:
    """Yields the trials of a server in real size, with its speed."""
    if at.bench.why_not_real:
        yield not_tried(f"{at.name} in real size", at.bench.why_not_real)
    else:
        yield from as_they_come(at.trials(REAL))


def on_two_gpus(at: ServerBench) -> Iterator[DeviceTrial]:
    """Yields the trials of a server that shares no GPU with the trainer, and of one on two GPUs."""
    yield from _own_engine(at)
    yield from _tensor_parallel(at)


def _own_engine(at: ServerBench) -> Iterator[DeviceTrial]:
    what = f"{at.name}: versions by its own transfer engine"
    if at.bench.is_cuda and at.bench.num_devices < 2:
        yield not_tried(what, f"it takes two GPUs, and {at.bench.num_devices} is here")
    elif at.kind == "vllm" and not at.bench.is_cuda:
        yield not_tried(what, "vLLM has one for GPUs only")
    else:
        yield asyncio.run(
            tried_while(
                what, lambda: _by_own_engine(at), remedy="set weights.server_engine = false"
            )
        )


async def _by_own_engine(at: ServerBench) -> str:
    more = ["weights.transport=direct"]
    if at.bench.is_cuda:  # the trainer's end has the first GPU
        more += ["trainer.device=cuda:0", "engine.device=cuda:1"]
    config = at.config(size=SMALL, more=more)
    with BroadcastPublisher(device=at.bench.device) as outbox:
        async with at.attached(SMALL, config, by_own_engine=True) as server:
            return await at.by_own_engine(server, outbox)


def _tensor_parallel(at: ServerBench) -> Iterator[DeviceTrial]:
    what = f"{at.name}: tensor-parallel 2"
    if not at.bench.is_cuda:
        yield not_tried(what, "two processes of a server on these cores are no trial of a GPU")
    elif at.bench.num_devices < 2:
        yield not_tried(what, f"it takes two GPUs, and {at.bench.num_devices} is here")
    else:
        yield asyncio.run(
            tried_while(
                what,
                lambda: _in_two(at),
                remedy="leave tensor_parallel out of engine.servers",
            )
        )


async def _in_two(at: ServerBench) -> Found:
    config = at.config(size=SMALL, tensor_parallel=2)
    async with at.attached(SMALL, config) as server:
        with _sender(at.bench, DIRECT) as outbox:
            await at.swapped(server.engine, outbox, 1, PauseMode.RECOMPUTE)
        return await at.said_and_computed(server.engine, SMALL)


def asleep(at: ServerBench) -> Iterator[DeviceTrial]:
    """Yields the trial of a server that gives its memory back and takes it again."""
    what = f"{at.name}: sleep and wake"
    if not at.bench.is_cuda:
        yield not_tried(what, f"{at.name} gives back the memory of GPUs alone")
        return
    yield asyncio.run(tried_while(what, lambda: _slept(at), remedy="leave engine.share out"))


async def _slept(at: ServerBench) -> str:
    """Holds what the server gives back against the memory that it was told to take for keys and
    values: other processes may take and leave memory of the GPU too.
    """
    sleep, wake, options = SLEEP[at.kind]
    config = at.config(size=SMALL, arguments=options)
    changes: list[int] = []
    async with at.attached(SMALL, config) as server:
        before = await _said(server.engine)
        for _ in range(SLEEPS):
            free_awake = _free(at.bench)
            await asyncio.to_thread(_post, server.url + sleep)
            changes.append(_free(at.bench) - free_awake)
            await asyncio.to_thread(_post, server.url + wake)
        after = await _said(server.engine)
    given = median(changes)
    said = (
        f"{given / GIB:.1f} GB were given back; it had {at.key_bytes / GIB:.1f} GB for keys and "
        "values"
    )
    if given < FREED * at.key_bytes:
        raise Wrong(said)
    if after != before:
        raise Wrong("the answer after it is another")
    return f"{said}, and the answer after it is the same"


def _free(bench: Bench) -> int:
    """Bytes of the GPU's memory that no process has."""
    free, _ = torch.cuda.mem_get_info(bench.device)
    return free


def _post(url: str) -> None:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, data=b"{}", headers=headers, method="POST")
    with urllib.request.urlopen(asked, timeout=CALL_SECONDS) as answer:
        answer.read()


def in_a_run(at: ServerBench, *, deterministic: bool) -> Iterator[DeviceTrial]:
    """Yields the trial of a run with such a server. It says no speed, because other parts run beside
    it.
    """
    word = "with" if deterministic else "without"
    what = f"{at.name}: mismatch of a run in bfloat16 {word} engine.deterministic"
    if deterministic and not at.bench.is_cuda:
        yield not_tried(what, f"{at.name} has such kernels for GPUs alone")
        return
    yield tried(
        what,
        lambda: _mismatch(at, word, deterministic=deterministic),
        remedy="remove engine.deterministic" if deterministic else at.other_engine,
    )


def _mismatch(at: ServerBench, word: str, *, deterministic: bool) -> Found:
    settings = [
        f"engine.kind={at.kind}",
        f"engine.python={at.python}",
        "engine.dtype=bfloat16",
        f"engine.arguments={json.dumps(at.memory_words(SMALL))}",
        f"engine.deterministic={str(deterministic).lower()}",
    ]
    found = run_training(at.bench, SMALL, f"{at.kind}-{word}", settings)
    return Found(f"engine and trainer {found.mismatch:.2g} nats apart in the mean")
