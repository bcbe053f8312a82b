"""Algorithms of the user's own: the examples of docs/your_own_algorithm.md train, stages act where the page says."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rows import R, credited_by, fresh, make_config, make_rollouts, on_actions

import roll
from roll.cli.__main__ import main
from roll.configs.catalog.stage_table import CREDIT, ESTIMATOR_NEEDS, MODEL_OUTPUTS, PHASES
from roll.pipelines.credit.credit import credit_stages

PAGE = Path(__file__).parents[2] / "docs/your_own_algorithm.md"
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
# Scores 1, 0, 0, 3 in two groups of two, one token each.
FOUR = ([R(1.0), R(0.0)], [R(0.0), R(3.0)])


@pytest.fixture
def examples(tmp_path, monkeypatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def stage_file(text: str) -> None:
    Path("own.py").write_text("import torch\nimport roll\n\n" + textwrap.dedent(text))


def credited(rollouts, **keys):
    found, metrics = credited_by(credit_stages(make_config(**keys)), fresh(rollouts, 1))
    return found, metrics.result()


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_three_examples_and_every_quantity():
    assert list(FILES) == ["maxrl.py", "squared.py", "hesitation.py"]
    text = PAGE.read_text("utf-8")
    assert [name for name in {**MODEL_OUTPUTS, **CREDIT} if f"`{name}`" not in text] == []


def test_maxrl_divides_by_the_mean(examples):
    # Group 1, 0 has mean 0.5: (1 - 0.5) / 0.5 = 1 and -1. Group 0, 3 has mean 1.5: -1 and 1. Without a success: 0.
    rollouts = make_rollouts(*FOUR, [R(0.0), R(0.0)])
    found, _ = credited(rollouts, adv_estimator="maxrl.py:maxrl")
    assert found.batch.advantages[found.batch.action_mask].tolist() == pytest.approx([1, -1, -1, 1, 0, 0], abs=1e-5)
    # The same in float64, of drawn rewards.
    rewards = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, _ = credited(make_rollouts([R(float(r)) for r in rewards]), adv_estimator="maxrl.py:maxrl")
    expected = (rewards - rewards.mean()) / (rewards.mean() + 1e-6)
    assert found.batch.advantages[found.batch.action_mask].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_examples_of_the_page_train_together(trained):
    for name, text in FILES.items():
        Path(name).write_text(text)
    rows = trained(
        "adv_estimator=maxrl.py:maxrl",
        "policy_loss={name: 'squared.py:squared', scale: 0.5}",
        "stages={name: 'hesitation.py:uncertain_tokens', share: 0.25}",
    )
    for row in rows:
        assert row["custom/squared_scale"] == 0.5
        # 8 prompts, 8 responses of 2 tokens: at least a quarter of 128 is left, and only that is in the loss.
        assert 0.25 <= row["custom/uncertain_share"] < 0.5
        assert row["actor/loss_tokens"] == pytest.approx(row["custom/uncertain_share"] * 128)
        assert row["time/old_logprobs"] > 0  # the pass that gives the entropies


def test_no_forward_pass_is_made_that_nobody_needs(trained):
    stage_file(
        """
        @roll.stage(needs=("scores",), gives=("trajectory_weights",))
        def twice(data):
            return {"trajectory_weights": 1.0 + (data["scores"] > 0)}
        """
    )
    rows = trained("stages=own.py:twice")
    assert not any("time/old_logprobs" in row for row in rows)


def test_a_stage_that_needs_the_reference_and_values_starts_both(trained, tiny_model):
    stage_file(
        """
        @roll.stage(needs=("ref_logprobs", "values"), gives=("rewards"))
        def compared(data):
            assert data["ref_logprobs"].shape == data["values"].shape == data.action_mask.shape
            data.metrics.add_mean("custom/reference", float(data["ref_logprobs"].sum()), 1.0)
            return {"rewards": data["scores"] - data["values"].mean(1)}
        """
    )
    critic = (
        "critic={training_args: {learning_rate: 1e-2, per_device_train_batch_size: 32, gradient_accumulation_steps: 2}}"
    )
    rows = trained("stages=own.py:compared", "reference={}", critic)
    for row in rows:
        assert row["custom/reference"] < 0
        assert row["time/reference"] > 0 and row["time/values"] > 0
        assert row["critic/grad_norm"] > 0


def test_a_step_in_which_nothing_counts_changes_nothing(trained):
    stage_file(
        """
        @roll.stage(needs=(), gives=("trajectory_mask",))
        def none(data):
            return {"trajectory_mask": torch.zeros(len(data.response_lengths), dtype=torch.bool)}
        """
    )
    rows = trained("stages=own.py:none")
    assert [row["actor/loss_tokens"] for row in rows] == [0, 0]
    assert [row["actor/grad_norm"] for row in rows] == [0, 0]


# --- where a stage acts -----------------------------------------------------------------------------------------------


def test_shaping_comes_before_normalisation_and_rewards_after_it(examples):
    stage_file(
        """
        @roll.stage(needs=("shaped_rewards",), gives=("shaped_rewards",))
        def plus_index(data):
            return {"shaped_rewards": data["shaped_rewards"] + torch.arange(4)}

        @roll.stage(needs=("rewards",), gives=("rewards",))
        def doubled(data, *, factor: float = 2.0):
            return {"rewards": factor * data["rewards"]}
        """
    )
    rollouts = make_rollouts(*FOUR)
    # 1, 1, 2, 6: without normalisation as they are; over their groups +-0.70711, then times 3.
    assert credited(rollouts, stages=("own.py:plus_index",))[0].shaped_rewards.tolist() == [1, 1, 2, 6]
    keys = {"reward_norm": "group", "stage_args": {"own.py:doubled": {"factor": 3.0}}}
    found, _ = credited(rollouts, stages=("own.py:doubled", "own.py:plus_index"), **keys)
    assert found.shaped_rewards.tolist() == pytest.approx([0, 0, -3 * 0.5**0.5, 3 * 0.5**0.5], abs=1e-4)


def test_advantages_masks_and_weights_reach_the_columns_of_the_rows(examples):
    stage_file(
        """
        @roll.stage(needs=("advantages",), gives=("advantages",))
        def clipped_below(data):
            return {"advantages": data["advantages"].clamp(min=0)}

        @roll.stage(needs=("scores",), gives=("trajectory_mask", "trajectory_weights"))
        def only_good(data):
            return {"trajectory_mask": data["scores"] > 0, "trajectory_weights": data["scores"]}
        """
    )
    rollouts = make_rollouts(*FOUR)
    keys = {"adv_estimator": "dr_grpo", "advantage_clip": 1.0}
    found, metrics = credited(rollouts, stages=("own.py:clipped_below", "own.py:only_good"), **keys)
    inside = found.batch.action_mask
    # Less the mean: 0.5, -0.5, -1.5, 1.5; clipped to +-1, then from below to 0.
    assert found.batch.advantages[inside].tolist() == [0.5, 0.0, 0.0, 1.0]
    assert found.batch.loss_mask[inside].tolist() == [True, False, False, True]
    assert found.batch.loss_weight.tolist() == [1, 0, 0, 3]
    assert metrics["rollout/masked_share"] == 0.5


def test_a_token_mask_never_holds_tokens_of_others(examples):
    stage_file(
        """
        @roll.stage(needs=("old_logprobs",), gives=("token_mask",))
        def everything(data):
            assert data["old_logprobs"].shape == data.action_mask.shape
            return {"token_mask": torch.ones_like(data.action_mask)}
        """
    )
    rollouts = make_rollouts([R(1.0, 2), R(0.0, 1)])
    column = on_actions(rollouts, -1.0, -2.0, -3.0)
    rollouts = replace(rollouts, batch=rollouts.batch.with_columns(old_logprobs=column))
    found, _ = credited(rollouts, stages=("own.py:everything",))
    assert torch.equal(found.batch.loss_mask, found.batch.action_mask)


def test_the_state_of_a_class_is_part_of_a_checkpoint(examples):
    stage_file(
        """
        @roll.stage(needs=("shaped_rewards",), gives=("shaped_rewards",))
        class Later:
            def __init__(self, *, start: int = 0):
                self.steps = start

            def __call__(self, data):
                self.steps += 1
                return {"shaped_rewards": data["shaped_rewards"] + self.steps}

            def state_dict(self):
                return {"steps": self.steps}

            def load_state_dict(self, state):
                self.steps = state["steps"]
        """
    )
    config = make_config(stages=("own.py:Later",), stage_args={"own.py:Later": {"start": 10}})
    stages, resumed = credit_stages(config), credit_stages(config)
    credited_by(stages, fresh(make_rollouts(*FOUR), 1))
    resumed.load_state_dict(stages.state_dict())
    for each in (stages, resumed):
        found, _ = credited_by(each, fresh(make_rollouts(*FOUR), 2), step=2)
        assert found.shaped_rewards.tolist() == [13, 12, 12, 15]


CONFIGURATIONS = {
    "plain": {},
    "everything on": {
        "adv_estimator": "gae", "add_token_level_kl": True, "whiten_advantages": True, "advantage_clip": 1.0,
        "max_len_mask": True, "difficulty_loss_weight": True, "add_len_reward": True, "reward_norm": "running",
    },
    "remax": {"adv_estimator": "remax"},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_stage_comes_after_those_that_give_what_it_needs(name):
    there = {"scores", "trajectory_mask", "token_mask", "trajectory_weights", *MODEL_OUTPUTS, *ESTIMATOR_NEEDS}
    there -= {"token_rewards"}
    for stage in credit_stages(make_config(**CONFIGURATIONS[name])).stages:
        assert set(stage.needs) <= there, type(stage).__name__
        there |= set(stage.gives)
    assert {name for phase in PHASES for name in phase} <= there


# --- what doesn't fit -------------------------------------------------------------------------------------------------

BROKEN = """
@roll.stage(needs=("rewards",), gives=("token_mask",))
def wrong_shape(data):
    return {"token_mask": torch.ones(3, dtype=torch.bool)}

