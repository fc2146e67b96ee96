"""Any engine behind the wire: what travels together, what ends one request, and what ends them all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from starlette.websockets import WebSocketDisconnect
from tests.engines.models import ask
from tests.engines.reading import collect, ids
from tests.engines.test_contract import attached, listening

from midflight.engines import relay as relays
from midflight.engines.app import build_app
from midflight.engines.relay import Outbox, relay
from midflight.engines.wire import (
    Abort,
    ClientFrame,
    EngineFrame,
    Hello,
    Rejected,
    StepFrame,
    Submit,
    decode_engine_frame,
    encode,
    step_rows,
)
from midflight.errors import EngineUnavailable, Overloaded, RequestRejected
from midflight.testing.script import scripted_tokenizer
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, EngineHealth, Finish, FinishReason, GenerateRequest, SamplingParams, Segment

LENGTH = Finish(FinishReason.LENGTH)


class Served(ScriptedEngine):
    """A scripted engine that can be served."""

    tokenizer = scripted_tokenizer()

    def reading(self) -> EngineHealth:
        return EngineHealth(0, paused=False, num_tokens=self._num_tokens, num_running=len(self._running), num_waiting=0)


class Line:
    """A client's socket, as its server sees it. What it was sent is in `frames`, with its time."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, EngineFrame]] = []
        self.closed: int | None = None
        self.worked_after: list[int] = []
        """How many frames had been sent each time that the engine was said to work."""
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()

    def say(self, *frames: ClientFrame | object) -> None:
        self._said.put_nowait(encode(list(frames)))

    def worked(self) -> None:
        self.worked_after.append(len(self.frames))

    def leave(self) -> None:
        self._said.put_nowait(None)

    async def accept(self) -> None: ...

    async def receive_bytes(self) -> bytes:
        if (data := await self._said.get()) is None:
            raise WebSocketDisconnect
        return data

    async def send_bytes(self, data: bytes) -> None:
        self.frames.append((round(asyncio.get_running_loop().time(), 3), decode_engine_frame(data)))

    async def close(self, *, code: int, reason: str) -> None:
        self.closed = code
        self.leave()

    @property
    def steps(self) -> list[tuple[float, StepFrame]]:
        return [(at, frame) for at, frame in self.frames if isinstance(frame, StepFrame)]


def on_a_line(engine: Served, test: Callable[[Line], Awaitable[None]]) -> Line:
    async def main() -> Line:
        line = Line()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(relay(engine, line, worked=line.worked))  # type: ignore[arg-type]
            await test(line)
            line.leave()
        return line

    return run_virtual(main())


def asked(number: int, *, tokens: int = 4) -> Submit:
    return Submit(number, ask(request_id=f"{number}", seed=number, max_tokens=tokens))


def test_what_comes_in_one_moment_travels_in_one_frame() -> None:
    async def test(line: Line) -> None:
        await asyncio.sleep(1)
        line.say(asked(1), asked(2, tokens=3), asked(3))
        await asyncio.sleep(1)

    engine = Served(step_seconds=0.01)
    line = on_a_line(engine, test)
    assert line.frames[0] == (0, Hello("scripted", engine.capabilities))
    assert [(at, [row[0] for row in step_rows(step)]) for at, step in line.steps] == [
        (1.01, [1, 2, 3]),
        (1.02, [1, 2, 3]),
        (1.03, [1, 2, 3]),
        (1.04, [1, 3]),
    ]
    assert [step.finishes for _, step in line.steps] == [(), (), ((2, LENGTH),), ((1, LENGTH), (3, LENGTH))]
    for number in (1, 2, 3):
        got = [row[1] for _, step in line.steps for row in step_rows(step) if row[0] == number]
        assert tuple(got) == engine.answer(asked(number, tokens=3 if number == 2 else 4).request)


