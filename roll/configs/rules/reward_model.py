"""Rules about reward models: who uses one, how its score joins a rule's, what its folder must hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.errors import NO_VALUE, Violation
from roll.configs.schema.reward_config import REWARD_MODEL, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig

_CLASSIFIER = "ForSequenceClassification"
_MOST_LABELS_SHOWN = 8


def reward_model_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Domains and the model they refer to."""
    for domain, reward in config.rewards.items():
        yield from _weight_rules(f"rewards.{domain}", reward)
    model = config.reward_model
    if model is not None:
        if model.use_sequence_packing and model.infer_batch_size == 1 and not model.use_dynamic_batching_in_infer:
            expected = "false, because infer_batch_size is 1 and there is nothing to lay end to end"
            fix = "reward_model.infer_batch_size=8, or use_dynamic_batching_in_infer"
            yield Violation("reward_model.use_sequence_packing", expected, fix, True)
    elif config.reward_model_domains:
        path = f"rewards.{config.reward_model_domains[0]}"
        asked = "name" if config.rewards[config.reward_model_domains[0]].name == REWARD_MODEL else "reward_model_weight"
        fix = "reward_model: {model_args: {model_name_or_path: <folder or hub id>}}"
        yield Violation("reward_model", f"a reward model, because {path}.{asked} asks for one", fix, NO_VALUE)


def _weight_rules(path: str, reward: RewardConfig) -> Iterator[Violation]:
    weights = {"rule_weight": reward.rule_weight, "reward_model_weight": reward.reward_model_weight}
    given = {key: value for key, value in weights.items() if value is not None}
    if not given or reward.name == REWARD_MODEL:
        return
    for key, value in weights.items():
        if value is None:
            other = next(iter(given))
            expected = f"a number, because {other} is set: a combined score states both weights"
            yield Violation(f"{path}.{key}", expected, f"{path}.{key}=1.0, or remove {other}", None)
        elif value == 0:
            alone = f"{path}.name={REWARD_MODEL}" if key == "rule_weight" else "remove both weights"
            yield Violation(f"{path}.{key}", "a number other than 0, which would score in vain", alone, value)


def classifier_checks(config: RLVRConfig, file: Path, limit: Any) -> Iterator[Violation]:
    """What a local model's config.json says already: that it is a classifier, its labels, its length.

    `limit`: positions that the model was built for; not a number where it doesn't say.
    """
    model = config.reward_model
    assert model is not None, "only called for a reward model that will be started"
    if isinstance(limit, int) and model.max_length is not None and model.max_length > limit:
        expected = f"at most {limit}, all that the model can hold"
        yield Violation("reward_model.max_length", expected, "", model.max_length)
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return  # transformers says it better when it loads the model
    architectures = tree.get("architectures") if isinstance(tree, dict) else None
    if architectures and not any(_CLASSIFIER in name for name in architectures):
        own = model.model_args.model_name_or_path
        path = "reward_model.model_args.model_name_or_path" if own else "reward_pretrain"
        expected = f"a sequence classifier (...{_CLASSIFIER}); {file.parent} holds {', '.join(architectures)}"
        yield Violation(path, expected, "a model trained to score responses", str(file.parent))
    elif architectures:
        yield from label_violations(model.label, _labels(tree, model.model_args.model_config_kwargs))


def label_violations(label: int | None, labels: list[str]) -> Iterator[Violation]:
    """A label that isn't there, or none where the model has several."""
    names = ", ".join(f"{i} ({name})" for i, name in enumerate(labels[:_MOST_LABELS_SHOWN]))
    names += ", ..." if len(labels) > _MOST_LABELS_SHOWN else ""
    if label is None and len(labels) != 1:
        expected = f"one of the model's {len(labels)} outputs: {names}"
        yield Violation("reward_model.label", expected, "reward_model.label=0", None)
    elif label is not None and label >= len(labels):
        yield Violation("reward_model.label", f"an output of the model: {names}", "", label)


def _labels(tree: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    """Names of the outputs; a file that doesn't say has two, which is what transformers takes."""
    names = overrides.get("id2label") or tree.get("id2label")
    count = overrides.get("num_labels") or tree.get("num_labels") or len(names or (0, 1))
    known = {int(key): str(name) for key, name in (names or {}).items()}
    return [known.get(i, f"LABEL_{i}") for i in range(int(count))]
