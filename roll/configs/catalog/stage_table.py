"""What the stages of a training step may need and give, and how one of the user's own declares it.

A stage is a piece of a step's work between its rollouts and its update: reference log-probs, shaping, the estimator, a
filter. It names what it reads (`needs`) and what it returns (`gives`). `roll/pipelines/credit/stages.py`
runs them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roll.configs.catalog.definitions import definition_in, module_file
from roll.configs.catalog.entries import nearest

F = TypeVar("F", bound=Callable[..., Any])

MODEL_OUTPUTS = {
    "old_logprobs": "[R, T], log-probs of the sampled tokens under the trainer's weights before the update",
    "ref_logprobs": "[R, T], those of the reference",
    "values": "[R, T], of the critic",
    "entropies": "[R, T], entropy of the trainer's distribution that a token was drawn from",
    "logit_gradients": "[R, T], squared length of the gradient of a token's log-prob in the trainer's logits",
}
"""What models say about the sampled tokens. The forward pass is made where something needs it."""

PHASES: tuple[dict[str, str], ...] = (
    {"scores": "[R], as reward functions and environments gave them"},
    {"shaped_rewards": "[R], scores times the domain's weight, with penalties and bonuses"},
    {"rewards": "[R], normalised and clipped"},
    {"token_rewards": "[R, T], rewards on the tokens at which they are paid, minus what the KL costs"},
    {"advantages": "[R, T]", "returns": "[R, T], what the critic learns to predict"},
    {
        "trajectory_mask": "bool [R], trajectories that count in the loss",
        "token_mask": "bool [R, T], tokens that count in the loss",
        "trajectory_weights": "[R], factors of trajectories in the loss; one of weight 0 leaves the denominators",
    },
)
"""From scores to what the loss reads: R trajectories, T tokens, of which `action_mask` marks what the policy chose.
Stages of one's own run at the end of the phase in which what they give is made."""
CREDIT = {name: text for phase in PHASES for name, text in phase.items()}

_GIVEN = {name: text for phase in PHASES[1:] for name, text in phase.items()}

ESTIMATOR_NEEDS = {
    "token_rewards": CREDIT["token_rewards"],
    **{name: MODEL_OUTPUTS[name] for name in ("values", "logit_gradients")},
    "group": "at least two responses of one prompt, which are compared",
    "greedy_rewards": "[B], the reward of a greedy response to the same prompt",
    "parts": "the parts of a `weighted` reward, which the estimator normalises one by one",
    "turns": "the turns of an episode and their rewards, which the estimator normalises",
    "states": "states of an environment, so that turns that began in the same one are compared",
}
"""What an estimator may need beyond the reward of each episode."""


@dataclass(frozen=True)
class Declared:
    """What a function or class of the user's own says of itself."""

    needs: tuple[str, ...]
    gives: tuple[str, ...] = ()


Names = str | Sequence[str]
"""One name, as in `needs=("values")`, or several."""


def _names(value: Any) -> tuple[str, ...]:
    """Return names as a tuple. Raises `ValueError` where it is something else."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"{wrong[0]!r} is no name: write needs=('values',), gives=('rewards',)")
    return names


def stage(*, needs: Names, gives: Names) -> Callable[[F], F]:
    """Declare a stage of a training step: `(data, *, options...) -> {name: tensor}`, or a class that makes such a one.

    `stages: [my_file.py:name]` runs it. It is read without running the file, so both are written out.

    Args:
        needs: names of `MODEL_OUTPUTS` and `CREDIT` that it reads; its models are started for it.
        gives: names that it returns, of one phase of `PHASES`.

    Raises:
        ValueError: there is no such name, or it needs what is made later than what it gives.
    """
    declared = Declared(_names(needs), _names(gives))
    if wrong := list(stage_problems(declared)):
        raise ValueError("; ".join(wrong))

    def declare(target: F) -> F:
        target.declared = declared  # type: ignore[attr-defined]
        return target

    return declare


def needs(*names: str) -> Callable[[F], F]:
    """Declare what an estimator of one's own needs, names of `ESTIMATOR_NEEDS`: `@needs("values")` starts the critic.

    Raises:
        ValueError: there is no such name.
    """
    if wrong := list(_unknown(names, ESTIMATOR_NEEDS)):
        raise ValueError("; ".join(wrong))

    def declare(target: F) -> F:
        target.declared = Declared(names)  # type: ignore[attr-defined]
        return target

    return declare


def stage_problems(declared: Declared) -> Iterator[str]:
    """Yield what is wrong with what a stage says that it needs and gives."""
    wrong = [*_unknown(declared.needs, {**MODEL_OUTPUTS, **CREDIT}), *_unknown(declared.gives, _GIVEN)]
    yield from wrong
    if wrong:
        return
    if len({phase_of(name) for name in declared.gives}) != 1:
        each = "; or ".join(", ".join(phase) for phase in PHASES[1:])
        yield f"gives {', '.join(declared.gives) or 'nothing'}: a stage gives some of {each}"
    elif late := [name for name in declared.needs if phase_of(name) > phase_of(declared.gives[0])]:
        yield f"needs {', '.join(late)}, which is made after {declared.gives[0]}, which it gives"


def phase_of(name: str) -> int:
    """Return the number of the phase in which a quantity is made; what models say is there from the first on."""
    return next((number for number, phase in enumerate(PHASES) if name in phase), 0)


def _unknown(names: Sequence[str], known: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"there is no {name!r}; {nearest(name, known)}known: {', '.join(known)}"


def declared_in_source(path: str) -> Declared | None:
    """Return what `package.module:name` or `path/to/file.py:name` declares; the source is read and not run.

    None: it declares nothing, or nobody knows without running it.
    """
    where, _, name = path.rpartition(":")
    file = Path(where).expanduser() if where.endswith(".py") else module_file(where)
    try:
        return None if file is None else _read(file, name, file.stat().st_mtime_ns)
    except OSError:
        return None  # another check says so


@functools.lru_cache(maxsize=64)
def _read(file: Path, name: str, changed: int) -> Declared | None:
    del changed  # a file that is edited between two looks, as in a notebook, is read again
    found = definition_in(file, name)
    for decorator in () if found is None else found.node.decorator_list:
        if isinstance(decorator, ast.Call):
            called = ast.unparse(decorator.func).rpartition(".")[2]
            try:
                positional = [ast.literal_eval(value) for value in decorator.args]
                named = {keyword.arg: _names(ast.literal_eval(keyword.value)) for keyword in decorator.keywords}
                if called == "stage" and not positional and set(named) == {"needs", "gives"}:
                    return Declared(named["needs"], named["gives"])
                if called == "needs" and not named:
                    return Declared(_names(positional))
            except (ValueError, TypeError):
                return None
    return None
