"""Finding and checking reward functions before anything runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll.configs.catalog.reward_table import REWARDS
from roll.rewards.base import Reward, RewardLoadError, RewardOutputError, RewardRequest, RewardSpec, as_reward
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task

CUSTOM = str(Path(__file__).with_name("rewards_custom.py"))
TASK = Task(id="t:1", source="t", payload={"ground_truth": "72"}, seed=0, tag="t", domain="d")


def request(response: str, task: Task = TASK, **more: Any) -> RewardRequest:
    return RewardRequest(id=task.id, domain="d", response=response, task=task, **more)


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
    ({"name": f"{CUSTOM}:NOT_A_FUNCTION"}, "is not a function, plain or async"),
    ({"name": f"{CUSTOM}:trl_columns", "kwargs": {"scal": 1}}, "scal: there is no such option"),
    ({"name": f"{CUSTOM}:compute_score", "kwargs": {"scal": 1}}, "scal: there is no such option.*data_source="),
    ({"name": f"{CUSTOM}:lists_with_option"}, "threshold: it has no default.*fn\\(responses, tasks"),
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


ROW = Task(
    id="t:7",
    source="file.parquet",
    payload={"prompt": "6*7?", "reward_model": {"ground_truth": "42"}, "data_source": "math", "level": 3},
    seed=0,
    tag="t",
    domain="d",
)
CHAT = Task(
    id="c:1",
    source="c",
    payload={"messages": [{"role": "user", "content": "hi"}], "level": 2},
    seed=0,
    tag="t",
    domain="d",
)


def test_verls_signature_is_called_as_verl_does() -> None:
    reward = load_reward(RewardSpec(name=f"{CUSTOM}:compute_score", kwargs={"scale": 2.0}))("42", ROW)
    assert (reward.value, reward.parts) == (2.0, {"right": 1.0, "length": 2.0})
    assert load_reward(RewardSpec(name=f"{CUSTOM}:verl_plain"))("42", ROW).value == 1.0


def test_verls_function_is_told_the_tag_where_the_rows_have_no_data_source() -> None:
    row = replace(ROW, tag="math", payload={name: ROW.payload[name] for name in ("prompt", "reward_model")})
    reward = load_reward(RewardSpec(name=f"{CUSTOM}:compute_score"))  # asserts that it is "math"
    assert reward("42", row).value == 1.0


def test_trls_signature_is_called_as_trl_does() -> None:
    columns = load_reward(RewardSpec(name=f"{CUSTOM}:trl_columns"))
    assert columns("abc", ROW).value == 3 + 3
    assert load_reward(RewardSpec(name=f"{CUSTOM}:trl_chat"))("abc", CHAT).value == 3.0


def test_a_function_that_takes_lists_scores_several_in_one_call() -> None:
    reward = load_reward(RewardSpec(name=f"{CUSTOM}:lists"))
    scored = reward.score_all([request("a"), request("bcd", finish_reason="length")])
    assert [(one.value, one.parts["together"], one.parts["stopped"]) for one in scored] == [(1, 2, 1), (3, 2, 0)]
    assert reward("abcd", TASK).value == 4.0
    with pytest.raises(RewardOutputError, match="returned 2 values for 1 responses, expected a list of 1"):
        load_reward(RewardSpec(name=f"{CUSTOM}:wrong_lists"))("a", TASK)


def test_an_async_function_can_be_called_plainly() -> None:
    reward = load_reward(RewardSpec(name=f"{CUSTOM}:asynchronous"))
    assert [reward("abc", TASK).value, reward("", TASK).value] == [3.0, 0.0]


@pytest.mark.parametrize("value", [1e308, -1e13, float("inf"), float("nan"), {"score": 1e300}, {"points": 1.0}])
def test_a_reward_that_no_optimiser_could_use_is_refused_with_its_row(value: Any) -> None:
    with pytest.raises(RewardOutputError, match=r"'f' returned .* \(row 't:3'\)"):
        as_reward(value, "f", "t:3")


def test_names_of_parts_are_texts_and_not_too_many() -> None:
    for parts in ({"\ud800": 1.0}, {"x" * 2000: 1.0}, {str(i): 1.0 for i in range(2000)}):
        with pytest.raises(RewardOutputError, match="part"):
            as_reward(Reward(1.0, parts), "f")
