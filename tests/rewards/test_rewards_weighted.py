"""Sums of named parts: their score, their configuration, and names with any printable character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.rules.rewards_rules import reward_rules
from roll.configs.schema.reward_config import RewardConfig, RewardPart
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.pipelines.rollouts.reward_router import reward_spec
from roll.rewards.base import Reward, RewardLoadError, RewardSpec
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task

TASK = Task(id="t:1", source="t", payload={"ground_truth": "72"}, seed=0, tag="t", domain="d")
CUSTOM = str(Path(__file__).with_name("rewards_custom.py"))
SHORT = {"name": "length", "weight": 0.1, "reward_kwargs": {"target": 2}}


def config(**rewards: Any) -> RLVRConfig:
    sections = {domain: build(RewardConfig, section, f"rewards.{domain}")[0] for domain, section in rewards.items()}
    assert all(sections.values())
    return RLVRConfig(pipeline="rlvr", pretrain="none", rewards=sections)  # type: ignore[arg-type]


def weighted(**parts: Any) -> dict[str, Any]:
    return {"name": "weighted", "parts": parts}


def scored(section: dict[str, Any], response: str) -> Reward:
    return load_reward(reward_spec(config(math=section), "math"))(response, TASK)


def test_a_sum_of_built_in_and_own_functions_logs_each_part_under_its_name():
    own = {"name": f"{CUSTOM}:length", "weight": 0.5, "reward_kwargs": {"scale": 2.0}}
    # right 1.0; 2 words of 2: 1.0; 7 characters x 2 = 14. Sum: 1 + 0.1 + 7.
    reward = scored(weighted(right={"name": "gsm8k"}, short=SHORT, **{"of/mine": own}), "#### 72")
    assert reward.value == pytest.approx(8.1)
    assert {name: reward.parts[name] for name in ("right", "short", "of/mine")} == {
        "right": 1.0,
        "short": 1.0,
        "of/mine": 14.0,
    }
    assert (reward.parts["right.correct"], reward.parts["short.length"]) == (1.0, 2.0)


def test_the_parts_learn_how_the_response_ended():
    section = weighted(end={"name": "length", "reward_kwargs": {"mode": "overlong", "maximum": 9}})
    loaded = load_reward(reward_spec(config(math=section), "math"))
    assert (loaded("a", TASK, "stop").value, loaded("a", TASK, "length").value) == (0.0, -1.0)


def test_a_part_that_fails_fails_the_sum():
    with pytest.raises(ValueError, match="no column 'instruction_id_list'"):
        scored(weighted(right={"name": "gsm8k"}, asked={"name": "ifeval"}), "#### 72")


def test_a_part_that_cannot_be_called_is_refused_when_it_is_loaded():
    section = weighted(short={"name": "length", "reward_kwargs": {"targets": 1}})
    with pytest.raises(RewardLoadError, match=r"rewards\.math\.parts\.short\.name.*targets.*did you mean 'target'"):
        load_reward(reward_spec(config(math=section), "math"))
    with pytest.raises(ValueError, match="there are no parts"):
        load_reward(RewardSpec(name="weighted"))("x", TASK)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no parts", {"math": {"name": "weighted"}}, "rewards.math.parts"),
    ("parts of another", {"math": {"name": "gsm8k", "parts": {"a": SHORT}}}, "rewards.math.parts"),
    ("an unknown name", {"math": weighted(a={"name": "lenght"})}, "rewards.math.parts.a.name"),
    ("a sum in a sum", {"math": weighted(a={"name": "weighted"})}, "rewards.math.parts.a.name"),
    ("a model as a part", {"math": weighted(a={"name": "reward_model"})}, "rewards.math.parts.a.name"),
    ("a pattern", {"math": {"name": "regex", "reward_kwargs": {"pattern": "("}}}, "rewards.math.reward_kwargs.pattern"),
    ("a part's pattern", {"math": weighted(a={"name": "format", "reward_kwargs": {"pattern": "a{2,1}"}})},
     "rewards.math.parts.a.reward_kwargs.pattern"),
    ("an address", {"math": {"name": "http", "reward_kwargs": {"url": "localhost:80"}}},
     "rewards.math.reward_kwargs.url"),
    ("a line break in a domain", {"ma\nth": {"name": "gsm8k"}}, "rewards"),
    ("a blank domain", {" ": {"name": "gsm8k"}}, "rewards"),
    ("an empty part", {"math": weighted(**{"": SHORT})}, "rewards.math.parts"),
    ("a long domain", {"x" * 101: {"name": "gsm8k"}}, "rewards"),
    ("a name that the sum uses", {"math": {**weighted(rule=SHORT), "rule_weight": 1.0, "reward_model_weight": 1.0}},
     "rewards.math.parts"),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "path"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_is_refused_at_check_time(rewards: dict[str, Any], path: str):
    found = list(reward_rules(config(**rewards)))
    assert [violation.path for violation in found] == [path], ConfigError(found)


@pytest.mark.parametrize("name", ["math/easy", "a b", "50%", "über", "math.hard", "a,b=c", "数学", "a%2Fb"])
def test_names_of_printable_characters_are_fine(name: str):
    assert list(reward_rules(config(**{name: weighted(**{name: SHORT})}))) == []


def test_a_part_is_what_the_schema_says():
    assert config(m=weighted(a=SHORT)).rewards["m"].parts["a"] == RewardPart(
        name="length", weight=0.1, reward_kwargs={"target": 2}
    )
