"""Rules between keys of the optimisation: estimator, rewards, KL, loss. Each yields what is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from roll.configs.catalog.entries import OWN_PATH, Entry
from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import DIVERGENCES, LOSSES
from roll.configs.catalog.stage_table import declared_in_source, stage_problems
from roll.configs.errors import Violation, nearest, no_effect, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.policy_config import PolicyOptimisation
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import DistillConfig, RLVRConfig
from roll.configs.schema.sft_config import SFTConfig


def named_rules(value: str, path: str, known: tuple[str, ...]) -> Iterator[Violation]:
    """Check that a name is in the table, or a path of the user's own."""
    if value not in known and not OWN_PATH.match(value):
        expected = f"one of {', '.join(known)}; or your own as package.module:name or file.py:name"
        where, _, name = value.rpartition(".")
        path_of_own = f"write {value}:name" if name == "py" else f"write {where}:{name}" if where and name else ""
        yield Violation(path, expected, nearest(value, known) or path_of_own, value)


def duplicate_options(config: Any, path: str, entry: Entry, default_of: Callable[[str], Any]) -> Iterator[Violation]:
    """Refuse an option that is written while its own key isn't at its default; `default_of` returns a key's default."""
    for name, value in getattr(config, path).items():
        option = entry.options.get(name)
        key = option.source or option.key if option is not None else ""
        if option is not None and key and getattr(config, key) != default_of(key):
            expected = f"no option {name}, because {option.key} says the same"
            yield Violation(f"{path}.{name}", expected, "keep one of the two", value)


def estimator_rules(config: RLConfig) -> Iterator[Violation]:
    """Names, group sizes, critic."""
    turns = isinstance(config, AgenticConfig)
    known = tuple(name for name, entry in ESTIMATORS.items() if turns or "turns" not in entry.needs)
    yield from _named(config.adv_estimator, "adv_estimator", known)
    yield from _named(config.policy_loss, "policy_loss", tuple(LOSSES))
    if config.adv_estimator not in ESTIMATORS and not turns and {"turns", "states"} & {*config.estimator.needs}:
        what = f"{config.adv_estimator} needs the turns of an environment, which only pipeline agentic has"
        yield problem("adv_estimator", what, "needs without turns and states", config.adv_estimator)
    default_of = functools.partial(getattr, PolicyOptimisation())
    yield from duplicate_options(config, "adv_estimator_args", config.estimator, default_of)
    yield from duplicate_options(config, "policy_loss_args", config.loss, default_of)
    if config.group_size == 1:
        size = config.group_size_key
        for key, why in (*_needs_group(config), *config.needs_group):
            fix = f"{size}=8, or adv_estimator=reinforce and nothing relative to a group"
            yield Violation(size, f"at least 2, because {key} {why}", fix, 1)
    if config.uses_critic and config.critic is None:
        expected = f"a critic, because {_reader(config, 'values', f'adv_estimator is {config.adv_estimator}')}"
        yield Violation("critic", expected, "add a critic section", None)
    if config.max_steps and config.critic_warmup >= config.max_steps:
        expected = f"less than max_steps ({config.max_steps}), or the actor never trains"
        yield Violation("critic_warmup", expected, "", config.critic_warmup)


def _reader(config: RLConfig, output: str, otherwise: str) -> str:
    """Return why a model is needed: a stage of the user's own says so, or `otherwise`."""
    if output in config.estimator.needs or not (readers := [p for p, n in config.stage_needs.items() if output in n]):
        return otherwise
    return f"the stage {readers[0]} needs {output}"


def stage_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that stages of the user's own can run, and that what they give is read."""
    for path in config.stages:
        if not OWN_PATH.match(path):
            yield Violation("stages", "your own as package.module:name or path/to/file.py:name", "", path)
            continue
        if config.stages.count(path) > 1:
            yield Violation("stages", "each stage once", "remove one", path)
        declared = declared_in_source(path)
        for wrong in () if declared is None else stage_problems(declared):
            yield Violation("stages", f"a stage that can run; {wrong}", "see docs/your_own_algorithm.md", path)
        for name in () if declared is None else declared.gives:
            if name == "returns" and not config.uses_critic:
                yield Violation(
                    "stages", "a stage whose returns a critic learns; there is none", "adv_estimator=gae", path
                )
            if name in ("rewards", "token_rewards") and "turns" in config.estimator.needs:
                why = f"adv_estimator {config.adv_estimator} takes the rewards of turns as they are"
                yield Violation(
                    "stages", f"a stage that gives something else than {name}; {why}", "shaped_rewards", path
                )
    for path in config.stage_args:
        if path not in config.stages:
            yield no_effect(f"stage_args.{path}", ", because stages doesn't name it", f"add {path} to stages")


