"""Engines that are sound and slow: of which a gateway hears through another, that it finds when it is started again, and that it pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.gateway.generating import TOKENIZER

from midflight.config.sections import Config, GatewaySection, RunSection
from midflight.run.rollout.serving import Serving
from midflight.run.rollout.version_followers import EngineVersion, FleetVersions, ShardRole
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import EngineHealth, Version
from midflight.types.facts import record_nothing


class SlowToSay(ScriptedEngine):
    """Sound, but on a machine that is slow: its health takes so many seconds to be said."""

    def __init__(self, name: str, *, seconds: float, version: Version = 0) -> None:
        super().__init__(name, tokenizer=TOKENIZER, version=version)
        self.seconds = seconds
        self.num_asking = self.most_asking = 0

    async def health(self) -> EngineHealth:
        self.num_asking += 1
        self.most_asking = max(self.most_asking, self.num_asking)
        try:
            await asyncio.sleep(self.seconds)
            return await super().health()
        finally:
            self.num_asking -= 1


def serving_of(engines: Sequence[ScriptedEngine], role: ShardRole, *, stall_seconds: float = 120.0) -> Serving:
    config = Config(gateway=GatewaySection(shards=2), run=RunSection(stall_seconds=stall_seconds))
    return Serving(config, TOKENIZER, engines, record=record_nothing, version=0, anonymous=False, role=role)


async def owner(serial: str) -> FleetVersions:
    """Says once that the engine serves version 0."""
    if serial:
        await asyncio.Event().wait()
    return FleetVersions("1", {"e0": EngineVersion(0)})


def follow(engine: ScriptedEngine, *, seconds: float) -> str | None:
    """What keeps the engine out of a further gateway, so many seconds after that was started again."""

    async def main() -> str | None:
        serving = serving_of([engine], ShardRole(1, owner, again=True))
        assert serving.version_follower is not None
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in (serving.version_follower.run(), serving.rejoin.run())]
            await asyncio.sleep(seconds)
            (state,) = serving.fleet.states()
            for task in running:
                task.cancel()
        return None if state.error is None else str(state.error)

    return run_virtual(main)


def test_a_further_gateway_lets_an_engine_in_that_takes_twenty_seconds_to_say_what_it_serves_and_asks_it_once() -> None:
    engine = SlowToSay("e0", seconds=20)
    assert follow(engine, seconds=30) is None
    assert engine.most_asking == 1


def test_an_engine_that_never_answers_a_further_gateway_is_asked_again_after_an_option(caplog: pytest.LogCaptureFixture) -> None:
    engine = SlowToSay("e0", seconds=0)
    engine.hang_next("health")
    assert follow(engine, seconds=115) == "this gateway was started again"
    engine.hang_next("health")
    assert follow(engine, seconds=125) is None
    assert "engine 'e0' has not said within 120 s what it serves, and is asked again (run.stall_seconds)" in caplog.text


def test_a_gateway_that_was_started_again_goes_on_from_the_newest_version_though_its_engine_is_slow_to_say_it() -> None:
    engines = [SlowToSay("e0", seconds=0, version=4), *(SlowToSay(f"e{i}", seconds=20, version=5) for i in (1, 2))]

    async def main() -> tuple[list[bool], float]:
        serving = serving_of(engines, ShardRole(0, None, again=True))
        await serving.adopt()
        assert serving.fleet.served_version() == 5
        return [state.error is None for state in serving.fleet.states()], asyncio.get_running_loop().time()

    serve, took = run_virtual(main)
    assert serve == [False, True, True]
    assert took == 20, "all are asked at once"


def test_an_operators_pause_waits_for_a_slow_engine_a_fourth_of_the_seconds_of_a_stall() -> None:
    engines = [SlowToSay(f"e{i}", seconds=seconds) for i, seconds in enumerate((0, 20, 55))]

    async def main() -> list[str | None]:
        serving = serving_of(engines, ShardRole(), stall_seconds=400)
        await serving.control.pause()
        assert serving.control.paused
        return [None if state.error is None else str(state.error) for state in serving.fleet.states()]

    assert run_virtual(main) == [
        None,
        None,
        "pausing or resuming e2: no answer in 100 s. Restart it, or raise run.stall_seconds if it is only slow.",
    ], "a pause is two answers of its health: 40 s and 110 s"
