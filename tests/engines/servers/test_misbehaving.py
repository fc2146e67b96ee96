"""Servers on a bad day: too old, not what they should be, deaf, broken off, or unable to load what they are given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engines.models import ask
from tests.engines.reading import collect, ids, labels, rest, until_tokens
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.models.tiny import tiny_model

from midflight.engines.servers.command import INSIDE
from midflight.errors import EngineError, EngineUnavailable, PauseIgnored, RequestRejected
from midflight.types import PauseMode

KINDS: list[type[Fake]] = [FakeSglang, FakeVllm]
of_both = pytest.mark.parametrize("kind", KINDS)


async def failure_to_attach(fake: Fake, folder: Path, *, num_workers: int | None = None) -> str:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(10), attached(fake, folder, num_workers=num_workers):
            pytest.fail("it was attached")
    found = caught.value.subgroup(EngineError)
    assert found is not None
    error: BaseException = found
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


@of_both
def test_a_server_in_order_is_attached_and_answers(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            answer = await collect(engine, ask(max_tokens=5))
            assert ids(answer) == (97,) * 5 and set(labels(answer)) == {(0, 0)}
            assert (await engine.health()).version == 0 and fake.label == "0"
            loads = [body for path, body in fake.calls if path == fake.load and body.get("method", "midflight_load") == "midflight_load"]
            assert loads == [], "it serves what it started with"

    asyncio.run(main())


@of_both
def test_a_server_without_a_route_that_is_needed_is_refused_with_the_remedy(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        for path in kind.paths[1:2] + kind.paths[3:]:
            fake = kind()
            fake.missing.add(path)
            assert f"has no {path}; " in await failure_to_attach(fake, tmp_path)

    asyncio.run(main())


def test_a_vllm_without_our_loader_is_refused_when_it_is_attached_and_not_at_its_first_version(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeVllm()
        fake.num_failing_loads = 1
        remedy = f"start it with --worker-extension-cls midflight_vllm.Loader and PYTHONPATH={INSIDE}."
        assert remedy in await failure_to_attach(fake, tmp_path)
        assert (INSIDE / "midflight_vllm.py").is_file()

    asyncio.run(main())


def test_a_vllm_that_is_too_old_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeVllm()
        fake.version = "0.31.1"
        assert "vLLM 0.31.1 is older than what this Midflight works with; use 0.32.0 or newer" in await failure_to_attach(fake, tmp_path)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
@pytest.mark.parametrize("version", ["99.0", "0.0.0.dev7+g12ab34", "main"])
def test_a_server_that_nobody_tried_is_taken_with_a_word(tmp_path: Path, kind: type[Fake], version: str) -> None:
    async def main() -> None:
        fake = kind()
        fake.version = version
        async with attached(fake, tmp_path) as (engine, _):
            assert f" {version} has not been tried with this Midflight" in await engine.attached()

    asyncio.run(main())


@pytest.mark.parametrize("version", ["0.5.22", "0.5.22.post1", "0.5.23"])
def test_a_server_that_was_tried_needs_no_word(tmp_path: Path, version: str) -> None:
    async def main() -> None:
        fake = FakeSglang()
        fake.version = version
        async with attached(fake, tmp_path) as (engine, _):
            assert await engine.attached() == ""

    asyncio.run(main())


def test_an_sglang_that_is_too_old_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeSglang()
        fake.version = "0.5.21.post1"
        assert "SGLang 0.5.21.post1 is older than what this Midflight works with; use 0.5.22 or newer" in await failure_to_attach(
            fake, tmp_path
        )

    asyncio.run(main())


@of_both
def test_what_is_no_engine_is_refused(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        fake.missing.add("/openapi.json")
        assert "/openapi.json" in await failure_to_attach(fake, tmp_path)
        other = FakeVllm() if kind is FakeSglang else FakeSglang()
        fake.answer = other.answer  # type: ignore[method-assign]
        fake.missing.clear()
        assert "attaching to" in await failure_to_attach(fake, tmp_path) or "Attach to" in await failure_to_attach(fake, tmp_path)

    asyncio.run(main())


@of_both
def test_an_answer_that_breaks_off_or_is_nonsense_costs_that_request_and_no_other(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            for spoil in ({"breaks_off_after": 3}, {"says_instead": b"<html>"}, {"ends_without_finish": True}):
                vars(fake).update(spoil)
                with pytest.raises(EngineUnavailable, match=r"fake|reading"):
                    await collect(engine, ask(max_tokens=5))
                vars(fake).update(breaks_off_after=None, says_instead=None, ends_without_finish=False)
                assert len(ids(await collect(engine, ask(max_tokens=5)))) == 5
            assert engine.reading().num_running == 0

    asyncio.run(main())


@of_both
def test_tokens_before_a_break_are_kept(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        fake.breaks_off_after = 4
        async with attached(fake, tmp_path) as (engine, _):
            chunks = engine.generate(ask(max_tokens=9))
            assert ids(await until_tokens(chunks, 3)) == (97,) * 3
            with pytest.raises(EngineUnavailable, match="broke off"):
                await anext(chunks)

    asyncio.run(main())


@of_both
def test_a_server_that_ignores_its_pause_is_found_out(kind: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midflight.engines.servers.engine._MAX_READINGS", 4)

    async def main() -> None:
        fake = kind()
        fake.ignores_pause = True
        fake.wanted = lambda body: 1_000_000  # type: ignore[method-assign]  # however slow the machine is
        async with attached(fake, tmp_path) as (engine, _), asyncio.TaskGroup() as tasks:
            chunks = engine.generate(ask("x", max_tokens=60))
            await until_tokens(chunks, 1)
            running = tasks.create_task(rest(chunks))
            with pytest.raises(PauseIgnored, match="restart it"):
                await engine.pause(PauseMode.KEEP)
            await engine.resume()
            running.cancel()

    asyncio.run(main())


@of_both
def test_a_pause_that_failed_is_asked_for_again(kind: type[Fake], tmp_path: Path) -> None:
    """It holds new requests back all the same, until `resume`."""

    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            fake.missing.update(fake.pause)
            with pytest.raises(EngineError, match="404"):
                await engine.pause(PauseMode.RECOMPUTE)
            fake.missing.clear()
            fake.calls.clear()
            await engine.pause(PauseMode.RECOMPUTE)
            assert fake.pause[0] in [path for path, _ in fake.calls]
            fake.calls.clear()
            await engine.pause(PauseMode.RECOMPUTE)
            assert fake.pause[0] not in [path for path, _ in fake.calls]
            waiting = asyncio.ensure_future(collect(engine, ask()))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await engine.resume()
            assert len(ids(await waiting)) == 8

    asyncio.run(main())


@of_both
def test_a_load_that_fails_is_undone_and_the_engine_goes_on(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            fake.num_failing_loads = 1
            with pytest.raises(EngineError, match=r"another model.*It serves version 0 again"):
                await engine.commit(1)
            assert fake.label == "0"
            assert len(ids(await collect(engine, ask()))) == 8, "the pause that the commit made has ended"
            health = await engine.health()
            assert (health.version, health.paused) == (0, False)
            assert (await engine.commit(1)).version == 1
            assert set(labels(await collect(engine, ask()))) == {(1, 1)}

    asyncio.run(main())


@of_both
def test_where_the_undoing_fails_too_nothing_is_served_until_a_version_is_loaded(kind: type[Fake], tmp_path: Path) -> None:
    """I7: weights that may be of both are never generated from."""

    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            fake.num_failing_loads = 2
            with pytest.raises(EngineError, match="another model"):
                await engine.commit(1)
            with pytest.raises(EngineError, match="not whole; stage and commit"):
                await engine.resume()
            waiting = asyncio.ensure_future(collect(engine, ask()))
            await asyncio.sleep(0.05)
            assert (await engine.health()).paused and not waiting.done()
            await engine.stage(receiver.publish(2, tiny_model(seed=2)))
            await engine.commit(2)
            await engine.resume()
            assert set(labels(await waiting)) == {(2, 2)}

    asyncio.run(main())


@of_both
def test_a_server_that_was_restarted_behind_our_back_is_given_its_version(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            await engine.commit(1)
            fake.label, fake.model = "default", str(tmp_path / "model")
            assert (await engine.health()).version == 1
            assert fake.label == "1"
            assert set(labels(await collect(engine, ask()))) == {(1, 1)}

    asyncio.run(main())


@of_both
def test_ids_at_the_server_are_of_one_length_and_a_seed_is_sent_only_where_our_plugin_makes_it_safe(
    kind: type[Fake], tmp_path: Path
) -> None:
    """Some servers abort by the beginning of an id, and some die of a seed."""

    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, _):
            for name in ("p1", "p10", "p1"):
                await collect(engine, ask(request_id=name, seed=7))
            asked = [body for path, body in fake.calls if path == fake.generate and body.get("stream")]
            names = {str(body.get("rid", body.get("request_id"))) for body in asked}
            assert len(names) == 3 and len({len(name) for name in names}) == 1
            assert not any("seed" in key for body in asked for key in body["sampling_params"])  # type: ignore[attr-defined]

    asyncio.run(main())


@of_both
def test_requests_under_other_weights_share_no_cached_prefix(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        fake = kind()
        async with attached(fake, tmp_path) as (engine, receiver):
            await collect(engine, ask())
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            await engine.commit(1)
            await collect(engine, ask())
            asked = [body for path, body in fake.calls if path == fake.generate and body.get("stream")]
            assert [body.get("extra_key", body.get("cache_salt")) for body in asked] == ["v0", "v1"]

    asyncio.run(main())


def test_sglang_weighs_penalties_only_without_its_overlap_scheduler(tmp_path: Path) -> None:
    """With it the last token counts a step late. So they are refused, and not weighed wrongly."""

    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path) as (engine, _):
            assert len(ids(await collect(engine, ask(presence_penalty=1.0)))) == 8
        fake.overlaps = True
        async with attached(fake, tmp_path) as (engine, _):
            with pytest.raises(RequestRejected, match="no penalties"):
                await collect(engine, ask(presence_penalty=1.0))

    asyncio.run(main())
