"""Which decoders are plain: RMS norm, rotary attention of grouped heads (with or without biases,
norms of queries and keys, and windows), RMS norm, and a SwiGLU (Touvron et al. 2023, section 2.2).
Engine and trainer compute them without their modules."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from midflight.models.sizes import FAMILIES

_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_plain(model: PreTrainedModel) -> bool:
    """Whether the model is of a plain family, and made of its plain modules: not of adapters, for
    one.
    """
    decoder: Any = getattr(model, "model", None)
    if (
        model.config.model_type not in FAMILIES
        or parts_of(model) != {"model", "lm_head"}
        or parts_of(decoder) != _DECODER
    ):
        return False
    return (
        type(decoder.embed_tokens) is nn.Embedding
        and type(model.lm_head) is nn.Linear
        and all(map(_is_plain_layer, decoder.layers))
    )


def _is_plain_layer(layer: Any) -> bool:
    attention = layer.self_attn
    mlp = layer.mlp
    if (
        parts_of(layer) != _LAYER
        or parts_of(attention) - {"q_norm", "k_norm"} != _ATTENTION
        or parts_of(mlp) != _MLP
    ):
        return False
    sides = sides_of(layer)
    if not all(type(product) is nn.Linear for side in sides for product in side):
        return False
    alike = all(len({product.bias is None for product in side}) == 1 for side in sides)
    return alike and type(mlp.act_fn).__name__.startswith("SiLU")


def sides_of(layer: Any) -> list[list[Any]]:
    """The products of a layer, those of one input together."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def parts_of(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
