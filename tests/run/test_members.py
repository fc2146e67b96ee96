"""Engines that join, move and leave: who is let in, from when on it serves, and what becomes of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from tests.facts import Facts
from tests.gateway.generating import TOKENIZER, generated
from tests.loop.joining import STALL_SECONDS, Arriving, Joinable, at, model_folder

from midflight.config.agents import UntrackedSection
from midflight.config.sections import Config, EnvironmentSection
from midflight.errors import EngineRefused, MemberConflict, NoEngine, SentAway, UnknownEngine
from midflight.models.identity import ModelIdentity
from midflight.run.api.membership import member_routes
from midflight.run.rollout.serving import Serving
from midflight.testing.script import Script
from midflight.testing.scripted import CAPABLE
from midflight.testing.virtual_time import VirtualTimeLoop, run_virtual
from midflight.types import GenerateRequest, LogprobKind, PauseMode, SamplingParams, Version, WeightManifest
from midflight.types.facts import EngineJoined, EngineLeft, Rejoined
from midflight.wire.memory import MemoryTransport

ENDLESS = Script(mean_length=None)
TOKEN = "the-control-token-of-this-test"


def manifest(version: Version, *, transport: str = "file", location: str = "/nowhere/weights") -> WeightManifest:
    return WeightManifest(version, f"weights-{version}", transport, location, ())


def request(name: str = "r", *, tokens: int = 50) -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), 3, SamplingParams(max_tokens=tokens, ignore_eos=True))


@dataclass
class Place:
    """A serving side with its first engines, and engines that wait outside."""

    serving: Serving
    joinable: Joinable
    seen: Facts
    first: list[Arriving]

    def arrive(self, url: str, **options: Any) -> Arriving:
        engine = Arriving("outside", script=ENDLESS, tokenizer=TOKENIZER, **options)
        self.joinable.street.engines[url] = engine
        return engine

    async def put(self, name: str, url: str, **more: Any) -> str:
        state, _ = await self.joinable.members.put(name, at(url, **more))
        return state.state

    async def leave(self, name: str, *, force: bool = False, drain_seconds: float | None = None) -> int:
        return (await self.joinable.members.leave(name, force=force, drain_seconds=drain_seconds)).resumed

    @property
    def states(self) -> dict[str, str]:
        return self.joinable.states()

    async def until(self, name: str, state: str) -> None:
        while self.states.get(name) != state:
            await asyncio.sleep(0.1)


def in_a_place(
    folder: Path,
    main: Callable[[Place], Awaitable[None]],
    *,
    num_first: int = 1,
    transport: str | None = "file",
    published: Version | None = 3,
    num_apart: int = 0,
) -> None:
    """On virtual time. The first engines serve the version that was published, but for the last of them, where some are apart."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Place]:
        first = [Arriving(f"e{i}", script=ENDLESS, tokenizer=TOKENIZER) for i in range(num_first)]
        seen = Facts()
        made = Config(environment=EnvironmentSection(untracked=UntrackedSection(engines=num_apart)))
        serving = Serving(made, TOKENIZER, first, record=seen.append, version=0, anonymous=not num_apart)
        joinable = Joinable.of(serving, first, folder, record=seen.append, transport=transport)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in (joinable.run(), serving.rejoin.run(), serving.watch())]
            await asyncio.sleep(0.01)
            if published is not None:
                await serving.handover.publish(manifest(published))
            yield Place(serving, joinable, seen, first)
            for task in running:
                task.cancel()

    async def within() -> None:
        async with opened() as place:
            await main(place)

    run_virtual(within())


# --- Joining ---------------------------------------------------------------------------------------------------------


