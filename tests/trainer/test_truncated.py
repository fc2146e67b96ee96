"""Turns sampled with top-p, top-k and min-p are trained exactly: over the set that the engine kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.models import MemoryReceiver, make_engine
from tests.engines.test_sampling_masks import mask, pointed
from tests.gateway.offered import KEY
from transformers import PreTrainedModel

from midflight.config.loss import ObjectiveSection
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.errors import RunFailed
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.testing.script import scripted_tokenizer
from midflight.trainer.model.microbatch import Layout, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.model.scores import SamplingMasks, sampling_masks_of, token_scores
from midflight.trainer.objective import Objective
from midflight.trajectories.database import decode_rows, encode_rows
from midflight.trajectories.packing import from_bytes, pack, to_bytes
from midflight.types import Batch, Feature, Group, PackedBatch, PauseMode, Reason, RolloutKey, SamplingParams, SessionRecord, Trajectory
from midflight.types.facts import record_nothing
from midflight.types.sampling_masks import pack_kept

from .fixtures import batch, tiny_model, trainer, weights, with_rows_in_order

# --- Scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_over_what_was_kept_have_the_values_and_gradients_of_the_softmax_over_it(temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets, by_logprob, by_entropy = torch.tensor([0, 10, 3, 7, 2]), *torch.randn(2, 5, dtype=torch.float64)
    sets = [[0, 4, 9], [10], list(range(11)), [2, 7], [1, 2, 3]]  # the third was not cut
    kept = SamplingMasks(np.array([0, 4, 9, 10, 2, 7, 1, 2, 3]), np.array([0, 3, 4, 4, 6, 9]))

    z = torch.nn.functional.linear(hidden, weight, bias) / temperature
    parts = [row[ids].log_softmax(0) for row, ids in zip(z, sets, strict=True)]
    plain = (torch.stack([p[ids.index(t)] for p, ids, t in zip(parts, sets, targets.tolist(), strict=True)]), torch.stack([-(p.exp() * p).sum() for p in parts]))  # fmt: skip
    expected = torch.autograd.grad(plain[0] @ by_logprob + plain[1] @ by_entropy, [hidden, weight, bias])
    for chunk in (10**6, 22, 1):

        def scored(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, chunk: int = chunk) -> Any:
            return token_scores(h, w, b, targets, temperature=temperature, with_entropy=True, chunk=chunk, kept=kept)

        found = scored(hidden, weight, bias)
        gradients = torch.autograd.grad(found[0] @ by_logprob + found[1] @ by_entropy, [hidden, weight, bias])
        for ours, theirs in zip((*found, *gradients), (*plain, *expected), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        assert torch.autograd.gradcheck(scored, (hidden, weight, bias))  # finite differences


def test_every_layout_and_form_of_head_scores_over_the_same_set() -> None:
    data = truncated(batch())
    predictions = predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask)
    predictions = replace(predictions, kept=sampling_masks_of(data, np.flatnonzero(data.loss_mask)))
    found = []
    for layout, plain in ((Layout.PACKED, True), (Layout.PACKED, False), (Layout.PADDED, True), (Layout.PADDED, False)):
        policy = Policy(tiny_model(), layout)
        policy.has_plain_head = plain
        order, scores = [], []
        for micro in split(predictions, np.arange(len(predictions.targets)), budget=10**6, device=torch.device("cpu"), layout=layout):
            order.append(micro.predictions)
            scores.append(torch.stack([s for s in policy(micro, temperature=0.8, with_entropy=True) if s is not None]))
        every = torch.cat(scores, 1)[:, torch.cat(order).argsort()]
        (gradient,) = torch.autograd.grad(every.sum(), [policy.model.get_output_embeddings().weight])
        found.append((every, gradient))
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


# --- A step -----------------------------------------------------------------------------------------------------------


def truncated(data: PackedBatch) -> PackedBatch:
    """The batch with made-up sets for two of three tokens to train on: some narrow, some wide."""
    draw = np.random.default_rng(5)
    lengths, records = np.zeros(len(data.token_ids), np.int32), list[bytes]()
    for place in np.flatnonzero(data.loss_mask):
        ids = {*draw.integers(0, 262, draw.choice([3, 200])).tolist(), int(data.token_ids[place])} if place % 3 else set(range(262))
        records += pack_kept(mask(262, ids))
        lengths[place] = len(records[-1])
    return replace(data, kept=np.frombuffer(b"".join(records), np.uint8), kept_lengths=lengths)


@pytest.mark.parametrize("section", [{}, {"entropy_coefficient": 0.01, "kl_coefficient": 0.1, "kind": "gspo"}])
def test_the_gradient_over_kept_sets_does_not_depend_on_packing(section: dict[str, Any]) -> None:
    def moved(data: PackedBatch, **options: Any) -> torch.Tensor:
        model = tiny_model()
        start = weights(model)
        ours = trainer(model, Objective.of(ObjectiveSection(**section)), max_grad_norm=1e9, reference=tiny_model(seed=1), **options)
        ours.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
        ours.step(data)
        return weights(model) - start

    data = truncated(batch())
    whole = moved(data)
    assert float((whole - moved(batch())).norm() / whole.norm()) > 1e-3
    for options in ({"micro_batch_tokens": 40}, {"activation_checkpointing": True}):
        assert float((moved(data, **options) - whole).norm() / whole.norm()) < 1e-12


def test_records_that_are_out_of_step_with_their_tokens_end_the_run() -> None:
    data = truncated(batch())
    assert data.kept_lengths is not None
    first = int(np.flatnonzero(data.kept_lengths)[0])
    data.token_ids[first] = (set(range(262)) - {*sampling_masks_of(data, np.array([first])).ids}).pop()  # type: ignore[union-attr]
    with pytest.raises(RunFailed, match=r"which is not among the \d+ ids that truncation is said to have left"):
        trainer(tiny_model()).step(data)
    data = truncated(batch())
    with pytest.raises(RunFailed, match="a record of form 9"):
        trainer(tiny_model()).step(replace(data, kept=np.full_like(data.kept, 9)))  # type: ignore[arg-type]


# --- From the engine to the step --------------------------------------------------------------------------------------


def assembled(model: PreTrainedModel, *, receiver: MemoryReceiver | None = None) -> tuple[EmbeddedEngine, Gateway]:
    engine = make_engine(model, receiver=receiver)
    fleet = Fleet()
    fleet.attach(engine)
    limits = EngineLimits.of([engine.capabilities])
    return engine, Gateway(Generator(fleet, request_seconds=60), scripted_tokenizer(), record_nothing, model="policy", limits=limits)


async def conversed(
    gateway: Gateway, sampling: SamplingParams, *, turns: int = 2, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> SessionRecord:
    """A session. `meanwhile` goes on beside its first turn."""
    handle = gateway.open(KEY, sampling=sampling, tracked=True)
    session = gateway.session_for(path_token=handle.api_key, api_key=None)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(turns):
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(gateway.answers(gateway.prepare(session, CompletionCall((Messages(tuple(messages)),)))))
            if meanwhile is not None:
                await meanwhile()
        (answer,) = asking.result()
        messages = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "more"}]
    return gateway.close(handle.session_id)


def batch_of(record: SessionRecord, *, version: int) -> PackedBatch:
    """As the trainer gets it: through the store's rows and the batch's bytes."""
    rows = decode_rows(encode_rows(record.rows))
    trajectories = tuple(Trajectory(RolloutKey(KEY.group, s), "t", "s", float(s), rows) for s in range(2))
    return from_bytes(to_bytes(pack(Batch(1, version, (Group(KEY.group, "t", "s", trajectories),)))))


TRUNCATED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=60, min_p=0.002, ignore_eos=True)


def test_a_truncated_conversation_trains_with_no_more_mismatch_than_rounding() -> None:
    """Engine, gateway, store, batch, step. Without the sets the same tokens are half a nat off."""

    async def main() -> SessionRecord:
        engine, gateway = assembled(pointed())
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            record = await conversed(gateway, TRUNCATED)
            running.cancel()
        return record

    record = asyncio.run(main())
    assert not record.masked and sum(row.num_trainable for row in record.rows) == 24
    data = batch_of(record, version=0)
    report = trainer(pointed(), temperature=0.9).step(data)
    assert report.metrics["mismatch/max"] < 5e-6 and report.num_tokens == 48
    blind = trainer(pointed(), temperature=0.9).step(replace(data, kept=None, kept_lengths=None))
    assert blind.metrics["mismatch/mean"] > 0.01


def test_i6_sets_stay_with_their_tokens_over_aborts_and_a_change_of_weights_in_mid_answer() -> None:
    """Version 1 has the weights of version 0, so that all tokens of both can be compared with one model."""
    receiver = MemoryReceiver()

    async def main() -> SessionRecord:
        model = pointed()
        engine, gateway = assembled(model, receiver=receiver)

        async def disturbed() -> None:
            while engine.reading().num_tokens < 5:
                await asyncio.sleep(0)
            await engine.pause(PauseMode.ABORT)
            await engine.stage(receiver.publish(1, pointed()))
            await engine.commit(1)
            await engine.resume()

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            record = await conversed(gateway, TRUNCATED.changed(max_tokens=40), turns=1, meanwhile=disturbed)
            running.cancel()
        return record

    record = asyncio.run(main())
    data = batch_of(record, version=1)
    assert {*data.versions[data.loss_mask].tolist()} == {0, 1}
    metrics = trainer(pointed(), temperature=0.9, version=1).step(data).metrics
    assert max(metrics["age/0/rho_max"], metrics["age/1/rho_max"]) < 1 + 1e-5
    assert min(metrics["age/0/rho_min"], metrics["age/1/rho_min"]) > 1 - 1e-5


def test_truncated_turns_are_masked_where_engines_keep_no_record_or_nobody_wants_it() -> None:
    async def main() -> None:
        engine, gateway = assembled(pointed())
        bare = EngineLimits.of([engine.capabilities], without=frozenset({Feature.SAMPLING_MASKS}))
        fleet = Fleet()
        fleet.attach(engine)
        without = Gateway(Generator(fleet, request_seconds=60), scripted_tokenizer(), record_nothing, model="policy", limits=bare)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            assert (await conversed(without, TRUNCATED)).masked == {Reason.NOT_POLICY_SAMPLED: 24}
            penalised = TRUNCATED.changed(presence_penalty=0.5)
            assert (await conversed(gateway, penalised)).masked == {Reason.NOT_POLICY_SAMPLED: 24}
            running.cancel()

    asyncio.run(main())


def test_rows_laid_down_in_another_order_keep_their_sets() -> None:
    data = truncated(batch())
    assert data.kept is not None and data.kept_lengths is not None
    order = list(reversed(range(len(data.row_rollout))))
    other = with_rows_in_order(data, order)
    ends = np.cumsum(data.kept_lengths)
    rows = [data.kept[(ends[a] - data.kept_lengths[a]) : ends[b - 1]] for a, b in zip(data.row_offsets, data.row_offsets[1:], strict=False)]
    lengths = np.concatenate([data.kept_lengths[data.row_offsets[r] : data.row_offsets[r + 1]] for r in order])
    other = replace(other, kept=np.concatenate([rows[r] for r in order]), kept_lengths=lengths)
    losses = [trainer(tiny_model()).step(each).loss for each in (data, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
