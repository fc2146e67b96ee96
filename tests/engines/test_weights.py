"""I7: whole versions only, staged beside decoding, live between two steps."""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.test_contract import running
from tests.models.tiny import tiny_model

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.table import Submission
from midflight.engines.embedded.weights import EngineWeights, model_fingerprint
from midflight.errors import EngineError, WeightsCorrupt
from midflight.types import Attestation, GenerateRequest, PauseMode, TensorSpec, WeightManifest

REQUEST = ask("a prompt", seed=21, max_tokens=20)


def step_until(engine: EmbeddedEngine, num: int) -> list[int]:
    """Single-request stepping: the first `num` tokens."""
    tokens: list[int] = []
    while len(tokens) < num:
        tokens += engine._scheduler.step().token_ids.tolist()
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_recompute_goes_on_as_an_engine_that_always_had_the_new_weights(dtype: str) -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny_model(dtype=dtype), receiver=receiver)
    engine._weights.stage(receiver.publish(1, tiny_model(seed=1, dtype=dtype)))
    engine._scheduler.submit(Submission(1, 0, REQUEST, (), None))
    before = step_until(engine, 6)
    engine._scheduler.pause(PauseMode.RECOMPUTE)
    engine._commit(1)
    engine._scheduler.resume()
    after = step_until(engine, 14)
    reference = make_engine(tiny_model(seed=1, dtype=dtype))
    assert after == list(reference.generate_all([resumed(before)])[0].token_ids)


def test_keep_goes_on_over_the_old_keys() -> None:
    receiver = MemoryReceiver()
    engine = make_engine(receiver=receiver)
    engine._weights.stage(receiver.publish(1, tiny_model(seed=1)))
    engine._scheduler.submit(Submission(1, 0, REQUEST, (), None))
    step_until(engine, 6)
    engine._commit(1)
    step = engine._scheduler.step()
    assert (step.version, step.kv_versions.tolist()) == (1, [0])
    assert -20 < float(step.logprobs[0]) <= 0


def resumed(tokens: list[int]) -> GenerateRequest:
    return replace(REQUEST, input_ids=(*REQUEST.input_ids, *tokens))


def test_identical_prompts_do_not_share_keys_across_a_commit() -> None:
    receiver = MemoryReceiver()
    engine = make_engine(receiver=receiver)
    engine.generate_all([REQUEST])
    engine._weights.stage(receiver.publish(1, tiny_model(seed=1)))
    engine._commit(1)
    generation = engine.generate_all([REQUEST])[0]
    assert generation.token_ids == make_engine(tiny_model(seed=1)).generate_all([REQUEST])[0].token_ids
    assert set(generation.kv_versions) == set(generation.versions) == {1}


def test_i7_a_commit_replaces_all_tensors_and_attests_what_is_served() -> None:
    """I7: tied weights stay tied, and the served model hashes to the attestation."""
    receiver, model = MemoryReceiver(), tiny_model()
    weights = EngineWeights(model, receiver, version=0)
    assert weights.commit(0).fingerprint == model_fingerprint(model)
    manifest = receiver.publish(3, tiny_model(seed=3))
    weights.stage(manifest)
    assert model_fingerprint(model) != manifest.fingerprint
    assert weights.commit(3).fingerprint == model_fingerprint(model) == manifest.fingerprint
    ids = torch.arange(9)[None]
    assert torch.equal(model(input_ids=ids).logits, tiny_model(seed=3)(input_ids=ids).logits)
    # What was staged is the engine's own copy: the publisher may reuse its buffer.
    receiver.published[3]["model.norm.weight"][0:4] = b"\0\0\0\1"
    assert model_fingerprint(model) == manifest.fingerprint


def test_i7_the_version_that_is_served_may_be_staged_under_another_fingerprint_and_is_attested_by_it() -> None:
    receiver, model = MemoryReceiver(), tiny_model()
    weights = EngineWeights(model, receiver, version=0)
    manifest = receiver.publish(0, model)
    weights.stage(manifest)
    weights._staged = replace(weights._staged, fingerprint="of the same bytes, cut where ranks' rows end")
    served = weights.commit(0)
    assert served == weights.served and served.fingerprint == "of the same bytes, cut where ranks' rows end"
    assert weights.commit(0) == served and model_fingerprint(model) == manifest.fingerprint


