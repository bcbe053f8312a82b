"""Advantage estimators: values of `adv_estimator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.configs.catalog.entries import Entry, Option


@dataclass(frozen=True, kw_only=True)
class Estimator(Entry):
    """An advantage estimator: `(AdvantageInputs, *, options...) -> (advantages [B, T], returns [B, T])`."""

    compares_group: bool = False
    """It compares the responses of one prompt, and needs at least two."""
    reads_tokens: bool = False
    """It reads the reward of every token and discounts by `gamma`; the others take one number per episode."""
    counts_tokens: bool = False
    """It goes by the number of tokens, so a discount over turns means nothing to it."""
    credits_turns: bool = False
    """It credits the turns of an episode and normalises their rewards itself: for environments."""
    compares_states: bool = False
    """It compares turns that begin in the same state of the environment."""
    reads: tuple[str, ...] = ()
    """Keys of `pipeline: agentic` that act only with some estimators, this one among them."""
    reads_parts: bool = False
    """It reads the parts of a `weighted` reward one by one, and normalises them itself: for `pipeline: rlvr`."""
    reads_logit_gradients: bool = False
    """It reads the squared length of each token's gradient in the logits, which takes a forward pass."""
    needs_critic: bool = False
    """It reads values."""
    needs_greedy: bool = False
    """It reads the score of a greedy response to the same prompt."""


_GAMMA = Option(float, "gamma", {"ge": 0, "le": 1})
_LAMBDA = Option(float, "lambd", {"ge": 0, "le": 1})


def _built_in(name: str, **more: Any) -> tuple[str, Estimator]:
    return name, Estimator(path=f"roll.algorithms.estimators:{name}", **more)


_OF_TURNS = ("episode_reward_weight", "step_reward_weight", "step_reward_gamma")

ESTIMATORS: dict[str, Estimator] = dict(
    [
        _built_in("gae", options={"gamma": _GAMMA, "lam": _LAMBDA}, reads_tokens=True, needs_critic=True),
        _built_in("reinforce", options={"gamma": _GAMMA}, reads_tokens=True),
        _built_in("reinforce_plus_plus", options={"gamma": _GAMMA}, reads_tokens=True),
        _built_in("reinforce_plus_plus_baseline", compares_group=True),
        _built_in("grpo", options={"eps": Option(float, bounds={"ge": 0}, default=1e-6)}, compares_group=True),
        _built_in(
            "gdpo",
            options={"eps": Option(float, bounds={"ge": 0}, default=1e-6)},
            compares_group=True,
            reads_parts=True,
        ),
        _built_in("dr_grpo", compares_group=True),
        _built_in("rloo", compares_group=True),
        _built_in("rloo_std", options={"eps": Option(float, bounds={"ge": 0}, default=1e-6)}, compares_group=True),
        _built_in(
            "pass_at_k",
            options={"k": Option(int, bounds={"ge": 1}, default=4), "threshold": Option(float, default=0.5)},
            compares_group=True,
        ),
        _built_in("best_of_n", compares_group=True),
        _built_in(
            "vapo",
            options={
                "gamma": _GAMMA,
                "alpha": Option(float, bounds={"gt": 0}, default=0.05),
                "critic_lam": Option(float, bounds={"ge": 0, "le": 1}, default=1.0),
            },
            reads_tokens=True,
            counts_tokens=True,
            needs_critic=True,
        ),
        _built_in("remax", needs_greedy=True),
        _built_in("opo", compares_group=True),
        _built_in("gpg", compares_group=True),
        _built_in(
            "optimal_token_baseline",
            options={"gamma": _GAMMA, "handle_zero_tail": Option(bool, default=False)},
            compares_group=True,
            reads_tokens=True,
            counts_tokens=True,
            reads_logit_gradients=True,
        ),
        _built_in("gigpo", compares_group=True, credits_turns=True, compares_states=True, reads=_OF_TURNS),
        _built_in("step_reinforce", credits_turns=True, reads=_OF_TURNS[2:]),
    ]
)


def estimator_of(name: str) -> Estimator:
    """Return the entry called `name`; one of the user's own may read token rewards."""
    return ESTIMATORS.get(name) or Estimator(path=name, reads_tokens=True)
