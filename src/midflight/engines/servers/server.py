"""A kind of inference server as the engine sees it: its wire, as a Protocol. `vllm.py` and
`sglang.py` implement it.

This file also has the HTTP connection to a server, whose errors name the server and the path. A
request at a server is here too, with the versions of its tokens (I6). It is synchronous.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import aiohttp
import msgspec
import numpy as np

from midflight.allowance import Allowance, Expired
from midflight.engines.streams import ChunkStream
from midflight.errors import (
    EngineError,
    EngineUnavailable,
    ModelNotFound,
    Overloaded,
    RequestRejected,
)
from midflight.models.sizes import ModelSizes, sizes_of
from midflight.types import (
    Capabilities,
    Finish,
    FinishReason,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    Segment,
    UInt8,
    Version,
)
from midflight.wire.client import HttpClient

_JSON = {"Content-Type": "application/json"}
_LINE_BYTES = 2**28
"""The limit of one event. A server that repeats earlier tokens sends the longest answer in one
event, and a record of experts takes kilobytes a token.
"""
_OF_THE_REQUEST = (400, 413, 422)
"""Statuses that judge the request. Any other may come from a proxy before the server, or from a
program that took its port. Elsewhere the request may succeed.
"""


Works: TypeAlias = Callable[[], Callable[[], bool]]
"""A function that is called once for each wait. It returns a function that says whether the server
has worked since the last call of that function.
"""


class ServerClient:
    """Connections to one server. Every call waits for the answer as long as the server works, so
    that a slow server may load the largest model.

    Callers have deadlines of their own, but may be gone, and a call that never ended would keep all
    others waiting.
    """

    def __init__(
        self, name: str, url: str, *, patience_seconds: float, works: Works | None = None
    ) -> None:
        """A call is given up when the server has done nothing for `patience_seconds`. `works` is
        `None` if the work of the server cannot be seen. Then a call is given up when the server has
        not answered for so long.
        """
        self.name = name
        self.url = url
        self._patience_seconds = patience_seconds
        self._works = works
        self._http = HttpClient(url, lost=self.unavailable, line_bytes=_LINE_BYTES)

    async def __aenter__(self) -> ServerClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def get(self, path: str) -> object:
        return _json(await self._call("GET", path, None))

    async def settle(self, path: str) -> None:
        """Asks for something that the server answers between two steps only, and waits for the
        answer however long the step is.
        """
        await self.get(path)

    async def post(self, path: str, body: object = None) -> object:
        return _json(await self._call("POST", path, body))

    async def paths(self) -> frozenset[str]:
        """The routes that the server has."""
        described = await self.get("/openapi.json")
        paths = described.get("paths") if isinstance(described, dict) else None
        if not isinstance(paths, dict):
            raise EngineError(
                f"{self._who} describes no routes at /openapi.json: neither vLLM nor SGLang "
                "listens there. Check the URL."
            )
        return frozenset(map(str, paths))

    async def _call(self, method: str, path: str, body: object) -> bytes:
        moved = None if self._works is None else self._works()
        patience = Allowance(self._patience_seconds, moved=moved)
        try:
            async with patience:
                answer = await self._http.call(method, path, _encoded(body), headers=_JSON)
        except Expired:
            stood = "" if self._works is None else ", and did nothing"
            what = (
                f"did not answer {path} for {self._patience_seconds:g} s{stood}; raise "
                "engine.start_seconds if it is only slow"
            )
            raise self.unavailable(what) from None
        if answer.status >= 300:
            raise EngineError(
                f"{self._who} answered {path} with {answer.status}: {_shown(answer.content)}. Look "
                "at its log."
            )
        return answer.content

    async def events(self, path: str, body: object) -> AsyncIterator[bytes]:
        """The data of each server-sent event but the closing `[DONE]`. Raises `RequestRejected` if
        the server refuses the request.
        """
        async with self._http.open("POST", path, _encoded(body), headers=_JSON) as answer:
            if answer.status != 200:
                raise self._refusal(answer, path, await answer.read())
            try:
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data != b"[DONE]":
                        yield data
            except ValueError as error:
                raise self.unavailable(
                    f"broke off its answer to {path} with a line that is too long: {error!r}"
                ) from error

    def unavailable(self, what: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"{self._who} {what}. Send the request to another engine, or wait for this one."
        )

    def _refusal(self, answer: aiohttp.ClientResponse, path: str, content: bytes) -> Exception:
        said = f"{self._who} answered {path} with {answer.status}: {_shown(content)}"
        if answer.status in (429, 503):
            after = answer.headers.get("Retry-After", "1")
            return Overloaded(f"{said}.", retry_after_seconds=int(after) if after.isdigit() else 1)
        if answer.status in _OF_THE_REQUEST:
            return RequestRejected(f"{said}.")
        return EngineUnavailable(f"{said}. Look at its log.")

    @property
    def _who(self) -> str:
        return f"engine {self.name!r} at {self.url}"


def _encoded(body: object) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


def _json(content: bytes) -> object:
    try:
        return msgspec.json.decode(content) if content.strip() else None
    except msgspec.DecodeError:
        return content.decode(errors="replace")


def _shown(content: bytes) -> str:
    return content[:300].decode(errors="replace").strip()


def part(answer: object, *path: str | int, of: str) -> object:
    """A part of a JSON answer; `EngineError` where it is not there. `of` names the server that
    should have sent it, and the release that is needed.
    """
    at = answer
    for key in path:
        if isinstance(at, dict) and key in at:
            at = cast(dict[object, object], at)[key]
        elif isinstance(at, list) and isinstance(key, int) and key < len(cast(list[object], at)):
            at = cast(list[object], at)[key]
        else:
            raise EngineError(
                f"reading {str(answer)[:200]!r}: it has no {'.'.join(map(str, path))}. Attach to "
                f"{of}."
            )
    return at


def number(answer: object, *path: str | int, of: str) -> int:
    """A part that is a whole number. Raises `EngineError` if it is not one."""
    found = part(answer, *path, of=of)
    if not isinstance(found, int):
        raise EngineError(
            f"reading {str(answer)[:200]!r}: {'.'.join(map(str, path))} is {found!r}, expected a "
            f"whole number. Attach to {of}."
        )
    return found


@dataclass(frozen=True, slots=True)
class EventTokens:
    """The tokens of one event of a stream, and the data that came with them."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The likeliest (id, log-probability) of each token, likeliest first, if they were
    asked for.
    """
    finish: Finish | None = None
    spans: tuple[tuple[str, int, int], ...] = ()
    """(label of the weights, first token, one past the last) over all tokens of the request so far.
    A server that our plugin is in says them with each piece, any other with the last one only.
    """
    experts: UInt8 | None = None
    """The experts of prompt and output but the last token, packed. Only the last piece of a server
    that records them has it.
    """


def recorded_experts(encoded: str, *, num_choices: int | None, num_experts: int) -> UInt8:
    """A server's record of experts as [T, bytes] of `Row.experts`. The record is base64 of int32,
    `num_choices` for each token. If `num_choices` is `None`, it is base64 of numpy's own format.
    """
    data = base64.b64decode(encoded)
    kind = "u1" if num_experts <= 256 else "<u2"
    try:
        if num_choices is None:
            numbers = np.load(BytesIO(data), allow_pickle=False)
        else:
            numbers = np.frombuffer(data, "<i4").reshape(-1, num_choices)
        packed = numbers.reshape(len(numbers), -1).astype(kind)
        return np.ascontiguousarray(packed).view(np.uint8)
    except ValueError as error:
        raise EngineUnavailable(
            f"reading a server's record of experts: {error}. Set correction.routing_replay = false."
        ) from error


class EventReader(Protocol):
    """Reads the events of one request, in order."""

    def read(self, event: bytes) -> EventTokens:
        """Raises `EngineUnavailable` if the event is nonsense, or an error of the server."""
        ...


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """A server's description of itself when it was attached."""

    capabilities: Capabilities
    label: str
    """The label of the weights that the server serves. If it is a number, it is a
    version of ours.
    """
    model: str
    """The folder that the server says its weights are from."""
    num_workers: int | None = None
    """The number of processes that compute for the server, as far as it says: one for each GPU if
    there are any.
    """
    caution: str = ""
    """A warning for people about the server's version."""

    @property
    def untouched(self) -> bool:
        """True if the weights have not been labelled since the server started."""
        return self.label == UNLABELLED


