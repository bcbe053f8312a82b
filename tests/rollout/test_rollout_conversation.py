"""Multi-turn episodes: what each sample unit shows and trains on, templates, and how episodes end."""

from __future__ import annotations

import pytest
from chat_tokenizers import Script, ScriptedEnv, bpe_tokenizer, conversation, group_of, ids_of, play
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.schema.env_config import CustomEnv
from roll.envs.base import Message, Observation
from roll.envs.wrappers import parse_actions
from roll.pipelines.rollouts.assemble import assemble
from roll.rollout.agent import Agent
from roll.rollout.conversation import ConversationRollout
from roll.types.trajectory import EpisodeError

PLAIN = bpe_tokenizer(None)
CHAT = bpe_tokenizer("chatml")


def played(*answers, shows=("A", "B", "C", "D"), tokenizer=PLAIN, reason="stop", env=None, limit=10_000, **spec):
    """(what the engine was shown turn by turn, as text; the trajectory; the environment)."""
    agent = Agent(tokenizer, chat=tokenizer.chat_template is not None)
    engines = Script(tokenizer, *[(answer, reason) for answer in answers])
    env = env or ScriptedEnv(*shows)
    rollout = ConversationRollout(agent, conversation(**{"instructions": "S", **spec}))
    trajectory = play(engines, env, rollout, agent, limit=limit)
    return engines, trajectory, env


# --- sample units -----------------------------------------------------------------------------------------------------


def rows_of(trajectory):
    batch = assemble([group_of(trajectory)]).batch
    return [PLAIN.decode(batch.row("token_ids", i)) for i in range(len(batch))]


def test_a_trajectory_is_one_row_that_every_turn_adds_to():
    engines, trajectory, _ = played("a", "b", "c", "d")
    assert engines.texts == ["SA", "SAaB", "SAaBbC", "SAaBbCcD"]
    assert [turn.resets_context for turn in trajectory.turns] == [False] * 4
    assert rows_of(trajectory) == ["SAaBbCcDd"]


@pytest.mark.parametrize(
    ("length", "contexts"),
    [
        (None, ["SA", "SAaB", "SAaBbC", "SAaBbCcD"]),
        (2, ["SA", "SAaB", "SAaBbC", "SBbCcD"]),
        (1, ["SA", "SAaB", "SBbC", "SCcD"]),
        (0, ["SA", "SB", "SC", "SD"]),
    ],
)
def test_a_step_is_a_row_of_its_own_with_the_last_exchanges(length, contexts):
    engines, trajectory, _ = played("a", "b", "c", "d", sample_unit="step", history_length=length)
    assert engines.texts == contexts
    assert [turn.resets_context for turn in trajectory.turns] == [False, True, True, True]
    assert rows_of(trajectory) == [context + answer for context, answer in zip(contexts, "abcd", strict=True)]


@pytest.mark.parametrize(
    ("length", "contexts", "rows"),
    [
        (None, ["SA", "SAaB", "SAaBbC", "SAaBbCcD"], ["SAaBbCcDd"]),
        (2, ["SA", "SAaB", "SAaBbC", "SD"], ["SAaBbCc", "SDd"]),
        (1, ["SA", "SAaB", "SC", "SCcD"], ["SAaBb", "SCcDd"]),
        (0, ["SA", "SB", "SC", "SD"], ["SAa", "SBb", "SCc", "SDd"]),
    ],
)
def test_concatenated_steps_share_a_row_until_the_context_is_reset(length, contexts, rows):
    engines, trajectory, _ = played("a", "b", "c", "d", sample_unit="concat", history_length=length)
    assert engines.texts == contexts
    assert rows_of(trajectory) == rows


