import os

import pytest
import torch
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.models.tiny import MAX_CONTEXT, tiny_model
from tests.models.zoo import tiny
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from midflight.engines.embedded.attention import KvCache, StepPlaces
from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.models.names import named_tensors
from midflight.observe.memory import resident_bytes
from midflight.types import GenerateRequest


def reference_logprobs(model: PreTrainedModel, request: GenerateRequest, generation: Generated) -> torch.Tensor:
    """Log-probabilities of the generated tokens by one plain forward of `transformers`."""
    ids = torch.tensor([[*request.input_ids, *generation.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / request.sampling.temperature
    start = len(request.input_ids)
    rows = torch.log_softmax(logits, -1)[start - 1 : -1]
    return rows.gather(-1, ids[0, start:, None])[:, 0]


def assert_serves(engine: EmbeddedEngine, model: PreTrainedModel) -> None:
    """That the engine generates with the log-probabilities of a plain forward of `model`."""
    for request, generation in zip(REQUESTS, engine.generate_all(REQUESTS), strict=True):
        difference = reference_logprobs(model, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


REQUESTS = [
    ask("a", request_id="0", max_tokens=20),
    ask("the same prompt", request_id="1", seed=3),
    ask("the same prompt", request_id="2", seed=4),
]
REQUESTS += [ask("x" * (3 + 5 * i), request_id=f"{3 + i}", seed=i, max_tokens=3 + i, temperature=0.7) for i in range(8)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("max_batch_tokens", [8, 256])
def test_logprobs_agree_with_a_plain_forward_whatever_the_batch(dtype: str, tolerance: float, max_batch_tokens: int) -> None:
    model = tiny_model(dtype=dtype)
    generations = make_engine(model, max_batch_tokens=max_batch_tokens, max_running=5).generate_all(REQUESTS)
    reference_model = tiny_model(dtype=dtype)
    for request, generation in zip(REQUESTS, generations, strict=True):
        assert len(generation.token_ids) == request.sampling.max_tokens
        difference = reference_logprobs(reference_model, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < tolerance


def test_a_served_model_still_computes_plain_forwards() -> None:
    model, plain = tiny_model(), tiny_model()
    make_engine(model).generate_all([ask()])
    ids = torch.randint(0, 262, (2, 9))
    assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_weights_that_lie_in_the_model_are_those_it_is_served_with(name: str) -> None:
    """Also after others were written into the same memory, or put in their place."""
    model = tiny(name)
    engine = make_engine(model)
    for tensor, new in zip(named_tensors(model).values(), named_tensors(tiny(name, seed=1)).values(), strict=True):
        tensor.copy_(new)
    assert_serves(engine, tiny(name, seed=1))
    model = tiny(name)
    engine = make_engine(model)
    for parameter, new in zip(model.parameters(), tiny(name, seed=2).parameters(), strict=True):
        parameter.data = new.data.clone()
    assert_serves(engine, tiny(name, seed=2))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_version_is_swapped_without_copying_and_none_is_computed_with_anothers_weights(name: str) -> None:
    receiver = MemoryReceiver()
    engine = make_engine(tiny(name), receiver=receiver)
    for version in (1, 2, 3):
        engine._weights.stage(receiver.publish(version, tiny(name, seed=version)))
        staged = engine._weights._staged.tensors  # type: ignore[union-attr]
        before = {key: tensor.data_ptr() for key, tensor in staged.items()}  # type: ignore[union-attr]
        assert_serves(engine, tiny(name, seed=version - 1 if version > 1 else 0))
        engine._commit(version)
        assert_serves(engine, tiny(name, seed=version))
        assert {key: tensor.data_ptr() for key, tensor in named_tensors(engine._model).items()} == before


def other_architectures() -> dict[str, PreTrainedModel]:
    sizes = {"vocab_size": 262, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "sliding window": MistralForCausalLM(MistralConfig(**sizes, sliding_window=5)),
        "gpt-neox": GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)),
        "mixture": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)),
    }


@pytest.mark.parametrize("name", ["llama", "sliding window", "gpt-neox", "mixture"])
def test_other_architectures_agree_with_their_plain_forward(name: str) -> None:
    model, plain = other_architectures()[name].eval(), other_architectures()[name].eval()
    generations = make_engine(model, max_batch_tokens=16).generate_all(REQUESTS)
    for request, generation in zip(REQUESTS, generations, strict=True):
        difference = reference_logprobs(plain, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


def test_room_for_keys_grows_by_doubling_and_ends_at_the_whole_context() -> None:
    """Old and new room stand beside each other while one is copied: the last growth must not be from almost all to all."""
    cache = KvCache(max_slots=64, max_context=2112)
    grown: list[int] = []
    for length in range(1, 2113):
        cache.reserve(slots=1, context=length)
        assert length <= cache.context
        grown += [cache.context] if cache.context not in grown else []
    assert grown == [33, 66, 132, 264, 528, 1056, 2112]


def test_room_for_keys_takes_memory_when_it_is_written_to() -> None:
    """Of 256 MB that are set aside one token of one slot is written."""
    before = resident_bytes(os.getpid())
    cache = KvCache(max_slots=64, max_context=8192)
    cache.reserve(slots=64, context=8192)
    keys, values = (torch.ones(1, 1, 64) for _ in range(2))
    step = StepPlaces(cache, torch.tensor([63]), torch.tensor([8191]), [], {})
    step.write((0, 0), keys, values)
    assert cache.line((0, 0), like=(keys, values))[0].nbytes == 64 * 8192 * 64 * 4
    assert resident_bytes(os.getpid()) - before < 2**24


def test_what_was_kept_of_a_sequence_is_put_back_also_after_another_attention_has_come() -> None:
    cache = KvCache(max_slots=2, max_context=8)
    cache.reserve(slots=2, context=4)
    slots, positions = torch.tensor([0, 0]), torch.tensor([0, 1])
    step = StepPlaces(cache, slots, positions, buckets=[], reaches={})
    keys, values = torch.arange(6.0).view(2, 1, 3), torch.arange(10.0, 14.0).view(2, 1, 2)
    step.write((0, 0), keys, values)
    kept = cache.take(0, start=0, end=2)
    step.write((1, 0), keys + 100, values + 100)
    cache.reserve(slots=2, context=6)
    cache.put(1, kept, start=0, num=2)
    (found, also), (others, _) = cache.read((0, 0), torch.tensor([1]), length=2), cache.read((1, 0), slice(0, 2), length=2)
    assert torch.equal(found[0, 0], keys[:, 0]) and torch.equal(also[0, 0], values[:, 0])
    assert torch.equal(others[0, 0], keys[:, 0] + 100) and not others[1].any(), "nothing was kept of that one"
