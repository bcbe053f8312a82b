"""Runs that people told about in public: model, layout, devices, and whether it had room.

Each entry has the thread it comes from, and the layout in the words of a configuration. Where the thread is about
another trainer, the layout is the one that holds the same states here.
"""

from __future__ import annotations

LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
LLAMA_33B = {
    "model_type": "llama", "hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60,
    "num_attention_heads": 52, "num_key_value_heads": 52, "vocab_size": 32000,
}  # fmt: skip
LLAMA_2_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN_2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
MIXTRAL_8X22B = {
    "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
    "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip

ZERO_2, ZERO_3 = {"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}
TO_HOST = {"device": "cpu"}
ALL_TO_HOST = {"zero_optimization": {"stage": 3, "offload_optimizer": TO_HOST, "offload_param": TO_HOST}}


def trained(model, devices, length, strategy, options, *, ranks, **more):
    """One role that trains on finished rows, one row per pass, in bf16 with gradient checkpointing."""
    return {"model": model, "devices": devices, "length": length, "strategy": strategy, "options": options,
            "ranks": ranks, **more}  # fmt: skip


CASES = {
    "https://github.com/OpenRLHF/OpenRLHF/issues/698: without offload": trained(LLAMA_3_8B, "a100-80:1", 128,
     "deepspeed_train", ZERO_2, ranks=1, fits=False, when="actor_train"),
    "https://github.com/OpenRLHF/OpenRLHF/issues/698: with adam_offload": trained(LLAMA_3_8B, "a100-80:1", 128,
     "deepspeed_train", {"zero_optimization": {"stage": 2, "offload_optimizer": TO_HOST}}, ranks=1, fits=True),
    "https://github.com/hiyouga/LlamaFactory/issues/5977: without offload": trained(LLAMA_3_8B, "rtx3090:8", 1024,
     "deepspeed_train", ZERO_3, ranks=8, fits=False),
    "https://github.com/hiyouga/LlamaFactory/issues/5977: with offload": trained(LLAMA_3_8B, "rtx3090:8", 1024,
     "deepspeed_train", ALL_TO_HOST, ranks=8, fits=True),
    # It failed when FSDP took over the whole model in float32, which our FSDP2 doesn't do: plain copies (ZeRO 0) do.
    "https://github.com/meta-llama/llama-cookbook/issues/100: 8 x 24 GB, with the whole model on each": trained(
        LLAMA_7B, "rtx3090:8", 2048, "deepspeed_train", {}, ranks=8, fits=False, phase="start"
    ),
    "https://github.com/meta-llama/llama-cookbook/issues/100: 4 x 40 GB": trained(LLAMA_7B, "a100-40:4", 2048,
     "fsdp2_train", {}, ranks=4, fits=True),
    "https://github.com/tatsu-lab/stanford_alpaca/issues/73: 4 x 24 GB": trained(LLAMA_7B, "rtx3090:4", 512,
     "fsdp2_train", {}, ranks=4, fits=False),
    "https://github.com/tatsu-lab/stanford_alpaca/issues/220: 1 x 80 GB": trained(LLAMA_7B, "a100-80:1", 512,
     "fsdp2_train", {}, ranks=1, fits=False),
    "https://github.com/tatsu-lab/stanford_alpaca/issues/280: 8 x 40 GB with offload": trained(LLAMA_7B, "a100-40:8",
     512, "fsdp2_train", {"offload_policy": True}, ranks=8, fits=True),
    "https://github.com/axolotl-ai-cloud/axolotl/issues/1439: 1,024 GB of host memory": trained(LLAMA_2_70B,
     "a100-80:8,cpu:1024", 2048, "deepspeed_train", ALL_TO_HOST, ranks=8, fits=False, where="host"),
    "https://github.com/deepspeedai/DeepSpeed/issues/3448: 600 GB of host memory": trained(LLAMA_33B,
     "a100-40:8,cpu:600", 2048, "deepspeed_train", ALL_TO_HOST, ranks=8, fits=False, where="host"),
}  # fmt: skip
"""Thread and case -> layout, and what was reported."""

ROLLOUTS = {
    "https://github.com/verl-project/verl/issues/224: 96 GB of host memory": {"model": QWEN_2_7B,
     "devices": "a800:8,cpu:96", "fits": False, "where": "host"},
    "https://github.com/verl-project/verl/issues/224: 1 TB of host memory": {"model": QWEN_2_7B,
     "devices": "a800:8,cpu:1024", "fits": True},
    "https://github.com/vllm-project/vllm/issues/4408: 8 x 22B on one device": {"model": MIXTRAL_8X22B,
     "devices": "a100-80:1", "fits": False, "engine_alone": True},
}  # fmt: skip
"""Likewise, with an engine on every device: of the trainer, or alone."""
