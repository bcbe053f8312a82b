"""How the rows of each text family may be computed, as measured with transformers 5.19 against rows by themselves.

`tests/evidence/test_evidence_families.py` measures it again, on tiny models, and fails where it isn't so. A family that
isn't here is measured when `roll check` sees it, on a small model of its configuration, and when its model is loaded.
So is one that is: fields of its configuration may open a way or close it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Way: TypeAlias = Literal["padded", "packed", "shared", "sampled"]
"""Rows padded at the right, laid end to end (use_sequence_packing), as a tree of what they have in common
(use_prefix_sharing); sampled by `hf_infer`, whose rows are padded at the left."""

# By the code of the family, whatever its configuration says.
OWN_ATTENTION = "its attention is code of its own, which isn't told where rows begin"
OWN_MASK = "its attention makes masks of its own"
SINKS = "its attention has sinks"
EAGER = "transformers has one implementation of its attention"
NAME = "it goes by the name of its attention function"
NO_HEAD = "its decoder and its output head can't be told apart"
HEAD = "its logits come from more than an output head"
POSITIONS = "it counts positions itself, padding included"
NO_CACHE = "its forward pass takes no cache of keys and values"
RECURRENT = "its recurrent layers go on from row to row"
NOT_CAUSAL = "its attention isn't causal by itself"
CACHE_ARGUMENTS = ("past_key_values", "cache")
"""What forward passes call their cache: until transformers 5.23, and since 5.24."""

_OF_CODE = frozenset({OWN_ATTENTION, SINKS, EAGER, NO_HEAD, HEAD, RECURRENT, NOT_CAUSAL})

# By fields that other models of the family may have otherwise.
CAP = "its attention caps logits, which packed rows have no code for"
MIXES = "layers other than attention go on from row to row, or it numbers positions itself"
STATES = "it has layers whose states hf_infer's cache doesn't carry"
CLAMPED = "steps of one token leave out its bounds of time steps"
LENDS = "some of its layers use the keys and values of others"
LENGTH = "it states no context length"
PADDING = "what a row gives depends on padding beside it, or on its mask"
LEFT = "it gives other log-probs for rows padded at the left"
RAISES = "its forward pass fails with several rows, or in a cache"

CAPPED: Mapping[Way, str] = {"packed": CAP, "shared": CAP}
"""Ways that are closed to models with `attn_logit_softcapping`."""

LANGUAGE_MODELS: dict[str, Mapping[Way, str]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "axk1": {},
    "axk2": {"packed": RAISES, "shared": NAME, "sampled": STATES},
    "bamba": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": POSITIONS},
    "blt": {"packed": OWN_ATTENTION, "shared": OWN_MASK, "sampled": RAISES},
    "codegen": {"packed": OWN_ATTENTION, "shared": EAGER},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cohere_compass_text": {},
    "cpmant": {"padded": RAISES, "packed": RAISES, "shared": RAISES, "sampled": POSITIONS},
    "ctrl": {},
    "cwm": {},
    "dbrx": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {"packed": RAISES, "shared": NAME, "sampled": STATES},
    "deepseek_v4": {"packed": SINKS, "shared": EAGER, "sampled": STATES},
    "diffllama": {},
    "doge": {"packed": OWN_MASK, "shared": OWN_MASK},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {"packed": OWN_ATTENTION, "shared": OWN_ATTENTION},
    "falcon_h1": {},
    "falcon_mamba": {"packed": MIXES, "shared": EAGER, "sampled": STATES},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {"packed": CAP, "shared": CAP},
    "gemma3_text": {},
    "gemma3n_text": {"sampled": LENDS},
    "gemma4_text": {"sampled": LENDS},
    "gemma4_unified_text": {"sampled": LENDS},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"packed": RAISES, "shared": PADDING, "sampled": STATES},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"packed": OWN_ATTENTION, "shared": EAGER},
    "gpt_neox": {},
    "gpt_neox_japanese": {"packed": OWN_ATTENTION, "shared": EAGER},
    "gpt_oss": {"packed": SINKS, "shared": EAGER},
    "gptj": {"packed": OWN_ATTENTION, "shared": EAGER},
    "granite": {},
    "granite_swa": {"packed": SINKS, "shared": EAGER},
    "granitemoe": {},
    "granitemoe_swa": {"packed": SINKS, "shared": EAGER},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "helium": {},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {"packed": RAISES, "shared": PADDING, "sampled": STATES},
    "hyperclovax": {},
    "inkling_text": {"packed": OWN_MASK, "shared": OWN_MASK},
    "jais2": {},
    "jamba": {"shared": MIXES},
    "jetmoe": {},
    "kimi_linear": {},
    "laguna": {},
    "lfm2": {},
    "lfm2_moe": {},
    "llama": {},
    "llama4_text": {"padded": NO_HEAD, "packed": NO_HEAD, "shared": NO_HEAD, "sampled": STATES},
    "longcat_flash": {},
    "mamba": {"packed": MIXES, "shared": EAGER, "sampled": STATES},
    "mamba2": {"shared": EAGER, "sampled": STATES},
    "mellum": {},
    "mimo_v2_flash": {"packed": SINKS, "shared": EAGER},
    "minicpm3": {},
    "minimax": {"packed": MIXES, "shared": MIXES, "sampled": STATES},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {"padded": NO_HEAD, "packed": NO_HEAD, "shared": NO_HEAD},
    "mpt": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": POSITIONS},
    "nanochat": {},
    "nemotron": {"packed": OWN_ATTENTION, "shared": MIXES},
    "nemotron_h": {"sampled": CLAMPED},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {},
    "olmoe": {},
    "openai-gpt": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": NO_CACHE},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen4_exp_text": {"packed": RAISES, "shared": RAISES, "sampled": STATES},
    "recurrent_gemma": {"padded": PADDING, "packed": PADDING, "shared": PADDING, "sampled": RAISES},
    "rwkv": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": NO_CACHE},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {"packed": OWN_ATTENTION, "shared": MIXES},
    "starcoder2": {},
    "vaultgemma": {"packed": CAP, "shared": EAGER},
    "xglm": {"packed": OWN_ATTENTION, "shared": EAGER},
    "xlstm": {"padded": PADDING, "packed": PADDING, "shared": PADDING, "sampled": NO_CACHE},
    "youtu": {},
    "zamba": {"packed": RECURRENT, "shared": RECURRENT},
    "zamba2": {"sampled": CLAMPED},
    "zaya": {"packed": RAISES, "shared": RAISES},
}
"""Decoders by `model_type`: the ways that are closed, each with the reason."""

OTHERS: dict[str, Mapping[Way, str]] = {
    "bert": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "bert-generation": {},
    "big_bird": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "camembert": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "data2vec-text": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "electra": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "ernie": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "megatron-bert": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "rembert": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "roberta": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "roberta-prelayernorm": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "roc_bert": {"padded": HEAD, "packed": HEAD, "shared": HEAD},
    "roformer": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": POSITIONS},
    "xlm-roberta": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "xlm-roberta-xl": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "xmod": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": LEFT},
    "bart": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "bigbird_pegasus": {"packed": NOT_CAUSAL, "shared": EAGER, "sampled": POSITIONS},
    "blenderbot": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "blenderbot-small": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "marian": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "mbart": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "mvp": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": POSITIONS},
    "pegasus": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "plbart": {"packed": MIXES, "shared": MIXES, "sampled": POSITIONS},
    "prophetnet": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": POSITIONS},
    "reformer": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": NO_CACHE},
    "xlm": {"padded": HEAD, "packed": HEAD, "shared": HEAD, "sampled": NO_CACHE},
    "xlnet": {"packed": OWN_ATTENTION, "shared": EAGER, "sampled": NO_CACHE},
}
"""Encoders and decoders of encoder-decoders, which transformers also loads as causal language models."""

WAYS: dict[str, Mapping[Way, str]] = {**LANGUAGE_MODELS, **OTHERS}


def closed_ways(model_type: object) -> Mapping[Way, str]:
    """Return the ways that are closed to a model type by its code, whatever its configuration says."""
    ways = WAYS.get(model_type, {}) if isinstance(model_type, str) else {}
    return {way: why for way, why in ways.items() if why in _OF_CODE}
