"""Rules about training with the experts that the engine has chosen (`router_replay`)."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, problem
from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.model_shape import ModelShape
from roll.configs.schema.rl_config import RLConfig

_KEY = "router_replay"
_ENGINE, _TRAINER = (f"{role}.strategy_args.strategy_config" for role in ("actor_infer", "actor_train"))


def router_replay_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that the engine reports its choice of experts, and that the trainer's routers can repeat it."""
    if not config.router_replay:
        return
    if config.replays:
        yield problem(_KEY, "experts aren't recorded, so replay_from has none to go by", "remove it", True)
    yield from _engine(config)
    worker = config.actor_train
    options = worker.strategy_args.strategy_config
    if isinstance(options, MegatronConfig):
        yield from _megatron(options)
    elif worker.model_args.torch_compile:
        why = "with router_replay routers are told what to choose, which torch.compile can't follow"
        yield problem("actor_train.model_args.torch_compile", why, "remove one of the two", True)


def _engine(config: RLConfig) -> Iterator[Violation]:
    worker = config.actor_infer
    options, name = worker.strategy_args.strategy_config, worker.strategy_args.strategy_name
    if not isinstance(options, VllmConfig):
        fix = "remove it, or actor_infer.strategy_args.strategy_name=vllm"
        yield Violation(_KEY, f"false with {name}, which doesn't tell to which experts tokens went", fix, True)
        return
    if not options.enable_prefix_caching:
        path = f"{_ENGINE}.enable_prefix_caching"
        yield Violation(
            path, "true with router_replay: vLLM keeps experts by blocks of its cache", f"{path}=true", False
        )
    stages = options.engine_args.get(options.pipeline_key, 1)
    if stages != 1:
        path = f"{_ENGINE}.{options.pipeline_key}"
        yield Violation(path, "1 with router_replay: vLLM tells the experts of one stage only", f"{path}=1", stages)
    if config.actor_infer.generating_args.stop_strings:
        path = "actor_infer.generating_args.stop_strings"
        why = "vLLM tells experts once it ends a response itself, and stop strings are looked for outside of it"
        yield problem(
            path, why, "write stop_token_ids, or remove router_replay", list(worker.generating_args.stop_strings)
        )


def _megatron(options: MegatronConfig) -> Iterator[Violation]:
    if options.additional_configs.get("moe_router_fusion"):
        path = f"{_TRAINER}.additional_configs.moe_router_fusion"
        yield problem(
            path, "a fused router can't be told what to choose (router_replay)", "remove one of the two", True
        )
    if options.moe_layer_recompute or "moe" in (options.recompute_modules or ()):
        path = f"{_TRAINER}.{'moe_layer_recompute' if options.moe_layer_recompute else 'recompute_modules'}"
        why = "recomputed expert layers aren't told the engine's experts (router_replay)"
        yield problem(path, why, f"recompute whole layers: {_TRAINER}.recompute_granularity=full")


def routed_model_rules(config: RLConfig, name: str, shape: ModelShape) -> Iterator[Violation]:
    """Check that the policy has experts; of a model whose config.json is at hand."""
    if config.router_replay and shape.experts == 0:
        yield Violation(_KEY, f"false: {name} has no experts between which a router chooses", "remove it", True)
