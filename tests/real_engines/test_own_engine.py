"""SGLang's own update by a process group, on a CPU, beside the served weights and in a pause: what is served, and what is taken back."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines.contract_weights import check_labels
from tests.engines.models import ask
from tests.engines.reading import collect, ids, labels, rest, until_tokens
from tests.engines.sites import ModelSite
from tests.real_engines.conftest import started
from tests.real_engines.direct import PROMPT, SWAPS, Breaking, serves, update
from tests.real_engines.process import ServerProcess, interpreter
from tests.real_engines.sites import attached, tied

from midflight.engines.servers.command import INSIDE
from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.own_engines import SglangOwnEngine
from midflight.engines.servers.plugin_workers import SglangWorkers
from midflight.engines.servers.server import ServerClient
from midflight.errors import EngineError
from midflight.models.names import named_tensors
from midflight.types import PauseMode, WorkerState
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastGroup

Test = Callable[[ModelSite, BroadcastPublisher], Awaitable[None]]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from started("sglang", tmp_path_factory.mktemp("sglang"), tensor_parallel=request.param)


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers say that they have no room for weights beside those that they serve."""
    said = SglangWorkers.states

    async def states(workers: SglangWorkers) -> Sequence[WorkerState]:
        return [replace(state, stages=False) for state in await said(workers)]

    monkeypatch.setattr(SglangWorkers, "states", states)


def on(server: ServerProcess, test: Test) -> None:
    async def main() -> None:
        with BroadcastPublisher(bucket_bytes=50_000) as sender:
            way = DirectLoader(server.kind, DirectFeed(), by_own_engine=True)
            async with asyncio.timeout(100), attached(server, direct=way) as site:
                await test(site, sender)
                assert not list(Path(site.engine._area._place).glob("*/*.safetensors"))

    asyncio.run(main())


