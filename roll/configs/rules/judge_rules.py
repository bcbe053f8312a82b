"""Rules about the judge: where it is, what it reads, how its score is found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roll.configs.errors import NO_VALUE, Violation, did_you_mean
from roll.configs.rules.endpoint_rules import endpoint_rules
from roll.configs.schema.judge_config import JUDGE, RUBRIC_KEYS, JudgeConfig
from roll.configs.schema.rlvr_config import RLVRConfig

PROMPTS = ("quality", "reference")
"""Names of built-in prompts."""

_TYPES: dict[str, tuple[type, ...]] = {
    "prompt": (str,),
    "score_format": (str,),
    "score_pattern": (str, type(None)),
    "score_min": (int, float),
    "score_max": (int, float),
    "normalize": (bool,),
    "unparsed_score": (int, float, type(None)),
}
_FORMATS = ("score", "json", "brackets", "yes_no")


def judge_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check the section, and what domains change in it."""
    judge, asking = config.judge, config.domains_of(JUDGE)
    if judge is None:
        if asking:
            path = f"rewards.{asking[0]}"
            asked = "name" if config.rewards[asking[0]].name == JUDGE else "judge_weight"
            fix = "judge: {endpoint: http://localhost:8000/v1, model: <name>}, or one with model_args"
            yield Violation("judge", f"a judge, because {path}.{asked} asks for one", fix, NO_VALUE)
        return
    yield from _endpoint_rules(judge)
    yield from _rubric_rules("judge", judge)
    for domain in asking:
        if config.rewards[domain].name == JUDGE:
            yield from _kwargs_rules(f"rewards.{domain}.reward_kwargs", judge, config.rewards[domain].reward_kwargs)


def _endpoint_rules(judge: JudgeConfig) -> Iterator[Violation]:
    answer = judge.generating_args.max_new_tokens or 0
    if not answer:
        expected = "a number of tokens for the judge's answer, which response_length says nothing about"
        yield Violation("judge.generating_args.max_new_tokens", expected, "judge.generating_args.max_new_tokens=512")
    if judge.endpoint is None:
        if answer >= judge.max_length:
            expected = f"more than generating_args.max_new_tokens ({answer}): the prompt needs room too"
            yield Violation("judge.max_length", expected, f"judge.max_length={answer * 8}", judge.max_length)
        return
    yield from endpoint_rules("judge", judge.endpoint, judge.model, judge.api_key_env)


def _kwargs_rules(path: str, judge: JudgeConfig, kwargs: dict[str, Any]) -> Iterator[Violation]:
    wrong = False
    for key, value in kwargs.items():
        if key not in RUBRIC_KEYS:
            wrong = True
            expected = f"one of {', '.join(RUBRIC_KEYS)}; the rest stands in the section judge"
            yield Violation(f"{path}.{key}", expected, did_you_mean(key, RUBRIC_KEYS), value)
        elif not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
            wrong = True
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in _TYPES[key])
            yield Violation(f"{path}.{key}", names, "", value)
        elif key == "score_format" and value not in _FORMATS:
            wrong = True
            yield Violation(f"{path}.{key}", f"one of {', '.join(_FORMATS)}", did_you_mean(str(value), _FORMATS), value)
    if not wrong and kwargs:
        yield from _rubric_rules(path, replace(judge, **kwargs))


def _rubric_rules(path: str, judge: JudgeConfig) -> Iterator[Violation]:
    if judge.prompt not in PROMPTS and "{response}" not in judge.prompt:
        expected = f"{' or '.join(PROMPTS)}, or a text with {{response}}"
        yield Violation(f"{path}.prompt", expected, did_you_mean(judge.prompt, PROMPTS), judge.prompt)
    if not judge.score_min < judge.score_max:
        expected = f"more than score_min ({judge.score_min:g})"
        yield Violation(f"{path}.score_max", expected, f"{path}.score_max={judge.score_min + 10:g}", judge.score_max)
    if judge.score_pattern is not None:
        try:
            groups = re.compile(judge.score_pattern).groups
        except re.error as error:
            expected = f"a regular expression with one group; this one is broken: {error}"
            yield Violation(f"{path}.score_pattern", expected, "(?i)grade: *([0-9.]+)", judge.score_pattern)
        else:
            if groups != 1:
                expected = f"a regular expression with one group, the score; this one has {groups}"
                yield Violation(f"{path}.score_pattern", expected, "(?i)grade: *([0-9.]+)", judge.score_pattern)