def test_i7_a_version_of_the_weights_that_are_served_is_not_fetched() -> None:
    """The first version of a run, and that of a step that changed nothing: half a gigabyte would be copied, hashed and thrown away."""
    receiver, model = MemoryReceiver(), tiny_model()
    weights = EngineWeights(model, receiver, version=0)
    first, same, other = (receiver.publish(n, tiny_model(seed=seed)) for n, seed in ((0, 0), (1, 0), (2, 5)))
    receiver.published.clear()
    for manifest in (first, same):
        weights.stage(manifest)
        served = weights.commit(manifest.version)
        assert (served.version, served.fingerprint) == (manifest.version, model_fingerprint(model))
    with pytest.raises(KeyError):
        weights.stage(other)


def test_replaced_weights_are_given_back_by_the_next_stage_and_not_by_the_commit() -> None:
    """Freeing them takes longer than the swap, for which the decode thread stands still."""
    receiver = MemoryReceiver()
    weights = EngineWeights(tiny_model(), receiver, version=0)
    for version in (1, 2):
        weights.stage(receiver.publish(version, tiny_model(seed=version)))
        weights.commit(version)
    assert receiver.fetched[1]() is not None
    weights.stage(receiver.publish(3, tiny_model(seed=3)))
    assert receiver.fetched[1]() is None
    assert receiver.fetched[2]() is not None


def test_i7_a_later_stage_replaces_the_earlier() -> None:
    """I7: there is one second buffer, and the refusal names what is in it."""
    receiver = MemoryReceiver()
    weights = EngineWeights(tiny_model(), receiver, version=0)
    weights.stage(receiver.publish(1, tiny_model(seed=1)))
    weights.stage(receiver.publish(2, tiny_model(seed=2)))
    with pytest.raises(EngineError, match=r"version 1: version 2 is staged\. Stage version 1 first"):
        weights.commit(1)
    assert weights.commit(2).version == 2


def test_i7_a_manifest_of_another_model_is_refused_at_the_stage() -> None:
    """I7: the commit cannot fail half way."""
    receiver = MemoryReceiver()
    weights = EngineWeights(tiny_model(), receiver, version=0)
    manifest = receiver.publish(1, tiny_model(seed=1))
    with pytest.raises(WeightsCorrupt, match=r"model\.norm\.weight.*only one"):
        weights.stage(replace(manifest, tensors=tuple(s for s in manifest.tensors if s.name != "model.norm.weight")))
    wrong = tuple(replace(s, shape=(2, 16)) if s.name == "model.norm.weight" else s for s in manifest.tensors)
    with pytest.raises(WeightsCorrupt, match=r"shape \(2, 16\)"):
        weights.stage(replace(manifest, tensors=wrong))
    extra = (*manifest.tensors, TensorSpec("ghost", "F32", (1,), 0, 4))
    with pytest.raises(WeightsCorrupt, match="ghost"):
        weights.stage(replace(manifest, tensors=extra))
    assert weights.served.version == 0


class SlowReceiver(MemoryReceiver):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        assert self.release.wait(10)
        return super().fetch(manifest)


def test_a_commit_says_how_long_decoding_stood_still_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        receiver = MemoryReceiver()
        async with running(make_engine(receiver=receiver)) as engine:
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            swap = engine._weights.commit

            def slow_swap(version: int) -> Attestation:
                time.sleep(0.05)
                return swap(version)

            monkeypatch.setattr(engine._weights, "commit", slow_swap)
            attested = await engine.commit(1)
            assert attested.version == 1 and attested.still_seconds is not None and attested.still_seconds >= 0.05

    asyncio.run(main())


def test_staging_does_not_hold_up_decoding() -> None:
    async def main() -> None:
        receiver = SlowReceiver()
        async with running(make_engine(receiver=receiver)) as engine, asyncio.TaskGroup() as tasks:
            staging = tasks.create_task(engine.stage(receiver.publish(1, tiny_model(seed=1))))
            chunks = [c async for c in engine.generate(ask(max_tokens=30))]
            assert sum(len(c.token_ids) for c in chunks) == 30 and {c.version for c in chunks} == {0}
            assert not staging.done()
            receiver.release.set()
            await staging
            assert (await engine.commit(1)).version == 1

    asyncio.run(main())
