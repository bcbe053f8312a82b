"""The configuration of `pipeline: distill`: a student samples, a teacher scores its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from roll.configs.schema.fields import named, number
from roll.configs.schema.reward_config import ANY_TAG, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RLVRConfig):
    """As `rlvr`, with a teacher; rewards only if there are any. Inert and frozen; derived values are properties."""

    pipeline: Literal["distill"]  # type: ignore[assignment]
    exp_name: str = "distill"
    num_return_sequences_in_group: int = number(1, ge=1, le=65_536)
    """Responses per prompt. One will do, unless rewards are compared."""
    adv_estimator: str = named("reinforce", args="adv_estimator_args")
    """As in `rlvr`, for the share of the rewards, `distill.reward_coef`."""
    rewards: dict[str, RewardConfig] = field(
        default_factory=lambda: {"distill": RewardConfig(name="none", tag_included=(ANY_TAG,))}
    )
    """How each domain is scored, for validation and for `distill.reward_coef`. Left out: rows of any tag, no score."""
