"""Tools and simulated users in episodes: which turns there are, what the policy is shown, what is counted and paid."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from chat_tokenizers import CHATML, KEY, TASK, Script, ScriptedEnv, bpe_tokenizer, conversation, group_of, play
from fakes import instant
from family_templates import FAMILIES, marked_tokenizer

from roll.configs.schema.tool_config import InteractionConfig, ToolConfig, ToolUseConfig
from roll.data.templates import TemplateError
from roll.envs.tools.interactions import BaseInteraction, Interactions
from roll.envs.tools.toolbox import Toolbox
from roll.pipelines.rollouts.assemble import assemble
from roll.rollout.agent import Agent
from roll.rollout.conversation import ConversationRollout
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.tool_rollout import ToolRollout
from roll.rollout.tool_turns import ToolTurns
from roll.strategies.base import SamplingParams

CHAT = bpe_tokenizer(CHATML)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
TASKS = '''
from roll.envs.tools.base import Tool, ToolError, ToolReply
from roll.envs.tools.interactions import BaseInteraction


def shout(word: str, times: int = 1) -> str:
    """Repeat a word.

    Args:
        word: what
        times: how often
    """
    return word.upper() * times


class Counter(Tool):
    description = "Counts its calls."
    closed = []

    def create(self, task, kwargs):
        return {"count": kwargs.get("start", 0)}

    def call(self, arguments, state):
        state["count"] += 1
        if state["count"] > 5:
            raise ToolError("that is enough")
        return ToolReply(str(state["count"]), reward=0.5, metrics={"seen": state["count"]})

    def close(self, state):
        self.closed.append(state["count"])


class User(BaseInteraction):
    finished = []

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"].strip() == kwargs["ground_truth"]
        return right, "Think again.", 1.0 if right else -0.25, {}

    async def calculate_score(self, instance_id, **kwargs):
        return 0.125

    async def finalize_interaction(self, instance_id, **kwargs):
        self.finished.append(instance_id)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with tools and a user of one's own, and the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TASKS)
    return "own.py"


CALCULATOR = ToolConfig(name="calculator")


def played(
    *answers,
    tools=(CALCULATOR,),
    payload=None,
    use=None,
    limit=10_000,
    requests=None,
    chat=None,
    parser="hermes",
    **more,
):
    """(the engines, the trajectory, what the reward function was given)"""
    use, asked, chat = use or ToolUseConfig(), [], chat or CHAT
    agent = Agent(chat)
    engines = Script(chat, *[answer if isinstance(answer, tuple) else (answer, "stop") for answer in answers])
    task = replace(TASK, payload={"prompt": "How much?", **(payload or {})})

    def score(request):
        asked.append(request.response)
        if requests is not None:
            requests.append(request)
        return 1.0

    with Toolbox(tools) as toolbox:
        turns = ToolTurns(agent, toolbox, [tool.name for tool in tools], use, parser)
        rollout = ToolRollout(agent, turns, **more)
        player = EpisodePlayer(
            engines,
            agent,
            lambda t, name: RewardEnv(instant(score), t, name),
            max_sequence_length=limit,
            rollouts={"maze": rollout},
        )
        trajectory = asyncio.run(player.play(task, KEY, SamplingParams(max_new_tokens=200)))
    return engines, trajectory, asked


def test_calls_are_answered_in_the_same_context_until_a_response_calls_nothing():
    first = f"Let me see. {CALL % '6*7'}"
    engines, trajectory, asked = played(first, CALL % "42+1", "It is 43.")
    assert trajectory.error == "" and trajectory.status == "ok"
    assert asked == ["It is 43."] and trajectory.reward == 1.0
    opening = "<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n"
    reply = "<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
    told = opening  # what a row's prompt says of tools is written where data are tokenised
    assert engines.texts[0] == told
    assert engines.texts[1] == told + first + reply.format(42)
    assert engines.texts[2] == told + first + reply.format(42) + CALL % "42+1" + reply.format(43)
    assert [turn.observation for turn in trajectory.turns] == ["42", "43", ""]
    assert trajectory.counts["tools/calls"] == 2 and trajectory.counts["tools/errors"] == 0
    row = assemble([group_of(replace(trajectory, task_id="maze"))]).batch
    assert CHAT.decode(row.row("token_ids", 0)) == engines.texts[2] + "It is 43."
    trained = [t for t, m in zip(row.row("token_ids", 0), row.row("action_mask", 0), strict=True) if m]
    assert CHAT.decode(trained) == first + CALL % "42+1" + "It is 43."


def test_a_reward_function_can_read_the_whole_conversation_and_its_tokens():
    requests = []
    first = f"Let me see. {CALL % '6*7'}"
    _, trajectory, _ = played(first, "It is 42.", requests=requests)
    (request,) = requests
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "6*7"}}}
    assert list(request.messages) == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "name": "calculator"},
        {"role": "assistant", "content": "It is 42."},
    ]
    # All tokens behind the first prompt: two responses, and the reply between them.
    reply = "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.decode(request.completion_ids) == first + reply + "It is 42."
    assert request.completion_text == CHAT.decode(request.completion_ids, skip_special_tokens=True)
    assert (request.step, len(trajectory.turns)) == (KEY.step - 1, 2)


def test_parallel_calls_are_answered_in_their_order_and_those_beyond_the_limit_are_refused():
    three = "".join(CALL % e for e in ("1+1", "2+2", "3+3"))
    engines, trajectory, _ = played(three, "ok", use=ToolUseConfig(max_parallel_calls=2))
    replies = engines.texts[1].partition(three)[2]
    assert replies.index("tool\n2<") < replies.index("tool\n4<") < replies.index("at most 2 calls")
    assert {k: v for k, v in trajectory.counts.items() if v} == {
        "tools/calls": 2, "tools/errors": 1, "tools/refused": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "told", "kind"),
    [
        (
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
            "no tool 'clock'; there are calculator",
            "unknown",
        ),
        ('<tool_call>{"name": "calculator", "arguments"</tool_call>', "isn't valid JSON", "bad_calls"),
        ('<tool_call>{"name": "calculator", "arguments": {"x": 1}}</tool_call>', "wrong arguments", "bad_arguments"),
        (CALL % "1/0", "division by zero", "refused"),
    ],
)
def test_what_cannot_be_called_is_told_to_the_policy_and_counted(said, told, kind):
    engines, trajectory, _ = played(said, "Sorry.")
    assert told in engines.texts[1].partition(said)[2]
    assert trajectory.status == "ok"
    assert trajectory.counts["tools/errors"] == trajectory.counts[f"tools/{kind}"] == 1


def test_an_episode_ends_with_its_turns_its_room_or_a_response_that_is_cut_off():
    call = CALL % "1+1"
    _, trajectory, asked = played(call, call, "never", use=ToolUseConfig(max_turns=2))
    assert (len(trajectory.turns), trajectory.status, asked) == (2, "truncated", [call])
    _, trajectory, asked = played((call, "length"), "never")
    assert (len(trajectory.turns), trajectory.status, asked) == (1, "truncated", [call])
    room = len(CHAT("<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n" + call).input_ids) + 10
    _, trajectory, asked = played(call, "never", limit=room)
    assert (len(trajectory.turns), trajectory.status, asked) == (1, "truncated", [call])


@pytest.mark.parametrize(("where", "kept"), [("left", ("", "z")), ("middle", ("a", "z")), ("right", ("a", ""))])
def test_a_long_reply_is_cut_to_its_tokens_with_a_note(own, where, kept):
    tool = ToolConfig(name="shout", path="own.py:shout", max_reply_tokens=20)
    call = json.dumps({"name": "shout", "arguments": {"word": "a" + "b" * 3000 + "z", "times": 1}})
    _, trajectory, _ = played(
        f"<tool_call>{call}</tool_call>", "ok", tools=[tool], use=ToolUseConfig(cut_replies=where)
    )
    shown = trajectory.turns[0].observation
    begin, note, end = shown.partition("[... ")
    assert note and "characters left out" in end
    assert begin.startswith(kept[0].upper()) and end.endswith(kept[1].upper() or "...]")
    assert len(CHAT(begin).input_ids) + len(CHAT(end.partition("...]\n")[2]).input_ids) <= 22
    assert trajectory.counts["tools/cut_replies"] == 1


def test_a_row_gives_its_tools_what_they_need_and_says_whether_it_uses_them(own):
    tools = [ToolConfig(name="count", path="own.py:Counter"), ToolConfig(name="shout", path="own.py:shout")]
    call = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
    kwargs = {"tools_kwargs": {"count": {"create_kwargs": {"start": 3}}, "shout": None}, "agent_name": "tool_agent"}
    _, trajectory, _ = played(call, call + call, "ok", tools=tools, payload={"extra_info": kwargs})
    assert [turn.observation for turn in trajectory.turns] == ["4", "5\nError: that is enough", ""]
    assert trajectory.reward == 1.0 + 0.5 + 0.5 and trajectory.turns[0].reward == 0.5
    assert trajectory.counts["tools/count/seen"] == 4 + 5 and trajectory.counts["tools/refused"] == 1
    from roll.utils.importing import load_object

    assert load_object("own.py:Counter").closed == [6]
    _, trajectory, asked = played(call, tools=tools, payload={"agent_name": "single_turn_agent"})
    assert len(trajectory.turns) == 1 and asked == [call]
    _, trajectory, _ = played(call, tools=tools, payload={"agent_name": "react"})
    assert trajectory.status == "env_error" and "tool_agent or single_turn_agent" in trajectory.error
    _, trajectory, _ = played(call, tools=tools, payload={"tools_kwargs": {"cuont": {}}})
    assert trajectory.status == "env_error" and "'cuont'" in trajectory.error


def test_a_simulated_user_answers_until_it_is_content_and_its_scores_are_added(own):
    users = Interactions([InteractionConfig(name="teacher", path="own.py:User", score_weight=2.0)])
    payload = {"interaction_kwargs": {"name": "teacher", "ground_truth": "43"}}
    engines, trajectory, asked = played(CALL % "6*7", "42", "43", payload=payload, interactions=users)
    users.close()
    assert asked == ["43"] and trajectory.status == "ok"
    assert "\n<|im_start|>user\nThink again.<|im_end|>\n" in engines.texts[2]
    # 1 of the reward function, and twice what the user gave: -1/4, 1, and 1/8 for the whole.
    assert trajectory.reward == 1.0 + 2 * (-0.25 + 1.0 + 0.125)
    assert trajectory.reward_parts["interaction"] == 1.75
    from roll.utils.importing import load_object

    assert load_object("own.py:User").finished == ["train/1/maze#0"]


def test_a_user_who_is_never_content_ends_with_the_turns_and_one_that_fails_is_no_score(own):
    users = Interactions([InteractionConfig(name="teacher", path="own.py:User")])
    payload = {"interaction_kwargs": {"ground_truth": "43"}}
    more = {"interactions": users, "interaction": "teacher", "use": ToolUseConfig(max_turns=2)}
    _, trajectory, asked = played("1", "2", "3", payload=payload, **more)
    assert (asked, trajectory.status) == (["2"], "truncated")
    _, trajectory, asked = played("1", payload={"interaction_kwargs": {}}, **more)
    assert (asked, trajectory.status) == ([], "env_error") and "KeyError: 'ground_truth'" in trajectory.error
    _, trajectory, _ = played("1", payload={"interaction_kwargs": {"name": "teachr"}}, **more)
    assert "teacher" in trajectory.error
    users.close()


def test_calls_in_a_thought_are_not_made():
    use = ToolUseConfig(thinking_tags=("<think>", "</think>"))
    said = f"<think>{CALL % '1+1'}</think>Two."
    _, trajectory, asked = played(said, use=use)
    assert asked == [said] and trajectory.counts["tools/calls"] == 0


def test_an_environment_is_given_the_first_response_without_calls():
    agent, env = Agent(CHAT), ScriptedEnv("A", "B")
    engines = Script(CHAT, *[(text, "stop") for text in (CALL % "1+1", "two", "three")])
    with Toolbox([ToolConfig(name="calculator")]) as toolbox:
        turns = ToolTurns(agent, toolbox, ["calculator"], ToolUseConfig(), "hermes")
        rollout = ConversationRollout(agent, conversation(instructions="S", tools=("calculator",)), turns)
        trajectory = play(engines, env, rollout, agent)
    assert trajectory.error == "" and env.actions == ["two", "three"]
    assert '{"type": "function", "function": {"name": "calculator"' in engines.texts[0]
    assert engines.texts[0].startswith("<|im_start|>system\nS\n\n# Tools")
    assert "<|im_start|>tool\n2<|im_end|>" in engines.texts[1]
    assert engines.texts[2].startswith(engines.texts[1] + "two")
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0, 1.0]
    assert len(assemble([group_of(trajectory)]).batch) == 1


# Results must follow calls, each with the id of its own, as Mistral's and Llama's templates want it.
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|im_start|>result ' + m.tool_call_id + ' ' + m.content + '<|im_end|>\n' }}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant\n' }}{% for c in m.tool_calls %}"
    "{{ '[TOOL_CALLS]' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (
            "qwen2.5",
            "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>",
        ),
        ("llama3", "<|start_header_id|>tool<|end_header_id|>\n\n2<|eot_id|><|start_header_id|>tool"),
        (STRICT, "<|im_start|>result call00000 2<|im_end|>\n<|im_start|>result call00001 4<|im_end|>"),
    ],
)
def test_results_are_written_as_the_chat_template_writes_them(template, shown, monkeypatch):
    tokenizer, said = bpe_tokenizer(template), CALL % "1+1" + CALL % "2+2"
    monkeypatch.setitem(globals(), "CHAT", tokenizer)
    engines, trajectory, _ = played(said, "ok")
    assert trajectory.error == ""
    assert shown in engines.texts[1].partition(said)[2]
    broken = '<tool_call>{"name": 1}</tool_call>'
    engines, trajectory, _ = played(broken, "ok")
    assert trajectory.error == "" and "Error: the call has no" in engines.texts[1].partition(broken)[2]


SAID = {
    "mistral v13": '[TOOL_CALLS]calculator[ARGS]{"expression": "6*7"}</s>',
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.calculator<|channel|>"
    'commentary json<|message|>{"expression": "6*7"}<|call|>',
    "gemma4": '<|tool_call>call:calculator{expression:<|"|>6*7<|"|>}<tool_call|><|tool_response>',
    "glm4.5": "\n<think>Hm.</think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>6*7</arg_value>\n"
    "</tool_call><|observation|>",
    "qwen3.5": "Hm: <tool_call>\n<function=calculator>\n</function>\n</tool_call>?\n</think>\n\n<tool_call>\n"
    "<function=calculator>\n<parameter=expression>\n6*7\n</parameter>\n</function>\n</tool_call><|im_end|>",
}
"""What a model of the family samples for one call; Qwen3.5's thinks of another one first, which isn't made."""


@pytest.mark.parametrize("family", SAID)
def test_an_episode_makes_the_calls_of_every_family_and_goes_on_in_the_same_context(family):
    template, parser = FAMILIES[family]
    engines, trajectory, _ = played(SAID[family], "It is 42.", chat=marked_tokenizer(template), parser=parser)
    assert trajectory.error == "" and trajectory.status == "ok"
    assert (trajectory.counts["tools/calls"], trajectory.counts["tools/errors"]) == (1, 0)
    before, carried, after = engines.texts[1].partition(SAID[family])
    assert before == engines.texts[0] and carried and "42" in after


def test_a_template_that_rewrites_what_stood_before_results_is_refused():
    numbered = CHATML.replace("m.content", "m.content + (messages|length)|string")
    with (
        pytest.raises(TemplateError, match="rewrites what stood before the results of tools"),
        Toolbox([ToolConfig(name="calculator")]) as toolbox,
    ):
        ToolTurns(Agent(bpe_tokenizer(numbered)), toolbox, ["calculator"], ToolUseConfig(), "hermes")


def test_the_base_class_of_users_has_verls_methods():
    user = BaseInteraction({"name": "x"})
    assert user.name == "x"
    assert asyncio.run(user.start_interaction("a", ground_truth="1")) == "a"
    assert asyncio.run(user.calculate_score("a")) == 0.0