def _named(value: str, path: str, known: tuple[str, ...]) -> Iterator[Violation]:
    for wrong in named_rules(value, path, known):
        if value in ESTIMATORS and path == "adv_estimator":
            what = f"{value} credits the turns of an environment, which only pipeline agentic has"
            wrong = problem(path, what, f"use {wrong.expected}")
        yield wrong


def _needs_group(config: RLConfig) -> Iterator[tuple[str, str]]:
    """Check what compares the responses of one prompt."""
    zero = "compares the responses of one prompt: with one response every advantage is 0"
    if "group" in config.estimator.needs:
        yield f"adv_estimator {config.adv_estimator}", zero
    if "group" in (config.reward_mean_over, config.reward_std_over):
        yield "reward_norm group", zero
    if config.add_len_reward:
        yield "add_len_reward", "compares lengths within the group"


def reward_norm_rules(config: RLConfig) -> Iterator[Violation]:
    """Whitening that suits the estimator, thresholds in order."""
    name = config.adv_estimator
    if config.whiten_rewards and "token_rewards" not in config.estimator.needs:
        expected = (
            f"false with adv_estimator {name}, which takes one number per response: whitened tokens take the mean off "
            "once per token, and the length of a response would count as reward"
        )
        yield Violation("whiten_rewards", expected, "whiten_rewards=false; see whiten_advantages", True)
    if "parts" in config.estimator.needs:
        yield from _part_rules(config)
    if config.difficulty_mask and config.difficulty_low_threshold >= config.difficulty_high_threshold:
        expected = f"less than difficulty_high_threshold ({config.difficulty_high_threshold})"
        yield Violation("difficulty_low_threshold", expected, "", config.difficulty_low_threshold)


