"""The experts of a mixture, recorded and chosen again, in any architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.models.mixtures import NUM_CHOSEN, NUM_EXPERTS, tiny_mixture
from tests.models.tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedModel

from midflight.errors import RunFailed
from midflight.models.routing import Routers, routers_of

IDS = torch.tensor([[5, 9, 100, 200, 33, 7]])


def other_mixture(kind: str) -> PreTrainedModel:
    """DeepSeek-V3 chooses groups of experts first, adds biases, and has a first layer without experts; gpt-oss weighs what it chose."""
    sizes = {"vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
             "num_experts_per_tok": 2, "intermediate_size": 32, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    if kind == "gpt_oss":
        return AutoModelForCausalLM.from_config(GptOssConfig(**sizes, head_dim=16, num_local_experts=8)).eval()
    low = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    grouped = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **low, **grouped)).eval()


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits[0]


def recorded(model: PreTrainedModel, routers: Routers) -> tuple[np.ndarray, Tensor]:
    with routers.recording() as chosen:
        found = logits(model)
    return routers.packed(chosen), found


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_what_was_recorded_is_chosen_again_and_other_experts_where_others_are_given(kind: str) -> None:
    model = tiny_mixture(kind) if kind in ("qwen3_moe", "mixtral") else other_mixture(kind)
    routers = routers_of(model)
    assert routers is not None
    record, own = recorded(model, routers)
    layers = 1 if kind == "deepseek_v3" else 2
    assert record.shape == (6, layers * 2) and record.dtype == np.uint8
    assert (routers.num_experts, routers.num_chosen, routers.num_bytes) == (NUM_EXPERTS, NUM_CHOSEN, layers * 2)
    shifted = (record + 1) % 8
    routers.replay(shifted, device=IDS.device)
    again, others = recorded(model, routers)
    np.testing.assert_array_equal(again, shifted)
    assert (others - own).abs().max() > 1e-3
    routers.replay(record, device=IDS.device)
    torch.testing.assert_close(logits(model), own, rtol=0, atol=0)
    routers.replay(None, device=IDS.device)
    torch.testing.assert_close(logits(model), own, rtol=0, atol=0)


def test_tokens_without_a_record_go_where_the_router_sends_them() -> None:
    model = tiny_mixture("qwen3_moe")
    routers = routers_of(model)
    assert routers is not None
    record, _ = recorded(model, routers)
    given = (record + 1) % 8
    given[2:] = 255
    routers.replay(given, device=IDS.device)
    again, _ = recorded(model, routers)
    np.testing.assert_array_equal(again[:2], given[:2])
    np.testing.assert_array_equal(again[2:, :2], record[2:, :2])  # of the first layer, which what came before cannot change


def test_the_gradient_goes_through_the_probabilities_of_the_experts_that_were_given() -> None:
    """With two experts of eight given for each token, w_i = p_i / (p_1 + p_2): finite differences of one router weight agree."""
    model = tiny_mixture("qwen3_moe").double()
    model.set_experts_implementation("eager")  # the other one computes in single precision only
    routers = routers_of(model)
    assert routers is not None
    record, _ = recorded(model, routers)
    routers.replay((record + 3) % 8, device=IDS.device)
    weight = model.model.layers[0].mlp.gate.weight
    model(IDS, use_cache=False).logits[0, -1, 7].backward()
    steepest = divmod(int(weight.grad.abs().argmax()), 64)
    gradient, values = float(weight.grad[steepest]), []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            weight[steepest] += step
            values.append(float(model(IDS, use_cache=False).logits[0, -1, 7]))
            weight[steepest] -= step
    assert gradient == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-2)


def test_a_record_that_has_room_for_layers_without_experts_is_read_too() -> None:
    """As vLLM and SGLang send it: of all layers, of which the first has no experts."""
    model = other_mixture("deepseek_v3")
    routers = routers_of(model)
    assert routers is not None
    whole = np.array([[0, 0, 3, 4], [255, 255, 255, 255]], dtype=np.uint8)
    assert routers.unpacked(whole).tolist() == [[[3, 4], [-1, -1]]]
    assert routers.unpacked(whole[:, 2:]).tolist() == [[[3, 4], [-1, -1]]]


@pytest.mark.parametrize("record", [np.zeros((6, 3), np.uint8), np.full((6, 4), 8, np.uint8)])
def test_a_record_of_another_model_ends_the_run_with_the_remedy(record: np.ndarray) -> None:
    routers = routers_of(tiny_mixture("qwen3_moe"))
    assert routers is not None
    with pytest.raises(RunFailed, match=r"this model has 8 experts.*routing_replay = false"):
        routers.unpacked(record)


def test_a_model_without_experts_has_no_routers() -> None:
    assert routers_of(tiny_model()) is None