def checksums(server: ServerProcess) -> object:
    """Of all tensors that it serves, as it says itself."""
    body = json.dumps({"action": "checksum"}).encode()
    asked = urllib.request.Request(f"{server.url}/weights_checker", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.load(answer)["ranks"]


@pytest.mark.usefixtures("without_room")
def test_i6_versions_come_by_its_own_routes_in_a_pause_and_every_token_is_of_the_version_that_it_claims(server: ServerProcess) -> None:
    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        assert site.engine.capabilities.commit_mode is PauseMode.RECOMPUTE
        chunks = site.engine.generate(ask(PROMPT, max_tokens=100, temperature=0.0))
        got = await until_tokens(chunks, 3)
        await update(site, sender, 1)
        got += [c async for c in chunks]
        check_labels(got)
        assert {version for version, _ in labels(got)} == {0, 1}
        assert await serves(site, 1)
        await update(site, sender, 2)
        assert await serves(site, 2)
        assert sender.service.num_groups == 1

    on(server, test)


@pytest.mark.usefixtures("without_room")
def test_i7_a_version_that_did_not_arrive_as_it_was_sent_is_taken_back_to_the_one_before(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        await update(site, sender, 1)
        before = checksums(server)
        await site.engine.stage(sender.publish(2, named_tensors(tied(2))))
        sent = BroadcastGroup.broadcast
        with monkeypatch.context() as changed:
            # a bit is lost on the way, after the trainer has hashed the version
            changed.setattr(BroadcastGroup, "broadcast", lambda group, part: sent(group, part.clone().bitwise_xor_(1)))
            with pytest.raises(EngineError, match=r"bucket 0 of worker 0 is not what was sent.*It serves version 1 again"):
                await site.engine.commit(2)
        assert checksums(server) == before and await serves(site, 1)
        await site.engine.commit(2)
        assert checksums(server) != before and await serves(site, 2)

    on(server, test)


@pytest.mark.usefixtures("without_room")
def test_i7_a_trainer_that_is_cut_off_in_mid_update_leaves_the_version_before(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        breaking = Breaking(0)
        monkeypatch.setattr(BroadcastGroup, "broadcast", lambda group, part: breaking(group, part))
        await update(site, sender, 1)
        breaking.__init__(1)
        await update(site, sender, 2)  # it breaks once, and comes in a new group
        assert sender.service.num_groups == 2 and await serves(site, 2)
        breaking.__init__(2)
        await site.engine.stage(sender.publish(3, named_tensors(tied(3))))
        with pytest.raises(EngineError, match="It serves version 2 again"):
            await site.engine.commit(3)
        assert await serves(site, 2)
        await site.engine.commit(3)
        assert await serves(site, 3)
        for version in (1, 2):
            sender.release(version)
        await site.engine.stage(sender.publish(4, named_tensors(tied(4))))
        sender.release(4)  # before an update of it has begun
        with pytest.raises(EngineError, match="It serves version 3 again"):
            await site.engine.commit(4)
        assert await serves(site, 3)

    on(server, test)


# --- Beside the weights that are served -----------------------------------------------------------


def test_i6_versions_come_beside_running_answers_which_are_of_the_version_before_until_the_pause_exchanges_the_two(
    server: ServerProcess,
) -> None:
    """SGLang by itself waits for the end of all answers before it takes a bucket."""

    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        num_beside = 0
        for version in range(1, SWAPS + 1):
            before = checksums(server)
            request = ask(PROMPT, max_tokens=400, temperature=0.0)
            chunks = site.engine.generate(request)
            got = await until_tokens(chunks, 3)
            going = asyncio.create_task(rest(chunks))
            await site.engine.stage(sender.publish(version, named_tensors(tied(version))))
            num_beside += not going.done()
            assert checksums(server) == before
            await site.engine.commit(version)
            sender.release(version - 1)
            assert checksums(server) != before
            got += await going
            check_labels(got)
            num_before = [made for made, _ in labels(got)].count(version - 1)
            assert num_before >= 3 and all(site.chosen(version - 1, request, ids(got))[:num_before])
            assert await serves(site, version)
        assert num_beside and sender.service.num_groups == 1

    on(server, test)


def test_i7_a_version_that_came_beside_is_taken_back_and_comes_again(server: ServerProcess) -> None:
    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        await update(site, sender, 1)
        first = checksums(server)
        await update(site, sender, 2)
        second = checksums(server)
        async with ServerClient("sglang", server.url, patience_seconds=20) as client:
            await site.engine.pause(PauseMode.RECOMPUTE)
            await SglangOwnEngine(client).take(1, recompute=True)
            await site.engine.resume()
        assert checksums(server) == first
        answer = await collect(site.engine, ask(PROMPT, max_tokens=30, temperature=0.0))
        assert {version for version, _ in labels(answer)} == {1}
        await site.engine.stage(sender.publish(3, named_tensors(tied(2))))
        assert checksums(server) == first
        await site.engine.commit(3)
        assert checksums(server) == second

    on(server, test)


def test_i7_what_comes_beside_damaged_or_is_cut_off_leaves_what_is_served(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
        await update(site, sender, 1)
        before = checksums(server)
        manifest = sender.publish(2, named_tensors(tied(2)))
        sent = BroadcastGroup.broadcast
        with monkeypatch.context() as changed:
            changed.setattr(BroadcastGroup, "broadcast", lambda group, part: sent(group, part.clone().bitwise_xor_(1)))
            with pytest.raises(EngineError, match="bucket 0 of worker 0 is not what was sent"):
                await site.engine.stage(manifest)
        breaking = Breaking(2)
        with monkeypatch.context() as changed:
            changed.setattr(BroadcastGroup, "broadcast", lambda group, part: breaking(group, part))
            with pytest.raises(EngineError, match="it broke 2 times"):
                await site.engine.stage(manifest)
        assert checksums(server) == before and await serves(site, 1)
        await site.engine.stage(manifest)
        await site.engine.commit(2)
        assert await serves(site, 2)

    on(server, test)


DIGESTS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import midflight_in_sglang as plugin
from midflight_direct import OwnUpdate

class Updater:
    def __init__(self, model):
        self.get_model = lambda: model

models = [torch.nn.Linear(1, 1) for _ in range(2)]
plugin._updates.append(OwnUpdate(models[0]))
for model, could in ((models[0], False), (models[1], True), (models[0], True)):
    plugin._load_and_note(lambda updater, weights: (could, ""), Updater(model), [("a", torch.zeros(1))])
    print(len(plugin._updates[0].state()["arrived"]))
"""


def test_a_bucket_that_a_worker_cannot_load_has_no_digest_nor_one_of_a_draft_model() -> None:
    """SGLang answers for its first worker only, so the digests say that another one has failed."""
    words = [str(interpreter("sglang")), "-c", DIGESTS, str(INSIDE)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, env=environ | {"SGLANG_USE_CPU_ENGINE": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-3:] == ["0", "0", "1"]