@roll.stage(needs=(), gives=("rewards",))
def infinite(data):
    return {"rewards": data["scores"] / 0}

@roll.stage(needs=(), gives=("rewards",))
def another_name(data):
    return {"reward": data["scores"]}

@roll.stage(needs=(), gives=("rewards",))
def nothing(data):
    pass

@roll.stage(needs=(), gives=("rewards",))
def undeclared(data):
    return {"rewards": data["values"].sum(1)}

@roll.stage(needs=(), gives=("trajectory_weights",))
def negative(data):
    return {"trajectory_weights": data["scores"] - 2}
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "wrong_shape",
            r"own.py:wrong_shape returned token_mask as torch.bool \[3\], expected a tensor, bool \[4, 3\]",
        ),
        ("infinite", "own.py:infinite returned rewards with numbers that are not finite"),
        ("another_name", "own.py:another_name gives rewards, and returned reward"),
        ("nothing", "own.py:nothing gives rewards, and returned NoneType"),
        ("negative", "own.py:negative returned weights below 0, which would unlearn"),
        ("undeclared", r"no stage before this one gives 'values'; declare it: needs=\('values',\)"),
    ],
)
def test_a_result_that_is_none_ends_the_step_with_the_stages_name(examples, name, message):
    stage_file(BROKEN)
    with pytest.raises(ValueError, match=message):
        credited(make_rollouts(*FOUR), stages=(f"own.py:{name}",))


