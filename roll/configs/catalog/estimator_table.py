"""Advantage estimators: values of `adv_estimator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.entries import OWN_PATH, Entry, Option
from roll.configs.catalog.stage_table import ESTIMATOR_NEEDS, declared_in_source


@dataclass(frozen=True, kw_only=True)
class Estimator(Entry):
    """An advantage estimator: `(AdvantageInputs, *, options...) -> (advantages [B, T], returns [B, T])`."""

    needs: tuple[str, ...] = ()
    """What it reads beyond the reward of each episode, names of `ESTIMATOR_NEEDS`."""
    discounts_over: tuple[str, ...] = ()
    """What its `gamma` can count: tokens, turns. Empty: it has none."""
    keys: tuple[str, ...] = ()
    """Keys of `pipeline: agentic` that act only with some estimators, this one among them."""


_GAMMA = Option(float, "gamma", {"ge": 0, "le": 1})
_LAMBDA = Option(float, "lambd", {"ge": 0, "le": 1})


def _built_in(name: str, *needs: str, **more: Any) -> tuple[str, Estimator]:
    return name, Estimator(path=f"roll.algorithms.estimators:{name}", needs=needs, **more)


_OF_TURNS = ("episode_reward_weight", "step_reward_weight", "step_reward_gamma")
_BY_TOKEN: dict[str, Any] = {"options": {"gamma": _GAMMA}, "discounts_over": ("token", "turn")}
_EPS = {"eps": Option(float, bounds={"ge": 0}, default=1e-6)}

ESTIMATORS: dict[str, Estimator] = dict(
    [
        _built_in(
            "gae",
            "token_rewards",
            "values",
            options={"gamma": _GAMMA, "lam": _LAMBDA},
            discounts_over=("token", "turn"),
        ),
        _built_in("reinforce", "token_rewards", **_BY_TOKEN),
        _built_in("reinforce_plus_plus", "token_rewards", **_BY_TOKEN),
        _built_in("reinforce_plus_plus_baseline", "group"),
        _built_in("grpo", "group", options=_EPS),
        _built_in("gdpo", "group", "parts", options=_EPS),
        _built_in("dr_grpo", "group"),
        _built_in("rloo", "group"),
        _built_in("rloo_std", "group", options=_EPS),
        _built_in(
            "pass_at_k",
            "group",
            options={"k": Option(int, bounds={"ge": 1}, default=4), "threshold": Option(float, default=0.5)},
        ),
        _built_in("best_of_n", "group"),
        _built_in(
            "vapo",
            "token_rewards",
            "values",
            options={
                "gamma": _GAMMA,
                "alpha": Option(float, bounds={"gt": 0}, default=0.05),
                "critic_lam": Option(float, bounds={"ge": 0, "le": 1}, default=1.0),
            },
            discounts_over=("token",),
        ),
        _built_in("remax", "greedy_rewards"),
        _built_in("opo", "group"),
        _built_in("gpg", "group"),
        _built_in(
            "optimal_token_baseline",
            "group",
            "token_rewards",
            "logit_gradients",
            options={"gamma": _GAMMA, "handle_zero_tail": Option(bool, default=False)},
            discounts_over=("token",),
        ),
        _built_in("gigpo", "group", "turns", "states", keys=_OF_TURNS),
        _built_in("step_reinforce", "turns", keys=_OF_TURNS[2:]),
    ]
)


def estimator_of(name: str) -> Estimator:
    """Return the entry called `name`; one of the user's own may read the rewards of tokens, and declares what else."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    declared = declared_in_source(name) if OWN_PATH.match(name) else None
    more = () if declared is None else tuple(need for need in declared.needs if need in ESTIMATOR_NEEDS)
    return Estimator(path=name, needs=("token_rewards", *more), discounts_over=("token", "turn"))
