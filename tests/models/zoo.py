"""Tiny configurations of the decoder architectures that `transformers` has, each made in milliseconds: windows and chunks of 8 tokens, rotary
boundaries at 16 positions, so that rows of 40 tokens pass them all. Weights are large enough that any wrong number shows.

    config = tiny_config("qwen3_next", vocab_size=262)
    model = tiny("qwen3_next")          # float32, in evaluation mode; depends on its name, the vocabulary and the seed only
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from midflight.models.proof import draw_weights

VOCABULARY = 262
"""Of the byte tokenizer."""
CONTEXT = 128
"""`max_position_embeddings`, where a name does not say otherwise."""
BOUNDARY = 16
"""The positions after which rotary frequencies may change."""
Options = Mapping[str, Any]

SIZES: Options = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_expand": 2,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 16, "state_size": 8,
    "attention_chunk_size": 8,
}  # fmt: skip
"""What a configuration gets of these is what it has a name for."""


@dataclass(frozen=True)
class Tiny:
    """`options` go before `SIZES`. A model of text and images has the options of its towers apart."""

    kind: str
    options: Options = field(default_factory=dict[str, Any])
    text: Options | None = None
    vision: Options = field(default_factory=dict[str, Any])


def _rope(rope_type: str, **options: Any) -> Options:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


def _layers(*kinds: str) -> Options:
    return {"layer_types": [_KINDS[kind] for kind in kinds], "num_hidden_layers": len(kinds)}


_KINDS = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention", "linear": "linear_attention", "conv": "conv",
          "moe": "moe", "mlp": "mlp"}  # fmt: skip
WINDOWED = _layers("sliding", "full")
RECURRENT = _layers("linear", "full", "linear")
LATENT: Options = {"num_key_value_heads": 4}
"""Every head has its own keys, made from what is kept."""
_LONGROPE: Options = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
                                          "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": BOUNDARY},
                      "original_max_position_embeddings": BOUNDARY, "max_position_embeddings": 64}  # fmt: skip

DENSE = {
    "llama": Tiny("llama"),
    "llama-linear-rope": Tiny("llama", _rope("linear", factor=2.0)),
    "llama-dynamic-rope": Tiny("llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": BOUNDARY}),
    "llama-yarn": Tiny("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=BOUNDARY)),
    "llama-3": Tiny(
        "llama", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=BOUNDARY)
    ),
    "mistral": Tiny("mistral"),
    "ministral": Tiny("ministral", WINDOWED),
    "ministral3": Tiny("ministral3", {"sliding_window": None}),
    "qwen2": Tiny("qwen2"),
    "qwen2-sliding": Tiny("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOWED}),
    "qwen3": Tiny("qwen3"),
    "phi": Tiny("phi"),
    "phi3": Tiny("phi3", {"sliding_window": None}),
    "phi3-longrope": Tiny("phi3", {"sliding_window": None, **_LONGROPE}),
    "gemma": Tiny("gemma"),
    "gemma2": Tiny("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "vaultgemma": Tiny("vaultgemma", {"attn_logit_softcapping": 2.0}),
    "gemma3-text": Tiny("gemma3_text", WINDOWED),
    "granite": Tiny("granite"),
    "granite-swa": Tiny("granite_swa"),
    "olmo": Tiny("olmo"),
    "olmo2": Tiny("olmo2"),
    "olmo3": Tiny("olmo3", WINDOWED),
    "cohere": Tiny("cohere", {"logit_scale": 1.0}),
    "cohere2": Tiny("cohere2", {**WINDOWED, "logit_scale": 1.0}),
    "starcoder2": Tiny("starcoder2"),
    "stablelm": Tiny("stablelm"),
    "stablelm-parallel": Tiny("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "gpt2": Tiny("gpt2"),
    "openai-gpt": Tiny("openai-gpt"),
    "gpt_bigcode": Tiny("gpt_bigcode"),
    "gpt_neo": Tiny("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": Tiny("gpt_neox"),
    "gpt_neox_japanese": Tiny("gpt_neox_japanese"),
    "gptj": Tiny("gptj", {"rotary_dim": 4}),
    "codegen": Tiny("codegen", {"rotary_dim": 4}),
    "mpt": Tiny("mpt"),
    "bloom": Tiny("bloom"),
    "opt": Tiny("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "falcon": Tiny("falcon", {"alibi": False}),
    "falcon-alibi": Tiny("falcon", {"alibi": True}),
    "falcon-new": Tiny("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "xglm": Tiny("xglm", {"ffn_dim": 48}),
    "biogpt": Tiny("biogpt"),
    "ctrl": Tiny("ctrl", {"dff": 48}),
    "persimmon": Tiny("persimmon"),
    "nemotron": Tiny("nemotron"),
    "arcee": Tiny("arcee"),
    "apertus": Tiny("apertus"),
    "smollm3": Tiny("smollm3", {"no_rope_layers": [1, 0]}),
    "exaone4": Tiny("exaone4", WINDOWED),
    "ernie4_5": Tiny("ernie4_5"),
    "glm": Tiny("glm"),
    "glm4": Tiny("glm4"),
    "helium": Tiny("helium"),
    "hunyuan_v1_dense": Tiny("hunyuan_v1_dense"),
    "seed_oss": Tiny("seed_oss"),
    "nanochat": Tiny("nanochat", {"final_logit_softcapping": 3.0}),
    "bitnet": Tiny("bitnet"),
    "diffllama": Tiny("diffllama"),
    "doge": Tiny("doge"),
    "cwm": Tiny("cwm", WINDOWED),
    "modernbert-decoder": Tiny("modernbert-decoder", {"local_attention": 8}),
    "jais2": Tiny("jais2"),
    "minicpm3": Tiny("minicpm3", {**LATENT, "dim_model_base": 32, "scale_emb": 2}),
    "youtu": Tiny("youtu", LATENT),
}
MIXTURES = {
    "mixtral": Tiny("mixtral", {"sliding_window": None}),
    "qwen2_moe": Tiny("qwen2_moe"),
    "qwen3_moe": Tiny("qwen3_moe"),
    "olmoe": Tiny("olmoe"),
    "flex_olmo": Tiny("flex_olmo"),
    "phimoe": Tiny("phimoe", {"sliding_window": None}),
    "granitemoe": Tiny("granitemoe"),
    "granitemoeshared": Tiny("granitemoeshared", {"shared_intermediate_size": 16}),
    "deepseek_v2": Tiny("deepseek_v2", {**LATENT, "first_k_dense_replace": 1}),
    "deepseek_v3": Tiny("deepseek_v3", {**LATENT, "first_k_dense_replace": 1}),
    "dots1": Tiny("dots1", {"first_k_dense_replace": 1}),
    "ernie4_5_moe": Tiny("ernie4_5_moe", {"moe_k": 2, "moe_num_experts": 4}),
    "glm4_moe": Tiny("glm4_moe", {"first_k_dense_replace": 1}),
    "glm4_moe_lite": Tiny("glm4_moe_lite", LATENT),
    "hunyuan_v1_moe": Tiny("hunyuan_v1_moe", {"moe_topk": 2}),
    "jetmoe": Tiny("jetmoe"),
    "minimax_m2": Tiny("minimax_m2"),
    "llama4-text": Tiny("llama4_text", {**_layers("chunked", "full"), "no_rope_layers": [1, 0], "moe_layers": [1], "intermediate_size_mlp": 48}),
    "gpt_oss": Tiny("gpt_oss"),
    "afmoe": Tiny("afmoe", {**WINDOWED, "num_dense_layers": 1}),
    "exaone_moe": Tiny("exaone_moe", WINDOWED),
    "longcat_flash": Tiny("longcat_flash", {**LATENT, "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2,
                                            "zero_expert_num": 2}),
    "solar_open": Tiny("solar_open"),
    "laguna": Tiny("laguna"),
    "mimo_v2_flash": Tiny("mimo_v2_flash"),
}  # fmt: skip
_MAMBA_HEADS: Options = {"num_heads": 4, "head_dim": 16}
HYBRIDS = {
    "qwen3_5-text": Tiny("qwen3_5_text", RECURRENT),
    "qwen3_5_moe-text": Tiny("qwen3_5_moe_text", RECURRENT),
    "qwen3_next": Tiny("qwen3_next", RECURRENT),
    "granitemoehybrid": Tiny("granitemoehybrid", {**RECURRENT, "shared_intermediate_size": 32, "position_embedding_type": "rope"}),
    "lfm2": Tiny("lfm2", {**_layers("conv", "full", "conv"), "block_multiple_of": 16}),
    "lfm2_moe": Tiny("lfm2_moe", {**_layers("conv", "full", "conv"), "num_dense_layers": 1}),
    "falcon_h1": Tiny("falcon_h1", {"mamba_d_ssm": 64}),
    "nemotron_h": Tiny("nemotron_h", {**_layers("linear", "moe", "full", "mlp", "linear"), "moe_shared_expert_intermediate_size": 16,
                                      "moe_latent_size": None}),
    "olmo_hybrid": Tiny("olmo_hybrid", RECURRENT),
    "bamba": Tiny("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "jamba": Tiny("jamba", {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}),
    "zamba2": Tiny("zamba2", {"layer_types": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "num_hidden_layers": 3, "num_mem_blocks": 1, "n_mamba_heads": 4,
                              "mamba_headdim": 16, "mamba_ngroups": 1, "use_mem_rope": True, "attention_head_dim": 16}),
    "minimax": Tiny("minimax", {**_layers("full", "linear"), "block_size": 8, "sliding_window": None}),
    "recurrent_gemma": Tiny("recurrent_gemma", {"num_hidden_layers": 3, "attention_window_size": 8, "lru_width": 32}),
    "mamba": Tiny("mamba"),
    "mamba2": Tiny("mamba2", _MAMBA_HEADS),
    "falcon_mamba": Tiny("falcon_mamba"),
    "rwkv": Tiny("rwkv", {"attention_hidden_size": 32}),
    "xlstm": Tiny("xlstm", {"num_heads": 2, "num_blocks": 2}),
}  # fmt: skip
_ROPE: Options = {"rope_type": "default", "rope_theta": 10000.0}
LATER = {
    **{name: Tiny(name) for name in ("apertus1p5_text", "aria_text", "beam", "cohere2_moe", "deepseek_v4", "dory", "exaone", "flint",
                                     "gemma4_unified_text", "gpt-sw3", "granitemoe_swa", "hrm_text", "hy_v3", "hy_v4", "hyperclovax",
                                     "inkling_text", "internlm3", "iquestcoder", "kolibri1", "lara_mini", "mellum", "minimax_m3_vl_text",
                                     "moshi", "sarvam_moe", "trocr")},
    **{name: Tiny(name, LATENT) for name in ("axk1", "axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "sarvam_mla")},
    **{name: Tiny(name, {"unpadded_vocab_size": VOCABULARY}) for name in ("inkling2_text", "inkling2_loop_text")},
    "bailing_hybrid": Tiny("bailing_hybrid", {**LATENT, **RECURRENT}),
    "cohere_compass_text": Tiny("cohere_compass_text", {**WINDOWED, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}),
    "dbrx": Tiny("dbrx", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT,
                          "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
                          "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}}),
    "gemma3n_text": Tiny("gemma3n_text", {**WINDOWED, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "intermediate_size": 48,
                                          "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0, 0.0]}),
    "gemma4_text": Tiny("gemma4_text", {**WINDOWED, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8,
                                        "hidden_size_per_layer_input": 8, "num_global_key_value_heads": 2}),
    "kimi_linear": Tiny("kimi_linear", {**LATENT, **RECURRENT, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2}),
    "lfm3": Tiny("lfm3", _layers("conv", "full", "conv")),
    "qwen4_exp_text": Tiny("qwen4_exp_text", {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "num_hidden_layers": 3,
                                              "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                                              "indexer_compress_ratio": 4, "hc_lowrank": 8}),
    "zamba": Tiny("zamba", {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "zaya": Tiny("zaya", {"num_experts_per_tok": 1}),
}  # fmt: skip
"""With what came to `transformers` later: of an older one some are missing."""
_DECODER: Options = {"is_decoder": True}
ENCODERS = {
    **{name: Tiny(name, _DECODER) for name in ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
                                               "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
                                               "xlm-roberta", "xlm-roberta-xl")},
    "xmod": Tiny("xmod", {**_DECODER, "default_language": "en_XX"}),
    "xlm": Tiny("xlm", {"causal": True}),
    "reformer": Tiny("reformer", {**_DECODER, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "local"],
                                  "local_attn_chunk_length": 8}),
}  # fmt: skip
"""Families of encoders that may also be decoders."""
LEFT_OUT = {
    "bart": "has an encoder", "bigbird_pegasus": "has an encoder", "blenderbot": "has an encoder", "blenderbot-small": "has an encoder",
    "marian": "has an encoder", "mbart": "has an encoder", "musicgen": "has an encoder", "musicgen_melody": "has an encoder",
    "mvp": "has an encoder", "pegasus": "has an encoder", "plbart": "has an encoder", "prophetnet": "has an encoder", "whisper": "has an encoder",
    "cpmant": "is no decoder: a token is seen by those before it", "xlnet": "is no decoder: it permutes its tokens",
    "gemma4_assistant": "drafts for another model", "gemma4_unified_assistant": "drafts for another model",
    "dots3_note": "its text is here", "fuyu": "its text is here", "gemma3n": "its text is here", "gemma4": "its text is here",
    "gemma4_unified": "its text is here", "got_ocr2": "its text is here", "moss_transcribe_diarize": "its text is here",
    "qwen3_5_moe": "its text is here", "qwen4_exp": "its text is here",
    "blt": "was not tried", "emu3": "was not tried", "git": "was not tried", "mllama": "was not tried", "phi4_multimodal": "was not tried",
}  # fmt: skip
"""Causal models of `transformers` that are not in the zoo, and why."""
_VISION: Options = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION: Options = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                         "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_SIGNS: Options = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
MULTIMODAL = {
    "gemma3": Tiny("gemma3", {"image_token_id": 250, "boi_token_index": 251, "eoi_token_index": 252, "mm_tokens_per_image": 4}, WINDOWED, _VISION),
    "qwen3_5": Tiny("qwen3_5", _SIGNS, RECURRENT, _QWEN_VISION),
    "qwen3_vl": Tiny("qwen3_vl", _SIGNS, _MROPE, _QWEN_VISION),
    "qwen2_5_vl": Tiny("qwen2_5_vl", _SIGNS, {**_MROPE, "sliding_window": None}, _QWEN_VISION),
    "qwen2_vl": Tiny("qwen2_vl", _SIGNS, {**_MROPE, "sliding_window": None}, _QWEN_VISION),
    "mistral3": Tiny("mistral3", {"image_token_index": 250, "spatial_merge_size": 1}, {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", **_VISION}),
    "llama4": Tiny("llama4", {"image_token_index": 250}, {**_layers("chunked", "full"), "no_rope_layers": [1, 0], "moe_layers": [1], "intermediate_size_mlp": 48},
                   {**_VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5}),
}  # fmt: skip
ZOO: dict[str, Tiny] = {
    name: entry
    for name, entry in {**DENSE, **MIXTURES, **HYBRIDS, **LATER, **ENCODERS, **MULTIMODAL}.items()
    if entry.kind in CONFIG_MAPPING
}
ORDINARY = ("llama", "llama-yarn", "mistral", "ministral", "qwen2", "qwen2-sliding", "qwen3")
SIX_HYBRIDS = ("qwen3_5-text", "qwen3_next", "granitemoehybrid", "lfm2", "falcon_h1", "nemotron_h")


def tiny_config(name: str, vocab_size: int = VOCABULARY) -> PreTrainedConfig:
    entry = ZOO[name]
    if entry.text is None:
        return _config(entry.kind, {"vocab_size": vocab_size, **entry.options})
    towers = type(CONFIG_MAPPING[entry.kind]()).sub_configs
    text_kind = entry.text.get("model_type") or towers["text_config"].model_type
    text = _config(text_kind, {"vocab_size": vocab_size, **entry.text})
    return _config(entry.kind, {**entry.options, "text_config": text.to_dict(), "vision_config": dict(entry.vision)})


def _config(kind: str, options: Options) -> PreTrainedConfig:
    known = CONFIG_MAPPING[kind]
    plain = known()
    names = {*plain.to_dict(), *known.attribute_map}
    sizes = {} if "text_config" in options else {name: value for name, value in SIZES.items() if name in names}
    return known(**{**sizes, "tie_word_embeddings": False, **options})


def tiny(name: str, *, vocab_size: int = VOCABULARY, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The global random state is left as it was."""
    config = tiny_config(name, vocab_size)
    auto = AutoModelForCausalLM if ZOO[name].text is None else AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype).eval()
        draw_weights(model)
    return model


def not_here() -> list[str]:
    """Causal models that the installed `transformers` has, and that are neither in the zoo nor left out for a reason."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {entry.kind for entry in ZOO.values()} - LEFT_OUT.keys())


def tiny_encoder() -> PreTrainedModel:
    """A BERT that is no decoder: every token sees all others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            _config("bert", {"vocab_size": VOCABULARY, "is_decoder": False}), dtype=torch.float32
        ).eval()
        draw_weights(model)
    return model