ESTIMATORS_THAT_RETURN = """
def per_response(inputs):
    return inputs.rewards, inputs.rewards

def nan(inputs):
    tokens = inputs.token_rewards / inputs.rewards[:, None]
    return tokens, tokens

def infinite_returns(inputs):
    return inputs.token_rewards, inputs.token_rewards + float("inf")

def only_advantages(inputs):
    return inputs.token_rewards

def nothing(inputs):
    pass

def a_mask(inputs):
    return inputs.action_mask, inputs.token_rewards

def everywhere(inputs):
    tokens = inputs.rewards[:, None].expand(inputs.action_mask.shape)
    return tokens, tokens
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "per_response",
            r"returned advantages as torch.float32 \[4\], expected a tensor, float \[4, 5\]; roll.*to_tokens\(values",
        ),
        # Rewards 1, 0, 0, 3: 0 / 0 in the second and the third.
        ("nan", r"returned advantages with numbers that are not finite, in trajectories \[1, 2\]"),
        ("infinite_returns", r"returned returns with numbers that are not finite, in trajectories \[0, 1, 2, 3\]"),
        ("only_advantages", r"returned Tensor, expected two tensors: \(advantages, returns\)"),
        ("nothing", r"returned NoneType, expected two tensors: \(advantages, returns\)"),
        ("a_mask", r"returned advantages as torch.bool \[4, 5\], expected a tensor, float \[4, 5\]"),
    ],
)
def test_an_estimator_that_returns_something_else_ends_the_step_with_its_name(examples, name, message):
    stage_file(ESTIMATORS_THAT_RETURN)
    rollouts = make_rollouts([R(1.0, 3), R(0.0)], [R(0.0), R(3.0)])  # rows of 2 + 3 tokens
    with pytest.raises(ValueError, match=f"adv_estimator: own.py:{name} {message}"):
        credited(rollouts, adv_estimator=f"own.py:{name}")


def test_an_estimator_has_no_effect_outside_the_action_tokens(examples):
    stage_file(ESTIMATORS_THAT_RETURN)
    found, metrics = credited(make_rollouts([R(1.0, 3), R(0.0)]), adv_estimator="own.py:everywhere")
    inside = found.batch.action_mask
    # Three tokens of the response with reward 1, one of the other: the mean is 3/4.
    assert found.batch.advantages[inside].tolist() == [1, 1, 1, 0]
    assert not found.batch.advantages[~inside].any()
    assert metrics["advantage/mean"] == 0.75


def test_a_declaration_that_cant_be_met_is_refused_where_it_stands():
    with pytest.raises(ValueError, match="there is no 'entropy'; did you mean 'entropies'"):
        roll.stage(needs=("entropy",), gives=("token_mask",))
    with pytest.raises(ValueError, match="needs advantages, which is made after shaped_rewards, which it gives"):
        roll.stage(needs=("advantages",), gives=("shaped_rewards",))
    with pytest.raises(ValueError, match="gives rewards, advantages: a stage gives some of"):
        roll.stage(needs=(), gives=("rewards", "advantages"))
    with pytest.raises(ValueError, match="there is no 'value'; did you mean 'values'"):
        roll.needs("value")
    with pytest.raises(ValueError, match="5 is no name: write needs="):
        roll.stage(needs=5, gives=("rewards",))


OWN = """
@roll.stage(needs=("ref_logprobs", "values"), gives=("rewards",))
def of_models(data, *, scale: float = 1.0):
    return {"rewards": scale * data["values"].sum(1)}