UNLABELLED = "default"
"""The label that vLLM and SGLang give to the weights they start with."""


class Server(Protocol):
    """One server. Calls wait for its answers, within the deadline of their caller. If an answer
    does not come, `EngineUnavailable` is raised.
    """

    @property
    def late_labels(self) -> int:
        """The number of tokens after a change of weights in `keep` that the server's account of
        versions may wrongly give to the new weights.
        """
        ...

    async def attach(self, client: ServerClient) -> ServerDescription:
        """Ends a pause that was left, and asks the server what it is and can. Raises `EngineError`
        if the server is of another kind, too old, or started without an option that we need.
        """
        ...

    async def label(self, client: ServerClient) -> str:
        """The label of the weights that the server serves. An answer also says that the server
        lives, paused or not.
        """
        ...

    async def relabel(self, client: ServerClient, version: Version) -> None: ...

    def body(self, asked: ServerRequest, *, salt: str) -> tuple[str, dict[str, object]]:
        """Path and JSON body of a streamed generation. `salt` separates prefix caches by
        version.
        """
        ...

    def reader(self, request: GenerateRequest) -> EventReader: ...

    async def abort(self, client: ServerClient, request_id: str) -> None: ...

    async def pause(self, client: ServerClient, mode: PauseMode) -> None:
        """Pauses in the mode keep, recompute or abort. The step that is under way may still make
        tokens (see `settle`). This is not called in a pause, but `resume` is.
        """
        ...

    async def settle(self, client: ServerClient) -> None:
        """Waits for the step that is under way. Returns when the server has carried out all earlier
        orders.
        """
        ...

    async def resume(self, client: ServerClient) -> None: ...

    async def sleep(self, client: ServerClient) -> None:
        """Gives the device's memory away: weights to host memory, keys to nowhere. Called in a
        pause, when the server has no request. A server on a CPU keeps its memory.
        """
        ...

    async def wake(self, client: ServerClient, part: MemoryPart) -> None:
        """Takes the memory of that part again. The weights are those from before. The pause may
        have ended with the last part.
        """
        ...

    async def load(
        self, client: ServerClient, folder: Path, version: Version, *, recompute: bool
    ) -> None:
        """Makes the weights of a model folder live, and labels them. Called in a pause. If it
        fails, the weights may be a mixture of old and new.

        With `recompute` the pause is of that mode, so no key of the old weights may be used again.
        """
        ...


