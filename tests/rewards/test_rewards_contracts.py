"""Reward functions of TRL's and verl's kind, by what trl 1.16.0 and verl 0.9.1 pass and take.

Read in `GRPOTrainer._calculate_rewards` (sums by `nansum` over the functions that give a value; a completion for which
every function returns None leaves its group) and in verl's `reward_loop/reward_manager/naive.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.pipelines.rollouts.reward_router import combined, in_run
from roll.rewards.base import Reward, RewardContractError, RewardLoadError, RewardRequest, RewardResult, RewardSpec
from roll.rewards.reward_pool import RewardPool
from roll.rewards.reward_registry import LoadedReward, load_reward
from roll.types.trajectory import Task

TRL = str(Path(__file__).with_name("rewards_trl.py"))


def task(answer: str = "42", **columns: Any) -> Task:
    payload = {"prompt": "6 * 7 = ?", "messages": None, "answer": answer, "ground_truth": answer, **columns}
    return Task(id=f"t:{answer}", source="t", payload=payload, seed=0, tag="sums", domain="d")


def chat_task(**columns: Any) -> Task:
    return task(**{"prompt": None, "messages": [{"role": "user", "content": "6 * 7 = ?"}], **columns})


def request(response: str, row: Task | None = None, **more: Any) -> RewardRequest:
    return RewardRequest(id=response, domain="d", response=response, task=row or task(), **more)


def loaded(name: str, *, of_run: bool = False, **kwargs: Any) -> LoadedReward:
    spec = RewardSpec(name=f"{TRL}:{name}", kwargs=kwargs)
    return load_reward(in_run(spec, 10) if of_run else spec)


def pooled(spec: RewardSpec, requests: Sequence[RewardRequest]) -> list[RewardResult]:
    with RewardPool({"d": spec}, num_processes=1, timeout_s=60.0, retries=1) as pool:
        pool.wait_ready()
        return pool.score(requests)


def values(name: str, requests: Sequence[RewardRequest], **more: Any) -> list[float | None]:
    outcomes = loaded(name, **more).score_all(requests)
    assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    return [outcome.value if isinstance(outcome, Reward) else None for outcome in outcomes]


# --- TRL: prompts and completions ---------------------------------------------------------


def test_completions_are_texts_where_the_prompt_is_a_text() -> None:
    # 21 characters: min(21, 19) - 20 = -1; as a list of one message it would be 1 - 20 = -19.
    assert values("near_twenty", [request("x" * 21), request("x" * 20)]) == [-1.0, 0.0]


def test_prompts_and_completions_are_messages_where_the_prompt_is_messages() -> None:
    with pytest.raises(RuntimeError) as raised:
        loaded("echo").score_all([request("42", chat_task(level=3))])
    told = eval(str(raised.value))  # what `echo` was given
    assert told["prompts"] == [[{"role": "user", "content": "6 * 7 = ?"}]]
    assert told["completions"] == [[{"role": "assistant", "content": "42"}]]
    assert {"answer", "level", "log_extra", "log_metric", "messages"} <= set(told["columns"])
    assert "prompt" not in told["columns"]


def test_a_column_called_messages_is_passed_only_where_rows_have_it() -> None:
    with pytest.raises(RuntimeError) as raised:
        loaded("echo").score_all([request("42")])
    told = eval(str(raised.value))
    assert (told["prompts"], told["completions"]) == (["6 * 7 = ?"], ["42"])
    assert "messages" not in told["columns"]


def test_a_conversation_with_tools_is_a_completion_of_all_its_messages() -> None:
    said = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]},
        {"role": "tool", "name": "add", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    with pytest.raises(RuntimeError) as raised:
        loaded("echo").score_all([request("It is 42.", chat_task(), messages=said)])
    assert eval(str(raised.value))["completions"] == [said]


# --- TRL: what else is passed ----------------------------------------------------------------


def test_token_ids_and_the_state_of_the_run_are_passed_and_what_is_logged_arrives() -> None:
    asked = [request("ab", task(level=1), completion_ids=(5, 6, 7), step=4), request("c", task(level=2), step=4)]
    asked[1] = request("c", task(level=2), completion_ids=(8,), step=4)
    first, second = loaded("everything", of_run=True).score_all(asked)
    assert isinstance(first, Reward)
    assert isinstance(second, Reward)
    # Rewards: 3 ids + level 1, 1 id + level 2. The metric: mean of 4/10 and 4/10 + 0.5.
    assert (first.value, second.value) == (4.0, 3.0)
    assert first.parts == second.parts == {"half_done": pytest.approx(0.65)}
    assert (first.explanation, second.explanation) == ("shouted: AB", "shouted: C")


def test_outside_of_a_run_a_function_that_needs_tokens_or_the_state_is_refused_by_name() -> None:
    with pytest.raises(RewardLoadError, match="completion_ids: only the episodes of a run have them.*trainer_state"):
        loaded("everything")
    with pytest.raises(
        RewardLoadError, match="environments: it has no default; TRL passes it with environment_factory"
    ):
        loaded("in_an_environment")


def test_of_the_state_what_is_not_known_is_an_error_that_names_it() -> None:
    with pytest.raises(RewardLoadError, match=r"it reads trainer_state\.epoch, and reward functions here"):
        loaded("asks_for_the_epoch", of_run=True)
    with pytest.raises(AttributeError, match=r"trainer_state\.best_metric isn't known"):
        loaded("asks_in_a_roundabout_way", of_run=True).score_all([request("a", completion_ids=(1,), step=0)])


def test_objects_partials_and_async_functions_are_called_alike() -> None:
    asked = [
        request("abcd", task(level=5), completion_ids=(1, 2, 3, 4)),
        request("a", task(level=6), completion_ids=(1,)),
    ]
    assert values("short", asked, of_run=True) == [0.0, 1.0]
    assert values("short_made", asked, of_run=True) == [0.0, 1.0]
    assert values("waiting", asked) == values("waiting_partial", asked) == [4.0, 1.0]
    assert values("twice", asked) == [10.0, 12.0]


def test_a_function_that_makes_reward_functions_is_refused_with_what_to_do() -> None:
    with pytest.raises(RewardLoadError, match="it returns a function: call it in a file of your own"):
        loaded("make_short")


def test_a_function_whose_parameters_name_no_style_is_refused() -> None:
    for name in ("keywords_alone", "verl_keywords"):
        with pytest.raises(RewardLoadError, match=r"solution_str \(verl\), completions, prompts or completion_ids"):
            loaded(name)
    with pytest.raises(RewardLoadError, match="completions: it can be given by position alone, and is called by name"):
        loaded("by_position")


# --- TRL: what is returned ----------------------------------------------------------------------


def test_any_list_of_numbers_is_a_list_of_rewards() -> None:
    asked = [request("abc"), request("a")]
    assert values("generated", asked) == values("an_array", asked) == [3.0, 1.0]
    assert values("booleans", asked) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["not_sevens", "not_sevens_async"])
def test_none_is_no_error_and_no_reward(name: str) -> None:
    requests = [request("42"), request("7", task("7")), request("5", task("6"))]
    results = pooled(RewardSpec(name=f"{TRL}:{name}"), requests)
    assert [result.status for result in results] == ["ok", "unscored", "ok"]
    assert [result.reward and result.reward.value for result in results] == [1.0, None, 0.0]
    assert results[1].error.startswith("no reward function scores this row")
    assert results[1].attempts == 1


def weighted(**parts: tuple[float, str]) -> RewardSpec:
    return RewardSpec(
        name="weighted", parts={name: (weight, RewardSpec(name=path)) for name, (weight, path) in parts.items()}
    )


def test_a_part_that_does_not_score_a_row_is_left_out_of_its_sum() -> None:
    spec = weighted(some=(0.5, f"{TRL}:not_sevens"), sevens=(2.0, f"{TRL}:only_sevens"), right=(1.0, "gsm8k"))
    results = pooled(spec, [request("#### 42"), request("#### 7", task("7"))])
    first, second = (result.reward for result in results)
    assert first is not None
    assert second is not None
    # 42: 0.5 x 1 + 1 x 1, `sevens` is None. 7: 2 x 10 + 1 x 1, `some` is None.
    assert (first.value, second.value) == (1.5, 21.0)
    assert "sevens" not in first.parts
    assert "some" not in second.parts


def test_a_row_that_no_part_scores_has_no_reward() -> None:
    spec = weighted(some=(0.5, f"{TRL}:not_sevens"), more=(1.0, f"{TRL}:not_sevens_async"))
    results = pooled(spec, [request("7", task("7")), request("42")])
    assert [result.status for result in results] == ["unscored", "ok"]
    assert "some, more returned None" in results[0].error


def test_beside_a_model_the_function_that_does_not_score_a_row_is_left_out() -> None:
    class Config:
        is_function, name, rule_weight, added = True, "x", 1.0, {"judge": 0.5}

    own = RewardResult(id="r", status="unscored", reward=None, error="None")
    judged = RewardResult(id="r", status="ok", reward=Reward(0.5, {"judge": 0.5}))
    found = combined(own, {"judge": judged}, Config())  # type: ignore[arg-type]
    assert found.reward == Reward(0.25, {"judge": 0.5})


# --- lists of the wrong length --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "got"), [("one_for_all", "1 value"), ("a_number", "float"), ("endless", "more than 3 values")]
)
def test_a_list_of_the_wrong_length_is_an_error_with_both_numbers(name: str, got: str) -> None:
    with pytest.raises(RewardContractError, match=f"'{name}' returned {got} for 3 responses, expected a list of 3"):
        loaded(name).score_all([request("a"), request("b"), request("c")])


@pytest.mark.parametrize("name", ["one_for_all", "wrong_extra"])
def test_a_wrong_length_is_never_repaired_by_calls_for_single_responses(name: str) -> None:
    # The process is kept busy with the first call while the others come, so these are scored in one.
    results = pooled(RewardSpec(name=f"{TRL}:{name}"), [request(str(i)) for i in range(40)])
    failed = [result for result in results if result.status == "error"]
    assert len(failed) >= 30
    assert all("expected a list of" in result.error and result.attempts == 1 for result in failed)


def test_a_part_with_lists_is_given_lists_in_a_weighted_sum_too() -> None:
    loaded_sum = load_reward(weighted(all=(1.0, f"{TRL}:one_for_all"), right=(1.0, "gsm8k")))
    with pytest.raises(RewardContractError, match="'one_for_all' returned 1 value for 2 responses"):
        loaded_sum.score_all([request("#### 42"), request("#### 42")])


def test_one_bad_value_of_a_list_costs_itself_alone_and_the_others_keep_theirs() -> None:
    outcomes = loaded("one_is_not_a_number").score_all([request("a"), request("bad"), request("c")])
    assert [o.value for o in outcomes if isinstance(o, Reward)] == [3.0, 3.0]
    assert "returned a value = nan, expected a finite number" in str(outcomes[1])


def test_a_column_that_a_row_does_not_have_is_named() -> None:
    with pytest.raises(RewardContractError, match=r"needs first_draft, marks, and row 't:42' has no such column"):
        loaded("needs_columns").score_all([request("a")])
    assert values("needs_bound", [request("a", task(first_draft="b"))]) == [1.0]


# --- verl ----------------------------------------------------------------------------------------


def test_verls_extra_info_is_a_dict_with_the_turns_and_earlier_scores() -> None:
    reward = loaded("verl_turns")
    assert reward.score(request("42")) == Reward(2.0, {"scores_before": 0.0, "index": -1.0})
    with_info = request("42", task(extra_info={"index": 5}))
    assert reward.score(with_info) == Reward(2.0, {"scores_before": 0.0, "index": 5.0})
    assert with_info.task.payload["extra_info"] == {"index": 5}  # a copy is changed
    # The prompt, a call, two replies in one round, the answer: 4, as verl's tool agent counts.
    roles = ["assistant", "tool", "tool", "assistant"]
    said = [{"role": role, "content": ""} for role in roles]
    turns = reward.score(request("42", messages=said))
    assert turns is not None and turns.value == 4.0
    # verl decodes all that follows the prompt.
    whole = loaded("verl_without_truth").score(request("42", messages=said, completion_text="call 42 42"))
    assert whole is not None and whole.value == 10.0


def test_verls_functions_are_recognised_by_solution_str_in_every_form() -> None:
    for name in ("verl_named_only", "verl_async"):
        reward = loaded(name).score(request("42"))
        assert reward is not None and reward.value == 1.0
    plain = loaded("verl_without_truth").score(request("abc"))
    assert plain is not None and plain.value == 3.0
    with pytest.raises(RewardLoadError, match="reward_router_address: it has no default; verl passes it with"):
        loaded("verl_router")


def test_verls_lists_are_scored_in_one_call() -> None:
    outcomes = loaded("verl_lists").score_all([request("42"), request("41")])
    assert outcomes == [Reward(1.0, {"together": 2.0}), Reward(0.0, {"together": 2.0})]
