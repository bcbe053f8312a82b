"""Templates of `custom_envs`.

`{name}` is filled in, `{{name}}` stands for `{name}` itself, other braces for themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM_NAMES = ("instructions", "role", "max_steps", "max_actions_per_step")
"""What `system_template` may name."""

TURN_NAMES = ("observation", "role", "step", "steps_left", "max_steps", "max_actions_per_step", "max_tokens")
"""What `turn_template` may name."""

OTHER_NAMES = {
    "current_observation": "observation",
    "turn_idx": "step",
    "actions_left": "steps_left",
    "max_response_length": "max_tokens",
    "env_instruction": "instructions",
}
"""Names that templates of other frameworks have, and what they are called here."""

_SLOT = re.compile(r"\{\{(?P<literal>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def names_in(template: str) -> list[str]:
    """Names that are filled in, in their order."""
    return [slot["name"] for slot in _SLOT.finditer(template) if slot["name"] is not None]


def unknown_names(template: str, known: Sequence[str]) -> list[str]:
    """Those of them that aren't known, each once."""
    return [name for name in dict.fromkeys(names_in(template)) if name not in known]


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The text. What is filled in isn't looked at again: the text of an environment may have braces of its own."""
    return _SLOT.sub(lambda slot: f"{{{slot['literal']}}}" if slot["literal"] else str(values[slot["name"]]), template)
