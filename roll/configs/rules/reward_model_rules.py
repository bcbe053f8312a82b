"""Rules about reward models and combined scores: who uses one, how scores are added, what its folder must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.errors import NO_VALUE, Violation, nearest, problem
from roll.configs.schema.judge_config import JUDGE
from roll.configs.schema.reward_config import REWARD_MODEL, REWARD_MODELS, RewardConfig, RewardModelConfig
from roll.configs.schema.rlvr_config import RLVRConfig

_CLASSIFIER = "ForSequenceClassification"
_MAX_LABELS_SHOWN = 8
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]+")
_WEIGHT_KEYS = {REWARD_MODEL: "reward_model_weight", JUDGE: "judge_weight"}


def reward_model_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Domains and the model they refer to."""
    for domain, reward in config.rewards.items():
        yield from _weight_rules(f"rewards.{domain}", reward)
        yield from _missing_models(config, f"rewards.{domain}", reward)
    for role, model in config.sections.items():
        if not isinstance(model, RewardModelConfig):
            continue
        if model.use_sequence_packing and model.infer_batch_size == 1 and not model.use_dynamic_batching_in_infer:
            expected = "false, because infer_batch_size is 1 and there is nothing to lay end to end"
            fix = f"{role}.infer_batch_size=8, or use_dynamic_batching_in_infer"
            yield Violation(f"{role}.use_sequence_packing", expected, fix, True)
    for name in config.reward_models:
        if not _MODEL_NAME.fullmatch(name):
            expected = "a name of letters, digits, _ and -, which becomes a part of metrics and processes"
            yield Violation(f"reward_models.{name}", expected, "rename it", NO_VALUE)
    asking = config.reward_model_domains
    if config.reward_model is None and asking:
        path = f"rewards.{asking[0]}"
        asked = "name" if config.rewards[asking[0]].name == REWARD_MODEL else "reward_model_weight"
        fix = "reward_model: {model_args: {model_name_or_path: <folder or hub id>}}"
        yield Violation("reward_model", f"a reward model, because {path}.{asked} asks for one", fix, NO_VALUE)


def _missing_models(config: RLVRConfig, path: str, reward: RewardConfig) -> Iterator[Violation]:
    """Refuse names that no entry of `reward_models` has, and a model that is added to itself."""
    asked = {f"{path}.reward_models_weights.{name}": name for name in reward.reward_models_weights}
    if reward.scorer == REWARD_MODELS:
        asked[f"{path}.name"] = reward.name.removeprefix(f"{REWARD_MODELS}.")
    for key, name in asked.items():
        if name not in config.reward_models:
            known = ", ".join(config.reward_models) or "none"
            fix = nearest(name, tuple(config.reward_models)) or f"reward_models: {{{name}: {{model_args: ...}}}}"
            yield Violation(key, f"a model of the section reward_models, which has {known}", fix, name)
    if reward.name in reward.added and reward.scorer == REWARD_MODELS:
        message = f"{reward.name} is this domain's score already and can't be added to itself"
        yield problem(f"{path}.reward_models_weights", message, "remove it, and set weight or rule_weight")


def _weight_rules(path: str, reward: RewardConfig) -> Iterator[Violation]:
    own = {"rule_weight": reward.rule_weight} if reward.rule_weight is not None else {}
    added = {_WEIGHT_KEYS.get(role) or role.replace(".", "_weights.", 1): w for role, w in reward.added.items()}
    if reward.name in (REWARD_MODEL, JUDGE):
        added.pop(_WEIGHT_KEYS[reward.name], None)  # `acts_if` says why
    if added and not own:
        other = next(iter(added))
        expected = f"a number, because {other} is set: a combined score states all weights"
        yield Violation(f"{path}.rule_weight", expected, f"{path}.rule_weight=1.0, or remove {other}", None)
    if own and not added:
        key = f"{path}.{'judge_weight' if reward.name == REWARD_MODEL else 'reward_model_weight'}"
        expected = "a number, because rule_weight is set: a combined score states all weights"
        yield Violation(key, expected, f"{key}=1.0 (or another model's), or remove rule_weight", None)
    for key, value in {**own, **added}.items():
        if value == 0:
            alone = f"{path}.name={next(iter(reward.added), REWARD_MODEL)}"
            fix = alone if key == "rule_weight" else "remove both weights" if len(added) == 1 else "remove it"
            yield Violation(f"{path}.{key}", "a number other than 0, which would score in vain", fix, value)


def classifier_checks(role: str, model: RewardModelConfig, file: Path, limit: Any) -> Iterator[Violation]:
    """Check what a local model's config.json shows already: that it is a classifier, its labels, its length.

    `limit`: positions that the model was built for; not a number where it doesn't say.
    """
    if isinstance(limit, int) and model.max_length is not None and model.max_length > limit:
        expected = f"at most {limit}, all that the model can hold"
        yield Violation(f"{role}.max_length", expected, "", model.max_length)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return  # transformers says it better when it loads the model
    architectures = tree.get("architectures") if isinstance(tree, dict) else None
    if architectures and not any(_CLASSIFIER in name for name in architectures):
        own = model.model_args.model_name_or_path
        path = f"{role}.model_args.model_name_or_path" if own else "reward_pretrain"
        expected = f"a sequence classifier (...{_CLASSIFIER}); {file.parent} holds {', '.join(architectures)}"
        yield Violation(path, expected, "a model trained to score responses", str(file.parent))
    elif architectures:
        yield from label_violations(model.label, _labels(tree, model.model_args.model_config_kwargs), role)


def label_violations(label: int | None, labels: list[str], role: str = REWARD_MODEL) -> Iterator[Violation]:
    """Refuse a label that isn't there, or none where the model has several."""
    names = ", ".join(f"{i} ({name})" for i, name in enumerate(labels[:_MAX_LABELS_SHOWN]))
    names += ", ..." if len(labels) > _MAX_LABELS_SHOWN else ""
    if label is None and len(labels) != 1:
        expected = f"one of the model's {len(labels)} outputs: {names}"
        yield Violation(f"{role}.label", expected, f"{role}.label=0", None)
    elif label is not None and label >= len(labels):
        yield Violation(f"{role}.label", f"an output of the model: {names}", "", label)


def _labels(tree: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    """Names of the outputs; a file that doesn't say has two, which is what transformers takes."""
    names = overrides.get("id2label") or tree.get("id2label")
    count = overrides.get("num_labels") or tree.get("num_labels") or len(names or (0, 1))
    known = {int(key): str(name) for key, name in (names or {}).items()}
    return [known.get(i, f"LABEL_{i}") for i in range(int(count))]
