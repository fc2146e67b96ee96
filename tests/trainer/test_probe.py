"""Whatever the architecture: packed, padded or refused, never wrong. `make test-models` holds all of the zoo against this."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models.zoo import ORDINARY, SIX_HYBRIDS, tiny, tiny_encoder
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.models import proof
from midflight.models.proof import Way, attention_of
from midflight.models.sizes import ModelSizes
from midflight.trainer.model import probe
from midflight.trainer.model.attention import Runs
from midflight.trainer.model.layers import recompute_activations
from midflight.trainer.model.microbatch import Layout, predictions_of, split
from midflight.trainer.model.policy import Policy

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*ORDINARY, *SIX_HYBRIDS, "gemma2", "gpt_oss", "llama4-text", "electra"])
def test_these_train_packed(name: str) -> None:
    """Recurrences, convolutions, capped scores, sinks, attention within chunks, and an output layer narrower than what stands before it."""
    found = probe.prove(tiny(name))
    assert (found.way, found.layout) == (Way.PACKED, Layout.PACKED)
    assert max(found.logprob_error, found.gradient_error) < 1e-4  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("name", "layout"), [("falcon", "padded"), ("doge", "padded"), ("phi3-longrope", "equal"), ("llama-dynamic-rope", "equal")]
)
def test_these_train_in_rows_under_each_other(name: str, layout: str) -> None:
    found = probe.prove(tiny(name))
    assert (found.way, found.layout) == (Way.FALLBACK, layout) and "packed" in found.reason
    assert max(found.logprob_error, found.gradient_error) < 1e-4  # type: ignore[type-var]


def test_a_model_whose_frequencies_never_change_in_the_runs_context_trains_packed() -> None:
    assert probe.prove(tiny("phi3-longrope"), max_context=16).way is Way.PACKED


def test_a_model_that_no_layout_fits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TOLERANCE", 0.0)
    with pytest.raises(ConfigError, match=r"training LlamaForCausalLM: .*packed: off by .*padded.*equal.*docs/models\.md"):
        probe.proven_layout(tiny("llama"))


def test_a_model_that_is_no_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bert is no decoder.*is_decoder = true"):
        probe.proven_layout(tiny_encoder())


def test_a_model_whose_backward_raises_is_refused_with_what_it_raised() -> None:
    model = tiny("llama")
    model.lm_head = NoBackward()
    found = probe.prove(model)
    assert (
        not found.is_right
        and "raises RuntimeError" in found.reason
        and found.reason.startswith("the backward of LlamaForCausalLM's own forward")
    )


class NoBackward(torch.nn.Linear):
    """The backward of exp needs what it gave, which is written over."""

    def __init__(self) -> None:
        super().__init__(32, 262, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).exp().add_(1)


def test_the_model_that_is_proven_stays_as_it_is() -> None:
    model = tiny("qwen3_next")
    before, kinds = attention_of(model), [type(module) for module in model.modules()]
    probe.prove(model)
    assert attention_of(model) == before and [type(module) for module in model.modules()] == kinds
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["falcon", "gpt_neo", "phi3-longrope", "llama", "qwen3_next", "doge"])
def test_a_stand_in_is_found_to_be_as_the_model_itself(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Random weights in two layers and short windows go through the same code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny(name)
    own = probe.prove(model)
    monkeypatch.setattr(proof, "SMALL", 0)
    found = probe.prove(model)
    assert (found.way, found.layout) == (own.way, own.layout)


def test_a_stand_in_sees_frequencies_change_only_if_rows_of_the_run_do(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "SMALL", 0)
    model = tiny("phi3-longrope")
    model.config.rope_parameters["original_max_position_embeddings"] = model.config.original_max_position_embeddings = 4096
    model.config.max_position_embeddings = 2**17
    layouts = [probe.prove(model, max_context=size).layout for size in (4096, 4097)]
    assert layouts == [Layout.PACKED, Layout.EQUAL]


def test_what_was_found_of_a_large_model_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "SMALL", 0)
    first = probe.prove(tiny("llama"))
    monkeypatch.setattr(probe, "prove_itself", None)  # nobody asks again
    assert probe.prove(tiny("llama", seed=1)) == first


def padded(model: PreTrainedModel, layout: Layout, lengths: list[int], budget: int) -> list[tuple[int, ...]]:
    """The shapes of the micro-batches of rows of these lengths, of which each is predicted but for its last two tokens."""
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    mask = np.ones(offsets[-1], np.bool_)
    mask[offsets[:-1]] = False
    mask[np.concatenate([offsets[1:] - 1, offsets[1:] - 2])] = False
    predictions = predictions_of(np.arange(offsets[-1], dtype=np.int32), offsets, mask=mask)
    return [
        tuple(m.input_ids.shape) for m in split(predictions, np.arange(len(predictions.targets)), budget=budget, device=CPU, layout=layout)
    ]


def test_rows_under_each_other_are_of_similar_length_within_the_budget() -> None:
    """A row of n tokens has n - 1 inputs, of which the last two predict nothing here."""
    model = tiny("llama")
    assert padded(model, Layout.PADDED, [10, 5, 9, 30], budget=24) == [(3, 7), (1, 27)]
    assert padded(model, Layout.PADDED, [10, 5, 9, 30], budget=20) == [(2, 6), (1, 7), (1, 27)]
    assert padded(model, Layout.EQUAL, [10, 5, 10, 30], budget=100) == [(1, 4), (2, 9), (1, 29)]


def test_recomputed_layers_of_a_recurrent_model_give_the_same_gradient() -> None:
    gradients = []
    for recomputes in (False, True):
        policy = Policy(tiny("qwen3_next"))
        if recomputes:
            recompute_activations(policy.model)
        tokens = np.random.default_rng(0).integers(3, 250, 30).astype(np.int32)
        predictions = predictions_of(tokens, np.array([0, 12, 30], np.int32), mask=np.ones(30, np.bool_))
        (micro,) = split(predictions, np.arange(28), budget=64, device=CPU)
        policy(micro, temperature=1.0)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None)


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_kept_for_the_backward_is_what_the_dry_run_counts(recomputes: bool) -> None:
    """Numbers of a token, in all layers: each memory once, without what is there anyway."""
    model = tiny("qwen3")
    policy = Policy(model)
    if recomputes:
        recompute_activations(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def kept(length: int) -> tuple[int, int]:
        """Numbers that are kept of four rows with nothing in common, and the tokens of these."""
        rows = np.random.default_rng(0).integers(3, 250, 4 * length).astype(np.int32)
        rows[::length] = range(4)
        predictions = predictions_of(rows, np.arange(0, 4 * length + 1, length, dtype=np.int32), mask=np.ones(len(rows), np.bool_))
        (micro,) = split(predictions, np.arange(4 * (length - 1)), budget=10**6, device=CPU)
        found: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            memory = tensor.untyped_storage()
            if tensor.is_floating_point() and memory.data_ptr() not in own:
                found[memory.data_ptr()] = memory.nbytes() // 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = policy._hidden(micro)
        del hidden
        return sum(found.values()), micro.input_ids.numel()

    few, many = kept(20), kept(120)
    config = model.config
    sizes = ModelSizes(
        262, config.hidden_size, config.intermediate_size, 2, config.num_attention_heads, config.num_key_value_heads, config.head_dim, 256
    )
    last_norm = 2 * sizes.hidden_size
    of_shared_rows = 2 * sizes.num_kv_heads * sizes.head_dim
    counted = sizes.num_layers * (sizes.hidden_size if recomputes else sizes.activations_per_layer - of_shared_rows)
    assert (many[0] - few[0]) / (many[1] - few[1]) == pytest.approx(counted + last_norm, rel=0.05)


def test_rows_under_each_other_are_taken_from_the_flat_row_and_put_back() -> None:
    """A prompt of 2 that two rows of 1 and 3 go on from, laid as prompt, row, row; then a row of 4 by itself."""
    keys = torch.tensor([0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9])
    runs = Runs(counts=(1, 1, 1, 1), lengths=(2, 1, 3, 4), contexts=(0, 2, 2, 0), keys=keys)
    tables, where = runs.under_each_other
    assert [table.tolist() for table in tables] == [[[0, 1, 3, 4, 5], [6, 7, 8, 9, 9], [0, 1, 2, 2, 2]], [[0, 1]]]
    laid = np.concatenate([table.reshape(-1) for table in tables])
    assert laid[where].tolist() == list(range(10))
