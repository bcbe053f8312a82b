"""Finding and checking reward functions before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from roll.catalog.rewards import REWARDS
from roll.rewards.base import RewardLoadError, RewardOutputError, RewardSpec, as_reward
from roll.rewards.reward_registry import load_reward
from roll.types.episode import Task

CUSTOM = str(Path(__file__).with_name("rewards_custom.py"))
TASK = Task(id="t:1", source="t", payload={"ground_truth": "72"}, seed=0, tag="t", domain="d")


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_name_loads(name: str) -> None:
    needed = {"regex": {"pattern": "x"}, "http": {"url": "http://localhost"}}
    assert callable(load_reward(RewardSpec(name=name, kwargs=needed.get(name, {}))))


def test_a_registered_reward_takes_its_keyword_arguments() -> None:
    assert load_reward(RewardSpec(name="gsm8k", kwargs={"mode": "flexible"}))("it is 72", TASK).value == 1.0


def test_a_function_is_found_by_file_and_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_reward(RewardSpec(name=f"{CUSTOM}:length", kwargs={"scale": 2.0}))("abc", TASK).value == 6.0
    monkeypatch.syspath_prepend(str(Path(CUSTOM).parent))
    assert load_reward(RewardSpec(name="rewards_custom:length"))("abc", TASK).value == 3.0
    sys.modules.pop("rewards_custom", None)


def test_a_function_that_asks_for_the_finish_reason_gets_it() -> None:
    reward = load_reward(RewardSpec(name=f"{CUSTOM}:by_finish"))
    assert (reward("", TASK, "stop").value, reward("", TASK, "length").value) == (1.0, 0.0)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"name": "math_rul"}, r"unknown name 'math_rul'; did you mean 'math_rule'\? known: .*gsm8k"),
    ({"name": "nothing_like_it"}, r"unknown name 'nothing_like_it'; known: .*gsm8k"),
    ({"name": "no_such_package:fn"}, "can't import 'no_such_package'"),
    ({"name": "roll.rewards.gsm8k:gsm9k"}, r"no function 'gsm9k'; did you mean 'gsm8k'\? it has .*gsm8k"),
    ({"name": "roll.rewards.gsm8k.gsm8k"}, "unknown name .*your own is roll.rewards.gsm8k:gsm8k"),
    ({"name": "no_such_file.py:f"}, "there is no file 'no_such_file.py'"),
    ({"name": f"{CUSTOM}:lenght"}, "no function 'lenght'; did you mean 'length'"),
    ({"name": f"{CUSTOM}:NOT_A_FUNCTION"}, "not a plain function"),
    ({"name": f"{CUSTOM}:one_argument"}, r"can't be called.*fn\(response, task, \*\*reward_kwargs\)"),
    ({"name": f"{CUSTOM}:needs_more"}, "url: it has no default and must be given"),
    ({"name": f"{CUSTOM}:length", "kwargs": {"scal": 2}}, "scal: there is no such option; did you mean 'scale'"),
    ({"name": "gsm8k", "kwargs": {"think": "auto"}}, "think: there is no such option; it has mode, format_weight"),
]


@pytest.mark.parametrize(("spec", "message"), BROKEN)
def test_a_broken_specification_says_what_is_wrong(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardLoadError, match=message):
        load_reward(RewardSpec(**spec))


def test_a_file_that_fails_to_import_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken_reward.py"
    file.write_text("import no_such_module_at_all\n")
    with pytest.raises(RewardLoadError, match=r"broken_reward\.py.*no_such_module_at_all"):
        load_reward(RewardSpec(name=f"{file}:f"))


def test_numbers_of_other_libraries_are_numbers() -> None:
    import numpy

    assert as_reward(numpy.float32(0.5), "f").value == 0.5
    assert as_reward(1, "f").value == 1.0
    with pytest.raises(RewardOutputError, match="'f' returned a value of type str"):
        as_reward("1", "f")
