"""Chat templates of model folders that are at hand: their variables, and what ends a response under them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.configs.errors import Violation, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.judge_config import JUDGE, JudgeConfig
from roll.configs.schema.offline_config import OfflineConfig
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.utils.chat_templates import VariableError, check_variables
from roll.utils.response_ends import missing_end, response_ends, template_ends
from roll.utils.tokenizer_files import TokenizerFiles, tokenizer_files

_POLICY = "actor_train"


def template_checks(config: RunConfig) -> Iterator[Violation]:
    """Check that a chat template reads every variable that it is given."""
    templates = [text for text in dict.fromkeys(words for words, _ in config.prompt_templates) if not _is_text(text)]
    policy = tokenizer_files(_tokenizer_path(config, _POLICY))
    for path, variables in _sections(config):
        if variables and not templates:
            words = config.prompt_templates[0][0]
            message = f"variables are for chat templates, and the template {words!r:.60} is a text"
            yield problem(path, message, "remove them, or template=native", dict(variables))
        for words in templates:
            yield from _unread(path, variables, words, policy)
    for role, worker in config.roles.items():
        if isinstance(worker, (RewardModelConfig, JudgeConfig)) and worker.chat_template_kwargs:
            words = worker.template if isinstance(worker, RewardModelConfig) else "native"
            files = tokenizer_files(_tokenizer_path(config, role))
            yield from _unread(f"{role}.chat_template_kwargs", worker.chat_template_kwargs, words, files)


def native_template_checks(config: RunConfig) -> Iterator[Violation]:
    """Tokenizers whose own chat template is to be used have one, where their folder is at hand."""
    for key, role in _native(config):
        files = tokenizer_files(_tokenizer_path(config, role))
        if files is not None and not files.has_chat_template:
            folder = _tokenizer_path(config, role)
            sentence = f"'native' is the tokenizer's own chat template, and the tokenizer in {folder} has none"
            fix = f"{key}=plain (or question_answer, or a text with {{prompt}}, or Jinja); or a model with a template"
            yield problem(key, sentence, "a judge with a chat template" if role == JUDGE else fix, "native")


def _native(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, role) of each template that is the tokenizer's own."""
    sections: dict[str, Any] = {}
    if isinstance(config, (RLVRConfig, OfflineConfig)):
        sections["actor_train.data_args"] = config.actor_train.data_args
        if config.validation is not None:
            sections["validation.data_args"] = config.validation.data_args
    if isinstance(config, OfflineConfig):
        train = config.actor_train.data_args.template
        yield from ((f"{path}.template", _POLICY) for path, data in sections.items()
                    if (data.template or train or "native") == "native")  # fmt: skip
    if not isinstance(config, RLVRConfig) or config.replays:
        return
    for path, data in sections.items():
        if data.has_rows and (config.global_template or data.template) == "native":
            yield ("global_template" if config.global_template else f"{path}.template"), _POLICY
    yield from ((f"tag_to_template.{tag}", _POLICY) for tag, text in config.tag_to_template.items() if text == "native")
    for role, worker in config.roles.items():
        if isinstance(worker, RewardModelConfig) and worker.template == "native":
            yield f"{role}.template", role
        elif isinstance(worker, JudgeConfig):
            yield role, role


def _sections(config: RunConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "chat_template_kwargs", config.chat_template_kwargs
    if isinstance(config, RLVRConfig):
        for domain, reward in config.rewards.items():
            yield f"rewards.{domain}.chat_template_kwargs", reward.chat_template_kwargs
    for tag, env in config.custom_envs.items() if isinstance(config, AgenticConfig) else ():
        yield f"custom_envs.{tag}.chat_template_kwargs", env.chat_template_kwargs


def _unread(path: str, variables: Mapping[str, Any], words: str, files: TokenizerFiles | None) -> Iterator[Violation]:
    template = words if words != "native" else files.chat_template if files is not None else None
    if template is None:
        return
    special = [] if files is None else list(files.special_tokens_map)
    for name in variables:
        try:
            check_variables({name: variables[name]}, template, special)
        except VariableError as error:
            yield problem(
                f"{path}.{name}", str(error), "remove it, or take one that the template reads", variables[name]
            )


def template_notes(config: RunConfig) -> Iterator[str]:
    """Say what ends a response of the policy, and which tokens its model doesn't know, where its folder is at hand."""
    path = config.model_path(_POLICY)
    files = tokenizer_files(_tokenizer_path(config, _POLICY))
    yield from _beyond_embedding(files, Path(path).expanduser())
    chat = [(words, variables) for words, variables in config.prompt_templates if not _is_text(words)]
    if files is None or not chat or (files.chat_template is None and any(words == "native" for words, _ in chat)):
        return
    templates = [("" if words == "native" else words, variables) for words, variables in chat]
    ends = response_ends(files, _declared(Path(path).expanduser()), templates)
    shown = ", ".join(repr(files.decode([end]) or f"token {end}") for end in sorted(ends))
    yield f"a response ends with {shown}" if ends else "nothing ends a response: every one runs to its length limit"
    for template, variables in templates:
        known_ends = template_ends(files, template, variables)
        end = missing_end(files, known_ends)
        if end is not None:
            marker = "the next role's marker" if known_ends.next_role else "the end of sequence"
            yield (
                f"the chat template ends no turn of the assistant with a token of its own; {marker}, "
                f"{files.decode([end])!r}, ends a response, and fine-tuning teaches it"
            )


def _beyond_embedding(files: TokenizerFiles | None, folder: Path) -> Iterator[str]:
    try:
        rows = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return
    beyond = [i for i in files.added_tokens_decoder if i >= rows] if files is not None and isinstance(rows, int) else []
    if files is not None and beyond:
        shown = ", ".join(repr(files.decode([token])) for token in sorted(beyond)[:5])
        yield (
            f"the tokenizer has {len(beyond)} tokens beyond the model's embedding of {rows} ({shown}): a prompt or row "
            "with one of them is refused; resize the embedding, or take the model's own tokenizer"
        )


def _declared(folder: Path) -> Any:
    """Return `eos_token_id` of the generation settings."""
    for name in ("generation_config.json", "config.json"):
        try:
            return json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
    return None


def _is_text(words: str) -> bool:
    """Return whether a template of the configuration isn't a chat template."""
    return words != "native" and "{%" not in words and "{{" not in words


def _tokenizer_path(config: RunConfig, role: str) -> str:
    return (config.tokenizer_path(role) or config.model_path(role)) if role in config.roles else ""
