"""Training backends and inference engines: values of `strategy_args.strategy_name`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.entries import Entry

TRAINED = ("actor_train", "critic")


@dataclass(frozen=True, kw_only=True)
class Strategy(Entry):
    """A training backend, made as `cls(spec, info)`; or the function that builds an engine, see `build_engine`."""

    config: str
    """`package.module:name` of the dataclass of its options."""
    roles: tuple[str, ...]
    """Roles whose work it can do."""
    package: str | None = None
    """What must be installed, by the name it is imported under."""
    project: str = ""
    """An engine's name as its project writes it."""
    lockstep: bool = False
    """An engine that computes only inside `poll`."""


_SCHEMA = "roll.configs.schema"
_ENGINES = "roll.strategies.engines"


def _trains(path: str, config: str, package: str | None = None) -> Strategy:
    return Strategy(path=path, config=f"{_SCHEMA}.{config}", roles=TRAINED, package=package)


def _scores(path: str, config: str, package: str | None = None, *, reward_model: bool = True) -> Strategy:
    roles = ("reference", "teacher", *(("reward_model",) if reward_model else ()))
    return Strategy(path=path, config=f"{_SCHEMA}.{config}", roles=roles, package=package)


def _samples(path: str, config: str, package: str | None = None, **more: Any) -> Strategy:
    return Strategy(path=path, config=f"{_SCHEMA}.{config}", roles=("actor_infer", "judge"), package=package, **more)


_FSDP2 = ("roll.strategies.hf.fsdp2:Fsdp2Strategy", "strategy_config:Fsdp2Config")
_DEEPSPEED = (
    "roll.strategies.deepspeed.deepspeed_strategy:DeepSpeedStrategy",
    "deepspeed_config:DeepSpeedConfig",
    "deepspeed",
)
_MEGATRON = (
    "roll.strategies.megatron.megatron_strategy:MegatronStrategy",
    "megatron_config:MegatronConfig",
    "megatron.core",
)

STRATEGIES: dict[str, Strategy] = {
    "fsdp2_train": _trains(*_FSDP2),
    "fsdp2_infer": _scores(*_FSDP2),
    "deepspeed_train": _trains(*_DEEPSPEED),
    "deepspeed_infer": _scores(*_DEEPSPEED),
    "megatron_train": _trains(*_MEGATRON),
    "megatron_infer": _scores(*_MEGATRON, reward_model=False),
    "endpoint": Strategy(
        path="roll.strategies.engines.endpoint_engine:EndpointTeacher",
        config=f"{_SCHEMA}.engine_config:EndpointConfig",
        roles=("teacher",),
    ),
    "hf_infer": _samples("roll.strategies.engines.hf.hf_infer:build", "strategy_config:HfInferConfig", lockstep=True),
    "vllm": _samples(f"{_ENGINES}.vllm.vllm_engine:build", "engine_config:VllmConfig", "vllm", project="vLLM"),
    "sglang": _samples(
        f"{_ENGINES}.sglang.sglang_engine:build", "engine_config:SglangConfig", "sglang", project="SGLang"
    ),
}


def is_lockstep(name: str) -> bool:
    """Return whether this is an engine that computes only inside `poll`; one of the user's own need not be."""
    return name in STRATEGIES and STRATEGIES[name].lockstep


def strategies_for(role: str) -> tuple[str, ...]:
    """Return the names of those that can do a role's work."""
    kind = {"reward_models": "reward_model", "teachers": "teacher"}.get(role.split(".")[0], role)
    return tuple(name for name, entry in STRATEGIES.items() if kind in entry.roles)
