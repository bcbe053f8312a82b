"""Losses of preferences: values of `loss_type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll.configs.catalog.entries import Entry, Option


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(Entry):
    """`(chosen [P], rejected [P], *, options...) -> [P]`; without `pairs` see `roll.algorithms.preference:kto`."""

    pairs: bool = True
    """Rows are pairs of a chosen and a rejected response; else single responses with a label."""
    reference: bool = True
    """Log-probs are those of the policy less those of the reference; else the policy's alone."""
    per_token: bool = False
    """They are means over the tokens of a response; else sums."""


_BETA = {"beta": Option(float, "beta", {"gt": 0})}
_SMOOTHED = {**_BETA, "label_smoothing": Option(float, "label_smoothing", {"ge": 0, "lt": 0.5})}


def _built_in(name: str, options: Mapping[str, Option], function: str = "", **more: bool) -> tuple[str, PreferenceLoss]:
    path = f"roll.algorithms.preference:{function or name}"
    return name, PreferenceLoss(path=path, options=options, **more)


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = dict(
    [
        _built_in("sigmoid", _SMOOTHED),
        _built_in("sigmoid_norm", _SMOOTHED, "sigmoid", per_token=True),
        _built_in("robust", _SMOOTHED),
        _built_in("hinge", _BETA),
        _built_in("ipo", _BETA, per_token=True),
        _built_in(
            "kto",
            {
                **_BETA,
                "desirable_weight": Option(float, "desirable_weight", {"ge": 0}),
                "undesirable_weight": Option(float, "undesirable_weight", {"ge": 0}),
            },
            pairs=False,
        ),
        _built_in("orpo", _BETA, reference=False, per_token=True),
        _built_in(
            "simpo",
            {**_SMOOTHED, "simpo_gamma": Option(float, "simpo_gamma", {"ge": 0})},
            reference=False,
            per_token=True,
        ),
    ]
)


def preference_loss_of(name: str) -> PreferenceLoss:
    """Return the entry called `name`; one of the user's own compares sums of log-ratios of pairs."""
    return PREFERENCE_LOSSES.get(name) or PreferenceLoss(path=name)
