"""Which way the metrics of validations are better: what `save_best` goes by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower"]

HIGHER = (
    "val/accuracy", "val/reward", "val/margin", "val/token_accuracy", "val/<domain>/accuracy", "val/<domain>/reward",
    "val/<domain>/best_at_<k>", "val/<domain>/worst_at_<k>", "val/<domain>/pass_at_<k>", "val/<domain>/maj_at_<k>",
    "val/<tag>/role/<role>/reward", "val/<tag>/role/<role>/success",
)  # fmt: skip
LOWER = ("val/loss", "val/perplexity", "val/<domain>/failed")
EITHER = (
    "val/chosen_reward", "val/rejected_reward", "val/chosen_logprob", "val/rejected_logprob", "val/kl", "val/score",
    "val/<domain>/length_mean", "val/<domain>/turns_mean", "val/<tag>/role/<role>/turns",
)  # fmt: skip
"""`max:` or `min:` in front of them says which way is meant."""
NEVER = (
    "val/tokens", "val/responses", "val/env_restarts", "val/env_timeouts", "val/agent/*", "val/accuracy_spread",
    "val/<domain>/accuracy_spread", "val/<domain>/maj_at_<k>_spread",
)  # fmt: skip
"""They say nothing about the model."""

_PREFIXES: dict[str, Better] = {"max": "higher", "min": "lower"}


@dataclass(frozen=True, slots=True)
class BestBy:
    """A value of `save_best`, read."""

    metric: str
    better: Better | None
    """None: nobody has said."""


def best_by(value: str) -> BestBy:
    """Return what `save_best` names: a metric, with `max:` or `min:` in front where its name doesn't say the way."""
    prefix, colon, rest = value.partition(":")
    if colon and prefix in _PREFIXES:
        return BestBy(rest, _PREFIXES[prefix])
    return BestBy(value, better_of(value))


def better_of(metric: str) -> Better | None:
    """Return which values of a metric are better, None where it depends."""
    ways: dict[Better, tuple[str, ...]] = {"higher": HIGHER, "lower": LOWER}
    for better, patterns in ways.items():
        if any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", pattern), metric) for pattern in patterns):
            return better
    return None


_ESCAPED = re.compile(r"%(?=[0-9A-Fa-f]{2})")


def name_part(text: str) -> str:
    """Return a text, such as a domain or a reward's part, as one part of a metric's name.

    A slash, which would begin another part, and what can't be printed are written as in an address: `math/easy` is
    `math%2Feasy`. Two texts never give the same.
    """
    text = _ESCAPED.sub("%25", text) or "\0"
    return "".join(
        c if c != "/" and c.isprintable() else "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))
        for c in text
    )


def name_parts(text: str, prefix: str) -> str:
    """Return the same, but for a beginning of its own that stays as it is: `env/` of `env/steps`."""
    return prefix + name_part(text[len(prefix) :]) if text.startswith(prefix) else name_part(text)
