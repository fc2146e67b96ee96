"""A Llama of a few thousand random weights as a GGUF file, as llama.cpp's converter writes one."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from gguf.quants import quant_shape_to_byte_shape
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from midflight.text.byte_tokenizer import byte_letters_to_bytes

HIDDEN, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 2, 4, 2, 128
LETTERS = sorted(byte_letters_to_bytes(), key=byte_letters_to_bytes().__getitem__)
MERGES = ["t h", "Ċ Ċ", "Ġ Ġ"]
SPECIAL = ["<|end|>", "<|start|>", "<|stop|>"]
TOKENS = [*SPECIAL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
END, START, STOP = range(3)
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"

Array = NDArray[np.float32]


def ids(text: str) -> list[int]:
    """The tokens of a text that needs no merge, by hand: one for each byte."""
    return [TOKENS.index(LETTERS[byte]) for byte in text.encode()]


def tiny_llama(*, seed: int = 0, tied: bool = True) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HIDDEN // HEADS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    stored: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "smollm",
    ends: dict[str, int] | None = None,
    extra_tensors: dict[str, Array] | None = None,
    scaled: str | None = None,
    parts: int | None = None,
) -> Path:
    """`stored`: of what is no vector. `ends`: ids by what they end, beside the text's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    config = model.config
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if scaled is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaled)
    if parts is not None:
        writer.add_uint16("split.count", parts)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    for name, token in (ends or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_chat_template(TEMPLATE)
    for name, numbers in (gguf_tensors(model) | (extra_tensors or {})).items():
        as_blocks = numbers.ndim > 1 and stored != GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(numbers, stored) if as_blocks else numbers, raw_dtype=stored if as_blocks else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vast_gguf(path: Path, shape: tuple[int, int]) -> Path:
    """A file with one tensor, whose bytes no disk holds: they were never written."""
    kind = GGMLQuantizationType.IQ1_S
    num_bytes = math.prod(quant_shape_to_byte_shape(shape, kind))
    writer = GGUFWriter(path, "llama")
    writer.add_tensor_info("token_embd.weight", shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + num_bytes + writer.data_alignment)
    return path


def gguf_tensors(model: PreTrainedModel) -> dict[str, Array]:
    """The model's tensors by GGUF's names, with the rows of queries and keys in llama.cpp's order."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    found: dict[str, Array] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        numbers = tensor.numpy()
        if "q_proj" in name:
            numbers = interleaved(numbers, HEADS)
        if "k_proj" in name:
            numbers = interleaved(numbers, KV_HEADS)
        found[str(names.get_name(name, try_suffixes=(".weight",)))] = numbers
    return found


def interleaved(rows: Array, heads: int) -> Array:
    """llama.cpp turns neighbouring rows of a head together, `transformers` those half a head apart."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
