"""Prompts that end with `<think>`: the response's thought has no opening tag, and unfinished it is no answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tiny_models import char_tokenizer

from roll.data.templates import PromptEncoder
from roll.data.thought_spans import prompted
from roll.rewards.base import Reward, RewardRequest, RewardResult, RewardSpec
from roll.rewards.code import code
from roll.rewards.format import format as form
from roll.rewards.reward_registry import load_reward
from roll.rollout.agent import Agent
from roll.rollout.episode_envs import RewardEnv
from roll.rollout.episode_key import Action
from roll.types.trajectory import Task


@pytest.fixture
def tokenizer() -> Any:
    return char_tokenizer()


OPENS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think>\n' }}{% endif %}"
)
CLOSES = OPENS.replace("<think>\n", "<think>\n\n</think>\n\n")


def task(truth: Any = "4", *, opens: bool = True, **payload: Any) -> Task:
    payload = {"prompt": "?", "ground_truth": truth, **payload}
    return Task(id="t:1", source="t", payload=payload, seed=0, tag="t", domain="d", opens_thought=opens)


ANSWERS = {
    "math_rule": ("4", r"\boxed{4}", {}),
    "gsm8k": ("4", "#### 4", {"mode": "flexible"}),
    "choice": ("B", "The answer is B", {}),
    "exact": ("Paris", "Answer: Paris", {"extract": "after_answer"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_unfinished_thought_states_no_answer(name: str) -> None:
    truth, answer, kwargs = ANSWERS[name]
    for loaded in (
        load_reward(RewardSpec(name=name, kwargs=kwargs)),
        load_reward(RewardSpec(name="weighted", parts={"right": (1.0, RewardSpec(name=name, kwargs=kwargs))})),
    ):
        assert loaded(f"Let me see. {answer}", task(truth, opens=False)).value == 1.0
        assert loaded(f"Let me see. {answer}", task(truth)).value == 0.0
        assert loaded(f"Let me see.\n</think>\n\n{answer}", task(truth)).value == 1.0
        # A thought that the response opens again is unfinished, too.
        assert loaded(f"Let me see.\n</think>\n<think>\n{answer}", task(truth)).value == 0.0


def test_a_program_or_a_generated_answer_in_an_unfinished_thought_is_none() -> None:
    entry = {"question": "2 + 3 =", "answer": "5", "metadata": {}}
    made = task(reasoning_gym={"dataset": "chain_sum", "config": {}, "entry": entry})
    generated = load_reward(RewardSpec(name="reasoning_gym"))
    assert [generated(text, made).value for text in ("5", "So.</think>5")] == [0.0, 1.0]
    tests = task('{"inputs": ["1"], "outputs": ["1"]}')
    # Nothing runs, since there is no program: no sandbox is asked for.
    assert code("```python\nprint(1)\n```", tests, sandbox=None).parts["answered"] == 0.0  # type: ignore[arg-type]


def test_thoughts_that_are_plain_text_are_still_so_where_it_is_asked_for() -> None:
    plain = load_reward(RewardSpec(name="math_rule", kwargs={"think": "ignore"}))
    assert plain(r"Hm: \boxed{4}", task()).value == 1.0


def test_the_form_of_a_response_begins_with_the_tag_that_the_prompt_ends_with() -> None:
    response = "Hm.</think><answer>4</answer>"
    assert [form(response, task(opens=opens)).value for opens in (True, False)] == [1.0, 0.0]
    assert form(f"<think>{response}", task()).value == 1.0  # the response repeats it
    assert form("Hm.<answer>4</answer>", task()).value == 0.0
    assert form("<answer>4</answer>", task(), template="answer").value == 1.0


def test_an_agent_sees_whether_the_prompt_opens_a_thought(tokenizer: Any) -> None:
    agent = Agent(tokenizer)

    def opens(prompt: str, response: str = "hm") -> bool:
        return agent.opens_thought(agent.encode(prompt), agent.encode(response), response)

    assert opens("user: hi\nassistant: <think>\n")
    assert not opens("user: hi\nassistant: <think>\n\n</think>\n\n")
    assert not opens("Think in <think> tags.\nassistant: ")
    assert not opens("")


def test_a_closing_tag_that_a_text_does_not_show_still_ends_the_thought(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    agent = Agent(tokenizer)
    prompt = agent.encode("assistant: <think>\n")
    for response, unfinished in (("So.</think>5", False), ("So. 5", True)):
        ids = agent.encode(response)
        text = agent.decode_response(ids, ())
        assert "</think>" not in text
        assert agent.opens_thought(prompt, ids, text) is unfinished


def test_the_reward_function_learns_it_from_the_task() -> None:
    asked: list[RewardRequest] = []

    def submit(request: RewardRequest) -> Future[RewardResult]:
        asked.append(request)
        future: Future[RewardResult] = Future()
        future.set_result(RewardResult(id=request.id, status="ok", reward=Reward(1.0)))
        return future

    env = RewardEnv(submit, task(opens=False), "e")
    for opens in (True, False):
        asyncio.run(env.step(Action("hm", "stop", opens)))
    assert [request.task.opens_thought for request in asked] == [True, False]


def test_a_template_tells_before_the_run(tokenizer: Any) -> None:
    for template, opens in ((OPENS, True), (CLOSES, False), ("{prompt}", False), ("{prompt} <think>", True)):
        encoder = PromptEncoder(tokenizer, template=template)
        assert prompted(task(opens=False), encoder).opens_thought is opens
    assert not prompted(task(opens=False), None).opens_thought


def test_reward_test_finds_a_function_that_pays_unfinished_thoughts(
    tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from roll.cli.__main__ import main

    tokenizer.chat_template = OPENS
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "How much is 2 + 2?", "answer": "4"}\n')
    (tmp_path / "own.py").write_text(
        "def pays(response, task):\n    return float(task.payload['ground_truth'] in response)\n"
    )
    (tmp_path / "c.yaml").write_text(
        f"""
pipeline: rlvr
pretrain: {tmp_path}/model
max_steps: 1
rollout_batch_size: 1
prompt_length: 64
response_length: 8
rewards: {{sums: {{name: math_rule}}}}
actor_train:
  data_args: {{file_name: {tmp_path}/rows.jsonl}}
"""
    )
    arguments = ["reward", "test", str(tmp_path / "c.yaml"), str(tmp_path / "rows.jsonl")]
    assert main(arguments) == 0, capsys.readouterr()
    assert main([*arguments, f"rewards.sums.name={tmp_path}/own.py:pays"]) == 1
    assert "unfinished thought" in capsys.readouterr().out
