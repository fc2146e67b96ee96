"""Pause, continue and abort over HTTP while requests of every dialect come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.asked import Asking, Told, asked, requests
from tests.gateway.site import Site

from midflight.testing.script import Script
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, GenerateRequest, PauseMode

KINDS = requests(40, stop="th")
OFFSETS = {"four choices": [0, 1, 2, 3], "eight prompts": [0] * 8}
"""What the choices of a request add to its seed, in their order."""


def seeded(asking: Asking, seed: int) -> Asking:
    """The same request with another seed."""
    path, body = asking
    if path == "/generate":
        return path, {**body, "sampling_params": {**body["sampling_params"], "sampling_seed": seed}}
    if "generationConfig" in body:
        return path, {**body, "generationConfig": {**body["generationConfig"], "seed": seed}}
    return path, {**body, "seed": seed}


class Noting(ScriptedEngine):
    """Notes when it is asked for what, in a list shared by all engines."""

    def __init__(self, name: str, dispatched: list[tuple[float, int | None]]) -> None:
        super().__init__(name, script=Script(mean_length=30))
        self._dispatched = dispatched

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._dispatched.append((asyncio.get_running_loop().time(), request.sampling.seed))
        return super().generate(request)


@pytest.mark.parametrize("mode", PauseMode)
def test_requests_of_all_dialects_posted_in_a_pause_are_dispatched_at_its_end_in_order_of_arrival_and_in_no_time(
    mode: PauseMode,
) -> None:
    async def main() -> None:
        dispatched: list[tuple[float, int | None]] = []
        site = Site([Noting(f"e{k}", dispatched) for k in range(2)])
        loop = asyncio.get_running_loop()
        async with site.http() as http, asyncio.TaskGroup() as group:
            await post(http, "/pause_generation", mode=mode)
            expected: list[int] = []
            for number, (name, asking) in enumerate((list(KINDS.items()) * 10)[:64]):
                group.create_task(asked(http, "/v1", seeded(asking, 100 * number), stream=number % 2 == 0))
                expected += [100 * number + offset for offset in OFFSETS.get(name, [0])]
                await asyncio.sleep(0.01)
            await asyncio.sleep(100)
            assert dispatched == [], "none earlier"
            ended_at = loop.time()
            await post(http, "/continue_generation")
            await asyncio.sleep(0)
            assert dispatched == [(ended_at, seed) for seed in expected]

    run_virtual(main())


async def post(http: httpx2.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def calm_answers() -> dict[tuple[str, bool], Told]:
    site = Site()
    async with site.http() as http:
        return {(name, stream): await asked(http, "/v1", KINDS[name], stream=stream) for name in KINDS for stream in (False, True)}


CALM: dict[tuple[str, bool], Told] = {}


def calm(name: str, stream: bool) -> Told:
    if not CALM:
        CALM.update(run_virtual(calm_answers()))
    return CALM[name, stream]


class Agents:
    """Clients who ask, some of whom go away."""

    def __init__(self, http: httpx2.AsyncClient, group: asyncio.TaskGroup) -> None:
        self._http, self._group = http, group
        self.num_told = 0

    def ask(self, name: str, *, stream: bool, patience: float | None) -> None:
        self._group.create_task(self._ask(name, stream=stream, patience=patience))

    async def _ask(self, name: str, *, stream: bool, patience: float | None) -> None:
        """`patience`: seconds after which the client is gone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                told = await asked(self._http, "/v1", KINDS[name], stream=stream)
                if name == "native" and told.choices[0].ended == "abort":
                    assert told.choices[0].ids == calm(name, stream).choices[0].ids[: len(told.choices[0].ids)]
                else:
                    assert told == calm(name, stream), name
        self.num_told += 1


async def operate(http: httpx2.AsyncClient, acts: list[tuple[float, str]]) -> None:
    """One operator: each act after the one before has been answered. (seconds since then, mode or what else)."""
    for seconds, act in acts:
        await asyncio.sleep(seconds)
        if act in list(PauseMode):
            await post(http, "/pause_generation", mode=act)
        elif act == "abort all":
            await post(http, "/abort_request", abort_all=True)
        else:
            await post(http, "/continue_generation")


