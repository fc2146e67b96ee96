"""What is found when a model is loaded: the way in which it is computed, or a refusal that names the remedy."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from tests.engines.models import TOKENIZER, MemoryReceiver, ask, make_engine
from tests.engines.test_contract import running
from tests.engines.test_runner import reference_logprobs
from tests.engines.test_scoring import ragged, reference
from tests.models.tiny import tiny_model
from tests.models.zoo import ORDINARY, ZOO, tiny

from midflight.engines.embedded import probe
from midflight.engines.embedded.attention import Bucket, Reach
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.probe import Manner, engine_verdict
from midflight.engines.embedded.states import States
from midflight.errors import ConfigError
from midflight.models.proof import TOLERANCE, Way
from midflight.run.launcher.checks.proofs import proofs
from midflight.types.facts import record_nothing

SINCE_5_24 = Way.PACKED if Version(transformers.__version__) >= Version("5.24") else Way.FALLBACK
"""Of those whose attention `transformers` lets be replaced since then."""
WAYS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "llama4-text", "stablelm", "nemotron", "diffllama", "gemma3", "zamba2"), Way.PACKED),
    **dict.fromkeys(("falcon", "falcon-alibi", "gpt_neo", "mpt", "bloom", "xglm", "doge", "minimax", "rwkv", "roberta"), Way.FALLBACK),
    **dict.fromkeys(("gptj", "codegen"), SINCE_5_24),
    **dict.fromkeys(("recurrent_gemma", "openai-gpt", "xlstm", "xlm"), Way.WHOLE),
    **dict.fromkeys(("phi3-longrope", "llama-dynamic-rope"), Way.REFUSED),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_found_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_found", {})


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_architectures_share_steps_go_alone_are_computed_whole_or_are_refused(name: str, way: Way) -> None:
    verdict = engine_verdict(tiny(name), max_context=64, max_batch_tokens=64)
    assert verdict.way is way, verdict
    assert verdict.is_right == (verdict.logprob_error is not None and verdict.logprob_error < TOLERANCE)
    if way is Way.REFUSED:
        assert ZOO[name].kind.split("_")[0] in verdict.reason and "set engine.kind to vllm or sglang" in verdict.reason.replace(
            ", or", "; set"
        )


@pytest.mark.parametrize("name", [*ORDINARY, "gemma2", "gpt_oss", "llama4-text", "diffllama", "falcon-alibi"])
def test_what_is_served_agrees_with_the_plain_forward(name: str) -> None:
    requests = [ask("a", request_id="0", max_tokens=20), *(ask("the same prompt", request_id=f"{1 + i}", seed=i) for i in range(3))]
    generations = make_engine(tiny(name), max_batch_tokens=8, max_running=3).generate_all(requests)
    plain = tiny(name)
    plain.set_attn_implementation("eager")
    for request, generation in zip(requests, generations, strict=True):
        difference = reference_logprobs(plain, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "jamba", "bamba", "mamba"])
def test_scores_are_those_of_plain_forwards_in_one_stretch_and_in_several(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny(name), max_batch_tokens=64)
    monkeypatch.setattr("midflight.engines.embedded.scoring.MAX_LOGITS", 262 * 9)

    async def main() -> Any:
        async with running(engine):
            return await engine.score(*ragged((5, 1, 17, 40)), temperature=0.7)

    plain = tiny(name)
    plain.set_attn_implementation("eager")
    np.testing.assert_allclose(asyncio.run(main()), reference(plain, *ragged((5, 1, 17, 40)), temperature=0.7), atol=1e-5)


def test_a_context_in_which_rotary_frequencies_would_change_is_refused_with_the_one_that_is_right() -> None:
    def engine(max_context: int) -> EmbeddedEngine:
        return EmbeddedEngine(
            tiny("phi3-longrope"), tokenizer=TOKENIZER, name="tiny", receiver=MemoryReceiver(), record=record_nothing, max_running=4,
            max_batch_tokens=64, max_context=max_context, pause_lease_seconds=30.0,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"phi3.*set model.max_context \(now 17\) to at most 16, or engine.kind to vllm or sglang"):
        engine(17)
    requests = [ask("12345", request_id=f"{i}", seed=i, max_tokens=20) for i in range(3)]
    for request, generation in zip(requests, engine(16).generate_all(requests), strict=True):
        assert len(generation.token_ids) == 11
        difference = reference_logprobs(tiny("phi3-longrope"), request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


def test_an_attention_scaled_by_its_place_in_the_step_goes_alone_once_a_step_is_long_enough_for_it() -> None:
    model = tiny("llama4-text")
    model.config.floor_scale = 32
    for module in model.modules():
        if hasattr(module, "floor_scale"):
            module.floor_scale = 32  # type: ignore[assignment]
    assert engine_verdict(model, max_context=16, max_batch_tokens=16).way is Way.PACKED
    assert engine_verdict(model, max_context=16, max_batch_tokens=64).way is Way.FALLBACK
    assert engine_verdict(model, max_context=64, max_batch_tokens=16).way is Way.FALLBACK


def test_an_engine_that_forgets_a_window_a_copy_or_a_state_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(name: str) -> Way:
        probe._found.clear()
        return engine_verdict(tiny(name), max_context=64, max_batch_tokens=64).way

    assert way("mistral") is way("lfm2") is Way.PACKED
    mask = Bucket.mask
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "mask", lambda self, reach, dtype: mask(self, Reach(), dtype))
        assert way("mistral") is not Way.PACKED and way("qwen3") is Way.PACKED
    with monkeypatch.context() as patch:
        patch.setattr("midflight.engines.embedded.attention.KvCache.put", lambda *_, **__: None)
        assert way("qwen3") is not Way.PACKED
    with monkeypatch.context() as patch:
        patch.setattr(States, "put", lambda *_: None)
        assert way("lfm2") is not Way.PACKED
    with monkeypatch.context() as patch:
        patch.setattr(States, "_store", lambda *_: None)
        assert way("lfm2") is not Way.PACKED


@pytest.mark.parametrize("name", ["mistral", "lfm2", "mamba", "gptj", "doge", "recurrent_gemma"])
def test_the_small_copy_of_a_large_model_is_found_to_be_what_the_model_is(name: str) -> None:
    """A model in half precision counts as large."""
    model, large = tiny(name), tiny(name, dtype=torch.bfloat16)
    manner, verdict = probe._judge(model, max_context=64, max_batch_tokens=64)
    other, copied = probe._judge(large, max_context=64, max_batch_tokens=64)
    assert (other, copied.way) == (manner, verdict.way)


def test_an_ordinary_model_shares_steps_and_attends_afterwards_as_before() -> None:
    model = tiny_model()
    assert probe._judge(model, max_context=64, max_batch_tokens=64)[0] == Manner()
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_was_tried_is_as_it_was_and_can_be_written() -> None:
    model = tiny("llama")
    assert [proof.way for proof in proofs(model, max_context=64)] == [Way.PACKED] * 3
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_a_model_that_does_not_run_is_refused_with_what_it_said() -> None:
    model = tiny("llama")
    model.lm_head = torch.nn.Linear(7, 262)
    with pytest.raises(ConfigError, match="LlamaForCausalLM's own forward in transformers"):
        make_engine(model)