def test_that_an_engine_works_is_told_before_its_tokens_are_sent_and_not_for_a_request_that_is_refused() -> None:
    async def test(line: Line) -> None:
        line.say(Submit(1, GenerateRequest("1", (10**6,), 1, SamplingParams())))
        await asyncio.sleep(1)
        line.say(asked(2, tokens=1))
        await asyncio.sleep(1)

    line = on_a_line(Served(step_seconds=0.01), test)
    assert [type(frame) for _, frame in line.frames] == [Hello, Rejected, StepFrame]
    assert line.worked_after == [2]


def test_a_frame_says_since_when_its_tokens_were_made_and_among_how_many_requests() -> None:
    async def test(line: Line) -> None:
        for at in (1, 2):
            await asyncio.sleep(1)
            line.say(asked(at, tokens=2), asked(at + 10, tokens=1))

    line = on_a_line(Served(step_seconds=0.01), lambda line: asyncio.wait_for(test(line), 5))
    assert [(round(s.started, 3), round(s.ended, 3), s.num_running) for _, s in line.steps] == [(1.0, 1.01, 2), (1.01, 1.02, 1)]


def test_tokens_of_two_versions_never_share_a_frame_and_stay_in_order() -> None:
    def split(chunk: Chunk) -> Iterable[Chunk]:
        half = chunk.changed(token_ids=chunk.token_ids[:2], logprobs=chunk.logprobs[:2], finish=None)
        return half, chunk.changed(token_ids=chunk.token_ids[2:], logprobs=chunk.logprobs[2:], version=1)

    engine = Served(chunk_tokens=4)
    engine.mangle = split

    async def test(line: Line) -> None:
        line.say(asked(1))
        await asyncio.sleep(1)

    line = on_a_line(engine, test)
    assert [(step.version, len(step_rows(step)), step.finishes) for _, step in line.steps] == [(0, 2, ()), (1, 2, ((1, LENGTH),))]
    assert tuple(row[1] for _, step in line.steps for row in step_rows(step)) == engine.answer(asked(1).request)


def test_an_abort_closes_one_stream_and_the_clients_leaving_all() -> None:
    engine = Served(step_seconds=0.01)

    async def test(line: Line) -> None:
        line.say(*(asked(number, tokens=90) for number in (1, 2, 3)))
        await asyncio.sleep(0.055)
        line.say(Abort(2), Abort(77))
        await asyncio.sleep(0.02)
        assert (await engine.health()).num_running == 2

    line = on_a_line(engine, test)
    assert len(engine._running) == len(engine._waiting) == 0
    assert [len(step_rows(step)) for _, step in line.steps] == [3] * 5 + [2] * 2


def test_a_client_that_lags_gets_no_frame_after_a_gap_and_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "_MAX_FRAMES", 3)

    class Lagging(Line):
        async def send_bytes(self, data: bytes) -> None:
            await super().send_bytes(data)
            frames.reject(4, RequestRejected("no"))  # there is room again

    frames = Outbox()

    async def main() -> None:
        line = Lagging()
        for number in range(4):
            frames.reject(number, RequestRejected("no"))
        await frames.drain(line)  # type: ignore[arg-type]
        assert [frame.handle for _, frame in line.frames] == [0, 1, 2]  # type: ignore[union-attr]
        assert line.closed == 1011

    run_virtual(main())


# --- Over a real connection, as the rollout process sees it -----------------------------------------------------------


@asynccontextmanager
async def reached(engine: Served) -> AsyncIterator[Callable[[GenerateRequest], Awaitable[list[Chunk]]]]:
    async with listening(build_app(engine, relay, token="secret")) as url, attached(url) as remote:
        yield lambda request: collect(remote, request)


