"""Plain families, computed without their modules: chosen by itself, right, and never of weights that are not those of the model."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.test_runner import reference_logprobs
from tests.models.tiny import tiny_model
from tests.models.zoo import tiny
from transformers import PreTrainedModel

from midflight.engines.embedded import plain, probe
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.embedded.plain import PlainRunner
from midflight.engines.embedded.probe import Manner
from midflight.engines.embedded.products import PackedProduct, PlainProduct
from midflight.models.names import as_tensors, assign, named_tensors, put_together, side_by_side
from midflight.models.plain import is_plain
from midflight.models.proof import Way
from midflight.run.launcher.checks.proofs import proofs
from midflight.types import TensorSpec

REQUESTS = [ask("a", request_id="0", max_tokens=20), *(ask("the same prompt", request_id=f"{1 + i}", seed=i) for i in range(3))]


def runner_of(engine: EmbeddedEngine) -> PlainRunner:
    runner = engine._scheduler._runner
    assert isinstance(runner, PlainRunner)
    return runner


def assert_computes(engine: EmbeddedEngine, model: PreTrainedModel) -> None:
    """That the engine generates with the log-probabilities of a plain forward of `model`."""
    for request, generation in zip(REQUESTS, engine.generate_all(REQUESTS), strict=True):
        difference = reference_logprobs(model, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "mistral", "ministral", "qwen2", "qwen2-sliding", "qwen3"])
def test_a_plain_family_goes_without_its_modules_and_agrees_with_their_forward(name: str) -> None:
    engine = make_engine(tiny(name), max_batch_tokens=8, max_running=3)
    assert engine._manner == Manner(plain=True)
    assert_computes(engine, tiny(name))


def test_a_model_that_was_tried_is_as_it_was_and_can_be_written() -> None:
    model = tiny("llama")
    assert [proof.way for proof in proofs(model, max_context=64)] == [Way.PACKED] * 3
    assert all(parameter.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gemma", "phi3", "ministral3", "qwen3_moe"])
def test_what_only_looks_plain_goes_with_its_modules(name: str) -> None:
    assert not is_plain(tiny(name))


def test_a_forward_that_is_wrong_is_found_out_and_the_modules_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_found", {})
    joined = PlainProduct.joined

    def wrong(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> PlainProduct:
        product = joined(weights, biases)
        added = product.added
        product.added = lambda to, x: 1.01 * added(to, x)
        return product

    monkeypatch.setattr(PlainProduct, "joined", wrong)
    model = tiny("llama")
    assert make_engine(model)._manner == Manner()
    assert_computes(make_engine(model), tiny("llama"))


def test_what_was_found_of_a_model_does_not_count_for_one_of_other_modules() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    def doubled() -> PreTrainedModel:
        model = tiny("llama")
        model.model.layers[0].mlp.down_proj.__class__ = Doubled
        return model

    assert make_engine(tiny("llama"))._manner == Manner(plain=True)
    engine = make_engine(doubled())
    assert engine._manner == Manner()
    assert_computes(engine, doubled())


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_weights_that_are_used_as_one_are_the_parameters_themselves(name: str) -> None:
    model = tiny(name)
    engine = make_engine(model)
    layer, attention = runner_of(engine)._layers[1], model.model.layers[1].self_attn
    product = cast(PlainProduct, layer.qkv)
    assert product.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert (product.bias is None) == (attention.q_proj.bias is None)
    other = tiny(name, seed=1)
    for tensor, new in zip(named_tensors(model).values(), named_tensors(other).values(), strict=True):
        tensor.copy_(new)
    assert_computes(engine, other)


@pytest.mark.parametrize(("name", "largest"), [("qwen2", 2**26), ("qwen2", 0), ("qwen3", 2**26)])
def test_a_version_is_laid_out_when_it_is_staged_and_swapped_without_copying(
    name: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "TURNED_BYTES", largest)
    receiver = MemoryReceiver()
    engine = make_engine(tiny(name), receiver=receiver)
    engine._weights.stage(receiver.publish(1, tiny(name, seed=1)))
    staged = cast("dict[str, torch.Tensor]", engine._weights._staged.tensors)  # type: ignore[union-attr]
    before = {key: tensor.data_ptr() for key, tensor in staged.items()}
    engine._commit(1)
    assert_computes(engine, tiny(name, seed=1))
    assert {key: tensor.data_ptr() for key, tensor in named_tensors(engine._model).items()} == before
    layer = runner_of(engine)._layers[0]
    weights = [cast(PlainProduct, product).weight for product in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert weights[0].data_ptr() == before["model.layers.0.self_attn.q_proj.weight"]
    assert {weight.is_contiguous() for weight in weights} == {largest > 0}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_large_model_that_nobody_writes_to_is_multiplied_with_packed_copies_and_each_version_has_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "TURNED_BYTES", 0)
    receiver = MemoryReceiver()
    engine = make_engine(tiny(name), receiver=receiver, owns_model=True)
    assert isinstance(runner_of(engine)._layers[0].qkv, PackedProduct)
    assert_computes(engine, tiny(name))
    for version in (1, 2, 3):
        engine._weights.stage(receiver.publish(version, tiny(name, seed=version)))
        assert_computes(engine, tiny(name, seed=version - 1 if version > 1 else 0))
        engine._commit(version)
        assert_computes(engine, tiny(name, seed=version))


def test_packed_copies_are_those_of_the_version_that_is_served_also_after_one_that_nobody_asked_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of a version may lie where those of the one before the last lay."""
    monkeypatch.setattr(plain, "TURNED_BYTES", 0)
    model = tiny("llama")
    runner = runner_of(make_engine(model, owns_model=True))
    places = [{n: t.clone() for n, t in named_tensors(tiny("llama", seed=seed)).items()} for seed in (1, 2)]
    for seed in (3, 4, 5):
        memory = places[seed % 2]
        for tensor, new in zip(memory.values(), named_tensors(tiny("llama", seed=seed)).values(), strict=True):
            tensor.copy_(new)
        assign(model, runner.laid_out(memory))
        if seed != 4:
            logits = runner.forward(probe.step_batch([(0, 0, np.arange(5))]))
            assert (logits[0] - tiny("llama", seed=seed)(input_ids=torch.arange(5)[None]).logits[0, -1]).abs().max() < 1e-4


