"""What a teacher must have: the student's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.configs.errors import Violation
from roll.configs.schema.run_config import RunConfig


def teacher_checks(config: RunConfig) -> Iterator[Violation]:
    """Folders whose tokenizer.json is at hand number the same tokens alike; others are compared when the run starts."""
    for role in () if config.makes_model else teacher_roles(config):
        folders = {of: config.tokenizer_path(of) or config.model_path(of) for of in ("actor_train", role)}
        student, teacher = (_tokens(Path(folder).expanduser()) for folder in folders.values())
        if student is not None and teacher is not None and student != teacher:
            own = "tokenizer" if config.tokenizer_path(role) else "model"
            key, fix = f"{role}.model_args.{own}_name_or_path", "a teacher of the same family, or its texts as sft rows"
            expected = f"a model with the student's tokenizer: {difference(student, teacher)}"
            yield Violation(key, expected, fix, folders[role])


def teacher_roles(config: RunConfig) -> list[str]:
    """Return the roles that teach."""
    return [role for role in config.roles if role.split(".")[0] in ("teacher", "teachers")]


def difference(student: dict[str, int], teacher: dict[str, int]) -> str:
    """Say how two vocabularies differ, by an example."""
    other = {token: number for token, number in student.items() if teacher.get(token) != number}
    sizes = f"the student has {len(student)} tokens, the teacher {len(teacher)}"
    if not other:
        return sizes
    token, number = min(other.items(), key=lambda item: item[1])
    there = teacher.get(token)
    return f"{sizes}, and {token!r} is {number} in one and {'missing' if there is None else there} in the other"


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return the tokens of a folder's tokenizer.json with their numbers; None where there is none that says so."""
    try:
        read: Any = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        added = {token["content"]: token["id"] for token in read.get("added_tokens", ())}
        vocabulary = read["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else None