@roll.stage(needs=("entropy",), gives=("rewards",))
def of_nothing(data):
    return {"rewards": data["scores"]}

@roll.stage(needs=(), gives=("returns",))
def for_nobody(data):
    return {"returns": data["advantages"]}

def undeclared(data):
    return {}

@roll.stage(need=("entropies",), gives=("token_mask",))
def misnamed(data):
    return {}

NAMES = ("entropies",)

@roll.stage(needs=NAMES, gives=("token_mask",))
def computed(data):
    return {}

made_otherwise = roll.stage(needs=(), gives=("rewards",))(undeclared)

@roll.needs("turns")
def of_turns(inputs):
    return inputs.token_rewards, inputs.token_rewards

@roll.needs("values")
def critical(inputs):
    return inputs.values, inputs.values

@roll.needs("value")
def misspelt(inputs):
    return inputs.values, inputs.values

@roll.needs("ref_logprobs")
def of_reference(inputs):
    return inputs.token_rewards, inputs.token_rewards

def of_three(rewards, mask, index):
    return rewards, rewards

def of_none():
    pass
"""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "stages=own.py:of_models",
            "critic: got null, expected a critic, because the stage own.py:of_models needs values",
        ),
        ("stages=own.py:of_models", "expected a reference, because the stage own.py:of_models needs ref_logprobs"),
        ("stages={name: 'own.py:of_models', sclae: 2}", "did you mean 'scale'"),
        ("stages=own.py:of_nothing", "there is no 'entropy'; did you mean 'entropies'"),
        ("stages=own.py:for_nobody", "a stage whose returns a critic learns; there is none"),
        ("stages=own.py:undeclared", "put @roll.stage(needs=(...), gives=(...)) above it"),
        ("stages=own.py:misnamed", "put @roll.stage(needs=(...), gives=(...)) above it"),
        ("stages=own.py:computed", "above it, written out"),
        ("stages=own.py:made_otherwise", "above it, written out"),
        ("adv_estimator=own.py:of_turns", "own.py:of_turns needs the turns of an environment"),
        ("stages=own.py:of_model", "did you mean 'of_models'"),
        ("stages=entropy_mask", "your own as package.module:name or path/to/file.py:name"),
        ("stages=[own.py:undeclared, own.py:undeclared]", "each stage once"),
        ("stage_args={mask: {share: 2}}", "because stages doesn't name it"),
        ("adv_estimator=own.py:critical", "a critic, because adv_estimator is own.py:critical"),
        ("adv_estimator=own.py:misspelt", "did you mean 'values'"),
        ("adv_estimator=own.py:of_reference", "1 problem"),
        ("adv_estimator=own.py:of_reference", "a stage can need it: @roll.stage(needs=('advantages', 'ref_logprobs')"),
        ("adv_estimator=own.py:of_three", "of_three(rewards, mask, index) is called with one argument by position"),
        ("adv_estimator=own.py:of_none", "a function that takes one argument by position"),
        ("adv_estimator=own.py", "write own.py:name"),
        ("adv_estimator=own.critical", "write own:critical"),
    ],
)
def test_what_cant_run_is_refused_before_the_start(tmp_path, tiny_model, monkeypatch, capsys, override, expected):
    from toy import write_toy

    monkeypatch.chdir(write_toy(tmp_path, tiny_model))
    stage_file(OWN)
    assert main(["check", "toy", override]) == 2
    assert expected in capsys.readouterr().err
