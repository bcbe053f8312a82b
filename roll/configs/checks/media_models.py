"""Models that read pictures, video or sound, and which of them train on text all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

from roll.configs.errors import Violation, problem
from roll.configs.schema.model_shape import config_file

TRAINED_AS_TEXT = (
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp",
)  # fmt: skip
"""Model types with a tower for pictures that transformers loads as causal language models, and that train on text."""
_TOWERS = (
    "vision_config", "audio_config", "speech_config", "image_config", "vq_config", "visual", "vision_tower",
    "mm_vision_tower", "thinker_config",
)  # fmt: skip


def media_checks(key: str, name: str) -> Iterator[Violation]:
    """A model whose config.json is at hand can be trained on text. Code of the folder's own isn't looked at."""
    file = config_file(name)
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except ValueError:
        return  # transformers says it better when it loads the model
    if not isinstance(tree, dict) or tree.get("model_type") in TRAINED_AS_TEXT:
        return
    tower = next((tower for tower in _TOWERS if tree.get(tower)), None)
    if tower is not None:
        names = ", ".join(map(str, tree.get("architectures") or ())) or tree.get("model_type")
        sentence = (
            f"{names} reads pictures, video or sound ({tower} in its config.json), which isn't supported, and it can't "
            "be loaded as a language model of text alone"
        )
        text_kinds = ", ".join(TRAINED_AS_TEXT)
        yield problem(
            key, sentence, f"a text model; of those with such a part, these train on text: {text_kinds}", name
        )