def _part_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that an estimator that normalises the parts of rewards has parts, and nothing else normalises or joins
    them."""
    name = config.adv_estimator
    if not (isinstance(config, RLVRConfig) and any(config.reward_terms(domain) for domain in config.rewards)):
        expected = (
            "an estimator of one reward: no domain has the reward `weighted` with parts, which are what it compares"
        )
        yield Violation("adv_estimator", expected, "adv_estimator=grpo, or rewards.<domain>.name=weighted", name)
    for key in ("reward_mean_over", "reward_std_over", "reward_clip"):
        if (value := getattr(config, key)) is not None:
            where = "reward_clip" if key == "reward_clip" else "reward_norm"
            expected = f"null with adv_estimator {name}, which normalises every part of the reward itself"
            yield Violation(where, expected, "remove it", value)
            break
    if config.add_token_level_kl:
        expected = f"false with adv_estimator {name}, which compares rewards without what tokens cost"
        yield Violation("add_token_level_kl", expected, "use_kl_loss=true instead", True)


def kl_rules(config: RLConfig) -> Iterator[Violation]:
    """Check KL terms and the reference they need."""
    if config.add_token_level_kl and config.use_kl_loss and not config.allow_both_kl:
        expected = "one KL term: add_token_level_kl already puts it into the reward"
        fix = "use_kl_loss=false, or add_token_level_kl=false, or say allow_both_kl=true"
        yield Violation("use_kl_loss", expected, fix, True)
    if config.uses_reference and config.reference is None and not config.reference_is_actor:
        key = "use_kl_loss" if config.use_kl_loss else "add_token_level_kl" if config.add_token_level_kl else "stages"
        expected = f"a reference, because {_reader(config, 'ref_logprobs', f'{key} is on')}"
        fix = "add a reference section, or " + ("remove the stage" if key == "stages" else f"{key}=false")
        yield Violation("reference", expected, fix, None)
    if config.full_kl and config.teacher is not None:
        key = "kl_penalty" if config.full_kl_penalty else "kl_loss_type"
        expected = "an estimator with a teacher: whole distributions are kept of one other model only"
        yield Violation(key, expected, f"{key}=low_var_kl", "full")
    if config.target_kl is not None and config.init_kl_coef == 0:
        expected = "more than 0, because the adaptive controller only multiplies it"
        yield Violation("init_kl_coef", expected, "init_kl_coef=0.2", 0.0)


def loss_rules(config: RLConfig) -> Iterator[Violation]:
    """Constants of the losses and the correction."""
    yield from _off_policy_rules(config)
    options = config.loss_options
    if config.policy_loss == "tis" and options["lower"] >= options["upper"]:
        written = bool(config.policy_loss_args)
        expected = f"less than {'upper' if written else 'tis_upper_bound'} ({options['upper']})"
        yield Violation("policy_loss_args.lower" if written else "tis_lower_bound", expected, "", options["lower"])
    coefs = (config.rl_loss_coef, config.sft_loss_coef, config.entropy_loss_coef)
    if not any(coefs) and not (config.use_kl_loss and config.kl_loss_coef):
        yield Violation("rl_loss_coef", "more than 0, because no other loss is on", "rl_loss_coef=1", 0.0)
    correction = config.train_infer_correction
    if correction is not None:
        bounds = ("importance_upper", "ratio_low", "ratio_high", "difference_low", "difference_high")
        divergences = ("divergence_high", "row_divergence_high")
        upper = correction.importance_upper
        if upper is not None and correction.importance_lower > upper:
            expected = f"at most importance_upper ({upper:g})"
            yield Violation("train_infer_correction.importance_lower", expected, "", correction.importance_lower)
        if correction.divergence != "k3" and all(getattr(correction, name) is None for name in divergences):
            fix = "train_infer_correction.divergence_high=0.1, or remove it"
            expected = "a bound: divergence_high and row_divergence_high are null, so it does nothing"
            yield Violation("train_infer_correction.divergence", expected, fix, correction.divergence)
        if all(getattr(correction, name) is None for name in (*bounds, *divergences)):
            expected = "a weight or a filter: all its bounds are null, so it does nothing"
            yield Violation("train_infer_correction", expected, "importance_upper=2, or train_infer_correction=null")
    if config.error_max_len_clip and config.error_max_len_threshold is None:
        yield Violation("error_max_len_threshold", "a length in tokens, because error_max_len_clip is on", "", None)


def _off_policy_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that samples of older weights are corrected for exactly once."""
    correction, ratio = config.train_infer_correction, config.async_generation_ratio
    if config.loss.decouples and correction is not None and correction.importance_upper is not None:
        yield Violation(
            "train_infer_correction.importance_upper",
            f"null with policy_loss {config.policy_loss}: both multiply a token's loss by p_train / p_infer, so the "
            "weight would be applied twice",
            "train_infer_correction.importance_upper=null (its filters stay), or train_infer_correction=null, or "
            "policy_loss=ppo",
            correction.importance_upper,
        )
    corrected = correction is not None or config.loss.corrects_staleness
    if ratio > 0 and not corrected and not config.allow_uncorrected_async:
        first, *others = (name for name, loss in LOSSES.items() if loss.corrects_staleness)
        yield Violation(
            "async_generation_ratio",
            f"0 with policy_loss {config.policy_loss} and no train_infer_correction: responses may come from weights "
            "that many updates old, and nothing would correct for it",
            f"policy_loss={first} (or {', '.join(others)}), or "
            "train_infer_correction={level: token, importance_upper: 2}, or say allow_uncorrected_async=true",
            ratio,
        )


def teacher_rules(config: RLConfig | SFTConfig) -> Iterator[Violation]:
    """Check the teacher, and what its weight leaves to rewards."""
    yield from named_rules(config.distill.divergence, "distill.divergence", tuple(DIVERGENCES))
    if isinstance(config, RLConfig):
        yield from _tags(config)
    elif config.teacher is not None and config.teacher.tags:
        yield Violation("teacher.tags", "none: it teaches all rows", "remove it", list(config.teacher.tags))
    if isinstance(config, DistillConfig):
        if config.teacher is None and not config.val_only:
            fix = "teacher={model_args: {model_name_or_path: <folder or hub id>}}"
            yield Violation("teacher", "the model that teaches", fix, None)
        scored = [domain for domain, reward in config.rewards.items() if reward.name != "none"]
        if config.distill.reward_coef and not scored:
            expected = "0, because no domain of rewards gives a score"
            yield Violation("distill.reward_coef", expected, "rewards.<domain>.name=...", config.distill.reward_coef)


def _tags(config: RLConfig) -> Iterator[Violation]:
    """Check that every tag has one teacher."""
    if config.teacher is not None and config.teacher.tags:
        expected = "none: it teaches all tasks that none of teachers teaches"
        yield Violation("teacher.tags", expected, "teachers={<name>: {tags: ...}}", list(config.teacher.tags))
    taught: set[str] = set()
    for name, model in config.teachers.items():
        for tag in model.tags or (name,):
            if tag in taught:
                yield Violation(f"teachers.{name}.tags", "each tag at one teacher", "remove it from one of them", tag)
            taught.add(tag)
