"""Rules of `save_best`: the metric is one that this run's validations give, and which way is better is known."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.catalog.pipeline_table import PIPELINES
from roll.configs.catalog.validation_metrics import best_by, name_part
from roll.configs.errors import Violation, nearest, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.preference_config import DPOConfig, PreferenceConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.sft_config import SFTConfig

_SHOWN = 12
_SIDES = ("chosen_reward", "rejected_reward")
_LOGPROBS = ("chosen_logprob", "rejected_logprob")


def save_best_rules(config: RunConfig) -> Iterator[Violation]:
    """Yield why checkpoints can't be compared by what `save_best` names."""
    if config.save_best is None or not config.validates or not config.eval_steps:
        return  # without validations `acts_if_rules` has said so
    best, names = best_by(config.save_best), validation_metrics(config)
    known = best.metric in names if config.pipeline in PIPELINES else best.metric.startswith(("val/", "custom/"))
    if not known:
        listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        expected = f"a metric of this run's validations: {listed or 'val/...'}"
        yield Violation("save_best", expected, nearest(best.metric, names), config.save_best)
    elif best.better is None:
        message = f"higher values of {best.metric} may be better, or lower ones"
        yield problem("save_best", message, f"save_best=max:{best.metric}, or save_best=min:{best.metric}")
    elif isinstance(config, RLVRConfig) and _is_unscored(config, best.metric):
        message = f"{best.metric} is always the same: no reward scores these responses (name: none)"
        fix = "score them in `rewards`, or choose a metric that doesn't come from a reward, e.g. min:.../length_mean"
        yield problem("save_best", message, fix, config.save_best)


def validation_metrics(config: RunConfig) -> list[str]:
    """Return the names of the metrics that a validation of this run may give, and that say something of the model."""
    if isinstance(config, RLVRConfig):
        return _of_domains(config)
    if isinstance(config, AgenticConfig):
        return _of_environments(config)
    if isinstance(config, SFTConfig):
        return ["val/loss", "val/perplexity", "val/token_accuracy"]
    if isinstance(config, PreferenceConfig):
        policy = isinstance(config, DPOConfig)
        if config.pairs:
            own = ("accuracy", "margin", *_SIDES, *(_LOGPROBS if policy else ()))
        else:
            own = ("accuracy", "kl", *_SIDES, *_LOGPROBS) if policy else ("score",)
        return ["val/loss", *(f"val/{name}" for name in own)]
    return []


def _of_domains(config: RLVRConfig) -> list[str]:
    if config.validation is None:
        return []
    ks = [f"{what}_at_{k}" for k in config.validation.pass_at_k for what in ("pass", "best", "worst")]
    ks += [f"maj_at_{k}" for k in config.validation.maj_at_k]
    of_each = ("accuracy", "reward", *ks, "failed", "length_mean")
    return [
        "val/accuracy",
        "val/reward",
        *(f"val/{name_part(domain)}/{name}" for domain in config.rewards for name in of_each),
    ]


def _of_environments(config: AgenticConfig) -> list[str]:
    if config.val_env_manager is None:
        return []
    names = ["val/accuracy", "val/reward"]
    for tag in config.tags_of(config.val_env_manager):
        own = ["accuracy", "reward", "failed", "length_mean", "turns_mean"]
        section = config.custom_envs.get(tag)
        for role in section.roles if section is not None else ():
            own += [f"role/{name_part(role)}/{name}" for name in ("reward", "success", "turns")]
        names += [f"val/{name_part(tag)}/{name}" for name in own]
    return names


def _is_unscored(config: RLVRConfig, metric: str) -> bool:
    """Return whether only rewards that give every response 0 are behind a metric."""
    if metric.rpartition("/")[2] in ("length_mean", "failed"):
        return False
    parts = metric.split("/")
    domains = [domain for domain in config.rewards if len(parts) > 2 and parts[1] == name_part(domain)]
    return all(
        config.rewards[domain].name == "none" and not config.rewards[domain].models
        for domain in domains or config.rewards
    )
