"""Rules of rows with pictures (`data_args.images`): what would show a part of one, or leave somebody blind."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, problem
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.rlvr_config import DistillConfig, RLVRConfig
from roll.configs.schema.sft_config import SFTConfig
from roll.configs.schema.worker_config import DataArgs

_CUTS = "error or filter where rows have pictures (data_args.images): a cut may leave a part of a picture"


def offline_picture_rules(config: OfflineConfig) -> Iterator[Violation]:
    """Check what finished rows with pictures can't have."""
    sections: dict[str, OfflineDataArgs] = {"actor_train": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation"] = config.validation.data_args
    key = next(
        (f"{name}.data_args.images" for name, data in sections.items() if config.data_args_of(data).images), None
    )
    if key is None:
        return
    if config.truncation == "right":
        yield Violation("truncation", _CUTS, "truncation=filter", "right")
    if config.pipeline == "reward_model":
        yield problem(key, "models that give a score aren't given pictures", "pipeline: dpo learns from such pairs")
    if isinstance(config, SFTConfig) and config.teacher is not None:
        yield problem("teacher", "a teacher isn't given the pictures of rows", "remove it, or train on rows of text")


def prompt_picture_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check what prompts with pictures can't have."""
    sections: dict[str, DataArgs] = {"actor_train": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation"] = config.validation.data_args
    shown = [f"{name}.data_args.images" for name, data in sections.items() if data.images is not None]
    if not shown:
        return
    if config.truncation not in ("error", "filter"):
        yield Violation("truncation", _CUTS, "truncation=filter", config.truncation)
    if isinstance(config, DistillConfig):
        yield problem(shown[0], "a teacher isn't given the pictures of prompts", "prompts of text alone")
    if config.replays:
        sentence = "recorded rollouts don't hold the pictures that their prompts show"
        yield problem("replay_from", sentence, "remove it, or take prompts of text alone", config.replay_from)
    if config.interactions:
        yield problem("interactions", "they carry on texts, and the prompts show pictures", "remove one of them")
    for name, reward in config.rewards.items():
        if reward.models:
            sentence = "a model that grades isn't given the pictures that prompts show, and would judge blindly"
            yield problem(f"rewards.{name}.name", sentence, "a rule, such as exact or math_rule", reward.name)
        if reward.tools:
            yield problem(f"rewards.{name}.tools", "calls of tools carry on texts, and the prompts show pictures")
