"""A tiny random model of any family that transformers has, from nothing but its config class.

The sizes in a config are fields with much the same names everywhere. Each one that is known here becomes small, in the
config and in those it holds (text, vision, audio); what a family needs otherwise stands in `CHANGES`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


WINDOW = 6
VOCABULARY = 64
POSITIONS = 64
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "embedding_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "d_ff", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim",
                     "n_inner", "ffn_hidden_size", "intermediate_size_mlp", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    "encoder_layers": 3,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
                     "decoder_attention_heads"), 4),
    "encoder_attention_heads": 2,
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "d_kv", "attention_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), POSITIONS),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "rotary_dim", "v_head_dim"), 16),
    **dict.fromkeys(("kv_lora_rank",), 32),
    # Of layers with states: 8 heads of 16 are the width that Mamba 2 wants, twice the hidden size.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_attn_head_dim", "mamba_d_head",
                     "mamba_head_dim", "mamba_headdim", "mamba_d_state", "ssm_state_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_attn_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "mamba_n_groups", "mamba_ngroups"), 2),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 16),
}  # fmt: skip
_KEPT = {"vocab_size", "image_size", "patch_size", "mamba_d_state", "ssm_state_size", "mamba_chunk_size"}
ODD_SIZES: dict[str, int] = {
    **{name: {64: 80, 32: 40, 16: 20, 128: 160}.get(size, size) for name, size in SIZES.items() if name not in _KEPT},
    **dict.fromkeys((name for name in SIZES if "intermediate" in name or "ff" in name or name == "n_inner"), 72),
    **dict.fromkeys((name for name in SIZES if "position" in name or name in ("n_ctx", "max_seq_len")), 256),
    **dict.fromkeys((name for name in SIZES if "vocab" in name), VOCABULARY),
}
"""Sizes that fill no register of a CPU, with room for longer rows."""
# Fields of any family that keep it small, its dropout quiet and its output a decoder's.
SETTINGS: dict[str, Any] = dict(
    pad_token_id=0, bos_token_id=1, eos_token_id=None, is_decoder=True, forced_eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
# Sizes that some families leave to be derived, from others that are not theirs.
OPTIONAL = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers")
# Lists with an entry for each layer, which say of what kind it is.
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "indexer_types")
_SECTIONS = dict(rope_parameters=dict(rope_type="default", rope_theta=10_000.0, mrope_section=[4, 2, 2]))
# What a family needs besides. Where the defaults of its config lack layers that its published checkpoints have, they
# stand here too: `conv` in LFM2, sparse attention in MiniMax M3, attention in Bamba and Granite 4.
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"], num_hidden_layers=3),
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(encoder_hash_byte_group_vocab=64),
    "cohere_compass_text": dict(layer_types=["full_attention", "sliding_attention"], rope_parameters={
        "full_attention": None, "sliding_attention": dict(rope_type="default", rope_theta=10_000.0,
                                                          mrope_section=[4, 2, 2])}),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=10_000.0, clip_qkv=8.0), ffn_config=dict(
        ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2)),
    "deepseek_v4": dict(o_groups=2, o_lora_rank=16),
    "dory": dict(layer_types=["sliding_attention", "full_attention"] * 3, num_hidden_layers=6, n_input_layers=2,
                 n_recurrent_layers=2, n_output_layers=2),
    "dots3_note_text": dict(num_key_value_heads=4, index_n_heads=4, index_head_dim=16, index_topk=8),
    "flint": dict(layer_types=["full_attention", "sliding_attention", "full_attention"], num_hidden_layers=3,
                  mlp_only_layers=[0]),
    # Two layers each that compute sparse activations, dense ones, and with the K/V of others.
    "gemma3n_text": dict(
        layer_types=["sliding_attention", "full_attention"] * 4, num_hidden_layers=8, num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.95] * 4 + [0.0] * 4, intermediate_size=64),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"]),
    "inkling2_text": dict(layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid_sliding"],
                          num_hidden_layers=4, n_layers_per_attn_res_block=3),
    "inkling2_loop_text": dict(
        layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid"] * 2 + ["hybrid_sliding"], num_hidden_layers=7,
        n_layers_per_attn_res_block=3, loop_layer_index_start=3, loop_layer_index_end=6),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2),
    "falcon_h1": dict(mamba_d_head=16),
    **dict.fromkeys(("lfm2", "lfm2_moe"), dict(layer_types=["conv", "full_attention"])),
    "longcat_flash": dict(head_dim=8, expert_ffn_hidden_size=32, zero_expert_num=2),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2, chunk_size=16),
    "minimax_m3_vl_text": dict(
        layer_types=["full_attention", "full_attention", "minimax_m3_sparse"], num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"], index_n_heads=2, index_head_dim=16, index_block_size=4,
        index_topk_blocks=2),
    "modernbert-decoder": dict(
        layer_types=["full_attention", "sliding_attention", "full_attention"], num_hidden_layers=3),
    "moshi": dict(sliding_window=48),
    "mllama_text_model": dict(num_hidden_layers=3, cross_attention_layers=[1], rope_parameters=dict(
        rope_type="default", rope_theta=10_000.0)),
    "phi4_multimodal_audio": dict(num_blocks=1, ext_pw_out_channel=64, depthwise_separable_out_channel=64,
                                  nemo_conv_channels=64),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_text",
                     "paddleocr_vl_text", "exaone4_5_text"), _SECTIONS),
    "glm4v_moe_text": dict(rope_parameters=dict(
        rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])),
    "qwen4_exp_text": dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8,
                           indexer_compress_ratio=2, ngram_vocab_size_base=64, hc_lowrank=8),
    "nemotron_h": dict(n_groups=2, chunk_size=16),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_shape=(8, 8), axial_pos_embds_dim=(32, 32), attn_layers=("local", "lsh"),
                     local_attn_chunk_length=4, lsh_attn_chunk_length=4, feed_forward_size=64),
    "roc_bert": dict(pronunciation_vocab_size=64, shape_vocab_size=64),
    "xlnet": dict(d_head=16, d_inner=64),
    "xmod": dict(default_language="en_XX"),
    "zamba": dict(layers_block_type=["linear_attention", "hybrid"], attention_hidden_size=128, attention_head_dim=32),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"], chunk_size=16),
}


def tiny_settings(config_class: type[PreTrainedConfig], sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """Keyword arguments that give a config of this class these `sizes`, or its own smaller ones."""
    settings: dict[str, Any] = {}
    default = config_class()
    for field in dataclasses.fields(config_class):
        name, value = field.name, vars(default).get(field.name)  # getattr refuses what differs between layers
        if name in SETTINGS:
            settings[name] = SETTINGS[name]
        elif isinstance(value, PreTrainedConfig):
            settings[name] = tiny_settings(type(value), sizes) | {"model_type": value.model_type}
        elif name in sizes and isinstance(value, int) and not isinstance(value, bool) and value:
            settings[name] = min(sizes[name], value)
        elif name in OPTIONAL and value is None and name in sizes:
            settings[name] = sizes[name]
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    settings |= _one_layer_of_each_kind(default)
    return settings | CHANGES.get(config_class.model_type, {})


def _one_layer_of_each_kind(default: PreTrainedConfig) -> dict[str, Any]:
    """The settings of `default` that are lists with an entry for each layer, cut to one layer of each kind, and their
    number; at least two layers."""
    for name in LAYER_COUNTS:
        count = vars(default).get(name)
        lists = {
            name: value for name, value in vars(default).items()
            if name in PER_LAYER and isinstance(value, list | tuple) and len(value) == count
        }  # fmt: skip
        if lists:
            layers = list(dict.fromkeys(zip(*lists.values(), strict=True)))
            layers = layers if len(layers) > 1 else layers * 2
            return {name: len(layers)} | {key: [kinds[at] for kinds in layers] for at, key in enumerate(lists)}
    return {}


def make(family: str, std: float = 0.3, seed: int = 0, sizes: Mapping[str, int] = SIZES) -> PreTrainedModel:
    """A random float64 model of a family, in eval mode: a causal LM, or the vision-language model where there is none.

    Args:
        family: key of transformers' mappings.
        std: of its weights. Under small ones the output is one constant, and a comparison says nothing.
        seed: of its weights.
        sizes: by field of the config.
    """
    config_class = CONFIG_MAPPING[family]
    config = config_class(**tiny_settings(config_class, sizes))
    for each in [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]:
        each._experts_implementation = "eager"  # grouped_mm has no float64
    auto = AutoModelForCausalLM if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = auto.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, std)
            else:  # biases of 0, and norms and sinks of 1, would hide their loss
                parameter += 0.1 * torch.randn_like(parameter)
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.bos_token_id = None
    generation.pad_token_id = 0
    return model


# Vision-language models without an entry among the causal language models.
VISION = (
    "aria", "aya_vision", "cohere2_vision", "deepseek_vl", "exaone4_5", "glm4v", "glm4v_moe", "idefics2", "idefics3",
    "internvl", "kimi_k25", "kosmos-2.5", "lfm2_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "mistral3", "ovis2", "paddleocr_vl", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "shieldgemma2", "smolvlm", "video_llava", "vipllava",
)  # fmt: skip