async def befall(site: Site, blows: list[tuple[float, str, int]]) -> None:
    """What happens to engines: (seconds since the last, what, which). What is dead or stalled for good is mended in the end."""
    dead: set[int] = set()
    for seconds, what, which in blows:
        await asyncio.sleep(seconds)
        engine = site.engines[which]
        match what:
            case "dies":
                engine.die()
                dead.add(which)
            case "is started again":
                engine.die()
                engine.revive()
                dead.discard(which)
            case "stalls":
                engine.stall()
            case "goes on":
                engine.unstall()
            case call:
                engine.hang_next("pause" if call == "hangs in a pause" else "resume")
    await asyncio.sleep(5)
    for which, engine in enumerate(site.engines):
        engine.unstall()
        if which in dead:
            engine.revive()


SECONDS = st.floats(0.0, 0.4)
ACTS = st.lists(st.tuples(SECONDS, st.sampled_from([*PauseMode, "continue", "continue", "continue", "abort all"])), max_size=8)
BLOWS = st.lists(
    st.tuples(
        SECONDS,
        st.sampled_from(["dies", "dies", "is started again", "stalls", "goes on", "hangs in a pause", "hangs in a resume"]),
        st.integers(0, 1),
    ),
    max_size=6,
)
ASKS = st.lists(
    st.tuples(SECONDS, st.sampled_from(list(KINDS)), st.booleans(), st.none() | st.none() | st.floats(0.0, 1.0)), min_size=1, max_size=8
)


@settings(max_examples=80, deadline=None)
@given(asks=ASKS, first=ACTS, second=ACTS, blows=BLOWS, loop_seed=st.none() | st.integers(0, 99))
def test_two_operators_and_any_blow_to_the_engines_leave_every_request_answered_and_every_engine_running(
    asks: list[tuple[float, str, bool, float | None]],
    first: list[tuple[float, str]],
    second: list[tuple[float, str]],
    blows: list[tuple[float, str, int]],
    loop_seed: int | None,
) -> None:
    calm("chat", False)

    async def main() -> None:
        site = Site()
        async with site.http() as http:
            async with asyncio.TaskGroup() as group:
                agents = Agents(http, group)
                group.create_task(end_well(http, [operate(http, first), operate(http, second), befall(site, blows)]))
                for seconds, name, stream, patience in asks:
                    await asyncio.sleep(seconds)
                    agents.ask(name, stream=stream, patience=patience)
            assert agents.num_told == len(asks)
            async with asyncio.timeout(100):  # an engine that hangs once more in the last resume comes back by itself
                while any(state.error is not None for state in site.fleet.states()) or any(engine.paused for engine in site.engines):
                    await asyncio.sleep(1)
        assert not site.control.paused and site.fleet.num_waiting == 0
        assert [(s.error, s.held_by, s.paused_by, s.num_requests) for s in site.fleet.states()] == [(None, (), (), 0)] * 2
        assert [engine.paused for engine in site.engines] == [None, None]

    run_virtual(main(), seed=loop_seed)


async def end_well(http: httpx2.AsyncClient, works: list[Coroutine[Any, Any, None]]) -> None:
    """When all have had their say, the last operator continues."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
    await post(http, "/continue_generation")


@pytest.mark.parametrize("loop_seed", range(12))
def test_a_client_who_leaves_a_stream_is_no_failed_request(loop_seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever comes first in the instant: that he is seen to be gone, or that his generation has ended for it."""

    async def main() -> None:
        site = Site()
        async with site.http() as http, asyncio.TaskGroup() as group:
            agents = Agents(http, group)
            for name in KINDS:
                for place in range(4):
                    agents.ask(name, stream=True, patience=0.1 + 0.005 * place)
            await asyncio.sleep(5)

    calm("chat", True)
    run_virtual(main(), seed=loop_seed)
    assert not caplog.records
