"""Two servers with their companions before a fleet, and what can happen to a server in the middle of a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from safetensors.numpy import load_file
from starlette.requests import Request
from starlette.responses import Response
from tests.engines.models import TOKENIZER, MemoryReceiver
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm
from tests.engines.test_contract import listening
from tests.gateway.generating import Heard
from tests.models.tiny import tiny_model
from tests.real.processes import free_port

from midflight.engines.app import build_app
from midflight.engines.relay import relay
from midflight.engines.remote import RemoteEngine
from midflight.engines.servers.engine import ServerEngine
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.health import HealthWatch
from midflight.models.load import save_model
from midflight.run.rollout import serving
from midflight.types import Chunk, GenerateRequest, PauseMode, SamplingParams, Version, WeightManifest
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

PROBE = "model.embed_tokens.weight"
"""A tensor that differs from version to version."""
NUM_TOKENS = 50
STAGE_SECONDS = 1.0


class Line:
    """The way to a server on this machine, which can be cut and frozen. It knows nothing of HTTP."""

    def __init__(self, server: str) -> None:
        self._server, self._port = int(server.rsplit(":", 1)[1]), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._moving = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None

    async def open(self) -> None:
        self._moving.set()
        self._listening = await asyncio.start_server(self._carry, "127.0.0.1", self._port)

    def cut(self) -> None:
        """As the death of a process does: whoever is connected is cut off, and nobody can connect."""
        if self._listening is not None:
            self._listening.close()
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """As SIGSTOP does: connections are taken and nothing is said."""
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._server)
            ends = {writer, back}
            self._writers |= ends
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, back))
                tasks.create_task(self._pump(there, writer))
            self._writers -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._moving.wait()
                writer.write(data)
        writer.close()


class Troubled(Fake):
    """Says the letter of each position, with a log-probability that tells the weights it has really loaded: -1 - version."""

    line: Line
    folder: str
    versions: dict[bytes, Version]
    trouble: Callable[[], Awaitable[Response | None]] | None = None
    """Happens once, at the next call of `trouble_at`; `None` lets the server do what it was asked."""
    trouble_at = ""
    truth: Version = 0
    label_path: str
    resume_path: str

    @property
    def is_paused(self) -> bool:
        return not self._going.is_set()

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if self.trouble is not None and path == self.trouble_at:
            trouble, self.trouble = self.trouble, None
            if (instead := await trouble()) is not None:
                return instead
        return await super()._answer(request)

    def restart(self) -> None:
        self.truth, self.label, self.model = 0, "default", self.folder
        self._going.set()

    def answer(self, path: str, body: dict[str, object]) -> object:
        if path == self.load and body.get("method", "midflight_load") == "midflight_load":
            folder = body.get("model_path") or body["args"][0]  # type: ignore[index]
            self.truth = self.versions[probe(Path(str(folder)))]
        return super().answer(path, body)

    async def _say(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        start, num = len(body.get("input_ids") or body["token_ids"]), self.wanted(body)  # type: ignore[arg-type]
        labels: list[str] = []
        for i in range(1, num + 1):
            await self._step()
            labels.append(self.label)
            event = self.told(letter(start + i - 1), -1.0 - self.truth, i, spans(labels) if i == num else None)
            yield b"data: " + json.dumps(event).encode() + b"\n\n"

    def told(self, token: int, logprob: float, i: int, account: list[dict[str, object]] | None) -> object:
        raise NotImplementedError


class TroubledSglang(Troubled, FakeSglang):
    label_path, resume_path = "/model_info", "/continue_generation"

    def told(self, token: int, logprob: float, i: int, account: list[dict[str, object]] | None) -> object:
        reason = None if account is None else {"type": "length"}
        meta = {"completion_tokens": i, "output_token_logprobs": [[logprob, token, None]], "finish_reason": reason}
        return {"output_ids": [token], "meta_info": {**meta, "weight_versions": account or []}}


class TroubledVllm(Troubled, FakeVllm):
    label_path, resume_path = "/weight_info", "/resume"

    def told(self, token: int, logprob: float, i: int, account: list[dict[str, object]] | None) -> object:
        content = [{"token_id": token, "logprob": logprob}]
        choice = {"token_ids": [token], "logprobs": {"content": content}, "weight_versions": account}
        return {"choices": [{**choice, "finish_reason": None if account is None else "length"}]}


def letter(position: int) -> int:
    return 97 + position % 26


def spans(labels: list[str]) -> list[dict[str, object]]:
    starts = [i for i, label in enumerate(labels) if not i or label != labels[i - 1]]
    return [{"version": labels[a], "start": a, "end": b} for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)]


def probe(folder: Path) -> bytes:
    return next(load_file(path)[PROBE].tobytes() for path in folder.glob("*.safetensors") if PROBE in load_file(path))


class Theatre:
    """Fakes, companions, fleet and handover; `open` runs them."""

    def __init__(self, kind: type[Troubled], folder: Path, *, way: str, pause_mode: str, commit_seconds: float) -> None:
        self.kind, self.folder = kind, folder
        self.receiver = MemoryReceiver()
        self.versions: dict[bytes, Version] = {}
        self.servers: list[Troubled] = []
        self.companions: list[asyncio.Task[None]] = []
        self._ports: list[int] = []
        self._services: list[asyncio.Task[None]] = []
        self.fleet = Fleet()
        self.generator = Generator(self.fleet, request_seconds=15)
        self.handover = Handover(
            self.fleet,
            pause_mode="auto" if pause_mode == "auto" else PauseMode(pause_mode),
            way=way,  # type: ignore[arg-type]
            stage_seconds=STAGE_SECONDS,
            commit_seconds=commit_seconds,
            record=record_nothing,
        )
        self.health = HealthWatch(self.fleet, interval_seconds=0.1, stall_seconds=0.6)
        self.answers: list[list[Chunk]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Theatre]:
        self.publish(0)
        save_model(tiny_model(seed=0), self.folder / "model")
        async with AsyncExitStack() as stack:
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for index in range(2):
                await self._add(index, stack)
            self.spawn(self.health.run())
            self.spawn(serving.Rejoin(self.fleet, self.handover).run())
            yield self
            for task in (*self._services, *self.companions):
                task.cancel()

    async def _add(self, index: int, stack: AsyncExitStack) -> None:
        fake = self.kind()
        fake.folder = fake.model = str(self.folder / "model")
        fake.versions = self.versions
        fake.line = Line(await stack.enter_async_context(listening(fake.app())))
        await fake.line.open()
        stack.callback(fake.line.cut)
        self.servers.append(fake)
        self._ports.append(free_port())
        self.companions.append(self._tasks.create_task(self._companion(index)))
        remote = RemoteEngine(f"e{index}", f"http://127.0.0.1:{self._ports[index]}", token=None, record=record_nothing)
        self.spawn(remote.run())
        await remote.connect(seconds=5)
        self.fleet.attach(remote)

    async def _companion(self, index: int) -> None:
        fake = self.servers[index]
        engine = ServerEngine(
            f"e{index}",
            fake.line.url,
            fake.adapter(),
            tokenizer=TOKENIZER,
            model=self.folder / "model",
            receiver=self.receiver,
            staging=self.folder / f"staging{index}",
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            await engine.attached()
            async with listening(build_app(engine, relay, token=None), port=self._ports[index]):
                await asyncio.Event().wait()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self._services.append(self._tasks.create_task(work))

    def kill_companion(self, index: int) -> None:
        """Its successor comes at once, as the ring sees to."""
        self.companions[index].cancel()
        self.companions[index] = self._tasks.create_task(self._companion_after(self.companions[index], index))

    async def _companion_after(self, dead: asyncio.Task[None], index: int) -> None:
        await asyncio.wait({dead})
        await self._companion(index)

    def publish(self, version: Version) -> WeightManifest:
        model = tiny_model(seed=version)
        manifest = self.receiver.publish(version, model)
        self.versions[bytes(self.receiver.published[version][PROBE])] = version
        return manifest

    async def write(self, name: str) -> None:
        """One answer after the other, for ever."""
        for i in range(1_000_000):
            ids = tuple(letter(p) for p in range(7))
            asked = GenerateRequest(f"{name}-{i}", ids, len(ids), SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
            answer = Heard(asked, tokenizer=TOKENIZER)
            self.answers.append(answer.chunks)
            await self.generator.generate(answer, affinity=name)
            answer.whole()

    async def more_answers(self, num: int) -> None:
        """Waits until as many more were begun."""
        enough = len(self.answers) + num
        while len(self.answers) < enough:
            await asyncio.sleep(0.02)

    def settled(self, version: Version) -> bool:
        return all(s.error is None and s.version == version for s in self.fleet.states())

    async def until_settled(self, version: Version) -> None:
        while not self.settled(version):
            await asyncio.sleep(0.05)