def test_a_processor_that_packs_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "TURNED_BYTES", 0)
    joined = PackedProduct.joined

    def wrong(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> PackedProduct:
        product = joined(weights, biases)
        of = product.of
        product.of = lambda x: 1.01 * of(x)
        return product

    monkeypatch.setattr(PackedProduct, "joined", wrong)
    engine = make_engine(tiny("llama"), owns_model=True)
    assert isinstance(runner_of(engine)._layers[0].qkv, PlainProduct)
    assert_computes(engine, tiny("llama"))


def test_weights_that_were_replaced_in_another_way_are_found_too() -> None:
    model = tiny_model()
    engine = make_engine(model)
    other = tiny_model(seed=1)
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = new.data.clone()
    assert_computes(engine, tiny_model(seed=1))


def test_tensors_of_one_memory_are_side_by_side_and_others_are_put_together() -> None:
    memory = memoryview(bytearray(4 * 10))
    specs = [TensorSpec("a", "F32", (2, 2), 0, 16), TensorSpec("b", "F32", (3, 2), 16, 24)]
    a, b = as_tensors(specs, {s.name: memory[s.offset : s.offset + s.num_bytes] for s in specs}).values()
    b.fill_(7)
    whole = side_by_side([a, b])
    assert whole is not None and whole.tolist() == [[0, 0], [0, 0], [7, 7], [7, 7], [7, 7]]
    assert put_together([a, b])[1] is b
    assert side_by_side([b, a]) is None
    first, second = put_together([b, a])
    assert side_by_side([first, second]) is not None and first.tolist() == b.tolist()


def test_turned_tensors_are_stretches_of_the_columns_of_one_matrix() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(1, 3)
    assert side_by_side([a, b], turned=True) is None
    first, second = put_together([a, b], turned=True)
    whole = side_by_side([first, second], turned=True)
    assert whole is not None and whole.t().is_contiguous() and whole.tolist() == [[0, 1, 2], [3, 4, 5], [1, 1, 1]]
    second.fill_(7)
    assert whole[2].tolist() == [7, 7, 7] and first.tolist() == a.tolist()
    assert put_together([first, second], turned=True)[1] is second
    assert side_by_side([second, first], turned=True) is None
