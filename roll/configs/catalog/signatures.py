"""Keyword arguments from YAML, compared with what a function or class of the user's own takes."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
"""Annotations that a value is compared with; others may be anything."""


@dataclass(frozen=True)
class Signature:
    """What may be given by name."""

    required: frozenset[str]
    annotations: Mapping[str, str]
    """Every name, with its annotation as text; empty where it has none."""
    takes_any: bool
    """It has `**kwargs`, or nothing is known of it."""
    text: str = ""
    """As it is written, for messages."""
    too_few: bool = False
    """It doesn't take as many parameters by position as were skipped."""
    unnamed: tuple[str, ...] = ()
    """Those without a default that can't be given by name."""
    returns: str = ""
    """The annotation of what it returns."""

    @property
    def returns_function(self) -> bool:
        """Return whether it says that it makes functions."""
        return self.returns.partition("[")[0].rpartition(".")[2] == "Callable"

    def problems(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (name, what is wrong with it) of arguments that are unknown, missing, or of another type."""
        for name, value in arguments.items():
            if name not in self.annotations:
                if not self.takes_any:
                    near = difflib.get_close_matches(name, self.annotations, n=1)
                    known = f"it has {', '.join(self.annotations)}" if self.annotations else "it has none"
                    yield name, f"there is no such option; {f'did you mean {near[0]!r}? ' if near else ''}{known}"
                continue
            annotation = self.annotations[name]
            if annotation in _TYPES and type(value) not in _TYPES[annotation]:
                yield name, f"it is annotated as {annotation}, which {value!r} isn't"
        for name in sorted(self.required - set(arguments)):
            yield name, "it has no default and must be given"


@dataclass(frozen=True)
class CallStyle:
    """How a reward function is called. Its parameters' names say which one it is."""

    called: str
    """The call, for messages."""
    positional: int
    """How many arguments are given by position."""
    supplied: frozenset[str] = frozenset()
    """Arguments that are given by name, where the function has them."""
    batch: bool = False
    """It takes several responses and returns a list."""
    columns: bool = False
    """It takes the columns of the data by name."""
    needs_truth: bool = False
    """It is given the row's ground truth, and fails for a row without."""


NATIVE = CallStyle("fn(response, task, **reward_kwargs)", 2, frozenset({"finish_reason", "sandbox"}))
BATCH = CallStyle(
    "fn(responses, tasks, **reward_kwargs), with lists", 2, frozenset({"finish_reasons", "sandbox"}), batch=True
)
VERL = CallStyle(
    "fn(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs)",
    0,
    frozenset({"data_source", "solution_str", "ground_truth", "extra_info", "sandbox"}),
    needs_truth=True,
)
VERL_LISTS = CallStyle(
    "fn(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs), with lists",
    0,
    frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos", "sandbox"}),
    batch=True,
    needs_truth=True,
)
TRL = CallStyle(
    "fn(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, **columns, "
    "**reward_kwargs), with lists",
    0,
    frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "sandbox"}),
    batch=True,
    columns=True,
)
NEVER_PASSED = {
    "environments": "TRL passes it with environment_factory, and there is none here",
    "reward_router_address": "verl passes it with a reward model, and there is none of verl's here",
    "reward_model_tokenizer": "verl passes it with a reward model, and there is none of verl's here",
}
"""What the functions of others may ask for and never get."""


TOO_FEW = (
    "it takes too few arguments, and none of these names, which say whose signature it has: response and task, "
    "solution_str (verl), completions, prompts or completion_ids (TRL)"
)


MAKES_REWARDS = (
    "it returns a function: call it in a file of your own, as in `short = make_reward(100)`, and name what it returns, "
    "my_rewards.py:short"
)


