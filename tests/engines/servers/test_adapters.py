"""Versions that are adapters, side by side in one server, before a server that may refuse, lose or keep them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.engines.models import MemoryReceiver, ask
from tests.engines.reading import ABORTED, LENGTH, collect, ids, labels, rest, until_tokens
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.engines.sites import output_logits
from tests.engines.test_lora import by_peft
from tests.models.tiny import tiny_adapted

from midflight.engines.servers.adapters import leaving
from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.sglang import SglangReader
from midflight.errors import EngineError, EngineUnavailable, RequestRejected
from midflight.models.load import save_model
from midflight.types import Attestation, PauseMode

SOON = 60.0
"""Seconds: what is not done by then hangs."""
weights = cache(lambda version: tiny_adapted(seed=version))
Test = Callable[[ServerEngine, MemoryReceiver], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted") / "model"
    save_model(tiny_adapted(), folder)
    return folder


@pytest.fixture(params=[FakeVllm, FakeSglang])
def fake(request: pytest.FixtureRequest) -> Fake:
    """Keeps three versions, as where the bound on age is 1."""
    return kept(request.param(), 3)


def kept(fake: Fake, num: int) -> Fake:
    fake.num_adapters, fake.step_seconds = num, 0.002
    if isinstance(fake, FakeVllm):
        fake.paths = (*FakeVllm.paths, "/v1/load_lora_adapter")
    else:
        fake.tells = {"enable_lora": True, "max_loras_per_batch": num, "max_loaded_loras": num}
    return fake


def play(fake: Fake, tmp_path: Path, model: Path, test: Test) -> None:
    async def main() -> None:
        shutil.copytree(model, tmp_path / "model", dirs_exist_ok=True)
        async with asyncio.timeout(SOON), attached(fake, tmp_path) as (engine, receiver):
            await test(engine, receiver)

    asyncio.run(main())


async def bring(engine: ServerEngine, receiver: MemoryReceiver, version: int) -> Attestation:
    await engine.stage(receiver.publish(version, weights(version)))
    return await engine.commit(version)


def asked(fake: Fake) -> list[object]:
    """The adapter that each request named, in order."""
    key = "model" if isinstance(fake, FakeVllm) else "lora_path"
    return [body.get(key) for path, body in fake.calls if path == fake.generate and body.get("stream")]


@pytest.mark.parametrize(
    ("there", "live", "coming", "room", "expected"),
    [
        ({0}, 0, 1, 3, set()),  # one and the coming one are two
        ({0, 1}, 1, 2, 3, set()),
        ({0, 1, 2}, 2, 3, 3, {0}),  # of three the oldest
        ({1, 2, 5}, 2, 6, 4, {5}),  # 5 was loaded and never served
        ({1, 2, 3}, 2, 3, 3, {3}),  # an earlier try of the same
        ({1, 2}, 2, 2, 2, {1, 2} - {1}),  # the live one itself, with other bytes
        ({0, 1, 2, 3}, 3, 4, 2, {0, 1, 2}),  # a bound of 0 keeps the live one and the next
    ],
)
def test_what_leaves_is_what_never_served_and_the_oldest_beyond_the_room(there, live: int, coming: int, room: int, expected) -> None:
    assert leaving(there, live=live, coming=coming, room=room) == expected


def test_new_requests_name_the_newest_and_those_under_way_go_on_with_their_own(fake: Fake, tmp_path: Path, model: Path) -> None:
    """No pause, no abort, and each token is of the version that its request named (I6)."""

    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        chunks = engine.generate(ask("before", max_tokens=30))
        got = await until_tokens(chunks, 2)
        manifest = receiver.publish(1, weights(1))
        await engine.stage(manifest)
        assert await engine.commit(1) == await engine.commit(1) == Attestation(1, manifest.fingerprint)
        after = await collect(engine, ask("after"))
        got += await rest(chunks)
        assert (len(ids(got)), got[-1].finish, set(labels(got))) == (30, LENGTH, {(0, 0)})
        assert set(labels(after)) == {(1, 1)} and not got[-1].attested
        assert asked(fake) == ["policy-v0", "policy-v1"]
        assert engine.capabilities.side_by_side and engine.reading().version == 1
        resumes = [path for path, _ in fake.calls if path in (*fake.pause, "/abort_request", "/abort_requests")]
        assert not resumes and set(fake.loras) == {"policy-v0", "policy-v1"}

    play(fake, tmp_path, model, test)


def test_what_a_server_loads_is_the_adapters_alone_as_peft_writes_them(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        await bring(engine, receiver, 1)
        folder = Path(fake.loras["policy-v1"])
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        (tmp_path / "alone").mkdir()
        for path in model.iterdir():
            if path.is_file():
                shutil.copy(path, tmp_path / "alone")
        shutil.copytree(folder, tmp_path / "alone" / "adapter")
        request = ask("some prompt")
        expected = output_logits(weights(1), request, [5]).log_softmax(-1)[0, 5]
        torch.testing.assert_close(by_peft(tmp_path / "alone", request, [5])[0], expected, rtol=0, atol=1e-5)

    play(fake, tmp_path, model, test)


def test_a_request_older_than_the_bound_is_aborted_with_its_tokens_and_the_rest_goes_on(fake: Fake, tmp_path: Path, model: Path) -> None:
    """Three versions are kept, so at version 2 those of 1 go on, and those of 0 are too old (I2)."""

    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        oldest = engine.generate(ask("oldest", max_tokens=40))
        got = await until_tokens(oldest, 2)
        await bring(engine, receiver, 1)
        younger = engine.generate(ask("younger", max_tokens=30))
        others = await until_tokens(younger, 1)
        fake._going.clear()  # no step is made meanwhile, so that neither comes to its end
        await bring(engine, receiver, 2)
        await engine.stage(receiver.publish(3, weights(3)))  # there is room for three, so the first is gone
        got += await rest(oldest)
        assert got[-1].finish == ABORTED and set(labels(got)) == {(0, 0)}
        assert set(fake.loras) == {"policy-v1", "policy-v2", "policy-v3"}
        fake._going.set()
        others += await rest(younger)
        assert others[-1].finish == LENGTH and set(labels(others)) == {(1, 1)}

    play(fake, tmp_path, model, test)


def test_a_server_never_has_more_versions_than_it_keeps(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        for version in range(1, 6):
            await bring(engine, receiver, version)
            assert set(labels(await collect(engine, ask()))) == {(version, version)}
        assert fake.most_loras == 3 and set(fake.loras) == {"policy-v3", "policy-v4", "policy-v5"}
        there = sorted(path.name for path in (tmp_path / "staging").iterdir())
        assert there == ["policy-v3", "policy-v4", "policy-v5"]

    play(fake, tmp_path, model, test)


def test_a_version_that_the_server_refuses_changes_nothing_and_may_come_again(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        await bring(engine, receiver, 1)
        fake.num_failing_loads = 1
        manifest = receiver.publish(2, weights(2))
        with pytest.raises(EngineError, match="this adapter is not taken"):
            await engine.stage(manifest)
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit(2)
        assert set(labels(await collect(engine, ask()))) == {(1, 1)}
        fake.num_failing_loads = 0
        await engine.stage(manifest)
        await engine.stage(manifest)
        await engine.commit(2)
        assert set(labels(await collect(engine, ask()))) == {(2, 2)}

    play(fake, tmp_path, model, test)


def test_an_engine_that_comes_back_at_the_version_it_has_loads_nothing(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        await bring(engine, receiver, 1)
        num = len([path for path, _ in fake.calls if "lora" in path])
        await bring(engine, receiver, 1)
        assert len([path for path, _ in fake.calls if "lora" in path]) == num

    play(fake, tmp_path, model, test)


def test_a_server_that_was_started_again_is_given_what_new_requests_name(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        await bring(engine, receiver, 1)
        fake.loras.clear()
        assert (await engine.health()).version == 1
        assert set(fake.loras) == {"policy-v1"} and not engine.reading().paused
        assert set(labels(await collect(engine, ask()))) == {(1, 1)}

    play(fake, tmp_path, model, test)


def test_what_an_earlier_companion_left_goes_and_what_is_of_others_stays(fake: Fake, tmp_path: Path, model: Path) -> None:
    fake.loras = {"policy-v0": "/of/another/run", "policy-v9": "/of/another/run", "mine": "/of/others"}

    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        assert fake.loras == {"policy-v0": str(tmp_path / "model" / "adapter"), "mine": "/of/others"}

    play(fake, tmp_path, model, test)


def test_a_commit_in_an_operators_pause_is_of_requests_after_it(fake: Fake, tmp_path: Path, model: Path) -> None:
    async def test(engine: ServerEngine, receiver: MemoryReceiver) -> None:
        chunks = engine.generate(ask("before", max_tokens=20))
        got = await until_tokens(chunks, 1)
        await engine.pause(PauseMode.KEEP)
        await bring(engine, receiver, 1)
        assert engine.reading().paused
        await engine.resume()
        assert set(labels(got + await rest(chunks))) == {(0, 0)}
        assert set(labels(await collect(engine, ask()))) == {(1, 1)}

    play(fake, tmp_path, model, test)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (FakeVllm(), r"has no /v1/load_lora_adapter; start it with --enable-lora .* or set lora.merged = true"),
        (FakeSglang(), r"without room for 3 adapters \(rollout.max_staleness \+ 2\); .*--max-loras-per-batch 3, or set lora.merged"),
    ],
)
def test_a_server_without_room_for_adapters_is_refused_with_both_remedies(made: Fake, says: str, tmp_path: Path, model: Path) -> None:
    made.num_adapters = 3

    async def nothing(_: ServerEngine, __: MemoryReceiver) -> None: ...

    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match=says), flatten_subgroups=True):
        play(made, tmp_path, model, nothing)


def test_a_request_whose_adapter_a_server_has_lost_is_not_to_blame() -> None:
    for said, blamed in (("Got LoRA adapter that has never been loaded", EngineUnavailable), ("too long", RequestRejected)):
        event = json.dumps({"error": {"message": said, "code": 400}}).encode()
        with pytest.raises(blamed, match=said):
            SglangReader(ask()).read(event)
