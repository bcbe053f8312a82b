"""From responses to actions: where they are found, what is counted, what it costs, and when time is up."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from roll.envs.base import Env, InvalidAction, Message, Observation, ResetNeeded, StepResult
from roll.envs.wrappers import EnvSpec, ResponseEnv, parse_actions, without_thoughts


class Line(Env):
    """Walk to cell 3. Left of 0 is invalid."""

    actions = ("Left", "Right")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.cell = 0
        return Observation((Message("system", "A line."), Message("user", "at 0")), "0")

    def step(self, action: str) -> StepResult:
        assert self.cell < 3, "stepped after the end"
        if action == "Left" and self.cell == 0:
            raise InvalidAction("There is nothing to the left.")
        self.cell += 1 if action == "Right" else -1
        over = self.cell == 3
        return StepResult(
            reward=1.0,
            terminated=over,
            observation=None if over else Observation.of(f"at {self.cell}", str(self.cell)),
            reward_parts={"walk": 1.0},
            metrics={"cell": self.cell, **({"success": 1} if over else {})},
        )


class Free(Env):
    """Says back any text."""

    def __init__(self, result: Any = None, first: Any = None) -> None:
        self.result, self.first = result, first

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        return self.first or Observation.of("hello")

    def step(self, action: str) -> StepResult:
        return self.result or StepResult(reward=0.0, terminated=False, observation=Observation.of(f"got {action}"))


class Reads(Free):
    """Finds the action in a text itself."""

    reads_responses = True


def spec_of(**keys: Any) -> EnvSpec:
    return EnvSpec(tag="x", env_type="x", **keys)


def started(env: Env | None = None, **rules: Any) -> ResponseEnv:
    wrapped = ResponseEnv(env or Line(), spec_of(**rules))
    wrapped.reset(0, {})
    return wrapped


@pytest.mark.parametrize(
    ("response", "rules", "actions"),
    [
        ("I go <answer>Left</answer>, no, <answer> Right </answer>.", {}, ["Right"]),
        ("<answer>Up\nthere</answer>", {}, ["Up\nthere"]),
        ("Right", {}, []),
        ("<answer> </answer>", {}, []),
        ("<answer>Right</answer", {}, []),
        ("", {}, []),
        ("It goes inside <answer> tags. <answer>Up</answer>", {}, ["Up"]),
        ("<answer>I think <answer>Up</answer></answer>", {}, ["Up"]),
        ("<answer>Up</answer> or <answer>Down", {}, ["Up"]),
        ("room 7, then 12", {"action_pattern": r"(\d+)"}, ["12"]),
        ("x 1 y 2 x 3", {"action_pattern": r"x (\d)|y (\d)"}, ["3"]),
        ("abbc, then abc", {"action_pattern": "ab*(c)"}, ["c"]),
        ("<answer>Up</answer>" + "!" * 20_000, {}, []),  # only the end of a long response is looked at
        (" Right\n", {"action_pattern": None}, ["Right"]),
        ("  ", {"action_pattern": None}, []),
        ("move: Right", {"action_pattern": r"move: (\w+)"}, ["Right"]),
        ("nothing", {"action_pattern": r"(a)|nothing"}, []),
        ("<answer>a || b||</answer>", {"max_actions_per_step": 3}, ["a", "b"]),
        ("<answer>a || b</answer>", {}, ["a || b"]),
        ("<answer>a; b</answer>", {"max_actions_per_step": 2, "action_separator": ";"}, ["a", "b"]),
        ("<t><answer>a</answer></t> so", {"thinking_tags": ("<t>", "</t>")}, []),
        ("<t>hm</t><answer>b</answer><t><answer>a</answer>", {"thinking_tags": ("<t>", "</t>")}, ["b"]),
        ("<answer>a</answer></t><answer>b", {"thinking_tags": ("<t>", "</t>")}, []),
    ],
)
def test_actions_are_found(response, rules, actions):
    assert parse_actions(response, spec_of(**rules)) == actions


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<t>a</t>b<t>c</t>d", "bd"),
        ("b<t>never closed", "b"),
        ("opened by the prompt</t>b", "b"),
        ("<t>a<t>b</t>c</t>d", "d"),
        ("a<t>b</t>c</t>d", "d"),
        ("", ""),
        ("none", "none"),
    ],
)
def test_thoughts_are_left_out(text, left):
    assert without_thoughts(text, ("<t>", "</t>")) == left


def test_an_action_is_looked_up_whatever_its_case():
    assert started().step("<answer>RIGHT</answer>").metrics["cell"] == 1
    with_lookup = started(action_lookup={"forward": "Right"})
    assert with_lookup.step("<answer>Forward</answer>").metrics["cell"] == 1
    unknown = with_lookup.step("<answer>Right</answer>")
    assert unknown.metrics["invalid_actions"] == 1
    assert unknown.observation.text == "'Right' is not an action. Actions: forward.\nat 1"


def test_a_response_without_an_action_costs_the_format_penalty_and_shows_the_last_message_again():
    env = started(format_penalty=-0.5, invalid_action_penalty=-0.25)
    for _ in range(2):
        result = env.step("Right!")
        assert result.observation.messages == (
            Message("user", "No action was found in your response; write it as <answer>...</answer>.\nat 0"),
        )
        assert result.observation.state == "0"
        assert result.reward == -0.5
        assert result.reward_parts == {"env": 0, "format_penalty": -0.5, "invalid_action_penalty": 0}
        assert result.metrics == {"actions": 0, "format_errors": 1, "invalid_actions": 0, "surplus_actions": 0}


def test_all_of_the_last_observation_is_shown_again_but_a_system_message():
    first = Observation((Message("system", "S"), Message("user", "Rules."), Message("user", "at 0")))
    shown = started(Free(first=first)).step("?").observation
    assert [message.content.splitlines()[-1] for message in shown.messages] == ["Rules.", "at 0"]


def test_metrics_of_several_actions_are_summed():
    result = started(max_actions_per_step=3).step("<answer>Right||Right||Right</answer>")
    assert result.metrics["cell"] == 1 + 2 + 3
    assert result.metrics["success"] == 1
    assert "success" not in started(max_actions_per_step=3).step("<answer>Right||Right</answer>").metrics


def test_the_state_of_a_repeated_message_is_the_first_ones():
    env = started(Free())
    shown = env.step("no tags").observation
    assert shown.state == "hello"
    assert shown.text.endswith("\nhello")


@pytest.mark.parametrize("pattern", [r"move: (\w+)", "<a>([^<]*)</a>", None])
def test_only_plain_patterns_are_shown_as_an_example(pattern):
    shown = started(action_pattern=pattern).step("").observation
    assert shown.text == "No action was found in your response.\nat 0"


def test_several_actions_are_done_in_turn_and_their_rewards_add_up():
    env = started(max_actions_per_step=3, invalid_action_penalty=-0.25)
    result = env.step("<answer>Left || Right || jump || Right || Right</answer>")
    # Of the first three, Left is refused by the environment, jump is unknown, and Right counts 1; two are surplus.
    assert result.reward == 1 - 2 * 0.25
    assert result.reward_parts == {
        "env": 1, "env/walk": 1, "format_penalty": 0, "invalid_action_penalty": -0.5,
    }  # fmt: skip
    assert result.metrics == {"cell": 1, "actions": 1, "format_errors": 0, "invalid_actions": 2, "surplus_actions": 2}
    problems = "There is nothing to the left.\n'jump' is not an action. Actions: Left, Right."
    assert result.observation.text == f"{problems}\nat 1"
    assert result.observation.state == "1"
    both = env.step("<answer>Right||Left||Right</answer>")
    assert (both.reward, both.reward_parts["env/walk"], both.observation.text) == (3, 3, "at 2")


def test_nothing_is_done_after_the_end_of_the_episode():
    env = started(max_actions_per_step=9)
    result = env.step("<answer>" + "||".join(["Right"] * 9) + "</answer>")
    assert (result.reward, result.terminated, result.observation) == (3, True, None)
    assert (result.metrics["actions"], result.metrics["success"]) == (3, 1)
    with pytest.raises(ResetNeeded):
        env.step("<answer>Right</answer>")
    env.reset(1, {})
    assert env.step("<answer>Right</answer>").observation.text == "at 1"


def test_before_reset_there_is_no_episode():
    with pytest.raises(ResetNeeded):
        ResponseEnv(Line(), spec_of()).step("x")


def test_the_time_limit_counts_responses_and_cuts_off():
    env = started(max_steps=2)
    assert not env.step("no action").truncated
    last = env.step("<answer>Right</answer>")
    assert (last.terminated, last.truncated, last.observation, last.metrics["success"]) == (False, True, None, 0)
    with pytest.raises(ResetNeeded):
        env.step("<answer>Right</answer>")


def test_an_end_on_the_last_step_is_an_end_and_not_a_cut():
    env = started(max_steps=3)
    *_, last = [env.step("<answer>Right</answer>") for _ in range(3)]
    assert (last.terminated, last.truncated, last.metrics["success"]) == (True, False, 1)


def changed(**fields: Any) -> StepResult:
    return StepResult(**{"reward": 1.0, "terminated": False, "observation": Observation.of("x"), **fields})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((1.0, False), r"Free.step returned \(1.0, False\) \(tuple\), expected a StepResult"),
        (changed(reward=math.nan), "reward = nan"),
        (changed(reward="1"), r"reward = '1' \(str\)"),
        (changed(terminated="yes"), r"terminated = 'yes' \(str\), expected True or False"),
        (changed(truncated=None), "truncated = None"),
        (changed(observation=None), "returned None .*expected an Observation"),
        (changed(observation="text"), r"returned 'text' \(str\)"),
        (changed(observation=Observation(())), "at least one Message"),
        (changed(observation=Observation(("hi",))), "at least one Message"),
        (changed(observation=Observation.of(3)), "strings"),
        (changed(metrics={"a": math.inf}), r"metrics\['a'\] = inf"),
        (changed(metrics=[1]), "dict of floats by name"),
        (changed(reward_parts={1: 1.0}), "dict of floats by name"),
    ],
)
def test_what_is_no_step_result_is_refused_by_class_and_value(result, message):
    with pytest.raises(TypeError, match=message) as caught:
        started(Free(result), action_pattern=None).step("go")
    assert "Free.step" in str(caught.value)


def test_a_reset_that_gives_a_text_is_refused():
    with pytest.raises(TypeError, match=r"Free.reset returned 'hi' \(str\), expected an Observation"):
        started(Free(first="hi"))


def test_numpy_numbers_become_plain_ones():
    import numpy as np

    result = started(
        Free(changed(reward=np.float32(0.5), terminated=np.bool_(True), metrics={"n": np.int64(3)})),
        action_pattern=None,
    ).step("go")
    assert type(result.reward) is float
    assert type(result.terminated) is bool
    assert type(result.metrics["n"]) is float


def test_a_lookup_must_lead_to_actions_of_the_environment():
    with pytest.raises(ValueError, match="no action 'Up'; it has Left, Right"):
        ResponseEnv(Line(), spec_of(action_lookup={"u": "Up"}))


def test_rules_travel():
    rules = spec_of(action_lookup={"u": "Up"}, thinking_tags=("<t>", "</t>"))
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_an_environment_that_reads_responses_gets_those_without_an_answer_as_they_are():
    env = started(Reads(), thinking_tags=("<think>", "</think>"))
    told = {text: env.step(text) for text in ("<think>1</think> go [2]", "go <answer>3</answer>", "<think>4</think>")}
    seen = [result.observation.text.splitlines()[-1] for result in told.values() if result.observation]
    assert seen == ["got go [2]", "got 3", "got 3"]
    assert [result.metrics["format_errors"] for result in told.values()] == [0, 0, 1]
    assert started(Free()).step("go").metrics["format_errors"] == 1
