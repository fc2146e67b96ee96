"""A server that speaks SGLang's or vLLM's wire over loopback and can misbehave: what a real one does only on a bad day."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.engines.models import TOKENIZER, MemoryReceiver
from tests.engines.test_contract import listening
from tests.models.tiny import tiny_adapted, tiny_model

from midflight.engines.servers.adapters import AdapterEngine
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Server, Works
from midflight.engines.servers.sglang import SglangServer
from midflight.engines.servers.vllm import VllmServer
from midflight.models.load import save_model

STEP_SECONDS = 0.005


class Fake:
    """Says the letter `a` until it has said enough. `calls` are (path, body), in order."""

    paths: tuple[str, ...]
    own: str
    """Described by no other kind."""
    generate: str
    pause: tuple[str, ...]
    between_steps: tuple[str, ...]
    """Answered after the step that is under way."""
    load: str
    step_seconds = STEP_SECONDS
    is_theirs = False
    """Whether others started it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.missing: set[str] = set()
        self.instead: dict[str, Response] = {}
        self.version = "99.0"
        self.label = "default"
        self.model = ""
        self.tells: dict[str, object] = {}
        """What it says of itself beyond what it must: for SGLang names and values, for vLLM routes and their answers."""
        self.num_failing_loads = 0
        self.num_adapters = 0
        """Versions that it is to keep side by side; with none they are whole weights."""
        self.loras: dict[str, str] = {}
        """Adapters that it has, and their folders."""
        self.most_loras = 0
        self.ignores_pause = False
        self.has_plugin = False
        self.is_direct = False
        """Whether versions come straight to its workers."""
        self.overlaps = False
        self.breaks_off_after: int | None = None
        self.says_instead: bytes | None = None
        self.ends_without_finish = False
        self.done_meanwhile: Awaitable[object] | None = None
        """Happens while an answer about the weights is on its way."""
        self.slept: list[str] = []
        """What it was told of sleep, in order."""
        self.asleep: set[str] = set()
        """Tags of the memory that it has given away."""
        self.thawed = asyncio.Event()
        """Cleared, it answers nothing."""
        self.thawed.set()
        self._going = asyncio.Event()
        self._going.set()
        self._num_stepping = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        body = json.loads(raw) if raw else {}
        self.calls.append((path, body))
        await self.thawed.wait()
        if path in self.missing:
            return Response("no such path", status_code=404)
        if path in self.instead:
            return self.instead[path]
        if path == self.generate and body.get("stream"):
            return StreamingResponse(self._say(body), media_type="text/event-stream")
        if path in self.pause and not self.ignores_pause:
            self._going.clear()
        if path in self.between_steps and not self._going.is_set():
            await self._at_rest.wait()
        if path in ("/resume", "/continue_generation"):
            self._going.set()
        if (slept := self._sleep(path, dict(request.query_params), body)) is not None:
            return slept
        if path == self.load and "weights" in self.asleep and body.get("method") != "midflight_ready":
            return Response("it has no memory for weights", status_code=500)
        if path == self.load and self.num_failing_loads:
            self.num_failing_loads -= 1
            return Response("the weights are of another model", status_code=400)
        if (lora := self._lora(path, body)) is not None:
            return lora
        answer = self.answer(path, body)
        if path == "/model_info" and self.done_meanwhile is not None:
            meanwhile, self.done_meanwhile = self.done_meanwhile, None
            await meanwhile
        return JSONResponse(answer)

    def _sleep(self, path: str, query: dict[str, str], body: dict[str, object]) -> Response | None:
        """As both kinds do: vLLM goes on by itself when all of it is awake, SGLang fails on what does not sleep."""
        tags = body.get("tags", [query.get("tags")])
        assert isinstance(tags, list)
        if path in ("/sleep", "/release_memory_occupation"):
            if self._num_stepping:
                return Response("it is not idle", status_code=500)
            self.asleep |= {"weights", "kv_cache"} if path == "/sleep" else set(tags)
        elif path in ("/wake_up", "/resume_memory_occupation"):
            if not set(tags) <= self.asleep:
                return Response("that does not sleep", status_code=500)
            self.asleep -= set(tags)
            if path == "/wake_up" and not self.asleep:
                self._going.set()
        else:
            return None
        self.slept.append(f"{path.split('_')[0]} {query or body}")
        return JSONResponse({})

    def _lora(self, path: str, body: dict[str, object]) -> Response | None:
        """As both kinds answer: what is there already, or is not there, is refused."""
        _, verb, name = *path.rpartition("/")[1:], str(body.get("lora_name"))
        if path == "/v1/models":
            return JSONResponse(
                {"data": [{"id": "policy", "max_model_len": 64, "root": self.model}, *({"id": lora} for lora in self.loras)]}
            )
        if verb not in ("load_lora_adapter", "unload_lora_adapter"):
            return None
        if self.num_failing_loads or (name in self.loras) == (verb == "load_lora_adapter"):
            return Response("this adapter is not taken", status_code=400)
        if verb == "load_lora_adapter":
            self.loras[name] = str(body["lora_path"])
            self.most_loras = max(self.most_loras, len(self.loras))
        else:
            del self.loras[name]
        return Response("Success")

    async def _say(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        num = self.wanted(body)
        for i in range(1, num + 1):
            await self._step()
            if i == self.breaks_off_after:
                raise ConnectionError("broken off by the test")
            if self.ends_without_finish and i == num:
                return
            said = self.says_instead or json.dumps(self.event(i, last=i == num)).encode()
            yield b"data: " + said + b"\n\n"

    async def _step(self) -> None:
        """Of one request: it begins in no pause, and one that has begun goes on."""
        await self._going.wait()
        self._num_stepping += 1
        self._at_rest.clear()
        try:
            await asyncio.sleep(self.step_seconds)
        finally:
            self._num_stepping -= 1
            if not self._num_stepping:
                self._at_rest.set()

    def answer(self, path: str, body: dict[str, object]) -> object:
        raise NotImplementedError

    def event(self, i: int, *, last: bool) -> object:
        raise NotImplementedError

    def wanted(self, body: dict[str, object]) -> int:
        raise NotImplementedError

    def adapter(self) -> Server:
        raise NotImplementedError


class FakeSglang(Fake):
    is_deterministic = asked_to_be_deterministic = False
    paths = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/update_weight_version")
    own = "/server_info"
    generate, pause, load = "/generate", ("/pause_generation",), "/update_weights_from_disk"
    between_steps = ("/server_info",)

    def answer(self, path: str, body: dict[str, object]) -> object:
        if path in ("/update_weights_from_disk", "/update_weight_version", "/update_weights_from_distributed"):
            self.label = str(body.get("weight_version", body.get("new_version")))
            self.model = str(body.get("model_path", self.model))
        return {
            "/openapi.json": {"paths": {p: {} for p in (self.own, *self.paths) if p not in self.missing}},
            "/server_info": {
                "version": self.version,
                "max_req_input_len": 64,
                "max_running_requests": 8,
                "disable_overlap_schedule": not self.overlaps,
                "enable_deterministic_inference": self.is_deterministic,
                "grammar_backend": "midflight" if self.has_plugin else "xgrammar",
                "device": "cpu",
                **self.tells,
            },
            "/model_info": {"weight_version": self.label, "model_path": self.model},
        }.get(path, {})

    def event(self, i: int, *, last: bool) -> object:
        meta = {"completion_tokens": i, "output_token_logprobs": [[-0.5, 97, None]], "finish_reason": {"type": "length"} if last else None}
        return {"output_ids": [97], "meta_info": meta}

    def wanted(self, body: dict[str, object]) -> int:
        return body["sampling_params"]["max_new_tokens"]  # type: ignore[index]

    def adapter(self) -> Server:
        asked = self.asked_to_be_deterministic
        given = {"theirs": self.is_theirs, "deterministic": asked, "num_adapters": self.num_adapters, "direct": self.is_direct}
        return SglangServer(vocab_size=262, max_running=8, max_context=64, **given)


class FakeVllm(Fake):
    paths = ("/inference/v1/generate", "/pause", "/resume", "/collective_rpc", "/update_weight_version")
    own = "/version"
    generate, pause, load = "/inference/v1/generate", ("/pause",), "/collective_rpc"
    between_steps = ("/pause", "/is_paused")

    def answer(self, path: str, body: dict[str, object]) -> object:
        if path == "/update_weight_version":
            self.label = str(body["new_version"])
        return {
            "/openapi.json": {"paths": {p: {} for p in (self.own, *self.paths, *self.tells) if p not in self.missing}},
            "/version": {"version": self.version},
            "/is_paused": {"is_paused": not self._going.is_set()},
            "/weight_info": {"weight_version": self.label},
            "/collective_rpc": {"results": [str(self.has_plugin)]},
            "/inference/v1/generate": self.event(1, last=True),
            **self.tells,
        }.get(path, {})

    def event(self, i: int, *, last: bool) -> object:
        content = [{"token_id": 97, "logprob": 0.0}]
        return {"choices": [{"token_ids": [97], "logprobs": {"content": content}, "finish_reason": "length" if last else None}]}

    def wanted(self, body: dict[str, object]) -> int:
        return body["sampling_params"]["max_tokens"]  # type: ignore[index]

    def adapter(self) -> Server:
        return VllmServer(vocab_size=262, max_running=8, theirs=self.is_theirs, num_adapters=self.num_adapters)


@asynccontextmanager
async def attached(
    fake: Fake,
    folder: Path,
    *,
    num_workers: int | None = None,
    direct: DirectLoader | None = None,
    start_seconds: float = 60.0,
    works: Works | None = None,
) -> AsyncIterator[tuple[ServerEngine, MemoryReceiver]]:
    """The adapter before the fake, which is to have so many workers. Its failure to attach is raised."""
    if not (folder / "model").exists():
        save_model(tiny_adapted() if fake.num_adapters else tiny_model(), folder / "model")
    fake.model = fake.model or str(folder / "model")
    receiver = MemoryReceiver()
    async with listening(fake.app()) as url:
        engine = (AdapterEngine if fake.num_adapters else ServerEngine)(
            *("fake", url, fake.adapter()),
            tokenizer=TOKENIZER,
            model=folder / "model",
            receiver=receiver,
            staging=folder / "staging",
            num_workers=num_workers,
            direct=direct,
            start_seconds=start_seconds,
            works=works,
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.run())
            try:
                await engine.attached()
                yield engine, receiver
            finally:
                task.cancel()
