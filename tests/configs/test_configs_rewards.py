"""`roll check` on reward functions of the user's own: what they take, and the columns that their rows have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.configs.catalog.definitions import definition_in, module_file
from roll.configs.checks.function_checks import reward_checks
from roll.configs.errors import Violation
from roll.configs.parsing.build_config import build
from roll.configs.schema.reward_config import RewardConfig, ValidationConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import ActorTrainConfig, DataArgs, ProceduralTask

OWN = Path(__file__).parents[1] / "rewards" / "rewards_trl.py"
ROWS = [{"prompt": "1 + 1?", "answer": "2", "tag": "a"}, {"prompt": "2 + 2?", "answer": "4", "tag": "b", "level": 3}]


def violations(tmp_path: Path, function: str, rows: list[dict[str, Any]], **more: Any) -> list[Violation]:
    (tmp_path / "d.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    name = function if ":" in function else f"{OWN}:{function}"
    sections = more.pop("rewards", {"all": {"name": name, **more}})
    rewards = {domain: build(RewardConfig, section, f"rewards.{domain}")[0] for domain, section in sections.items()}
    data = DataArgs(file_name=(str(tmp_path / "d.jsonl"),), prompt="prompt")
    train = ActorTrainConfig(data_args=data)
    config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards=rewards, actor_train=train)  # type: ignore[arg-type]
    return list(reward_checks(config))


@pytest.mark.parametrize("function", ["needs_columns", "alias", "needs_bound"])
def test_a_function_that_needs_columns_no_row_has_is_refused(tmp_path: Path, function: str) -> None:
    found = violations(tmp_path, function, ROWS)
    missing = ["first_draft"] if function == "needs_bound" else ["first_draft", "marks"]
    assert [violation.path for violation in found] == ["rewards.all.name"] * len(missing)
    for violation, name in zip(found, missing, strict=True):
        assert f"{name}: no row has such a column, and it has no default" in violation.expected
        assert "answer, ground_truth, level, tag" in violation.expected


def test_columns_that_some_later_row_has_options_and_what_the_run_passes_are_no_problem(tmp_path: Path) -> None:
    late = [{"prompt": "x", "answer": "1"}] * 500 + [{"prompt": "x", "answer": "1", "first_draft": "a", "marks": 1}]
    assert violations(tmp_path, "needs_columns", late) == []
    assert violations(tmp_path, "needs_columns", ROWS, reward_kwargs={"first_draft": "a", "marks": 2}) == []
    for function in ("everything", "short", "waiting", "near_twenty", "not_sevens"):
        assert violations(tmp_path, function, ROWS) == []


def test_each_domain_has_the_columns_of_its_own_rows(tmp_path: Path) -> None:
    name = f"{OWN}:scaled"  # needs `level`, which the rows of tag b have
    two = {"a": {"name": name, "reward_kwargs": {"factor": 1}}, "b": {"name": name, "reward_kwargs": {"factor": 1}}}
    found = violations(tmp_path, "scaled", ROWS, rewards=two)
    assert [violation.path for violation in found] == ["rewards.a.name"]
    part = {"a": {"name": "weighted", "parts": {"x": {"name": name, "reward_kwargs": {"factor": 1}}}}}
    found = violations(tmp_path, "scaled", ROWS[:1], rewards=part)
    assert [violation.path for violation in found] == ["rewards.a.parts.x.name"]


def test_validation_rows_need_the_columns_too(tmp_path: Path) -> None:
    rewards = {"all": build(RewardConfig, {"name": f"{OWN}:scaled", "reward_kwargs": {"factor": 1}}, "rewards.all")[0]}
    files = {"train": {"prompt": "x", "level": 1}, "val": {"prompt": "x", "answer": "1"}}
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    train, val = (DataArgs(file_name=(str(tmp_path / f"{name}.jsonl"),)) for name in files)
    config = RLVRConfig(
        pipeline="rlvr", pretrain="none", rewards=rewards,  # type: ignore[arg-type]
        actor_train=ActorTrainConfig(data_args=train), validation=ValidationConfig(data_args=val),
    )  # fmt: skip
    (found,) = reward_checks(config)
    assert "level: no row has such a column, and it has no default; columns: answer, ground_truth" in found.expected


def test_what_is_never_passed_is_refused_by_name(tmp_path: Path) -> None:
    (found,) = violations(tmp_path, "in_an_environment", ROWS)
    assert "environments: it has no default; TRL passes it with environment_factory" in found.expected
    (found,) = violations(tmp_path, "verl_router", ROWS)
    assert found.path == "rewards.all.reward_kwargs.reward_router_address"
    assert "it has no default; verl passes it with a reward model" in found.expected
    (found,) = violations(tmp_path, "make_short", ROWS)
    assert "it returns a function: call it in a file of your own" in found.expected
    (found,) = violations(tmp_path, "asks_for_the_epoch", ROWS)
    assert "it reads trainer_state.epoch, and reward functions here are told global_step and" in found.expected
    for function in ("keywords_alone", "verl_keywords"):
        (found,) = violations(tmp_path, function, ROWS)
        assert "solution_str (verl), completions, prompts or completion_ids (TRL)" in found.expected


def test_verls_function_needs_rows_with_a_ground_truth(tmp_path: Path) -> None:
    (found,) = violations(tmp_path, "verl_turns", [{"prompt": "x", "reward_model": {"style": "rule"}}])
    assert found.path == "rewards.all.name"
    assert "rows with a ground truth, which this function is given; columns: reward_model" in found.expected
    assert violations(tmp_path, "verl_turns", [{"prompt": "x", "reward_model": {"ground_truth": "2"}}]) == []
    assert violations(tmp_path, "verl_without_truth", [{"prompt": "x"}]) == []


def test_rows_that_the_run_makes_are_not_asked_for_their_columns(tmp_path: Path) -> None:
    rewards = {"all": build(RewardConfig, {"name": f"{OWN}:needs_columns"}, "rewards.all")[0]}
    for data in (
        DataArgs(file_name=("owner/name",)),
        DataArgs(procedural=(ProceduralTask(dataset="sums", tag="other"),)),
    ):
        train = ActorTrainConfig(data_args=data)
        config = RLVRConfig(pipeline="rlvr", pretrain="none", rewards=rewards, actor_train=train)  # type: ignore[arg-type]
        assert list(reward_checks(config)) == []


def test_functions_of_packages_are_found_in_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rewarding"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .inner import graded\nelse:\n    graded = None\n"
    )
    (package / "inner.py").write_text(
        "def graded(completions, solution, **kwargs):\n    return []\nraise ImportError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module_file("rewarding.inner") == package / "inner.py"
    assert definition_in(package / "__init__.py", "graded") is not None
    (found,) = violations(tmp_path, "rewarding:graded", ROWS)
    assert "solution: no row has such a column" in found.expected
    assert violations(tmp_path, "rewarding:graded", [{"prompt": "x", "solution": "2"}]) == []


# Each was trained until the first score failed; the functions' own messages say what they take.
REFUSED_OPTIONS = [
    ("length", {}, "target must be at least 1"),
    ("length", {"mode": "overlong", "maximum": 5, "buffer": 9}, "0 <= buffer < maximum"),
    ("length", {"mode": "short", "target": 3}, "mode is target, overlong or cosine"),
    ("repetition", {"n": 0}, "n is at least 1"),
    ("format", {"template": "thought"}, "template is one of"),
    ("exact", {"extract": "first_word"}, "extract is one of"),
    ("choice", {"letters": "ABBA"}, "each once"),
    ("gsm8k", {"mode": "loose"}, "strict or flexible"),
    ("math_rule", {"think": "maybe"}, "auto, required or ignore"),
    ("ifeval", {"score": "most"}, "fraction or all"),
]


@pytest.mark.parametrize(("name", "kwargs", "fragment"), REFUSED_OPTIONS)
def test_options_with_which_a_bundled_reward_scores_nothing_are_refused(tmp_path, name, kwargs, fragment) -> None:
    (found,) = violations(tmp_path, name, ROWS, rewards={"all": {"name": name, "reward_kwargs": kwargs}})
    assert found.path == "rewards.all.reward_kwargs"
    assert fragment in str(found)
    sections = {"all": {"name": "weighted", "parts": {"term": {"name": name, "reward_kwargs": kwargs}}}}
    (found,) = violations(tmp_path, name, ROWS, rewards=sections)
    assert found.path == "rewards.all.parts.term.reward_kwargs"


ACCEPTED_OPTIONS = [
    ("length", {"target": 5}),
    ("length", {"mode": "cosine", "maximum": 9}),
    ("repetition", {"n": 2}),
    ("format", {"tags": ["think", "answer"]}),
    ("regex", {"pattern": "a+"}),
    ("exact", {"ignore_case": True}),
    ("choice", {"letters": "ABC"}),
    ("gsm8k", {"mode": "flexible"}),
    ("math_rule", {"think": "ignore"}),
    ("ifeval", {"mode": "loose"}),
    ("code", {"timeout_s": 1.0}),
]


@pytest.mark.parametrize(("name", "kwargs"), ACCEPTED_OPTIONS)
def test_options_of_bundled_rewards_are_no_problem_where_only_a_row_is_missing(tmp_path, name, kwargs) -> None:
    assert violations(tmp_path, name, ROWS, rewards={"all": {"name": name, "reward_kwargs": kwargs}}) == []