def is_async_callable(function: Callable[..., Any]) -> bool:
    """Return whether a function, a partial of one, or an object with `__call__` is async."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_style(names: Sequence[str]) -> CallStyle:
    """Return how a reward function with these parameters is called."""
    for first, style in ((["response", "task"], NATIVE), (["responses", "tasks"], BATCH)):
        if list(names[:2]) == first:
            return style
    for telling, style in (
        (("solution_str",), VERL),
        (("solution_strs",), VERL_LISTS),
        (("prompts", "completions", "completion_ids"), TRL),
    ):
        if any(name in names for name in telling):
            return style
    return NATIVE


def reward_problems(
    takes: Signature, style: CallStyle, kwargs: Mapping[str, Any], columns: Collection[str] | None = None
) -> list[tuple[str, str]]:
    """Return (name, what is wrong with it) of a reward function's options.

    Args:
        columns: of the data, for a function that takes them; None: nobody knows which there are.
    """
    by_process = {name for name in style.supplied if name in takes.annotations}
    required = takes.required - by_process
    own = {name: text for name, text in takes.annotations.items() if name not in style.supplied or name in kwargs}
    missing = [name for name in sorted(required - set(kwargs)) if name in NEVER_PASSED]
    wrong = [(name, f"it has no default; {NEVER_PASSED[name]}") for name in missing]
    required -= set(missing)
    if style.columns:
        if columns is not None:
            there = ", ".join(sorted(columns)) or "none"
            absent = sorted(required - set(kwargs) - set(columns))
            wrong += [(name, f"no row has such a column, and it has no default; columns: {there}") for name in absent]
        required = frozenset()
    if style.positional == 0 and takes.unnamed:
        wrong += [(name, "it can be given by position alone, and is called by name") for name in takes.unnamed]
    return wrong + list(replace(takes, required=required, annotations=own).problems(kwargs))


def signature_of(function: Callable[..., Any], *, skip: int) -> Signature:
    """Return what a function or class takes by name, without its first `skip` parameters."""
    signature = inspect.signature(function)
    first = list(signature.parameters.values())
    by_position = [p for p in first if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    parameters = first[min(skip, len(by_position)) :]
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        required=frozenset(p.name for p in plain if p.default is p.empty),
        annotations={p.name: _text(p.annotation) for p in plain},
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        text=str(signature),
        too_few=len(by_position) < skip and not any(p.kind is p.VAR_POSITIONAL for p in first),
        unnamed=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty),
        returns="" if inspect.isclass(function) else _text(signature.return_annotation),
    )


def signature_in_source(node: ast.AST, *, skip: int) -> Signature:
    """Return the same of a definition that is only read; of a class that inherits its `__init__` nothing is known."""
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        node, skip = (made[0] if made else node), skip + 1
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return Signature(frozenset(), {}, takes_any=True)
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    without = len(positional) - len(spec.defaults)
    required = {argument.arg for argument in positional[skip:without]}
    required |= {one.arg for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None}
    named = [*positional[skip:], *spec.kwonlyargs]
    annotations = {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in named}
    return Signature(
        frozenset(required),
        annotations,
        takes_any=spec.kwarg is not None,
        text=f"({ast.unparse(spec)})",
        too_few=len(positional) < skip and spec.vararg is None,
        unnamed=tuple(one.arg for one in spec.posonlyargs[skip:] if one.arg in required),
        returns=ast.unparse(node.returns) if node.returns else "",
    )


STATE_ATTRIBUTES = ("global_step", "max_steps")
"""What a reward function is told of TRL's `trainer_state`."""


def unknown_state(node: ast.AST) -> list[str]:
    """Return the attributes of `trainer_state` that a function reads and isn't told, in its source."""
    read = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and ast.unparse(part.value) in ("trainer_state", "kwargs['trainer_state']", "kwargs.get('trainer_state')")
    }
    return sorted(read - set(STATE_ATTRIBUTES))


def unknown_state_message(names: Sequence[str]) -> str:
    """Return what is wrong with reading these."""
    return (
        f"it reads trainer_state.{', trainer_state.'.join(names)}, and reward functions here are told "
        f"{' and '.join(STATE_ATTRIBUTES)} alone"
    )


def parameter_names(node: ast.AST) -> list[str]:
    """Return the names of the parameters of a function that is only read."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    spec = node.args
    return [one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
