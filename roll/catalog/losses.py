"""Policy losses: values of `policy_loss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.catalog.entries import Entry, Option


@dataclass(frozen=True, kw_only=True)
class Loss(Entry):
    """A policy loss: `(PolicyLossInputs, *, options...) -> PolicyLoss`."""

    corrects_staleness: bool = False
    """It weighs a token by how probable that has become since it was sampled, so older weights need no correction."""
    decouples: bool = False
    """It weighs tokens by p_old / p_sampled, so old log-probs are computed by a forward pass of their own."""
    scales_with_advantage: bool = False
    """It is a multiple of the advantage: rows whose advantage is 0 have no gradient."""


_CLIP = {
    "clip_low": Option(float, "pg_clip_low", {"gt": 0, "lt": 1}, source="clip_low"),
    "clip_high": Option(float, "pg_clip_high", {"gt": 0}, source="clip_high"),
}
_PPO = {
    **_CLIP,
    "dual_clip": Option(float | None, "dual_clip_c", {"gt": 1}, source="dual_clip"),
    "ratio_type": Option(Literal["token", "segment"], "ratio_type"),
}
_LEVEL = Literal["sequence", "token"]

LOSSES: dict[str, Loss] = {
    "ppo": Loss(path="roll.algorithms.losses:ppo", options=_PPO, scales_with_advantage=True),
    "gspo": Loss(path="roll.algorithms.losses:gspo", options=_CLIP, scales_with_advantage=True),
    "decoupled_ppo": Loss(
        path="roll.algorithms.losses:decoupled_ppo",
        options={**_PPO, "behave_cap": Option(float | None, "decoupled_ppo_cap", {"gt": 0})},
        corrects_staleness=True,
        decouples=True,
        scales_with_advantage=True,
    ),
    "tis": Loss(
        path="roll.algorithms.losses:tis",
        options={
            "lower": Option(float, "tis_lower_bound", {"ge": 0}),
            "upper": Option(float, "tis_upper_bound", {"gt": 0}),
        },
        corrects_staleness=True,
        scales_with_advantage=True,
    ),
    "topr": Loss(
        path="roll.algorithms.losses:topr",
        options={
            "positive_weight": Option(float, "topr_positive_weight", {"ge": 0}),
            "negative_weight": Option(float, "topr_negative_weight", {"ge": 0}),
            "level": Option(_LEVEL, "topr_level"),
        },
        corrects_staleness=True,
        scales_with_advantage=True,
    ),
    "cispo": Loss(
        path="roll.algorithms.losses:cispo",
        options={
            "clip_low": Option(float, "cispo_epsilon_low", {"gt": 0}),
            "clip_high": Option(float, "cispo_epsilon_high", {"gt": 0}),
        },
        corrects_staleness=True,
        scales_with_advantage=True,
    ),
    "reinforce": Loss(path="roll.algorithms.losses:reinforce", scales_with_advantage=True),
    "kimi15": Loss(
        path="roll.algorithms.losses:kimi15",
        options={"tau": Option(float, "kimi15_tau", {"ge": 0}), "level": Option(_LEVEL, "kimi15_level")},
    ),
    "sapo": Loss(
        path="roll.algorithms.losses:sapo",
        options={
            "tau_pos": Option(float, "sapo_tau_positive", {"gt": 0}),
            "tau_neg": Option(float, "sapo_tau_negative", {"gt": 0}),
        },
        scales_with_advantage=True,
    ),
}


def loss_of(name: str) -> Loss:
    """Return the entry called `name`; one of the user's own is a loss of which nothing is known."""
    return LOSSES.get(name) or Loss(path=name)
