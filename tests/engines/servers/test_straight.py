"""The companion where weights come straight into its server's workers: what lies in a folder, what is taken back, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.responses import Response
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.models.tiny import tiny_model

from midflight.engines.servers.direct import DirectLoader
from midflight.errors import EngineError
from midflight.ports import ServerWorkers
from midflight.types import PauseMode, Version, WeightManifest

HELD = {"version": 1, "done": True, "digests": ["x"], "error": "", "live": None}
STRAIGHT = "/update_weights_from_distributed"


class Feed:
    """Stands for the way from the publisher."""

    def __init__(self) -> None:
        self.brought: list[tuple[Version, int]] = []

    async def bring(self, manifest: WeightManifest, workers: ServerWorkers) -> None:
        self.brought.append((manifest.version, len(await workers.states())))


def with_workers() -> FakeSglang:
    fake = FakeSglang()
    fake.tells["internal_states"] = [{"midflight": [HELD, HELD]}]
    return fake


@contextmanager
def folders(staging: Path) -> Iterator[None]:
    """That no model folder is written in the block."""
    yield
    assert not list(staging.glob("*/model.safetensors"))


def test_i7_a_version_comes_by_no_folder_and_is_taken_in_a_pause_by_all_workers(tmp_path: Path) -> None:
    async def main() -> None:
        fake, feed = with_workers(), Feed()
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", feed)) as (engine, receiver):
            with folders(tmp_path / "staging"):
                manifest = replace(receiver.publish(1, tiny_model()), transport="direct")
                await engine.stage(manifest)
                assert feed.brought == [(1, 2)]
                attestation = await engine.commit(1)
            assert (attestation.version, attestation.fingerprint) == (1, manifest.fingerprint)
            routes = [path for path, _ in fake.calls]
            assert routes[-3:] == ["/pause_generation", STRAIGHT, "/continue_generation"]
            assert fake.calls[-2][1]["weight_version"] == "1" and fake.label == "1"
            assert (await engine.health()).version == 1

    asyncio.run(main())


def test_i7_a_server_with_our_plugin_swaps_between_two_steps_without_a_pause_and_one_that_is_told_to_recompute_pauses(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        fake = with_workers()
        fake.has_plugin = fake.is_direct = True
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", Feed())) as (engine, receiver):
            assert engine.capabilities.commit_mode is PauseMode.KEEP
            for version, pauses in ((1, False), (2, True)):
                await engine.stage(replace(receiver.publish(version, tiny_model()), transport="direct"))
                fake.calls.clear()
                if pauses:
                    await engine.pause(PauseMode.RECOMPUTE)
                await engine.commit(version)
                await engine.resume()
                said = dict(fake.calls)
                assert ("/pause_generation" in said) == pauses and said[STRAIGHT]["flush_cache"] is pauses
            assert not (await engine.health()).paused

    asyncio.run(main())


def test_i7_a_server_on_a_gpu_which_loads_where_a_step_may_be_under_way_pauses(tmp_path: Path) -> None:
    async def main() -> None:
        fake = with_workers()
        fake.has_plugin = fake.is_direct = True
        fake.tells["device"] = "cuda"
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", Feed())) as (engine, _):
            assert engine.capabilities.commit_mode is PauseMode.RECOMPUTE

    asyncio.run(main())


def test_i7_where_workers_that_swap_without_a_pause_take_nothing_nothing_new_is_served_until_a_version_has_come(tmp_path: Path) -> None:
    async def main() -> None:
        fake = with_workers()
        fake.has_plugin = fake.is_direct = True
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", Feed())) as (engine, receiver):
            await engine.stage(replace(receiver.publish(1, tiny_model()), transport="direct"))
            fake.instead[STRAIGHT] = fake.instead["/update_weights_from_disk"] = Response("no", status_code=400)
            with pytest.raises(EngineError):
                await engine.commit(1)
            with pytest.raises(EngineError, match="its weights are not whole"):
                await engine.resume()
            assert engine.reading().paused
            fake.instead.clear()
            await engine.commit(1)
            await engine.resume()
            assert not (await engine.health()).paused and fake.label == "1"

    asyncio.run(main())


def test_i7_workers_that_do_not_take_it_go_back_to_what_they_served(tmp_path: Path) -> None:
    async def main() -> None:
        fake = with_workers()
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", Feed())) as (engine, receiver):
            for version in (1, 2):
                await engine.stage(replace(receiver.publish(version, tiny_model()), transport="direct"))
                if version == 2:
                    fake.load, fake.num_failing_loads = STRAIGHT, 1
                    with pytest.raises(EngineError, match="It serves version 1 again"):
                        await engine.commit(2)
                else:
                    await engine.commit(1)
            taken = [body["weight_version"] for path, body in fake.calls if path == STRAIGHT]
            assert taken == ["1", "2", "1"] and not (await engine.health()).paused

    asyncio.run(main())


def test_i7_a_server_that_was_started_anew_serves_nothing_until_a_version_has_come_to_it(tmp_path: Path) -> None:
    async def main() -> None:
        fake = with_workers()
        async with attached(fake, tmp_path, direct=DirectLoader("sglang", Feed())) as (engine, receiver):
            manifest = replace(receiver.publish(1, tiny_model()), transport="direct")
            await engine.stage(manifest)
            await engine.commit(1)
            fake.label, fake.instead[STRAIGHT] = "default", Response("version 1 is not with every worker", status_code=400)
            with pytest.raises(EngineError, match="is not with every worker"):
                await engine.health()
            with pytest.raises(EngineError, match="its weights are not whole"):
                await engine.resume()
            assert engine.reading().paused
            del fake.instead[STRAIGHT]
            await engine.stage(manifest)
            await engine.commit(1)
            await engine.resume()
            assert fake.label == "1" and not (await engine.health()).paused

    asyncio.run(main())


@pytest.mark.parametrize(("make", "kind"), [(FakeSglang, "sglang"), (FakeVllm, "vllm")])
def test_a_server_without_our_plugin_gets_a_folder_and_the_log_says_so_once(
    make: type[Fake], kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        feed = Feed()
        async with attached(make(), tmp_path, direct=DirectLoader(kind, feed)) as (engine, receiver):
            for version in (1, 2):
                await engine.stage(replace(receiver.publish(version, tiny_model()), transport="direct"))
                assert list((tmp_path / "staging").glob("*/model.safetensors"))
                await engine.commit(version)
        assert feed.brought == []

    asyncio.run(main())
    assert caplog.text.count("gets its weights from a folder") == 1
