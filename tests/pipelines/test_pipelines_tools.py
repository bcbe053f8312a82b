"""Tools and simulated users in whole runs of a tiny random model."""

from __future__ import annotations

import string

import pytest
from tiny_models import build_tiny_model, char_tokenizer
from toy import run_toy, write_toy

from roll.configs.schema.tool_config import ToolConfig
from roll.data.templates import PromptEncoder
from roll.envs.tools.toolbox import Toolbox
from roll.pipelines.rl.rlvr import prompt_encoder
from roll.types.trajectory import Task

LETTERS = list(string.ascii_letters + string.digits)  # a random model ends with one of them soon
USER = """
from roll.envs.tools.interactions import BaseInteraction


class User(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "Again.", 0.5, {}
"""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=2048)


def test_a_run_with_tools_and_a_user_trains_on_several_turns_and_counts_calls(long_model, tmp_path):
    (tmp_path / "user.py").write_text(USER)
    folder = write_toy(tmp_path / "toy", long_model, rows=4)
    rows = run_toy(
        folder,
        "max_steps=2", "rollout_batch_size=2", "num_return_sequences_in_group=2",
        "tools=[{name: calculator}]", "tool_use.max_turns=3", "rewards.case.tools=[calculator]",
        f"interactions=[{{name: user, path: '{tmp_path}/user.py:User', score_weight: 0.25}}]",
        "rewards.case.interaction=user",
        "prompt_length=900", "sequence_length=1100", "response_length=16",
        f"actor_infer.generating_args.stop_strings={LETTERS}", "actor_infer.generating_args.ignore_eos=false",
        "actor_train.data_args.template=native", "validation.data_args.template=native",
        "actor_train.training_args.per_device_train_batch_size=4",
        "actor_train.training_args.gradient_accumulation_steps=1",
    )  # fmt: skip
    for row in rows:
        assert row["episode/turns_mean"] > 2 and row["response/truncated_share"] == 1
        assert row["tools/calls"] == row["tools/errors"] == 0  # a random model calls nothing
        assert row["reward/case/part/interaction"] == pytest.approx(row["episode/turns_mean"] * 0.5 * 0.25, abs=0.13)
        assert row["rollout/rows"] == row["rollout/responses"] == 4
        assert row["mismatch/kl"] < 1e-10
        assert row["prompt/length_max"] > 500  # the tool is described


def test_prompts_tell_of_tools_and_those_of_rows_without_do_not():
    from roll.configs.parsing.loader import read_tree

    tree = {"pipeline": "rlvr", "pretrain": "m", "max_steps": 1, "tools": [{"name": "calculator"}]}
    tree |= {"rewards": {"maths": {"name": "none", "tools": "calculator"}, "other": {"name": "none"}}}
    config = read_tree({**tree, "actor_train": {"data_args": {"file_name": "a.jsonl"}}}).config
    tokenizer = char_tokenizer()

    def task(domain, **payload):
        return Task(id="t", source="s", payload={"prompt": "1+1?", **payload}, seed=0, tag=domain, domain=domain)

    with Toolbox([ToolConfig(name="calculator")]) as toolbox:
        encoder = prompt_encoder(config, config.actor_train.data_args, tokenizer, toolbox)
        told = encoder.render(task("maths"))
        assert '"name": "calculator"' in told and told.endswith("1+1?<|im_end|>\n<|im_start|>assistant\n")
        plain = PromptEncoder(tokenizer).render(task("maths"))
        for without in (task("other"), task("maths", agent_name="single_turn_agent")):
            assert encoder.render(without) == plain
        with pytest.raises(ValueError, match="task 't': agent_name 'react' isn't known"):
            encoder.render(task("maths", agent_name="react"))