@pytest.mark.parametrize(
    "error", [EngineUnavailable("it fell over"), Overloaded("full", retry_after_seconds=7), RequestRejected("bad", param="top_p")]
)
def test_an_error_ends_the_request_that_it_is_about_and_no_other(error: Exception) -> None:
    async def main() -> None:
        engine = Served(step_seconds=0.002)
        async with reached(engine) as generate, asyncio.TaskGroup() as tasks:
            other = tasks.create_task(generate(ask(max_tokens=30)))
            await asyncio.sleep(0.01)
            engine.fail_next("generate", error)
            with pytest.raises(type(error), match=str(error)) as caught:
                await generate(ask(request_id="failing"))
            assert vars(caught.value) == vars(error)
            assert ids(await other) == engine.answer(ask(max_tokens=30))

    asyncio.run(main())


def no_finish(chunk: Chunk) -> Iterable[Chunk]:
    return [] if chunk.finish else [chunk]


def too_few_logprobs(chunk: Chunk) -> Iterable[Chunk]:
    return [chunk.changed(logprobs=())]


def huge_id(chunk: Chunk) -> Iterable[Chunk]:
    return [chunk.changed(token_ids=(2**40,))]


@pytest.mark.parametrize(("mangle", "says"), [(too_few_logprobs, "malformed"), (huge_id, "malformed"), (no_finish, "without a finish")])
def test_an_answer_that_makes_no_sense_ends_its_request_and_not_the_connection(
    mangle: Callable[[Chunk], Iterable[Chunk]], says: str
) -> None:
    async def main() -> None:
        engine = Served(step_seconds=0.001)
        engine.mangle = mangle
        async with reached(engine) as generate:
            with pytest.raises(EngineUnavailable, match=says):
                await generate(ask())
            engine.mangle = None
            assert len(ids(await generate(ask()))) == 8

    asyncio.run(main())


def test_tokens_before_a_death_come_before_its_error() -> None:
    counter = itertools.count()

    def dies_at_the_fourth(chunk: Chunk) -> Iterable[Chunk]:
        if next(counter) == 3:
            raise EngineUnavailable("it fell over")
        return [chunk]

    async def main() -> None:
        engine = Served(step_seconds=0.001)
        engine.mangle = dies_at_the_fourth
        async with listening(build_app(engine, relay, token="secret")) as url, attached(url) as remote:
            got: list[Chunk] = []
            with pytest.raises(EngineUnavailable, match="fell over"):
                async for chunk in remote.generate(ask()):
                    got.append(chunk)
            assert ids(got) == engine.answer(ask())[:3]

    asyncio.run(main())


def test_versions_told_at_the_end_arrive_with_the_finish() -> None:
    spans = (Segment(0, 0, 0, 3), Segment(1, 0, 3, 8))

    async def main() -> None:
        engine = Served(step_seconds=0.001, chunk_tokens=3)
        engine.mangle = lambda c: [c.changed(attested=spans)] if c.finish else [c]
        async with reached(engine) as generate:
            chunks = await generate(ask())
            assert ids(chunks) == engine.answer(ask())
            assert [c.attested for c in chunks] == [()] * (len(chunks) - 1) + [spans]

    asyncio.run(main())


def test_a_frame_that_cannot_be_read_or_carried_out_costs_its_request_and_no_other() -> None:
    class Faulty(Served):
        def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
            if request.request_id == "faulty":
                raise ValueError("a fault of ours")
            return super().generate(request)

    async def test(line: Line) -> None:
        unreadable = {"type": "submit", "handle": 7, "request": {"request_id": "x", "input_ids": ["no id"]}}
        line.say(
            Submit(1, ask(max_tokens=5)), unreadable, Submit(2, ask(request_id="faulty")), Submit(3, ask(request_id="r3", max_tokens=5))
        )
        await asyncio.sleep(1)

    line = on_a_line(Faulty("e"), test)
    refused = {frame.handle: (frame.code, frame.message) for _, frame in line.frames if isinstance(frame, Rejected)}
    assert set(refused) == {2, 7}
    assert refused[7][0] == "invalid_request" and "input_ids" in refused[7][1]
    assert refused[2] == ("engine_error", "generating: this request failed inside the server; its log has the traceback.")
    assert {handle for _, step in line.steps for handle, _ in step.finishes} == {1, 3}
