"""A model's folder has weights, and a tokenizer where the run loads one: for `roll check`, which loads neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from roll.configs.errors import Violation
from roll.configs.schema.run_config import RunConfig

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.index.json")
_TOKENIZER = ("*token*", "*vocab*", "*.model", "*.tiktoken", "merges.txt", "*.gguf")
"""Names of files that a tokenizer is made of, one of which every family's has."""
_WITH_TOKENIZER = ("actor_train", "teacher", "teachers", "reward_model", "reward_models", "judge")


def model_file_checks(config: RunConfig) -> Iterator[Violation]:
    """Folders that are here hold what is loaded from them. Code of a folder's own isn't looked at."""
    reported: set[str] = set()
    for role, worker in config.roles.items():
        args, name = worker.model_args, config.model_path(role)
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file() or args.trust_remote_code:
            continue  # another check says so
        key = f"{role}.model_args.model_name_or_path" if args.model_name_or_path else "pretrain"
        kind = role.split(".")[0]
        if _lacks(folder, _TOKENIZER) and kind in _WITH_TOKENIZER and config.tokenizer_path(role) is None:
            expected = "a model folder with its tokenizer (tokenizer.json, tokenizer_config.json), which this one lacks"
            fix = f"tokenizer.save_pretrained({name!r}), or {role}.model_args.tokenizer_name_or_path=<its folder>"
            yield Violation(key, expected, fix, name)
        if _lacks(folder, _WEIGHTS) and name not in reported:
            reported.add(name)
            expected = "a model folder with weights (*.safetensors, *.bin), which this one lacks"
            yield Violation(key, expected, "copy them there, or model.save_pretrained(...)", name)


def _lacks(folder: Path, names: Sequence[str]) -> bool:
    return not any(next(folder.glob(name), None) for name in names)