@given(
    unit=st.sampled_from(["trajectory", "step", "concat"]),
    length=st.none() | st.integers(0, 4),
    turns=st.integers(1, 7),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_rows_are_what_the_engine_saw_and_every_sampled_token_is_in_one_of_them(unit, length, turns):
    answers, shows = [f"r{i}" for i in range(turns)], [f"#{i}" for i in range(turns)]
    engines, trajectory, _ = played(*answers, shows=shows, sample_unit=unit, history_length=length)
    rollouts = assemble([group_of(trajectory)])
    batch = rollouts.batch
    for i, turns_of_row in enumerate(rollouts.row_turns):
        last = turns_of_row.stop - 1
        context = (*engines.contexts[last], *trajectory.turns[last].response_ids)
        assert tuple(batch.row("token_ids", i).tolist()) == context
    assert [turn for row in rollouts.row_turns for turn in row] == list(range(turns))
    assert int(batch.action_mask.sum()) == trajectory.num_response_tokens
    assert trajectory.num_tokens == len(batch.token_ids)


def test_later_prompts_show_responses_without_their_thoughts_where_they_are_rerendered():
    answers = ("<think>left or up?</think>\nUp", "Down")
    shown = {"shows": ("A", "B"), "thinking_tags": ("<think>", "</think>")}
    assert played(*answers, sample_unit="step", **shown)[0].texts == ["SA", "SAUpB"]
    assert played(*answers, sample_unit="trajectory", **shown)[0].texts[1] == "SA<think>left or up?</think>\nUpB"


def test_a_thought_that_the_template_opened_is_one_also_when_it_is_cut_off():
    opens = CHAT.chat_template.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    env = ScriptedEnv("A", "B")
    played(
        "Perhaps <answer>Up</answer>? No,", "so</think>Down", tokenizer=bpe_tokenizer(opens), env=env,
        sample_unit="step", history_length=0, thinking_tags=("<think>", "</think>"), system_template=None,
    )  # fmt: skip
    assert env.actions == ["<think>Perhaps <answer>Up</answer>? No,", "<think>so</think>Down"]
    spec = CustomEnv(env_type="x", thinking_tags=("<think>", "</think>"))
    assert [parse_actions(action, spec) for action in env.actions] == [[], []]


def test_what_the_environment_says_as_system_holds_in_later_contexts_too():
    first = Observation((Message("system", "Be quick. "), Message("user", "A")))
    units = [("step", 0, "SBe quick. C"), ("step", 1, "SBe quick. BbC"), ("concat", 1, "SBe quick. C")]
    for unit, length, last in units:
        engines, _, _ = played("a", "b", "c", shows=(first, "B", "C"), sample_unit=unit, history_length=length)
        assert engines.texts[0] == "SBe quick. A"
        assert engines.texts[2] == last


def test_a_template_that_strips_thoughts_is_for_steps_alone():
    stripping = CHAT.chat_template.replace("m.content", "m.content.split('</think>')[-1]")
    agent = Agent(bpe_tokenizer(stripping), chat=True)
    units = [("trajectory", None, True), ("concat", 3, True), ("concat", 0, False), ("step", 3, False)]
    for unit, length, refused in units:
        spec = conversation(sample_unit=unit, history_length=length)
        if refused:
            with pytest.raises(ValueError, match="sample_unit: step"):
                ConversationRollout(agent, spec)
        else:
            ConversationRollout(agent, spec)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_templates_tell_the_rules_and_what_is_left():
    engines, _, _ = played(
        "a",
        "b",
        shows=("A", "B"),
        system_template="{instructions}! {max_steps} turns of {max_actions_per_step}. {{max_steps}} {} {2}",
        turn_template="[{step}/{max_steps}] {observation} ({steps_left} left, {max_tokens} tokens)",
        max_steps=3,
        max_actions_per_step=2,
        max_tokens_per_step=7,
        sample_unit="step",
        history_length=0,
    )
    system = "S! 3 turns of 2. {max_steps} {} {2}"
    assert engines.texts == [f"{system}[1/3] A (3 left, 7 tokens)", f"{system}[2/3] B (2 left, 7 tokens)"]
    assert engines.limits == [7, 7]


def test_without_a_limit_of_its_own_a_step_has_the_runs():
    engines, _, _ = played("a", shows=("A",), turn_template="{observation}{max_tokens}")
    assert (engines.texts, engines.limits) == (["SA50"], [50])


def test_what_an_environment_says_is_never_read_as_a_template():
    text = "{step} {{step}} {0} {observation} {% raw %}"
    assert played("a", shows=(text,), instructions=text)[0].texts == [text + text]


@pytest.mark.parametrize("keys", [{"system_template": None}, {"instructions": ""}])
def test_without_a_text_there_is_no_system_message(keys):
    engines, _, _ = played("a", shows=("A",), tokenizer=CHAT, **keys)
    assert engines.texts == ["<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"]


def test_messages_of_several_roles_keep_them_and_the_last_one_is_filled_in():
    both = Observation((Message("tool", "7"), Message("user", "and?")))
    engines, _, _ = played("a<|im_end|>", "b", shows=("A", both), tokenizer=CHAT, turn_template="{step}: {observation}")
    assert engines.texts[1].endswith(
        "<|im_start|>user\n1: A<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>user\n2: and?<|im_end|>\n<|im_start|>assistant\n"
    )


# --- how episodes end -------------------------------------------------------------------------------------------------


def outcome(trajectory):
    return trajectory.status, trajectory.trainable, len(trajectory.turns), trajectory.reward


def test_rewards_of_turns_add_up_and_their_parts_do():
    _, trajectory, env = played("a", "b", "c", shows=("A", "B", "C"))
    assert outcome(trajectory) == ("ok", True, 3, 3.0)
    assert trajectory.reward_parts == {"env": 2.0}
    assert env.actions == ["a", "b", "c"] and env.closed == 1


def test_a_response_that_is_cut_off_is_an_action_like_others_and_the_episode_goes_on():
    engines, trajectory, env = played("a", "b", "c", shows=("A", "B", "C"), tokenizer=CHAT, reason="length")
    assert outcome(trajectory) == ("ok", True, 3, 3.0)
    assert env.actions == ["a", "b", "c"]
    assert {turn.finish_reason for turn in trajectory.turns} == {"length"}
    assert engines.texts[1].endswith("a<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n")


def test_a_time_limit_truncates():
    assert outcome(played("a", "b", env=ScriptedEnv("A", "B", truncates=True))[1]) == ("truncated", True, 2, 2.0)


def test_an_environment_without_a_limit_is_stopped_after_the_last_step():
    assert outcome(played("a", "b", shows="ABCD", max_steps=2)[1]) == ("truncated", True, 2, 2.0)


def test_a_full_context_ends_the_episode_with_what_was_played():
    # S A a B b C is 6 tokens: no room for the third response.
    _, trajectory, _ = played("a", "b", "c", limit=6)
    assert outcome(trajectory) == ("truncated", True, 2, 2.0)
    assert "6 tokens of context and no room" in trajectory.error


def test_the_limit_holds_for_each_context_and_not_for_the_episode():
    _, trajectory, _ = played("a", "b", "c", "d", limit=6, sample_unit="concat", history_length=1)
    assert outcome(trajectory) == ("ok", True, 4, 4.0)


def test_the_last_room_bounds_the_response():
    engines, trajectory, _ = played("a", "b", "c", limit=7)
    assert engines.limits == [5, 3, 1]
    assert outcome(trajectory) == ("truncated", True, 3, 3.0)


def test_a_first_prompt_over_the_limit_is_counted_and_not_trained_on():
    engines, trajectory, env = played("a", shows=("A much longer observation",), limit=4)
    assert outcome(trajectory) == ("truncated", False, 0, 0)
    assert engines.contexts == [] and env.closed == 1
    assert len(assemble([group_of(trajectory)]).batch) == 0


@pytest.mark.parametrize("status", ["env_error", "timeout"])
def test_a_failure_of_the_environment_is_a_status_and_no_reward(status):
    env = ScriptedEnv("A", "B", error=EpisodeError(status, "it broke"))
    _, trajectory, env = played("a", "b", env=env)
    assert (trajectory.status, trajectory.trainable, trajectory.error) == (status, False, "it broke")
    assert env.closed == 1


def test_an_environment_that_shows_nothing_fails_when_nothing_else_is_told():
    _, trajectory, _ = played("a", shows=("",), instructions="")
    assert (trajectory.status, trajectory.trainable) == ("env_error", False)
    assert "without tokens" in trajectory.error


def test_turns_name_the_state_that_was_shown():
    shows = (Observation.of("A", state="1"), Observation.of("B"), Observation.of("C", state="1"), Observation.of("B"))
    _, trajectory, _ = played("a", "b", "c", "d", shows=shows, turn_template="{step} {observation}")
    one, two, three, four = (turn.state for turn in trajectory.turns)
    assert one == three and two == four and one != two
    assert len(one) == 16
    # The same in another episode and another process.
    assert played("x", shows=(Observation.of("other", state="1"),))[1].turns[0].state == one
    assert one == "8c16510882e1ba6b"


def test_the_tokens_of_an_observation_are_no_more_and_no_less():
    _, trajectory, _ = played("a", "b", shows=("A", "B"))
    assert [turn.prompt_ids for turn in trajectory.turns] == [ids_of(PLAIN, "SA"), ids_of(PLAIN, "B")]
