"""A model's folder has weights, and a tokenizer where the run loads one: for `roll check`, which loads neither."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from roll.configs.catalog.family_table import FAMILIES, family_of
from roll.configs.errors import Violation, no_effect, problem
from roll.configs.schema.model_shape import config_file
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


HUB_TIMEOUT_S = 1.5
"""Seconds that the hub has to answer. Its own client tries five times with pauses, for each file again."""


@cache
def hub_problem(name: str) -> str:
    """Return why the model `name` can't be loaded from the hub; empty if it can, or nobody can tell."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return ""
    except HFValidationError as error:
        return f"{name!r} is neither a folder here nor a name that the hub can have: {error}"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0") not in ("", "0"):
        return f"{name!r} isn't in the hub's cache, and HF_HUB_OFFLINE forbids to look further"
    request = Request(f"{constants.ENDPOINT}/api/models/{quote(name)}", method="HEAD")
    try:
        with urlopen(request, timeout=HUB_TIMEOUT_S):
            return ""
    except HTTPError as error:
        if error.code == 404:
            return f"there is neither a folder {name!r} here nor such a model on {constants.ENDPOINT}"
        return ""  # private or gated: whoever has a token may have it
    except (TimeoutError, URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return (
            f"{name!r} is neither a folder here nor in the hub's cache, and {constants.ENDPOINT} can't be reached "
            f"({reason})"
        )


_TOWERS = (
    "vision_config", "audio_config", "speech_config", "image_config", "vq_config", "visual", "vision_tower",
    "mm_vision_tower", "thinker_config",
)  # fmt: skip


def media_checks(key: str, name: str) -> Iterator[Violation]:
    """Check that a model whose config.json is at hand can be trained on text. Code in its folder isn't looked at."""
    tree = model_tree(name)
    family = family_of(tree.get("model_type"))
    if family.trained_as_text or family.pictures is not None:
        return
    tower = next((tower for tower in _TOWERS if tree.get(tower)), None)
    if tower is not None:
        names = ", ".join(map(str, tree.get("architectures") or ())) or tree.get("model_type")
        sentence = (
            f"{names} reads pictures, video or sound ({tower} in its config.json), which isn't supported, and it can't "
            "be loaded as a language model of text alone"
        )
        text_kinds = ", ".join(name for name, family in FAMILIES.items() if family.trained_as_text)
        fix = f"a text model; of those with such a part, these train on text: {text_kinds}; these are given pictures: "
        yield problem(key, sentence, fix + ", ".join(picture_families()), name)


def picture_families() -> list[str]:
    """Return the model types that are given pictures."""
    return [name for name, family in FAMILIES.items() if family.pictures is not None]


_PICTURE_BACKENDS = ("fsdp2_", "deepspeed_", "hf_infer")
"""Beginnings of the names of backends that give pictures to models of these families."""


def picture_checks(config: RunConfig, role: str) -> Iterator[Violation]:
    """Check that a role whose model reads pictures can give it some, and that no other freezes a tower."""
    worker, section = config.roles[role], f"{role}.model_args"
    model_type = model_tree(config.model_path(role)).get("model_type")
    backend, args = worker.strategy_args.strategy_name, worker.model_args
    if family_of(model_type).pictures is None:
        for key in ("freeze_vision_tower", "freeze_projector"):
            if getattr(args, key) and model_type is not None:
                yield no_effect(
                    f"{section}.{key}", f": models of type {model_type} aren't given pictures", "remove it", True
                )
        return
    if not backend.startswith(_PICTURE_BACKENDS):
        sentence = f"{backend} doesn't run models that read pictures, as {model_type} does"
        fix = "hf_infer" if role == "actor_infer" else "fsdp2_* or deepspeed_*"
        yield problem(f"{role}.strategy_args.strategy_name", sentence, fix, backend)
    elif config.kind_of(role) != "policy":
        sentence = f"{model_type} reads pictures, which only roles that write text are given"
        yield problem(f"{section}.model_name_or_path", sentence, "a text model", args.model_name_or_path)
    for key in ("ulysses_size", "ring_attention_size"):
        if (ranks := getattr(args, key)) > 1:
            yield problem(f"{section}.{key}", "rows with pictures can't be cut over several ranks", "1", ranks)


def model_tree(name: str) -> dict[str, Any]:
    """Return a model's config.json; empty where it isn't at hand, or can't be read."""
    file = config_file(name)
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except ValueError:
        return {}  # transformers says it better when it loads the model
    return tree if isinstance(tree, dict) else {}
