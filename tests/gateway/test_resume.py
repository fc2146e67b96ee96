"""Invariant I5: for any schedule of interruptions under fixed weights, the answer equals the uninterrupted answer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.gateway.generating import Heard, generated

from midflight.errors import EngineUnavailable, NoEngine, Overloaded, RequestRejected, RequestTimeout
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.http.control import Control
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, PauseMode, SamplingParams, WeightManifest

PROMPT = tuple(b"say something")
ENDLESS = Script(mean_length=None)
TOKENIZER = scripted_tokenizer()


def request(max_tokens: int = 20, *, request_id: str = "r", **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id, PROMPT, len(PROMPT), SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]


def gateway(*engines: ScriptedEngine, request_seconds: float = 100.0) -> Generator:
    fleet = Fleet()
    for engine in engines:
        fleet.attach(engine)
    return Generator(fleet, request_seconds=request_seconds)


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(i for chunk in chunks for i in chunk.token_ids)


def answer_of(*engines: ScriptedEngine, asked: GenerateRequest) -> tuple[list[Chunk], Heard]:
    """The chunks of one request on a gateway over these engines, and the answer that they made."""

    async def main() -> tuple[list[Chunk], Heard]:
        answer = Heard(asked)
        await gateway(*engines).generate(answer, affinity="s")
        return answer.whole(), answer

    return run_virtual(main())


def test_nothing_of_an_answer_is_left_to_the_collector():
    async def main() -> weakref.ref[Heard]:
        answer = Heard(request())
        await gateway(ScriptedEngine("a")).generate(answer, affinity="s")
        return weakref.ref(answer)

    gc.collect()
    gc.disable()
    try:
        assert run_virtual(main)() is None
    finally:
        gc.enable()


def assert_uninterrupted(chunks: list[Chunk], engine: ScriptedEngine, asked: GenerateRequest) -> None:
    """I5: the ids, as many log-probabilities, and the finish of an uninterrupted run; I6: lengths agree."""
    expected = engine.whole_answer(asked)
    assert ids(chunks) == expected.token_ids
    assert tuple(p for c in chunks for p in c.logprobs) == expected.logprobs
    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + [expected.finish]
    assert all(len(c.token_ids) == len(c.logprobs) for c in chunks)


# --- Any schedule ----------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[float, str, int]]:
    """Up to 12 deeds, each so many seconds after the one before, on one of three engines."""
    deeds = [*(f"pause {mode}" for mode in PauseMode), "abort", "cancel", "die", "update", "quarantine", "probation"]
    return draw(
        st.lists(st.tuples(st.sampled_from([0.0, 0.004, 0.01, 0.017, 0.1]), st.sampled_from(deeds), st.integers(0, 2)), max_size=12)
    )


async def do(deed: str, engine: ScriptedEngine, generator: Generator, control: Control) -> None:
    """One deed of a schedule. Each leaves the fleet able to go on."""
    fleet = generator.fleet
    if deed.startswith("pause"):
        await control.pause(PauseMode(deed.removeprefix("pause ")))
        await asyncio.sleep(0.03)
        await control.resume()
    elif deed == "abort":
        await engine.abort(None)
    elif deed == "cancel":
        await control.abort(None)
    elif deed == "die":
        engine.die()
        await asyncio.sleep(0.02)
        engine.revive()
        fleet.served(engine.name, engine.served.version)
    elif deed == "update":
        version = engine.served.version + 1
        await engine.stage(WeightManifest(version, "hash", "file", "nowhere", ()))
        await engine.commit(version)
        fleet.served(engine.name, version)
    else:
        fleet.quarantine(engine.name, EngineUnavailable("as ordered"), probation=deed == "probation")
        await asyncio.sleep(0.02)
        fleet.served(engine.name, engine.served.version)


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    schedule=schedules(),
    interruptions=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=6),
    num_engines=st.integers(1, 3),
    chunk_tokens=st.sampled_from([1, 4, 50]),
    mean_length=st.sampled_from([8, 40, None]),
    min_tokens=st.integers(0, 20),
    max_tokens=st.integers(1, 40),
    stop=st.sampled_from([(), ("e",), ("a", "th"), ("q", "zz")]),
    stops_on_strings=st.booleans(),
    loop_seed=st.none() | st.integers(0, 1000),
)
def test_i5_no_schedule_of_interruptions_changes_the_answer(
    schedule: list[tuple[float, str, int]],
    interruptions: list[tuple[int, int]],
    num_engines: int,
    chunk_tokens: int,
    mean_length: int | None,
    min_tokens: int,
    max_tokens: int,
    stop: tuple[str, ...],
    stops_on_strings: bool,
    loop_seed: int | None,
) -> None:
    async def main() -> None:
        capabilities = replace(CAPABLE, stops_on_strings=stops_on_strings, max_running=2)
        engines = [
            ScriptedEngine(
                f"e{i}",
                script=Script(mean_length=mean_length),
                chunk_tokens=chunk_tokens,
                capabilities=capabilities if i else replace(capabilities, stops_on_strings=True),
                tokenizer=TOKENIZER,
            )
            for i in range(num_engines)
        ]
        for which, at in interruptions:
            engines[which % num_engines].interrupt(at)
        generator = gateway(*engines)
        control = Control(generator.fleet, generator, verify_seconds=0.03)
        asked = [request(max_tokens, request_id=str(i), seed=i, stop=stop, min_tokens=min(min_tokens, max_tokens)) for i in range(4)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(generated(generator, r, affinity=r.request_id)) for r in asked]
            for seconds, deed, which in schedule:
                await asyncio.sleep(seconds)
                await do(deed, engines[which % num_engines], generator, control)
        for r, task in zip(asked, tasks, strict=True):
            assert_uninterrupted(task.result(), engines[0], r)
        assert generator.num_active == 0
        assert all((s.num_requests, s.tokens_in_flight, s.held_by, s.paused_by) == (0, 0, (), ()) for s in generator.fleet.states())
        assert all((len(e._running), len(e._waiting), e.paused) == (0, 0, None) for e in engines)

    run_virtual(main(), seed=loop_seed)


@settings(max_examples=40, deadline=None)
@given(
    updates=st.lists(st.floats(0, 0.2), min_size=1, max_size=5),
    aborts=st.lists(st.integers(0, 20), max_size=4),
    chunk_tokens=st.sampled_from([1, 7]),
)
def test_i5_across_versions_there_is_no_gap_no_duplicate_and_every_token_is_its_versions_own(
    updates: list[float], aborts: list[int], chunk_tokens: int
) -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=Script(mean_length=None, by_version=True), chunk_tokens=chunk_tokens)
        for at in aborts:
            engine.interrupt(at)
        generator = gateway(engine)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generated(generator, request(20, seed=7), affinity="s"))
            for number, seconds in enumerate(updates, start=1):
                await asyncio.sleep(seconds)
                await engine.stage(WeightManifest(number, "hash", "file", "nowhere", ()))
                await engine.commit(number)
        so_far = PROMPT
        for chunk in task.result():
            expected = engine.answer(replace(request(20, seed=7), input_ids=so_far), version=chunk.version)
            assert chunk.token_ids == expected[: len(chunk.token_ids)]
            so_far += chunk.token_ids
        assert len(so_far) - len(PROMPT) == 20
        assert task.result()[-1].finish == Finish(FinishReason.LENGTH)

    run_virtual(main())


# --- Single seams ----------------------------------------------------------------------------------------------------


def test_a_stop_string_split_over_the_seam_is_found_and_the_rest_is_cut_and_counted() -> None:
    lacking = replace(CAPABLE, stops_on_strings=False)
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=6, capabilities=lacking)
    text = TOKENIZER.decode(engine.answer(request(60)))
    at = next(i for i in range(5, 50) if text.index(text[i : i + 4]) == i)
    engine.interrupt(at + 2)
    asked = request(60, stop=(text[at : at + 4],))
    chunks, answer = answer_of(engine, asked=asked)
    assert_uninterrupted(chunks, engine, asked)
    assert TOKENIZER.decode(ids(chunks)) == text[: at + 4]
    assert chunks[-1].finish == Finish(FinishReason.STOP, text[at : at + 4])
    assert (answer.num_resumes, answer.num_overshoot) == (1, 4)
    assert engine._running == [], "the engine's request was ended with the answer"


def test_an_abort_with_no_budget_left_finishes_as_length_without_a_request() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    # The engine reports the last token without finishing, then aborts.
    engine.mangle = lambda c: [c.changed(finish=None), Chunk((), (), 0, 0, Finish(FinishReason.ABORT))] if c.finish else [c]
    chunks, _ = answer_of(engine, asked=request(5))
    assert_uninterrupted(chunks, engine, request(5))
    assert chunks[-1].finish == Finish(FinishReason.LENGTH)
    assert len(engine.requests) == 1


def test_an_abort_right_after_the_end_token_finishes_as_stop_and_generates_nothing_behind_it() -> None:
    engine = ScriptedEngine(script=Script(mean_length=5))
    engine.mangle = lambda c: [c.changed(finish=Finish(FinishReason.ABORT))] if c.finish else [c]
    asked = next(r for s in range(9) if engine.whole_answer(r := request(100, seed=s)).finish.reason is FinishReason.STOP)
    chunks, _ = answer_of(engine, asked=asked)
    assert_uninterrupted(chunks, engine, asked)
    assert len(engine.requests) == 1


def test_an_abort_with_zero_tokens_resends_the_request_unchanged() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    engine.interrupt(0)
    chunks, answer = answer_of(engine, asked=request(20, seed=3))
    assert_uninterrupted(chunks, engine, request(20, seed=3))
    first, second = engine.requests
    assert replace(first, request_id="") == replace(second, request_id="") == replace(request(20, seed=3), request_id="")
    assert answer.num_resumes == 1


def test_a_resume_sends_the_tokens_so_far_with_seed_limits_and_prompt_length_unchanged() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    engine.interrupt(7)
    asked = request(20, seed=3, min_tokens=9)
    answer_of(engine, asked=asked)
    first, second = engine.requests
    assert second.input_ids == PROMPT + engine.answer(asked)[:7]
    assert (second.num_prompt_tokens, second.sampling) == (len(PROMPT), asked.sampling)
    assert len(first.request_id) == len(second.request_id) == 32
    assert first.request_id != second.request_id
    assert int(second.request_id, 16) >= 0


def test_a_dead_engine_is_quarantined_and_its_request_goes_on_elsewhere() -> None:
    dying, healthy = ScriptedEngine("dying", script=ENDLESS), ScriptedEngine("healthy", script=ENDLESS)
    dying.interrupt(4, "die")

    async def main() -> None:
        generator = gateway(dying, healthy)
        chunks = await generated(generator, request(), affinity="s")
        assert_uninterrupted(chunks, healthy, request())
        assert len(healthy.requests[0].input_ids) == len(PROMPT) + 4
        assert [type(s.error) for s in generator.fleet.states()] == [EngineUnavailable, type(None)]

    run_virtual(main())


def test_the_loss_of_an_engine_ends_the_wait_for_it_at_once() -> None:
    async def main() -> None:
        hung, healthy = ScriptedEngine("hung", script=ENDLESS), ScriptedEngine("healthy", script=ENDLESS)
        generator = gateway(hung, healthy)
        hung.stall()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generated(generator, request(), affinity="s"))
            await asyncio.sleep(1)
            generator.fleet.quarantine("hung", EngineUnavailable("stalled"))
        assert_uninterrupted(task.result(), healthy, request())
        assert asyncio.get_running_loop().time() == pytest.approx(1.2)

    run_virtual(main())


NONSENSE: dict[str, Callable[[Chunk], Iterable[Chunk]]] = {
    "lengths differ": lambda c: [c.changed(logprobs=())],
    "id outside the vocabulary": lambda c: [c.changed(token_ids=tuple(999 for _ in c.token_ids))],
    "negative id": lambda c: [c.changed(token_ids=tuple(-1 for _ in c.token_ids))],
    "log-probability not a number": lambda c: [c.changed(logprobs=tuple(float("nan") for _ in c.logprobs))],
    "positive log-probability": lambda c: [c.changed(logprobs=tuple(0.5 for _ in c.logprobs))],
    "version going back": lambda c: [c.changed(version=5, kv_version=5), c.changed(version=4, kv_version=4)],
    "keys newer than weights": lambda c: [c.changed(kv_version=c.version + 1)],
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_quarantines_the_engine_and_the_request_goes_on_elsewhere(what: str) -> None:
    mad, sane = ScriptedEngine("mad", script=ENDLESS, chunk_tokens=3), ScriptedEngine("sane", script=ENDLESS)
    mad.mangle = NONSENSE[what]

    async def main() -> None:
        generator = gateway(mad, sane)
        chunks = await generated(generator, request(), affinity="s")
        assert_uninterrupted(chunks, sane, request())
        state = generator.fleet.states()[0]
        assert isinstance(state.error, EngineUnavailable)
        assert state.on_probation

    run_virtual(main())


def test_a_stream_that_ends_without_a_finish_is_an_interruption() -> None:
    silent, sane = ScriptedEngine("silent", script=ENDLESS), ScriptedEngine("sane", script=ENDLESS)
    silent.mangle = lambda c: [] if c.finish else [c]
    chunks, answer = answer_of(silent, sane, asked=request())
    assert ids(chunks) == sane.answer(request())[:20]
    assert chunks[-1].finish == Finish(FinishReason.LENGTH)
    assert answer.num_resumes == 1


def test_i5_an_engine_that_sends_too_much_is_cut_at_the_budget() -> None:
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=8)
    engine.mangle = lambda c: [c.changed(token_ids=(*c.token_ids, 97, 98, 99), logprobs=(*c.logprobs, -1.0, -1.0, -1.0), finish=None)]
    chunks, answer = answer_of(engine, asked=request(10))
    assert [len(c.token_ids) for c in chunks] == [len(c.logprobs) for c in chunks] == [10]
    assert chunks[-1].finish == Finish(FinishReason.LENGTH)
    assert answer.num_overshoot == 8 + 3 - 10


# --- Ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detached", [False, True], ids=["in quarantine", "detached"])
def test_a_request_waits_as_long_as_it_takes_for_engines_that_are_started_again_and_keeps_its_own_time(*, detached: bool) -> None:
    async def main() -> None:
        fleet, engine = Fleet(come_back=True), ScriptedEngine("first", step_seconds=1.0)
        fleet.attach(engine)
        generator = Generator(fleet, request_seconds=12)
        under_way = asyncio.create_task(generated(generator, request(max_tokens=8, ignore_eos=True), affinity="s"))
        await asyncio.sleep(3.5)
        if detached:
            fleet.detach("first")
        else:
            fleet.quarantine("first", EngineUnavailable("it has died"))
        later = asyncio.create_task(generated(generator, request(max_tokens=2, ignore_eos=True), affinity="t"))
        await asyncio.sleep(1000)
        assert fleet.num_waiting == 2
        if detached:
            fleet.attach(engine)
        else:
            fleet.served("first", 0)
        assert len(ids(await under_way)) == 8 and len(ids(await later)) == 2

    run_virtual(main())


def test_a_rejected_request_is_never_retried() -> None:
    engine = ScriptedEngine()
    asked = GenerateRequest("r", (999,), 1, SamplingParams())
    with pytest.raises(RequestRejected, match="vocabulary"):
        answer_of(engine, asked=asked)
    assert list(engine.calls) == ["generate"]


def test_no_engine_before_the_deadline_says_how_long_and_why() -> None:
    async def main() -> None:
        generator = gateway(ScriptedEngine("first"), request_seconds=12)
        generator.fleet.quarantine("first", EngineUnavailable("its cable was cut"))
        with pytest.raises(NoEngine, match=r"in 12 s.*first is in quarantine \(its cable was cut\).*raise gateway.request_seconds"):
            await generated(generator, request(), affinity="s")
        assert asyncio.get_running_loop().time() == pytest.approx(12)
        assert generator.fleet.num_waiting == 0

    run_virtual(main())


def test_an_answer_that_grows_is_never_late_however_slowly() -> None:
    async def main() -> None:
        engine = ScriptedEngine("slow", script=ENDLESS, step_seconds=5)
        generator = gateway(engine, request_seconds=5.5)
        assert len(ids(await generated(generator, request(), affinity="s"))) == 20
        assert asyncio.get_running_loop().time() == pytest.approx(100)

    run_virtual(main())


def test_an_answer_that_stands_still_on_an_engine_that_serves_others_is_ended_and_says_how_far_it_came() -> None:
    """Its tokens come every second until 5 s, then none: the 20 s are spent at 25 s, seen by a tenth of them later at most."""

    async def main() -> None:
        engine = ScriptedEngine("slow", script=ENDLESS, step_seconds=1)
        generator = gateway(engine, request_seconds=20)
        running = asyncio.create_task(generated(generator, request(max_tokens=1000), affinity="s"))
        await asyncio.sleep(5.5)
        engine.mangle = lambda chunk: ()  # they are lost on their way
        with pytest.raises(RequestTimeout, match=r"slow: no token in 20 s .*, after 5 of 1000"):
            await running
        assert 25 <= asyncio.get_running_loop().time() <= 27.1
        assert (await engine.health()).num_running == 0

    run_virtual(main())


def test_an_answer_that_may_wait_inside_a_full_engine_does_not_stand_still() -> None:
    """The engine makes one answer of 30 s after the other."""

    async def main() -> None:
        engine = ScriptedEngine("full", script=ENDLESS, step_seconds=1, capabilities=replace(CAPABLE, max_running=1))
        generator = gateway(engine, request_seconds=10)
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(generated(generator, request(max_tokens=30, seed=n), affinity=str(n))) for n in range(3)]
        assert [len(ids(answer.result())) for answer in answers] == [30, 30, 30]
        assert asyncio.get_running_loop().time() == pytest.approx(90, abs=1)

    run_virtual(main())


@pytest.mark.parametrize("mode", PauseMode)
def test_a_deadline_excludes_paused_time_at_the_gate_and_on_the_engine(mode: PauseMode) -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS, step_seconds=1)
        generator = gateway(engine, request_seconds=25)
        control = Control(generator.fleet, generator)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(generated(generator, request(seed=1), affinity="s"))
            await asyncio.sleep(4.5)
            await control.pause(mode)
            waiting = group.create_task(generated(generator, request(seed=2), affinity="t"))
            await asyncio.sleep(1000)
            await control.resume()
        assert_uninterrupted(running.result(), engine, request(seed=1))
        assert_uninterrupted(waiting.result(), engine, request(seed=2))

    run_virtual(main())


def test_attempts_without_progress_are_bounded_and_attempts_with_progress_are_not() -> None:
    fruitful = ScriptedEngine(script=ENDLESS)
    for at in range(1, 60):
        fruitful.interrupt(at)
    chunks, answer = answer_of(fruitful, asked=request(60))
    assert_uninterrupted(chunks, fruitful, request(60))
    assert answer.num_resumes == 59

    barren = ScriptedEngine(script=ENDLESS)
    for _ in range(100):
        barren.interrupt(0)
    with pytest.raises(NoEngine, match="16 attempts in a row made no token"):
        answer_of(barren, asked=request())
    assert len(barren.requests) == 16


def test_cancel_ends_with_abort_only_a_caller_that_asked_for_it() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        generator = gateway(engine)
        async with asyncio.TaskGroup() as group:
            native = group.create_task(generated(generator, request(request_id="p1"), affinity="", may_abort=True))
            other = group.create_task(generated(generator, request(request_id="p10"), affinity="", may_abort=True))
            agent = group.create_task(generated(generator, request(request_id="agent"), affinity="s"))
            await asyncio.sleep(0.055)
            assert generator.cancel("p1") == 1
            assert generator.cancel("agent") == 1
            assert generator.cancel("unknown") == 0
        assert ids(native.result()) == engine.answer(request())[:5]
        assert native.result()[-1].finish == Finish(FinishReason.ABORT)
        assert_uninterrupted(other.result(), engine, request())
        assert_uninterrupted(agent.result(), engine, request())
        assert len(engine.requests) == 4

    run_virtual(main())


def test_cancel_ends_a_native_request_that_waits_at_the_gate() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        generator = gateway(engine)
        generator.fleet.hold_all("operator")
        async with asyncio.TaskGroup() as group:
            native = group.create_task(generated(generator, request(request_id="n"), affinity="", may_abort=True))
            await asyncio.sleep(1)
            generator.cancel(None)
        assert [c.finish for c in native.result()] == [Finish(FinishReason.ABORT)]
        assert len(engine.requests) == generator.fleet.num_waiting == 0

    run_virtual(main())


def test_a_caller_that_leaves_ends_its_request_on_the_engine_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        generator = gateway(engine)
        left = asyncio.create_task(generated(generator, request(), affinity="s"))
        await asyncio.sleep(0.015)
        left.cancel()
        await asyncio.wait({left})
        await generated(generator, request(), affinity="s")
        assert (await engine.health()).num_running == generator.num_active == 0
        assert generator.fleet.states()[0].num_requests == 0
        async with asyncio.TaskGroup() as group:
            task = group.create_task(generated(generator, request(), affinity="s"))
            await asyncio.sleep(0.05)
            task.cancel()
        assert (await engine.health()).num_running == generator.num_active == 0
        assert generator.fleet.states()[0].num_requests == 0

    run_virtual(main())


def test_a_goodbye_that_hangs_delays_the_answer_by_seconds_only() -> None:
    class Clinging(ScriptedEngine):
        async def generate(self, request: GenerateRequest):  # type: ignore[no-untyped-def]
            try:
                yield Chunk(tuple(b"stop"), (-1.0,) * 4, 0, 0)
            finally:
                await asyncio.sleep(1000)

    async def main() -> None:
        chunks = await generated(gateway(Clinging()), request(stop=("top",)), affinity="s")
        assert chunks[-1].finish == Finish(FinishReason.STOP, "top")
        assert asyncio.get_running_loop().time() == 5

    run_virtual(main())


def test_an_engine_that_is_full_is_asked_again_when_it_said() -> None:
    """It is not at fault, so it is not quarantined; the wait counts against the request's deadline."""

    async def main() -> None:
        engine = ScriptedEngine()
        for seconds in (3, 2):
            engine.fail_next("generate", Overloaded("full", retry_after_seconds=seconds))
        generator = gateway(engine)
        chunks = await generated(generator, request(max_tokens=4, ignore_eos=True), affinity="s")
        assert asyncio.get_running_loop().time() == pytest.approx(3 + 2 + 4 * engine.step_seconds)
        assert len([c for chunk in chunks for c in chunk.token_ids]) == 4
        assert [state.error for state in generator.fleet.states()] == [None]

    run_virtual(main())


def test_a_wait_for_a_full_engine_costs_a_request_none_of_its_seconds_and_ends_with_its_cancellation() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        for _ in range(41):
            engine.fail_next("generate", Overloaded("full", retry_after_seconds=50))
        generator = gateway(engine, request_seconds=10)
        assert_uninterrupted(await generated(generator, request(), affinity="s"), engine, request())
        assert asyncio.get_running_loop().time() == pytest.approx(41 * 50, abs=1)
        engine.fail_next("generate", Overloaded("full", retry_after_seconds=50))
        waiting = asyncio.create_task(generated(generator, request(), affinity="s", may_abort=True))
        await asyncio.sleep(1)
        generator.cancel(None)
        assert (await waiting)[-1].finish == Finish(FinishReason.ABORT)
        assert asyncio.get_running_loop().time() == pytest.approx(41 * 50 + 1, abs=1)

    run_virtual(main())
