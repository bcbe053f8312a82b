"""Policy losses: values of `policy_loss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.catalog.entries import Entry, Option


@dataclass(frozen=True, kw_only=True)
class Loss(Entry):
    """A policy loss: `(PolicyLossInputs, *, options...) -> PolicyLoss`."""

    corrects_staleness: bool = False
    """It weighs a token by how probable that has become since it was sampled, so older weights need no correction."""
    decouples: bool = False
    """It weighs tokens by p_old / p_sampled, so old log-probs are computed by a forward pass of their own."""
    selects: str = ""
    """`(covariances [N], mask [N], generator, *, cov_... options) -> bool [N]`: tokens of a mini-batch that it treats
    apart, picked before the mini-batch is cut into parts."""
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
_SEQUENCE_MASK = {"sequence_mask": Option(float | None, bounds={"gt": 0})}
_COV = {"cov_ratio": Option(float, bounds={"gt": 0, "lt": 1}, default=2e-4)}
_LEVEL = Literal["sequence", "token"]


def _built_in(name: str, *, scales_with_advantage: bool = True, **more: Any) -> tuple[str, Loss]:
    return name, Loss(path=f"roll.algorithms.losses:{name}", scales_with_advantage=scales_with_advantage, **more)


def _floats(bound: Mapping[str, float], **keys: str) -> dict[str, Option]:
    return {name: Option(float, key, bound) for name, key in keys.items()}


_AT_LEAST_0, _ABOVE_0 = {"ge": 0}, {"gt": 0}

LOSSES: dict[str, Loss] = dict(
    [
        _built_in("ppo", options=_PPO | _SEQUENCE_MASK),
        _built_in("gspo", options=_CLIP),
        _built_in(
            "clip_cov",
            options={**_CLIP, **_COV, "cov_low": Option(float, default=1.0), "cov_high": Option(float, default=5.0)},
            selects="roll.algorithms.covariance:clip_cov",
        ),
        _built_in(
            "kl_cov",
            options={**_COV, "kl_coef": Option(float, bounds={"ge": 0}, default=1.0)},
            selects="roll.algorithms.covariance:kl_cov",
            scales_with_advantage=False,
        ),
        _built_in(
            "decoupled_ppo",
            options={**_PPO, "behave_cap": Option(float | None, "decoupled_ppo_cap", _ABOVE_0)},
            corrects_staleness=True,
            decouples=True,
        ),
        _built_in(
            "tis",
            options=_floats(_AT_LEAST_0, lower="tis_lower_bound") | _floats(_ABOVE_0, upper="tis_upper_bound"),
            corrects_staleness=True,
        ),
        _built_in(
            "topr",
            options={
                **_floats(_AT_LEAST_0, positive_weight="topr_positive_weight", negative_weight="topr_negative_weight"),
                "level": Option(_LEVEL, "topr_level"),
            },
            corrects_staleness=True,
        ),
        _built_in(
            "cispo",
            options=_floats(_ABOVE_0, clip_low="cispo_epsilon_low", clip_high="cispo_epsilon_high"),
            corrects_staleness=True,
        ),
        _built_in("reinforce"),
        _built_in(
            "kimi15",
            options={**_floats(_AT_LEAST_0, tau="kimi15_tau"), "level": Option(_LEVEL, "kimi15_level")},
            scales_with_advantage=False,
        ),
        _built_in("gmpo", options={name: Option(float, bounds={"gt": 0}, default=0.4) for name in _CLIP}),
        _built_in(
            "dppo",
            options={
                "divergence": Option(Literal["tv", "kl"], default="tv"),
                "threshold": Option(float, bounds={"gt": 0}, default=0.15),
            },
        ),
        _built_in("sapo", options=_floats(_ABOVE_0, tau_pos="sapo_tau_positive", tau_neg="sapo_tau_negative")),
    ]
)


def loss_of(name: str) -> Loss:
    """Return the entry called `name`; one of the user's own is a loss of which nothing is known."""
    return LOSSES.get(name) or Loss(path=name)


_SHARE = {"gt": 0, "lt": 1}


def _divergence(name: str, options: Mapping[str, Option] | None = None) -> tuple[str, Entry]:
    return name, Entry(path=f"roll.algorithms.divergences:{name}", options=options or {})


DIVERGENCES: dict[str, Entry] = dict(
    [
        _divergence("reverse_kl"),
        _divergence("forward_kl"),
        _divergence("jensen_shannon", {"beta": Option(float, bounds=_SHARE, default=0.5)}),
        _divergence("skewed_forward_kl", {"skew": Option(float, bounds=_SHARE, default=0.1)}),
        _divergence("skewed_reverse_kl", {"skew": Option(float, bounds=_SHARE, default=0.1)}),
    ]
)
"""`(student_logprobs [..., K], teacher_logprobs [..., K], mask [...], *, options...) -> [...]`"""
