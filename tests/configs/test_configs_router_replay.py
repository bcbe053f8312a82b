"""`router_replay`: an engine that tells its experts, and a trainer whose routers can be told."""

from __future__ import annotations

import json

from refused import check_refused, refusals

from roll.configs.checks.prerequisites import shape_checks
from roll.configs.parsing.loader import load_config

ON = "router_replay=true"
ENGINE, TRAINER = "actor_infer.strategy_args", "actor_train.strategy_args"
VLLM = (ON, f"{ENGINE}.strategy_name=vllm", f"+{ENGINE}.strategy_config={{sleep_level: 1}}")


def engine(options):
    return (ON, f"{ENGINE}.strategy_name=vllm", f"+{ENGINE}.strategy_config={{{options}}}")


def megatron(options):
    return f"{TRAINER}={{strategy_name: megatron_train, strategy_config: {{{options}}}}}"


REFUSED = [
    ("another engine", [ON], ["false with hf_infer", "strategy_name=vllm"]),
    ("no prefix cache", engine("enable_prefix_caching: false"), ["true with router_replay", "blocks of its cache"],
     f"{ENGINE}.strategy_config.enable_prefix_caching"),
    ("the engine's own word", engine("enable_return_routed_experts: true"), ["write router_replay"],
     f"{ENGINE}.strategy_config.enable_return_routed_experts"),
    ("stop strings", [*VLLM, "actor_infer.generating_args.stop_strings=END"], ["looked for outside", "stop_token_ids"]),
    ("a compiled trainer", [*VLLM, "actor_train.model_args.torch_compile=true"], ["can't follow"]),
    ("a fused router", [*VLLM, megatron("additional_configs: {moe_router_fusion: true}")], ["a fused router"],
     f"{TRAINER}.strategy_config.additional_configs.moe_router_fusion"),
    ("recomputed experts", [*VLLM, megatron("moe_layer_recompute: true, recompute_granularity: selective")],
     ["aren't told", "recompute whole layers"], f"{TRAINER}.strategy_config.moe_layer_recompute"),
    ("a replay", [*VLLM, "replay_from=other"], ["aren't recorded"], "router_replay"),
]  # fmt: skip


@refusals(REFUSED)
def test_where_experts_can_not_be_told_or_taken_the_key_is_refused(job, overrides, path, fragments):
    check_refused(job, overrides, path, fragments)


def test_models_with_experts_alone_can_replay_them(job, tmp_path):
    for experts, refused in ((8, 0), (0, 1)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": experts}))
        config = load_config(job, "job", [*VLLM, f"pretrain={tmp_path}", "prompt_length=16", "response_length=16"])
        found = [violation for violation in shape_checks(config) if violation.path == "router_replay"]
        assert len(found) == refused
        assert all("has no experts" in str(violation) for violation in found)


def test_pipeline_stages_of_the_engine_are_refused(job):
    stages = engine("pipeline_parallel_size: 2")
    many = [*stages, "actor_infer.num_gpus_per_worker=2", "actor_infer.device_mapping=[0, 1]", "num_gpus_per_node=2"]
    check_refused(job, many, f"{ENGINE}.strategy_config.pipeline_parallel_size", ["1 with router_replay"])
