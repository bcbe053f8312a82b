"""Tiny random models of every text family that transformers loads as a causal language model.

Hidden size 32, as many layers as kinds occur, four experts, windows and chunks of 4 to 8 tokens, and weights drawn
wide, so that differences show. `tests/evidence/test_evidence_families.py` runs what users run on each of them.
"""

from __future__ import annotations

from pathlib import Path

from tiny_models import char_tokenizer

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_INDEXED = {**_ROUTED, **_LATENT, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 4, "num_hidden_layers": 3}
_SPARSE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
}  # fmt: skip
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "rotary_dim": 4}
_BART = {
    "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "is_decoder": True, "is_encoder_decoder": False,
    "decoder_start_token_id": 1,
}  # fmt: skip
_BERT = {"is_decoder": True}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 4, "mamba_d_ssm": 64,
}  # fmt: skip

DECODERS: dict[str, dict[str, object]] = {
    "afmoe": {**_SPARSE, "num_hidden_layers": 4, "num_dense_layers": 1, "sliding_window": 4,
              "global_attn_every_n_layers": 2},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1},
    "axk2": {**_INDEXED, "gated_norm_rank": 4, "head_dim": 8},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "blt": {
        "max_position_embeddings": 128,
        "patcher_config": {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                           "intermediate_size": 48},
        "encoder_config": {"vocab_size": 260, "hidden_size": 32, "hidden_size_global": 32, "num_attention_heads": 4,
                           "num_hidden_layers": 1, "intermediate_size": 48},
        "decoder_config": {"vocab_size": 260, "hidden_size": 32, "hidden_size_global": 32, "num_attention_heads": 4,
                           "num_hidden_layers": 1, "intermediate_size": 48},
        "global_config": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1,
                          "intermediate_size": 48},
        "vocab_size": 260, "encoder_hash_byte_group_vocab": 40, "encoder_hash_byte_group_size": [3, 4],
    },
    "codegen": {**_GPT},
    "cohere": {},
    "cohere2": {**_WINDOWS},
    "cohere2_moe": {**_SPARSE, **_WINDOWS, "mlp_layer_types": ["dense", "sparse"],
                    "prefix_dense_intermediate_size": 48},
    "cohere_compass_text": {
        **_WINDOWS,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0,
                                                  "mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "ctrl": {**_GPT, "dff": 48},
    "cwm": {**_WINDOWS},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    "deepseek_v2": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1},
    "deepseek_v32": {**_INDEXED, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v4": {**_ROUTED, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16,
                    "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4,
                    "sliding_window": 4, "hc_mult": 2},
    "diffllama": {},
    "doge": {"keep_window_size": 128},
    "dots1": {**_ROUTED, "first_k_dense_replace": 1, "sliding_window": 4, "num_key_value_heads": 4},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_intermediate_size": 16, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 1},
    "exaone4": {**_WINDOWS},
    "exaone_moe": {**_SPARSE, **_WINDOWS, "first_k_dense_replace": 1, "num_shared_experts": 1, "n_group": 2,
                   "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "falcon": {"multi_query": True, "ffn_hidden_size": 48, "head_dim": None},
    "falcon_h1": {**_MAMBA2},
    "falcon_mamba": {"state_size": 4},
    "flex_olmo": {**_SPARSE},
    "gemma": {},
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3n_text": {**_WINDOWS, "num_hidden_layers": 4,
                     "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [48] * 4,
                     "vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
                     "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": {**_WINDOWS, "num_hidden_layers": 4,
                    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 120,
                    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "global_head_dim": 8},
    "gemma4_unified_text": {**_WINDOWS, "num_hidden_layers": 4,
                            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                            "global_head_dim": 8},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True},
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {**_INDEXED, "first_k_dense_replace": 1, "head_dim": 8},
    "gpt2": {**_GPT},
    "gpt_bigcode": {**_GPT},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gpt_oss": {**_SPARSE, **_WINDOWS},
    "gptj": {**_GPT},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.7,
                "attention_multiplier": 0.3},
    "granite_swa": {**_WINDOWS},
    "granitemoe": {**_SPARSE},
    "granitemoe_swa": {**_SPARSE, **_WINDOWS},
    "granitemoehybrid": {**_SPARSE, **_MAMBA2, "layer_types": ["mamba", "attention"]},
    "granitemoeshared": {**_SPARSE},
    "helium": {},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_SPARSE, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v4": {**_INDEXED, "hc_mult": 2},
    "hyperclovax": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "inkling_text": {**_ROUTED, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
                     "sliding_window_size": 4, "d_rel": 4, "rel_extent": 16, "layer_types": None,
                     "local_layer_ids": [0], "mlp_layer_types": ["dense", "sparse"]},
    "jais2": {},
    "jamba": {**_SPARSE, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "kimi_linear": {**_ROUTED, **_LATENT, "q_lora_rank": None, "num_local_experts": 4,
                    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
                    "linear_head_dim": 8, "linear_num_heads": 4},
    "laguna": {**_SPARSE, **_WINDOWS, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**_SPARSE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
                    "attention_chunk_size": 4, "num_hidden_layers": 4},
    "longcat_flash": {**_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2, "n_routed_experts": 4,
                      "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "head_dim": 8},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4},
    "mellum": {**_SPARSE, **_WINDOWS},
    "mimo_v2_flash": {**_ROUTED, **_WINDOWS, "v_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "minicpm3": {**_LATENT, "head_dim": 16, "dim_model_base": 4, "scale_emb": 3},
    "minimax": {**_SPARSE, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "minimax_m2": {**_SPARSE, "rotary_dim": 8},
    "minimax_m3_vl_text": {**_SPARSE, "dense_intermediate_size": 48, "rotary_dim": 4, "index_n_heads": 2,
                           "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
                           "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention"] * 2},
    "ministral": {**_WINDOWS},
    "ministral3": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {**_SPARSE},
    "modernbert-decoder": {**_WINDOWS, "local_attention": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {**_ROUTED, "num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp", "moe"],
                   "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4,
                   "moe_shared_expert_intermediate_size": 16, "use_mamba_kernels": False},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": {**_WINDOWS},
    "olmo_hybrid": {**_DELTA},
    "olmoe": {**_SPARSE},
    "openai-gpt": {**_GPT},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 128},
    "phimoe": {**_SPARSE},
    "qwen2": {},
    "qwen2_moe": {**_SPARSE, "mlp_only_layers": [0]},
    "qwen3": {},
    "qwen3_5_moe_text": {**_SPARSE, **_DELTA},
    "qwen3_5_text": {**_DELTA},
    "qwen3_moe": {**_SPARSE, "mlp_only_layers": [0]},
    "qwen3_next": {**_SPARSE, **_DELTA},
    "qwen4_exp_text": {**_SPARSE, **_DELTA, "hc_count": 2, "hc_lowrank": 4, "ngram_vocab_size_base": 100,
                       "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2,
                       "ple_embed_dim": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 8, "indexer_compress_ratio": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 4},
    "rwkv": {"context_length": 128, "attention_hidden_size": 32},
    "seed_oss": {},
    "smollm3": {"num_hidden_layers": 4},
    "solar_open": {**_ROUTED},
    "stablelm": {},
    "starcoder2": {"sliding_window": 4},
    "vaultgemma": {**_WINDOWS, "query_pre_attn_scalar": 8},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "chunk_size": 4, "ffn_round_up_to_multiple_of": 8},
    "youtu": {**_LATENT},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
              "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False, "num_key_value_heads": 4,
              "attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
               "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 4,
               "use_mamba_kernels": False, "num_key_value_heads": 4, "adapter_rank": 4, "attention_head_dim": 16},
    "zaya": {**_SPARSE, "num_experts_per_tok": 1, "router_hidden_size": 8},
}  # fmt: skip
"""Decoders by `model_type`: what their configuration has beside `_SIZES`."""