def cut(piece: EventTokens, *, ends: tuple[int, ...], start: int, min_tokens: int) -> EventTokens:
    """The piece up to the first token that ends the answer, in case the server went on after it.
    `start` output tokens came before the piece.
    """
    for i, token in enumerate(piece.token_ids):
        if token in ends and start + i + 1 > min_tokens:
            return replace(
                piece,
                token_ids=piece.token_ids[: i + 1],
                logprobs=piece.logprobs[: i + 1],
                top_logprobs=piece.top_logprobs[: i + 1],
                finish=Finish(FinishReason.STOP, token),
            )
    return piece


def mode_at_server(mode: PauseMode) -> PauseMode:
    """The pause mode among those that `Server.pause` knows. A server that is drained has nothing
    left to lose.
    """
    return PauseMode.KEEP if mode is PauseMode.DRAIN else mode


_OF_THE_SHAPES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)


def check_same_model(theirs: str, ours: Path, *, url: str) -> None:
    """Raises `EngineError` if the two models certainly differ. Our weights would not fit, and a
    token id outside its vocabulary kills SGLang.
    """
    found = _sizes(Path(theirs))
    wanted = _sizes(ours)
    if found is None or wanted is None:
        return
    for name in _OF_THE_SHAPES:
        if getattr(found, name) != getattr(wanted, name):
            raise EngineError(
                f"attaching to {url}: it serves {theirs!r}, whose {name} is "
                f"{getattr(found, name)}, and {str(ours)!r} has {getattr(wanted, name)}; start the "
                "server with the same model, or give its model to Midflight (--model, model.path)."
            )


def _sizes(folder: Path) -> ModelSizes | None:
    """The sizes of a model folder. `None` if it cannot be read, because it is on another machine or
    named as a repository.
    """
    try:
        return sizes_of(folder) if folder.is_absolute() else None
    except (ModelNotFound, OSError):
        return None


@dataclass(frozen=True, slots=True)
class _Change:
    """Weights that went live while the request ran."""

    version: Version
    kv_version: Version
    late: int
    """The number of tokens after this change that the server may wrongly give to the
    new weights.
    """


