"""Plain decoders, which engine and trainer compute without their modules.

Each of their layers is an RMS norm, rotary attention of grouped heads (with or without biases,
norms of queries and keys, and windows), an RMS norm, and a SwiGLU (Touvron et al. 2023, section
2.2).
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from midflight.models.sizes import FAMILIES

_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_plain(model: PreTrainedModel) -> bool:
    """True if the model is of a plain family, and made of its plain modules. A model with adapters,
    for one, is not.
    """
    decoder: Any = getattr(model, "model", None)
    if model.config.model_type not in FAMILIES or parts_of(model) != {"model", "lm_head"}:
        return False
    if parts_of(decoder) != _DECODER or type(decoder.embed_tokens) is not nn.Embedding:
        return False
    if type(model.lm_head) is not nn.Linear:
        return False
    return all(map(_is_plain_layer, decoder.layers))


def _is_plain_layer(layer: Any) -> bool:
    attention = layer.self_attn
    mlp = layer.mlp
    if parts_of(layer) != _LAYER or parts_of(mlp) != _MLP:
        return False
    if parts_of(attention) - {"q_norm", "k_norm"} != _ATTENTION:
        return False
    for side in sides_of(layer):
        if not all(type(product) is nn.Linear for product in side):
            return False
        if len({product.bias is None for product in side}) != 1:
            return False
    return type(mlp.act_fn).__name__.startswith("SiLU")


def sides_of(layer: Any) -> list[list[Any]]:
    """The products of a layer. Products of one input are together."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def parts_of(module: nn.Module) -> set[str]:
    """The names of a module's direct parts."""
    return {name for name, _ in module.named_children()}