OTHERS: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        _BERT,
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        _BART,
    ),
    "prophetnet": {**_BART, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_attention_heads": 4,
                   "num_encoder_attention_heads": 4, "num_hidden_layers": None},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "attention_head_size": 8,
                 "feed_forward_size": 48, "axial_pos_embds": False, "local_attn_chunk_length": 4},
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "max_position_embeddings": None},
}  # fmt: skip
"""Encoders, decoders of encoder-decoders and models of other orders, which transformers also loads as causal ones."""

_EXTRA: dict[str, dict[str, object]] = {
    "big_bird": {"block_size": 4},
    "bigbird_pegasus": {"block_size": 4},
    "electra": {"embedding_size": 32},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 48},
    "roc_bert": {"pronunciation_vocab_size": 120, "shape_vocab_size": 120, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}  # fmt: skip


def tiny_family(folder: Path, kind: str, *, spread: float = 0.3, seed: int = 0, **options: object) -> Path:
    """Save a random model of a model type with the tokenizer of characters; `options` change its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = char_tokenizer()
    shape = {
        **_SIZES,
        "vocab_size": 120,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **(DECODERS.get(kind) or OTHERS.get(kind) or {}),
        **_EXTRA.get(kind, {}),
        **options,
    }
    config = AutoConfig.for_model(kind, **{key: value for key, value in shape.items() if value is not None})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1 and parameter.is_floating_point():
                    parameter.normal_(std=spread)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
