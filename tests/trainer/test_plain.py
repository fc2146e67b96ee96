"""Plain families, trained without their modules: chosen by itself, and the same gradients as by the modules."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.models.zoo import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from midflight.models.proof import Way
from midflight.models.sizes import ModelSizes
from midflight.trainer.model import plain, probe
from midflight.trainer.model.microbatch import Layout, predictions_of, split
from midflight.trainer.model.plain import PlainDecoder, can_be_plain
from midflight.trainer.model.policy import Policy

FAMILIES = ["llama", "llama-yarn", "mistral", "ministral", "qwen2", "qwen2-sliding", "qwen3"]


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """In float64, scales of norms that are not 1, and norms that do not round to float32 as those of the library."""
    draw = torch.Generator().manual_seed(1)

    def normed(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = normed.__get__(module)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.7, 1.3, generator=draw)
    return model


def gradients(policy: Policy, *, budget: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of rows that share beginnings, in micro-batches of at most `budget` tokens."""
    tokens = np.random.default_rng(0).integers(3, 250, 60).astype(np.int32)
    tokens[20:30], tokens[44:50] = tokens[:10], tokens[:6]
    predictions = predictions_of(tokens, np.array([0, 20, 44, 60], np.int32), mask=np.ones(60, np.bool_))
    weights, found = torch.linspace(-1, 2, 57), torch.zeros(57, dtype=torch.float64)
    for micro in split(predictions, np.arange(57), budget=budget, device=torch.device("cpu")):
        logprobs, _ = policy(micro, temperature=0.7)
        (logprobs * weights[micro.predictions]).sum().backward()
        found[micro.predictions] = logprobs.detach()
    return found, {name: parameter.grad for name, parameter in policy.model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_by_hand_log_probabilities_and_gradients_are_those_of_the_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_CACHED", 700)  # pieces of a few rows
    by_hand, by_modules = Policy(exact(tiny(name)), by_hand=False), Policy(exact(tiny(name)), by_hand=False)
    by_hand._plain = PlainDecoder(by_hand.model)
    expected, theirs = gradients(by_modules, budget=100)
    for budget in (100, 30):
        by_hand.model.zero_grad()
        found, ours = gradients(by_hand, budget=budget)
        assert (found - expected).abs().max() < 1e-10
        assert set(ours) == set(theirs)
        assert max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in theirs) < 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plain_family_is_trained_by_hand_if_it_is_in_float32(name: str) -> None:
    assert Policy(tiny(name))._plain is not None
    assert Policy(tiny(name), Layout.PADDED)._plain is None
    assert not can_be_plain(tiny(name).double())
    found = probe.prove(tiny(name))
    assert (found.way, found.layout) == (Way.PACKED, Layout.PACKED)
    assert max(found.logprob_error, found.gradient_error) < 1e-5  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["gemma", "phi3", "ministral3", "qwen3_moe"])
def test_what_only_looks_plain_goes_with_its_modules(name: str) -> None:
    assert Policy(tiny(name))._plain is None


def test_a_second_backward_of_one_forward_is_refused_because_the_first_overwrites_what_it_needs() -> None:
    policy = Policy(tiny("llama"))
    predictions = predictions_of(np.arange(3, 9, dtype=np.int32), np.array([0, 6], np.int32), mask=np.ones(6, np.bool_))
    (micro,) = split(predictions, np.arange(5), budget=64, device=torch.device("cpu"))
    loss = policy(micro, temperature=1.0)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_kept_for_the_backward_is_what_the_dry_run_counts() -> None:
    """Of a token and layer, and of a layer's weights with the norm's scale in them."""
    model = tiny("llama")
    policy, config = Policy(model), model.config
    sizes = ModelSizes(
        262, config.hidden_size, config.intermediate_size, 2, config.num_attention_heads, config.num_key_value_heads, config.head_dim, 256
    )
    assert policy._plain is not None

    def kept(length: int) -> int:
        """Numbers, each memory once, without what is there anyway."""
        rows = np.random.default_rng(0).integers(3, 250, 4 * length).astype(np.int32)
        rows[::length] = range(4)
        predictions = predictions_of(rows, np.arange(0, 4 * length + 1, length, dtype=np.int32), mask=np.ones(len(rows), np.bool_))
        (micro,) = split(predictions, np.arange(4 * (length - 1)), budget=10**6, device=torch.device("cpu"))
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = policy._plain.hidden(micro)  # type: ignore[union-attr]
        tokens.append(micro.input_ids.numel())
        del hidden
        return sum(found.values())

    tokens: list[int] = []
    few, many = kept(20), kept(120)
    of_a_token = (many - few) / (tokens[1] - tokens[0])
    counted = sizes.num_layers * (
        sizes.activations_per_layer(by_hand=True) - 2 * sizes.num_kv_heads * sizes.head_dim
    )  # nothing is shared here
    joined = sizes.num_layers * sizes.num_joined_parameters
    assert of_a_token == pytest.approx(counted, rel=0.1)
    assert few - of_a_token * tokens[0] == pytest.approx(joined, rel=0.1)
