"""Tasks from the generators of reasoning-gym, with few-shot examples and a held-out set that doesn't overlap."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from roll.configs.schema.worker_config import ProceduralTask
from roll.types.trajectory import Task
from roll.utils.readers import DataError
from roll.utils.reasoning_gym_sets import UselessVerifier, check_dataset, create_dataset
from roll.utils.seeding import stable_hash

PAYLOAD_KEY = "reasoning_gym"
"""Where the reward `reasoning_gym` finds the generator's entry in a task's payload."""
_SLOT = re.compile(r"\{(\w+)\}")
_DRAWS_PER_TASK = 20
_MIN_DRAWS = 200


def procedural_tasks(
    spec: ProceduralTask, *, seed: int, split: str = "train", domain: str = "", exclude: Collection[str] = ()
) -> list[Task]:
    """Make `spec.size` tasks with different questions, none of them in `exclude` (see `questions_of`) or among the
    examples.

    The payload holds `prompt`, `messages` (None), `question`, `ground_truth` and, for the reward
    `reasoning_gym`, the generator's entry. The generator's seed is a hash of (seed, dataset, split), because
    neighbouring seeds of reasoning-gym generate the same tasks shifted by one.

    Raises `DataError` for an unknown dataset, a configuration it refuses, a verifier that rejects its own answers or
    pays texts that are none, and when it has too few different questions.
    """
    examples = _examples(spec, seed)
    prefix = "".join(_fill(spec.example_template, entry, spec.dataset) for entry in examples)
    taken = set(exclude) | {entry["question"] for entry in examples}
    prefix_of_id = spec.tag if spec.tag == spec.dataset else f"{spec.tag}/{spec.dataset}"
    tasks: list[Task] = []
    limit = max(spec.size * _DRAWS_PER_TASK, _MIN_DRAWS)
    for entry in _entries(spec, seed, split, limit):
        if entry["question"] in taken:
            continue
        taken.add(entry["question"])
        task_id = f"{prefix_of_id}:{split}:{len(tasks) + 1}"
        payload = {
            "prompt": prefix + _fill(spec.question_template, entry, spec.dataset),
            "messages": None,
            "question": entry["question"],
            "ground_truth": entry["answer"],
            PAYLOAD_KEY: {"dataset": spec.dataset, "config": dict(spec.config), "entry": entry},
        }
        tasks.append(
            Task(
                id=task_id,
                source=spec.dataset,
                payload=payload,
                seed=stable_hash(seed, "task", task_id),
                tag=spec.tag,
                domain=domain,
            )
        )
        if len(tasks) == spec.size:
            return tasks
    raise DataError(
        f"procedural {spec.dataset!r} ({split}): only {len(tasks)} new questions in {limit} draws, {spec.size} "
        f"are needed ({len(exclude)} are excluded because another split has them); lower a size or widen config"
    )


def questions_of(tasks: Sequence[Task]) -> set[str]:
    """Return the questions of procedural tasks, to exclude from another split."""
    return {task.payload["question"] for task in tasks}


def _fill(template: str, entry: Mapping[str, Any], dataset: str) -> str:
    """Replace each `{name}` literally, in one pass: what is put in is not looked at again."""
    values = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}

    def value(match: re.Match[str]) -> str:
        filling = values.get(match[1])
        if not isinstance(filling, (str, int, float)):
            usable = sorted(name for name, item in values.items() if isinstance(item, (str, int, float)))
            raise DataError(f"procedural {dataset!r}: template {template!r} asks for {match[0]}; there are {usable}")
        return str(filling)

    return _SLOT.sub(value, template)


def _examples(spec: ProceduralTask, seed: int) -> list[dict[str, Any]]:
    examples: dict[str, dict[str, Any]] = {}
    if not spec.few_shot:
        return []
    for entry in _entries(spec, seed, "few_shot", max(spec.few_shot * _DRAWS_PER_TASK, _MIN_DRAWS)):
        if entry["answer"] is not None:
            examples.setdefault(entry["question"], entry)
        if len(examples) == spec.few_shot:
            return list(examples.values())
    raise DataError(f"procedural {spec.dataset!r}: found only {len(examples)} of {spec.few_shot} few-shot examples")


def _entries(spec: ProceduralTask, seed: int, split: str, count: int) -> Iterator[dict[str, Any]]:
    generator_seed = stable_hash(seed, "procedural", spec.dataset, split) % 2**31
    try:
        data = create_dataset(spec.dataset, spec.config, seed=generator_seed, size=count)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"procedural {spec.dataset!r}: config {dict(spec.config)} is refused: {error}") from error
    try:
        made = check_dataset(data, spec.dataset)
    except UselessVerifier as error:
        raise DataError(f"procedural {spec.dataset!r}: {error}") from None
    for index in range(count):
        yield made[index] if index < len(made) else data[index]