class Attempt:
    """Labels tokens as they come, never with a newer version than their own. At the end it has the
    server's own account of them.

    Only what comes with the tokens tells their version. When tokens come, compared with the answers
    to other calls, tells nothing: a server's answer that it has new weights overtakes tokens that
    are on their way. A server that our plugin is in says the versions with each event. Of any other
    server, tokens have the version that the request began with until the end of the answer.

    If a request ran under weights that changed, keys made before the change stay in `keep` and are
    recomputed otherwise.
    """

    def __init__(self, version: Version) -> None:
        self._changes = [_Change(version, version, 0)]
        self.version = version
        """The version of the last token that came."""
        self.num_tokens = 0

    def changed(self, version: Version, *, recomputed: bool, late: int) -> None:
        """Takes note that new weights went live. The server's account may wrongly give them `late`
        tokens after that.
        """
        kv_version = version if recomputed else self._changes[-1].kv_version
        self._changes.append(_Change(version, kv_version, late))

    def take(self, event: EventTokens) -> list[Version]:
        """The version of each token of the event that has come."""
        num_before = self.num_tokens
        num_new = len(event.token_ids)
        self.num_tokens += num_new
        versions: list[Version] = []
        for segment in self.account(event):
            first = max(segment.start, num_before)
            versions += [segment.version] * max(0, segment.end - first)
        if versions:
            self.version = versions[-1]
        return versions or [self.version] * num_new

    def account(self, event: EventTokens) -> tuple[Segment, ...]:
        """The server's own account of all tokens so far. It is empty if the event has none, or one
        that does not cover the tokens received.
        """
        spans = [(int(label), start, end) for label, start, end in event.spans]
        if not spans or spans[-1][2] < self.num_tokens or not _contiguous(spans):
            return ()
        starts: list[int] = []
        for version, start, _ in spans:
            late = self._late(version) if start else 0
            starts.append(min(start + late, self.num_tokens))
        ends = [*starts[1:], self.num_tokens]
        segments: list[Segment] = []
        for (version, _, _), start, end in zip(spans, starts, ends, strict=True):
            if end > start:
                segments.append(Segment(version, self.kv_version(version), start, end))
        return tuple(segments)

    def kv_version(self, version: Version) -> Version:
        """The oldest weights of the keys of a token of this version. Its first tokens may come
        before the answer that it went live, if it did so between two steps.
        """
        for change in reversed(self._changes):
            if change.version == version:
                return change.kv_version
        return min(version, self._changes[-1].kv_version)

    def _late(self, version: Version) -> int:
        for change in reversed(self._changes):
            if change.version == version:
                return change.late
        return 0


@dataclass(eq=False)
class ServerRequest:
    """A request that has not ended."""

    request: GenerateRequest
    stream: ChunkStream
    ends: tuple[int, ...] = ()
    """The token ids that end its answer."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id at the server. It has a fixed length, because some servers match ids by their
    beginning, and it is never used twice.
    """
    shape: str = ""
    """The grammar and its position after the answer's tokens so far, for our plugin in
    the server.
    """
    adapter: str = ""
    """The server's name for the version that the request is sampled by, if versions are
    adapters.
    """
    attempt: Attempt | None = None
    """Present from when the server was asked."""
    reading: asyncio.Task[None] | None = None
    ended: bool = False

    def take(self, attempt: Attempt, event: EventTokens) -> EventTokens:
        """Labels the tokens of an event and gives them to the caller, up to one that ends the
        answer. Returns the tokens that were given.
        """
        done = self.request.num_output_tokens + attempt.num_tokens
        event = cut(event, ends=self.ends, start=done, min_tokens=self.request.sampling.min_tokens)
        if self.adapter:
            event = replace(event, spans=())  # they are of the base, which stays the same
        versions = attempt.take(event)
        tops = event.top_logprobs or (None,) * len(event.token_ids)
        for token_id, logprob, top, version in zip(
            event.token_ids, event.logprobs, tops, versions, strict=True
        ):
            kv_version = attempt.kv_version(version)
            self.stream.add(token_id, logprob, version=version, kv_version=kv_version, top=top)
        if event.finish is not None:
            attested = attempt.account(event)
            experts = self._record(event.experts, attempt)
            self.stream.end(attempt.version, event.finish, attested=attested, experts=experts)
        return event

    def _record(self, experts: UInt8 | None, attempt: Attempt) -> bytes:
        """The experts of all tokens of the attempt, as `Chunk.experts`. The server may have made
        more tokens than were given, and has no experts for the last.
        """
        if experts is None:
            return b""
        num_tokens = len(self.request.input_ids) + attempt.num_tokens
        unknown = np.full((num_tokens, experts.shape[1]), 255, dtype=np.uint8)
        return np.concatenate([experts, unknown[len(experts) :]])[:num_tokens].tobytes()


def _contiguous(spans: list[tuple[int, int, int]]) -> bool:
    """True if the spans go from the first token on without a gap, and never back to an older
    version.
    """
    _, first, _ = spans[0]
    if first != 0:
        return False
    for (version, _, end), (next_version, next_start, _) in pairwise(spans):
        if end != next_start or version > next_version:
            return False
    return True