def test_i2_i7_a_joiner_takes_nothing_before_it_has_attested_the_current_weights(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b", stage_seconds=5.0)
        assert await place.put("b", "http://b") == "joining"
        answers = asyncio.gather(*(generated(place.serving.generator, request(str(i)), affinity="") for i in range(8)))
        await asyncio.sleep(4)
        assert place.states == {"e0": "serving", "b": "joining"}
        assert not joiner.requests and place.serving.fleet.served_version() == 3
        await answers
        await place.until("b", "serving")
        assert joiner.served == (await joiner.commit(3)) and joiner.served.fingerprint == "weights-3"
        assert place.seen.of(EngineJoined) == [EngineJoined("b", "http://b")]
        assert place.seen.of(Rejoined) == [Rejoined("b", 3)]
        await asyncio.gather(*(generated(place.serving.generator, request(str(i)), affinity="") for i in range(8)))
        assert len(joiner.requests) == 4, "half of the load"

    in_a_place(tmp_path, main)


def test_one_that_joins_during_a_handover_gets_that_version_and_never_an_older_one(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        place.first[0].stage_seconds = 10.0
        handing = asyncio.create_task(place.serving.handover.publish(manifest(4)))
        await asyncio.sleep(1)
        joiner = place.arrive("http://b")
        await place.put("b", "http://b")
        await handing
        await place.until("b", "serving")
        assert joiner.served.version == 4 and "stage" in joiner.calls
        assert list(joiner.calls).count("commit") == 1

    in_a_place(tmp_path, main)


def test_before_anything_was_published_whoever_serves_what_the_fleet_serves_is_in_at_once(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        place.arrive("http://b")
        await place.put("b", "http://b")
        await place.until("b", "serving")
        place.arrive("http://c", version=7)
        with pytest.raises(EngineRefused, match="it serves version 7, and the run has published none"):
            await place.put("c", "http://c")

    in_a_place(tmp_path, main, transport=None, published=None)


@pytest.mark.parametrize(
    "says, why",
    [
        ({"midflight": "0.0.1"}, "it is of Midflight 0.0.1, the run of"),
        ({"capabilities": replace(CAPABLE, max_context=64)}, "it takes 64 tokens of prompt and answer, the run needs 4096"),
        ({"capabilities": replace(CAPABLE, vocab_size=300)}, "its vocabulary has 300 ids, that of the run 262"),
        ({"capabilities": replace(CAPABLE, features=frozenset())}, "it cannot do top_logprobs"),
        ({"capabilities": replace(CAPABLE, honours_seed=False)}, "it does not honour seeds"),
        ({"capabilities": replace(CAPABLE, logprob_kind=LogprobKind.RAW)}, "of another kind \\(raw\\).*\\(sampled\\)"),
        ({"capabilities": replace(CAPABLE, pause_modes=frozenset())}, "it can no pause at all"),
        ({"model": ModelIdentity({"hidden_size": 16}, "")}, "its hidden_size is 16 and not 8"),
        ({"model": ModelIdentity({"rope.theta": 1e6}, "")}, "its rope.theta is 1000000.0 and not 10.0"),
        ({"sees": None}, 'they lie in /nowhere, which it does not see, as on another machine; set weights.transport to "pull", or share'),
    ],
)  # fmt: skip
def test_what_could_not_serve_the_run_is_refused_in_a_sentence_and_nothing_has_changed(tmp_path: Path, says: Any, why: str) -> None:
    weights = tmp_path / "published"
    weights.mkdir()

    async def main(place: Place) -> None:
        await place.serving.handover.publish(manifest(4, location=str(weights / "w")))
        joiner = place.arrive("http://b")
        place.joinable.street.says["http://b"] = says
        with pytest.raises(EngineRefused, match=why.replace("/nowhere", str(weights))) as refused:
            await place.put("b", "http://b")
        assert refused.value.status == 422
        assert place.states == {"e0": "serving"} and joiner.num_connected == 0 and not joiner.calls
        assert not place.seen.of(EngineJoined) and not list(weights.iterdir()), "no file is left to look at"
        del place.joinable.street.says["http://b"]
        await place.put("b", "http://b")
        await place.until("b", "serving")

    in_a_place(tmp_path, main)


@pytest.mark.parametrize(
    "transport, location, why",
    [
        ("shared_memory", "/dev/shm/x", "they lie in /dev/shm, which it does not see, as on another machine"),
        ("direct", "tcp://127.0.0.1:5000/secret", "sends them from 127.0.0.1, which other machines do not reach"),
        ("direct", "tcp://10.0.0.7:5000/secret", None),
        (
            "pull",
            "http://127.0.0.1:5000/secret http://10.0.0.7:5000/secret",
            "sends them from 127.0.0.1, which other machines do not reach",
        ),
        ("pull", "http://10.0.0.7:5000/secret", None),
    ],
)
def test_weights_that_cannot_reach_another_machine_are_known_at_joining(
    tmp_path: Path, transport: str, location: str, why: str | None
) -> None:
    async def main(place: Place) -> None:
        await place.serving.handover.publish(manifest(4, transport=transport, location=location))
        place.arrive("http://b")
        place.joinable.street.shared = False
        if why is None:
            await place.put("b", "http://b")
        else:
            with pytest.raises(EngineRefused, match=why) as refused:
                await place.put("b", "http://b")
            assert "secret" not in str(refused.value)

    in_a_place(tmp_path, main)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "ä", "x" * 65, "-a", "teacher", "a\n", "%2e"])
def test_names_are_words(tmp_path: Path, name: str) -> None:
    async def main(place: Place) -> None:
        place.arrive("http://b")
        with pytest.raises(EngineRefused, match="cannot be called"):
            await place.put(name, "http://b")

    in_a_place(tmp_path, main)


def test_said_again_nothing_changes_and_nobody_is_asked(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b")
        await place.put("b", "http://b", token="t")
        await place.until("b", "serving")
        asked = place.joinable.street.num_asked
        assert await place.put("b", "http://b", token="t", again=True) == "serving"
        assert place.joinable.street.num_asked == asked and joiner.num_connected == 1
        assert len(place.seen.of(EngineJoined)) == 1 and not place.seen.of(EngineLeft)

    in_a_place(tmp_path, main)


def test_one_engine_is_one_member_under_one_name(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        engine = place.arrive("http://b")
        place.joinable.street.engines["http://b.again"] = engine
        place.joinable.street.seconds = 1.0
        first, second, third = await asyncio.gather(
            place.put("b", "http://b"), place.put("b", "http://b"), place.put("c", "http://b.again"), return_exceptions=True
        )
        assert first == "joining"
        assert isinstance(second, MemberConflict) and "is joining at this moment" in str(second)
        assert isinstance(third, MemberConflict) and "a member already, as b" in str(third)
        with pytest.raises(MemberConflict, match="the engine at http://b/ is a member already, as b"):
            await place.put("d", "http://b/")
        assert sorted(place.states) == ["b", "e0"]

    in_a_place(tmp_path, main)


def test_a_name_at_another_address_moves_and_its_requests_go_on_elsewhere(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        old, new = place.arrive("http://old"), place.arrive("http://new", stage_seconds=2.0)
        await place.put("b", "http://old")
        await place.until("b", "serving")
        answers = [asyncio.create_task(generated(place.serving.generator, request(str(i), tokens=200), affinity="")) for i in range(4)]
        await asyncio.sleep(1)
        assert len(old.requests) == 2
        assert await place.put("b", "http://new") == "joining"
        await asyncio.sleep(0.1)
        assert not old.is_attached and not new.requests
        for chunks in await asyncio.gather(*answers):
            assert sum(len(chunk.token_ids) for chunk in chunks) == 200
        await place.until("b", "serving")
        assert new.served.version == 3
        assert place.seen.of(EngineLeft) == [EngineLeft("b", "moved to http://new", 2)]

    in_a_place(tmp_path, main)


def test_an_engine_apart_comes_back_elsewhere_as_what_it_was_with_the_weights_that_it_keeps(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        fleet, apart = place.serving.fleet, place.serving.apart
        lost = place.first[1]
        lost.die()
        await asyncio.sleep(3)
        assert place.states == {"e0": "serving", "e1": "quarantined"}
        back = place.arrive("http://b")
        assert await place.put("e1", "http://b") == "serving"
        assert [(state.name, state.version) for state in fleet.states()] == [("e0", 3)]
        assert [(state.name, state.version, state.error) for state in apart.states()] == [("e1", 0, None)]
        await place.serving.handover.publish(manifest(4))
        await generated(place.serving.generator, request(), affinity="")
        assert not back.requests and "stage" not in back.calls and back.served.version == 0
        with pytest.raises(MemberConflict, match="e1 is the only engine that serves"):
            await place.leave("e1")
        assert await place.leave("e1", force=True) == 0 and not apart.states()

    in_a_place(tmp_path, main, num_first=2, num_apart=1)


def test_what_only_an_engine_apart_could_answer_fails_by_its_name_when_that_has_left_for_good_and_is_answered_when_it_joins(
    tmp_path: Path,
) -> None:
    async def main(place: Place) -> None:
        asked = asyncio.ensure_future(generated(place.serving.beside, request(), affinity=""))
        await asyncio.sleep(0.1)
        place.first[1].die()
        await asyncio.sleep(3)
        assert not asked.done(), "it may be started again"
        began = asyncio.get_running_loop().time()
        await place.joinable.members.leave("e1", force=True, drain_seconds=0, for_good=True)
        for lost in (asked, asyncio.ensure_future(generated(place.serving.beside, request(), affinity=""))):
            with pytest.raises(NoEngine, match="e1, the last engine that answers what is not trained, has left the run"):
                await lost
        assert asyncio.get_running_loop().time() == began
        place.arrive("http://b")
        await place.put("e1", "http://b")
        await generated(place.serving.beside, request(), affinity="")
        await place.leave("e1", force=True)
        waiting = asyncio.ensure_future(generated(place.serving.beside, request(), affinity=""))
        await asyncio.sleep(50)
        assert not waiting.done(), "who leaves without that word is being moved"
        place.arrive("http://c")
        await place.put("e1", "http://c")
        await waiting

    in_a_place(tmp_path, main, num_first=2, num_apart=1)


@pytest.mark.parametrize(
    "says, why",
    [
        ({"version": 3}, "it serves version 3, and e1 keeps version 0"),
        ({"model": ModelIdentity({}, "", "other")}, "its weights are others"),
    ],
)
def test_an_engine_apart_is_not_replaced_by_one_of_other_weights(tmp_path: Path, says: Any, why: str) -> None:
    async def main(place: Place) -> None:
        (place.joinable.street.model / "model.safetensors").write_bytes(b"1")
        place.arrive("http://b")
        place.joinable.street.says["http://b"] = says
        with pytest.raises(EngineRefused, match=why):
            await place.put("e1", "http://b")
        assert place.states == {"e0": "serving", "e1": "serving"}

    in_a_place(tmp_path, main, num_first=2, num_apart=1)


def test_a_move_that_is_refused_leaves_the_engine_where_it_was(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        with pytest.raises(EngineRefused, match="did not answer"):
            await place.put("e0", "http://nobody")
        assert place.states == {"e0": "serving"} and place.first[0].is_attached

    in_a_place(tmp_path, main)


def test_a_joiner_that_dies_while_it_stages_harms_nobody_and_is_forgotten_when_it_stays_away(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b", stage_seconds=5.0)
        await place.put("b", "http://b")
        await asyncio.sleep(3)
        joiner.die()
        await place.serving.handover.publish(manifest(4))
        assert place.serving.fleet.served_version() == 4 and place.states == {"e0": "serving", "b": "joining"}
        await asyncio.sleep(STALL_SECONDS + 11)
        assert place.states == {"e0": "serving"}
        assert place.seen.of(EngineLeft) == [EngineLeft("b", "was out of reach for 10 s (run.stall_seconds)", 0)]
        joiner.revive()
        await place.put("b", "http://b", again=True)
        await place.until("b", "serving")
        assert joiner.served.version == 4

    in_a_place(tmp_path, main)


def test_one_that_says_where_it_is_stays_a_member_however_long_its_connection_takes(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b")
        await place.put("b", "http://b")
        await place.until("b", "serving")
        joiner.die()
        for _ in range(60):
            await asyncio.sleep(5)
            assert await place.put("b", "http://b", again=True) == "quarantined"
        joiner.revive()
        await asyncio.sleep(5)
        assert place.states["b"] == "serving"
        assert not place.seen.of(EngineLeft)

    in_a_place(tmp_path, main)


def test_time_in_which_the_gateway_stood_still_itself_is_nobodys_absence(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b")
        await place.put("b", "http://b")
        await place.until("b", "serving")
        joiner.die()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.block(300)
        await asyncio.sleep(STALL_SECONDS - 1)
        joiner.revive()
        await asyncio.sleep(5)
        assert place.states["b"] == "serving"
        assert not place.seen.of(EngineLeft)

    in_a_place(tmp_path, main)


def test_one_that_the_run_was_started_with_is_never_forgotten(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        place.first[1].die()
        await asyncio.sleep(10 * STALL_SECONDS)
        assert place.states == {"e0": "serving", "e1": "quarantined"}

    in_a_place(tmp_path, main, num_first=2)


# --- Leaving ---------------------------------------------------------------------------------------------------------


def test_who_leaves_ends_its_requests_gets_no_new_ones_and_passes_on_what_takes_too_long(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        generator, (stays, leaves) = place.serving.generator, place.first
        short = [asyncio.create_task(generated(generator, request(f"s{i}", tokens=100), affinity="")) for i in range(2)]
        long = [asyncio.create_task(generated(generator, request(f"l{i}", tokens=2000), affinity="")) for i in range(2)]
        await asyncio.sleep(0.1)
        assert len(leaves.requests) == 2
        leaving = asyncio.create_task(place.leave("e1"))
        await asyncio.sleep(0.1)
        assert place.states == {"e0": "serving", "e1": "leaving"}
        late = asyncio.create_task(generated(generator, request("late"), affinity=""))
        began = asyncio.get_running_loop().time()
        assert await leaving == 1, "the long one: after five seconds it has 500 of its 2000 tokens"
        assert asyncio.get_running_loop().time() - began == pytest.approx(4.9, abs=0.1)
        assert len(leaves.requests) == 2 and len(stays.requests) == 4
        for chunks, tokens in zip(await asyncio.gather(*short, *long, late), [100, 100, 2000, 2000, 50], strict=True):
            assert sum(len(chunk.token_ids) for chunk in chunks) == tokens
        resumed = stays.requests[-1]
        assert resumed.request_id.startswith(resumed.request_id) and resumed.num_output_tokens > 400, "from its tokens"
        assert place.states == {"e0": "serving"} and not leaves.is_attached
        assert place.seen.of(EngineLeft) == [EngineLeft("e1", "left", 1)]

    in_a_place(tmp_path, main, num_first=2)


def test_who_has_nothing_to_do_leaves_at_once_and_asking_twice_is_one_leaving(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        assert await place.leave("e1", drain_seconds=1000) == 0
        running = asyncio.create_task(generated(place.serving.generator, request(tokens=100), affinity=""))
        await asyncio.sleep(0.1)
        busy = next(state.name for state in place.serving.fleet.states() if state.num_requests)
        assert await asyncio.gather(place.leave(busy), place.leave(busy)) == [0, 0]
        await running
        with pytest.raises(UnknownEngine, match="there is no engine 'e1'"):
            await place.leave("e1")
        assert len(place.seen.of(EngineLeft)) == 2

    in_a_place(tmp_path, main, num_first=3)


def test_the_last_that_serves_may_not_leave_unless_it_must(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        place.first[1].die()
        await asyncio.sleep(3)
        assert await place.leave("e1") == 0, "it serves nobody: without it nothing changes"
        with pytest.raises(MemberConflict, match="e0 is the only engine that serves"):
            await place.leave("e0")
        assert place.states == {"e0": "serving"}
        answer = asyncio.create_task(generated(place.serving.generator, request(tokens=1000), affinity=""))
        await asyncio.sleep(0.1)
        assert await place.leave("e0", force=True) == 1
        assert place.states == {}
        place.arrive("http://b")
        await place.put("b", "http://b")
        assert sum(len(chunk.token_ids) for chunk in await answer) == 1000, "it waited for the next, and went on there"

    in_a_place(tmp_path, main, num_first=2)


def test_two_that_leave_at_once_do_not_count_on_each_other(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        answers = asyncio.gather(*(generated(place.serving.generator, request(str(i), tokens=100), affinity="") for i in range(4)))
        await asyncio.sleep(0.1)
        found = await asyncio.gather(place.leave("e0"), place.leave("e1"), return_exceptions=True)
        assert found[0] == 0 and isinstance(found[1], MemberConflict)
        await answers

    in_a_place(tmp_path, main, num_first=2)


def test_a_leaving_goes_on_though_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        answers = asyncio.gather(*(generated(place.serving.generator, request(str(i), tokens=2000), affinity="") for i in range(2)))
        await asyncio.sleep(0.1)
        asking = asyncio.create_task(place.leave("e1"))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.sleep(6)
        assert place.states == {"e0": "serving"}
        await answers

    in_a_place(tmp_path, main, num_first=2)


def test_while_it_leaves_its_name_is_its_own_and_who_was_sent_away_stays_away_unless_asked_anew(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        joiner = place.arrive("http://b")
        await place.put("b", "http://b")
        await place.until("b", "serving")
        answers = asyncio.gather(*(generated(place.serving.generator, request(str(i), tokens=1000), affinity="") for i in range(2)))
        await asyncio.sleep(0.1)
        leaving = asyncio.create_task(place.leave("b"))
        await asyncio.sleep(0.1)
        with pytest.raises(MemberConflict, match="b is leaving"):
            await place.put("b", "http://b", again=True)
        await leaving
        await answers
        joiner.revive()
        with pytest.raises(SentAway, match="was told to leave this run"):
            await place.put("b", "http://b", again=True)
        assert await place.put("b", "http://b") == "joining", "by somebody who wants it so"

    in_a_place(tmp_path, main)


def test_i7_a_handover_to_one_that_left_says_nothing_of_its_successor(tmp_path: Path) -> None:
    """The old engine's commit ends after another has taken its name: the new one has attested nothing yet."""

    async def main(place: Place) -> None:
        place.first[1].commit_seconds = 20.0
        handing = asyncio.create_task(place.serving.handover.publish(manifest(4)))
        await asyncio.sleep(1)
        await place.leave("e1", drain_seconds=0)
        successor = place.arrive("http://b")
        place.first[1]._dead = False  # its connection is closed, and yet its answer comes
        assert await place.put("e1", "http://b") == "joining"
        report = await handing
        assert report.served_by == ("e0",) and successor.served.version == 0
        assert place.serving.fleet.served_version() == 4
        await place.until("e1", "serving")
        assert successor.served.version == 4

    in_a_place(tmp_path, main, num_first=2)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.DRAIN])
def test_a_leaving_during_an_operators_pause_ends_at_its_deadline(tmp_path: Path, mode: PauseMode) -> None:
    async def main(place: Place) -> None:
        answer = asyncio.gather(*(generated(place.serving.generator, request(str(i), tokens=60), affinity="") for i in range(2)))
        await asyncio.sleep(0.1)
        await place.serving.control.pause(mode)
        await place.leave("e1")
        await place.serving.control.resume()
        await answer
        assert place.states == {"e0": "serving"}

    in_a_place(tmp_path, main, num_first=2)


# --- Over HTTP -------------------------------------------------------------------------------------------------------


def test_the_routes_say_who_may_what_it_was_and_what_became_of_it(tmp_path: Path) -> None:
    async def main(place: Place) -> None:
        app = Starlette(routes=[*member_routes(place.joinable.members, token=TOKEN)])
        async with asyncio.TaskGroup() as tasks:
            transport = MemoryTransport(app, tasks)
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with httpx2.AsyncClient(transport=transport, base_url="http://run", headers=headers) as client:
                await asked(place, client)

    async def asked(place: Place, client: Any) -> None:
        path = "/midflight/v1/engines"
        assert (await client.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
        for method in ("put", "delete"):
            assert (await client.request(method, f"{path}/b", headers={"authorization": "Bearer wrong"})).status_code == 401
        place.arrive("http://b:1")
        made = await client.put(f"{path}/b", json={"url": "http://b:1", "token": "secret"})
        assert (made.status_code, made.json()["state"]) == (201, "joining") and "secret" not in made.text
        again = await client.put(f"{path}/b", json={"url": "http://b:1", "token": "secret"})
        assert again.status_code == 200
        for body in ({}, {"url": "b:1"}, {"url": "ftp://b"}, {"url": "http://b/x?y"}, {"url": "http://b", "name": "c"}):
            assert (await client.put(f"{path}/c", json=body)).status_code == 400
        lost = await client.put(f"{path}/c", json={"url": "http://c"})
        assert (lost.status_code, lost.json()["error"]["code"]) == (422, "engine_refused")
        odd = await client.put(f"{path}/a%2Fb", json={"url": "http://c"})
        assert odd.status_code == 422 and "'a/b'" in odd.json()["error"]["message"]
        await place.until("b", "serving")
        listed = (await client.get(path)).json()
        assert [(e["name"], e["state"], e["version"]) for e in listed["engines"]] == [("e0", "serving", 3), ("b", "serving", 3)]
        assert listed["run"]["model_path"] == str(place.joinable.street.model) and "secret" not in str(listed)
        assert (await client.delete(f"{path}/b?drain_seconds=-1")).status_code == 400
        assert (await client.delete(f"{path}/b?drain_seconds=1")).json() == {"name": "b", "resumed": 0}
        assert (await client.delete(f"{path}/b")).status_code == 404
        last = await client.delete(f"{path}/e0")
        assert last.status_code == 409 and last.headers["x-should-retry"] == "false"
        assert (await client.delete(f"{path}/e0?force=true")).status_code == 200

    in_a_place(tmp_path, main)


def test_two_folders_are_the_same_model_by_what_it_computes_and_not_by_how_it_was_written(tmp_path: Path) -> None:
    ours = ModelIdentity.of(model_folder(tmp_path / "a", transformers_version="4", torch_dtype="float32", eos_token_id=1))
    theirs = ModelIdentity.of(model_folder(tmp_path / "b", transformers_version="5", extra=3, eos_token_id=[1, 2]))
    assert not ours.difference(theirs)
    assert ours.difference(ModelIdentity.of(model_folder(tmp_path / "c", layers=[1, 2]))) == ""
    (tmp_path / "b" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "<s>"}]}')
    (tmp_path / "c" / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
    assert ModelIdentity.of(tmp_path / "b").difference(ModelIdentity.of(tmp_path / "c")) == "its tokenizer has other ids"
    (tmp_path / "a" / "model.safetensors").write_bytes(b"1")
    (tmp_path / "c" / "model.safetensors").write_bytes(b"2")
    one, other = (ModelIdentity.of(tmp_path / name, weights=True) for name in "ac")
    assert one.difference(other) == "its weights are others"
