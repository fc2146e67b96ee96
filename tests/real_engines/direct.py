"""What real servers must keep where weights come straight into their workers: tokens, and what they serve when the way breaks."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from functools import cache

import pytest
import torch
from tests.engines.contract_weights import check_labels
from tests.engines.models import ask
from tests.engines.reading import collect, ids, labels, live_labels, logprobs, rest, until_tokens
from tests.engines.sites import ModelSite
from tests.real_engines.process import ServerProcess
from tests.real_engines.reference import is_first_choice, labelled_logprobs
from tests.real_engines.sites import attached, tied
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.servers.direct import DirectLoader
from midflight.errors import EngineUnavailable
from midflight.models.names import named_tensors
from midflight.types import Chunk
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.deltas import DeltaPublisher
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastGroup, GroupBroken

GREEDY = {"temperature": 0.0, "max_tokens": 30}
PROMPT = "The quick brown fox"
GIVE_UP_SECONDS = 0.5
"""A caller's patience with a server that was stopped."""
SWAPS, BETWEEN_SECONDS = 4, 0.004
NUM_GOING = 3
_BROADCAST = BroadcastGroup.broadcast
Test = Callable[[ModelSite, BroadcastPublisher], Awaitable[None]]


class Breaking:
    """Stands for `BroadcastGroup.broadcast`: the trainer's connections close in the middle of the next `rounds` versions."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self._whole, self._sent = rounds, _BROADCAST, 0

    def __call__(self, group: BroadcastGroup, part: Tensor) -> None:
        self._sent += 1
        if self.rounds and self._sent == 2:
            self.rounds, self._sent = self.rounds - 1, 0
            group.close()
            raise GroupBroken("cut off")
        self._whole(group, part)


async def update(site: ModelSite, sender: BroadcastPublisher, version: int) -> None:
    """It comes while the server generates, and nothing of it lies in a folder."""
    manifest = sender.publish(version, named_tensors(tied(version)))
    await site.engine.stage(manifest)
    attestation = await site.engine.commit(version)
    assert (attestation.version, attestation.fingerprint) == (version, manifest.fingerprint)


async def swap_soon(site: ModelSite, version: int) -> None:
    await asyncio.sleep(8 * BETWEEN_SECONDS)
    await site.engine.commit(version)


async def serves(site: ModelSite, version: int) -> bool:
    answer = await collect(site.engine, ask(PROMPT, **GREEDY))
    return all(site.chosen(version, ask(PROMPT, **GREEDY), ids(answer))) and {v for v, _ in labels(answer)} == {version}


@cache
def stepped(version: int) -> PreTrainedModel:
    """Versions that differ in one tensor."""
    model = copy.deepcopy(tied(1))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1 + version)
    return model


class DirectContract:
    server: ServerProcess

    def _on(self, test: Test) -> None:
        async def main() -> None:
            with BroadcastPublisher(bucket_bytes=50_000) as sender:
                way = DirectLoader(self.server.kind, DirectFeed())
                async with asyncio.timeout(100), attached(self.server, direct=way) as site:
                    await test(site, sender)

        asyncio.run(main())

    def test_i6_weights_that_come_straight_are_served_as_if_they_were_loaded_from_a_folder(self) -> None:
        async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
            request = ask(PROMPT, max_tokens=150, temperature=0.0)
            beside = asyncio.create_task(collect(site.engine, request))
            await site.engine.stage(sender.publish(1, named_tensors(tied(1))))  # comes while the server generates, however long that takes
            check_labels(await beside)
            chunks = site.engine.generate(ask(PROMPT, max_tokens=150, temperature=0.0))
            got = await until_tokens(chunks, 3)
            await site.engine.commit(1)
            got += [c async for c in chunks]
            check_labels(got)
            changed = [v for v, _ in labels(got)].index(1)
            assert all(site.chosen(0, request, ids(got))[:changed])
            await update(site, sender, 2)
            await update(site, sender, 3)
            assert sender.service.num_groups == 1
            straight = await collect(site.engine, ask(PROMPT, **GREEDY))
            await site.engine.stage(site.receiver.publish_tensors(4, named_tensors(tied(3))))
            await site.engine.commit(4)
            loaded = await collect(site.engine, ask(PROMPT, **GREEDY))
            assert ids(straight) == ids(loaded) and logprobs(straight) == pytest.approx(logprobs(loaded), abs=1e-6)
            assert all(site.chosen(3, ask(PROMPT, **GREEDY), ids(straight)))

        self._on(test)

    def test_i6_a_first_token_that_is_being_computed_while_versions_are_swapped_is_of_the_version_that_made_it(self) -> None:
        """Requests come one after the other all through the swap. No two begin alike, so that a first token owes nothing to keys of before."""

        async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
            seen = set[int]()
            for version in range(1, SWAPS + 1):
                await site.engine.stage(sender.publish(version, named_tensors(tied(version))))
                firsts = range(24 * version, 24 * version + 24)
                requests, answers = [ask(f"{chr(first)}{PROMPT}", temperature=0.0, max_tokens=2) for first in firsts], []
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(swap_soon(site, version))
                    for request in requests:
                        answers.append(tasks.create_task(collect(site.engine, request)))
                        await asyncio.sleep(BETWEEN_SECONDS)
                sender.release(version - 1)
                for request, answer in zip(requests, [task.result() for task in answers], strict=True):
                    (made, keys), *_ = labels(answer)
                    seen.add(version - made)
                    assert is_first_choice(tied, request.input_ids, ids(answer)[0], version=made, begun_by=keys), (
                        f"swap {version}: labelled {made}"
                    )
            assert seen == {0, 1}

        self._on(test)

    def test_i6_every_token_of_answers_that_go_on_beside_new_prompts_is_of_the_version_that_it_claims(self) -> None:
        """A server reads new prompts in steps of their own. So when versions are swapped the step under way may be of answers that go on, of
        new ones, or of both: only those that it is of get one more token of the old weights."""

        async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
            await collect(site.engine, ask(PROMPT, max_tokens=30))  # a server's first answer takes as long as many
            going = [ask(f"{PROMPT} {i}", temperature=1.0, max_tokens=300) for i in range(NUM_GOING)]
            streams = [site.engine.generate(request) for request in going]
            await site.engine.stage(sender.publish(1, named_tensors(tied(1))))
            begun = await asyncio.gather(*[until_tokens(stream, 1) for stream in streams])
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(rest(stream)) for stream in streams]
                beside: list[asyncio.Task[list[Chunk]]] = []
                for version in range(1, SWAPS + 1):
                    if version > 1:
                        await site.engine.stage(sender.publish(version, named_tensors(tied(version))))
                    swap = tasks.create_task(swap_soon(site, version))
                    for number in range(16):
                        beside.append(tasks.create_task(collect(site.engine, ask(f"{chr(24 * version + number)}{PROMPT}", max_tokens=1))))
                        await asyncio.sleep(BETWEEN_SECONDS)
                    await swap
                    sender.release(version - 1)
            nums: list[int] = []
            for request, first, task in zip(going, begun, answers, strict=True):
                answer = first + task.result()
                check_labels(answer)
                nums.append(len({version for version, _ in labels(answer)}))
                assert live_labels(answer) == labels(answer)
                expected = labelled_logprobs(tied, request.input_ids, ids(answer), labels(answer))
                assert logprobs(answer) == pytest.approx(expected, abs=1e-4, rel=0)
            assert max(nums) > 1, "on a busy machine some may have ended before"

        self._on(test)

    def test_i7_a_way_that_breaks_in_mid_update_hangs_nobody_and_the_last_whole_version_is_served(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
            breaking = Breaking(0)
            monkeypatch.setattr(BroadcastGroup, "broadcast", lambda group, part: breaking(group, part))
            await update(site, sender, 1)
            breaking.__init__(1)
            await update(site, sender, 2)  # broken once, it comes in a new group
            assert sender.service.num_groups == 2 and await serves(site, 2)
            breaking.__init__(2)
            manifest = sender.publish(3, named_tensors(tied(3)))
            with pytest.raises(EngineUnavailable, match="it broke 2 times"):
                await site.engine.stage(manifest)
            assert await serves(site, 2)
            self.server.freeze()
            try:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        await site.engine.stage(manifest)
            finally:
                self.server.thaw()
            assert await serves(site, 2)
            await site.engine.stage(manifest)
            await site.engine.commit(3)
            assert await serves(site, 3)

        self._on(test)


class DifferencesContract:
    server: ServerProcess

    def test_i6_differences_come_straight_too_and_lead_to_the_same_answers(self) -> None:
        async def main(sender: DeltaPublisher) -> None:
            async with asyncio.timeout(100), attached(self.server, stepped, direct=DirectLoader(self.server.kind, DirectFeed())) as site:
                whole = named_tensors(stepped(1))
                for version in (1, 2, 3):
                    manifest = sender.publish(version, named_tensors(stepped(version)))
                    await site.engine.stage(manifest)
                    await site.engine.commit(version)
                    assert len(manifest.deltas) == version - 1 and await serves(site, version)
                assert all(d.payload.num_bytes < 0.1 * sum(t.nbytes for t in whole.values()) for d in manifest.deltas)
                assert not list(site.engine._area._place.glob("*/*.safetensors"))

        with DeltaPublisher(BroadcastPublisher(bucket_bytes=50_000, num_slots=6), full_every=4) as sender:
            asyncio.run(main(sender))
