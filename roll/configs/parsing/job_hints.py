"""Files of verl's stand-alone jobs, generation and evaluation: here they are commands, not pipelines."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

_GENERATION = {
    "data.prompt_key": "--prompt_key",
    "data.n_samples": "--n_samples",
    "data.output_path": "--output_path",
    "rollout.temperature": "--temperature",
    "rollout.response_length": "--max_new_tokens",
    "rollout.prompt_length": "--prompt_length",
}
_EVALUATION = {
    "data.prompt_key": "--prompt_key",
    "data.response_key": "--response_key",
    "data.data_source_key": "--data_source_key",
    "data.reward_model_key": "--reward_model_key",
}


def job_command(plain: Mapping[str, Any]) -> str | None:
    """Return the command that does what a file without `pipeline` asks for; None if it is no such job."""
    data = plain.get("data")
    if not isinstance(data, Mapping) or "path" not in data:
        return None
    path = _word(data["path"], "DATA")
    if "output_path" in data or "n_samples" in data:
        words = ["roll eval generate", path, "--model", _word(_at(plain, "model.path"), "MODEL")]
        words += _options(plain, _GENERATION)
        engine = _at(plain, "rollout.name")
        words += ["--engine", engine] if engine in ("vllm", "sglang") else []
    elif "response_key" in data:
        file, name = (_at(plain, f"custom_reward_function.{key}") for key in ("path", "name"))
        reward = f"{_word(file, 'REWARD.py')}:{_word(name, 'compute_score')}"
        words = ["roll eval score", path, "--reward", reward, *_options(plain, _EVALUATION)]
    else:
        return None
    return " ".join(words)


def _options(plain: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    found = {option: _at(plain, key) for key, option in names.items()}
    return [word for option, value in found.items() if value is not None for word in (option, _word(value, "VALUE"))]


def _at(plain: Mapping[str, Any], path: str) -> Any:
    value: Any = plain
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _word(value: Any, otherwise: str) -> str:
    """Return a value as a shell has it; `otherwise` where there is none yet."""
    return shlex.quote(str(value)) if isinstance(value, (str, int, float)) and value != "???" else otherwise
