"""Conversions of values of Alibaba's ROLL about tasks: rewards, environments, fine-tuning, distillation."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from roll.catalog.entries import OWN_PATH
from roll.catalog.envs import ENVS
from roll.configs.schema.turn_templates import OTHER_NAMES, SYSTEM_NAMES, TURN_NAMES, names_in
from roll.workbench.migrate.conversions import DTYPES, conversion, first, last
from roll.workbench.migrate.draft import Step

# --- rewards ---------------------------------------------------------------------------------------------------------

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "ifeval",
    "IfEvalRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "choice",
    "MultipleChoiceBooleanRuleRewardWorker": "choice",
    "GeneralValRuleRewardWorker": "exact",
    "LLMJudgeRewardWorker": "judge",
    "DetectionRewardWorker": "",
    "ModelRewardWorker": "reward_model",
}
"""Their reward workers by our rewards; empty: none."""
ENV_TYPES = {
    "sokoban": "sokoban-v1", "frozen_lake": "frozen_lake-v1", "countdown": "countdown-v1",
}  # fmt: skip
"""Their environments by ours."""


def _domain(step: Step) -> str:
    return step.use.key.split(".")[1]


@first
def reward_class(step: Step) -> None:
    """A reward worker by the reward that does its work."""
    cls = str(step.value).rpartition(".")[2]
    name = REWARD_CLASSES.get(cls, "")
    if name:
        step.put(name)
        step.use.fate, step.use.note = "translated", f"{cls} is {name}; docs/rewards.md says what it reads"
    else:
        step.put("none")
        step.decide(f"nothing here is {cls}: name a reward, or a function of your own as path/to/file.py:function")
        step.draft.report.missing.append(f"rewards.{_domain(step)}.name: a reward in place of {cls}")


def _judges(step: Step) -> bool:
    return str(step.draft.their(f"rewards.{_domain(step)}.worker_cls", "")).endswith("LLMJudgeRewardWorker")


@conversion
def of_judge(step: Step) -> None:
    """A key of the model that grades; rewards that are functions have none."""
    key, value = step.use.key, step.value
    if not _judges(step):
        step.dead("a reward is a function, which has no model, backend or devices of its own")
        return
    remote = step.draft.their(f"rewards.{_domain(step)}.judge_model_type") == "api"
    if value is None:
        step.dead("null leaves the default")
    elif key.endswith("strategy_name"):
        step.put("hf_infer" if str(value) not in ("vllm", "sglang") else value)
        step.use.fate, step.use.note = "translated", ""
    elif key.endswith(("judge_model_name", "judge_api_url")) != remote:
        step.dead("the judge is an engine of the run" if not remote else "the judge is behind an endpoint")
    elif ".strategy_config." in key:
        step.put(value, f"judge.strategy_args.strategy_config.{key.split('.strategy_config.')[1]}")
    elif key.endswith("dtype"):
        step.put(DTYPES.get(str(value), value))
    elif step.place in step.draft.made_by:
        step.decide("judge has it already, from another domain")
    else:
        step.put(value)


@conversion
def judge_prompt(step: Step) -> None:
    """What the judge reads; a name of theirs isn't known here."""
    if not _judges(step):
        step.dead("no judge grades this domain")
    elif "{response}" in str(step.value):
        step.put(step.value)
    else:
        step.put("reference")
        step.decide(f"{step.value} is a text of theirs; reference compares with the ground truth. Write your own as "
                    "judge.prompt, with {response}")  # fmt: skip


@conversion
def judge_type(step: Step) -> None:
    """Behind an endpoint, or an engine of the run."""
    if not _judges(step):
        step.dead("no judge grades this domain")
    elif step.value == "api":
        step.use.ours, step.use.note = ("judge.endpoint",), "judge.endpoint and judge.model say it"
        step.use.fate = "translated"
    else:
        step.use.ours, step.use.note = ("judge",), "an engine of the run with judge.model_args"
        step.use.fate = "translated"


@conversion
def format_pattern(step: Step) -> None:
    """The pattern of a reward that looks at the format."""
    if step.value is None:
        step.dead("null asks for nothing")
    else:
        step.put(step.value, f"rewards.{_domain(step)}.reward_kwargs.pattern")


# --- environments ----------------------------------------------------------------------------------------------------


@first
def env_type(step: Step) -> None:
    """A kind of environment."""
    name = str(step.value)
    if name in ENV_TYPES or name in ENVS:
        step.put(ENV_TYPES.get(name, name))
        step.use.fate, step.use.note = "translated", ""
    elif OWN_PATH.match(name):
        step.put(name)
        step.use.fate, step.use.note = "translated", ""
    else:
        step.put(name)
        step.decide(f"no bundled environment is {name}: write a class of your own as path/to/file.py:Class")
        step.draft.report.missing.append(f"{step.place}: an environment in place of {name}")


@cache
def _arguments(env: str) -> frozenset[str]:
    from roll.utils.importing import load_object

    return frozenset(inspect.signature(load_object(ENVS[env].path, key="env_type")).parameters)


def _env(step: Step) -> str:
    return str(step.draft.get(".".join([*step.use.key.split(".")[:2], "env_type"])))


@conversion
def env_option(step: Step) -> None:
    """An argument of a bundled environment."""
    env = _env(step)
    name = step.place.rpartition(".")[2]
    if env in ENVS and name not in _arguments(env):
        step.dead(f"{env} has no such argument")
    elif step.value is None:
        step.dead("null leaves the default")
    else:
        step.put(step.value)
        step.use.fate = "translated" if step.row.fate == "translated" else step.use.fate


@conversion
def env_argument(step: Step) -> None:
    """An argument of a class of the user's own."""
    env = _env(step)
    if env in ENVS and step.use.key.split(".")[3] not in _arguments(env):
        step.absent(f"{env} has no such argument: roll envs list shows those it has")
    else:
        step.put(step.value, step.use.key)


@conversion
def env_side(step: Step) -> None:
    """One side of a room."""
    section = step.use.key.rpartition(".")[0]
    sides = [step.draft.their(f"{section}.{side}") for side in ("dim_x", "dim_y")]
    known = next((side for side in sides if side is not None), None)
    if _env(step) != "sokoban-v1":
        env_argument(step)
    else:
        step.put([side if side is not None else known for side in sides])


@last
def env_manager(step: Step) -> None:
    """What a training row is, by the class that plays."""
    cls = str(step.value).rpartition(".")[2]
    unit = "concat" if "Concat" in cls else "step" if "Step" in cls else "trajectory" if "Traj" in cls else ""
    now = step.draft.get("sample_unit")
    if not unit:
        step.absent("code of your own goes into environments and rollouts; sample_unit says what a row is")
    elif now not in (None, unit):
        step.decide(f"one sample_unit for all environments: {now}")
    else:
        step.put(unit, "sample_unit")
        step.note(f"{cls} is sample_unit: {unit}")


@conversion
def env_template(step: Step) -> None:
    """A text with slots, which have other names here."""
    text = step.value
    if not isinstance(text, str):
        step.dead("null leaves the default")
        return
    known = SYSTEM_NAMES if step.place.endswith("system_template") else TURN_NAMES
    gone = []
    for name in dict.fromkeys(names_in(text)):
        new = OTHER_NAMES.get(name, {"current_step": "step"}.get(name, name))
        if new in known:
            text = text.replace("{" + name + "}", "{" + new + "}")
        elif name == "history":
            text = text.replace("{history}", "(above)")
            gone.append("earlier turns are messages of their own, so {history} is left out")
        else:
            text = text.replace("{" + name + "}", "(" + name + ")")
            gone.append(f"there is no {{{name}}}")
    step.put(text)
    if gone:
        step.decide("; ".join(gone))


@conversion
def action_pattern(step: Step) -> None:
    """Where the action is in a response; thoughts in front of it are thinking_tags."""
    pattern = str(step.value)
    section = step.place.rpartition(".")[0]
    if pattern.startswith("<think>") and "<answer>" in pattern:
        step.put("<answer>(.*?)</answer>")
        step.put(["<think>", "</think>"], f"{section}.thinking_tags")
        step.decide("thoughts in front of the action are thinking_tags")
    else:
        step.put(step.value)


@last
def format_penalty(step: Step) -> None:
    """A penalty of the environment is one of the manager."""
    place = "train_env_manager.format_penalty"
    tag = step.use.key.split(".")[1]
    tags = step.draft.get("train_env_manager.tags")
    tags = [tags] if isinstance(tags, str) else tags
    if tags and tag not in tags:
        step.dead("it isn't played in training")
    elif step.draft.has(place):
        step.decide(f"train_env_manager.format_penalty is {step.draft.get(place)}")
    else:
        step.put(step.value, place)


@conversion
def action_lookup(step: Step) -> None:
    """Names of actions: numbers by names there, names by names here."""
    if isinstance(step.value, dict) and all(isinstance(key, str) and not key.isdigit() for key in step.value):
        step.put(step.value)
    else:
        step.dead("actions have names in the environment itself")


@conversion
def val_only(step: Step) -> None:
    """Sampling of environments, which only validation has apart."""
    if step.use.key.startswith("val_env_manager."):
        step.put(step.value)
    else:
        step.dead("actor_infer.generating_args says it")


@conversion
def merge_envs(step: Step) -> None:
    """Environment variables of environments' processes."""
    if not isinstance(step.value, dict):
        step.dead("null leaves the default")
        return
    now = dict(step.draft.get("system_envs", {}))
    step.draft.put("system_envs", {**step.value, **now})
    step.use.ours = ("system_envs",)


@last
def env_norm(step: Step) -> None:
    """The level that rewards of episodes are compared at."""
    section = "reward_normalization"
    mean, deviation = (step.draft.their(f"{section}.norm_{kind}_type") for kind in ("mean", "std"))
    level = mean or deviation
    if level in (None, "None"):
        step.dead("null asks for nothing")
        return
    grouping = {"group": "traj_group", "batch": "batch", "running": "batch"}.get(str(level), "traj_group")
    if not step.draft.their(f"{section}.grouping"):
        step.put(grouping, f"{section}.grouping")
    if not step.draft.their(f"{section}.method"):
        step.put("mean_std" if deviation not in (None, "None") else "mean", f"{section}.method")
    if not step.use.ours:
        step.dead("grouping and method say it")
    elif level == "running":
        step.decide("of all episodes so far isn't here: of the batch")


# --- rows ------------------------------------------------------------------------------------------------------------


@conversion
def both_data(step: Step) -> None:
    """A column of training and validation rows."""
    word = step.place.rpartition(".")[2]
    if step.value is None:
        step.dead("null lets the column be found")
        return
    if step.use not in step.draft.report.filled or step.draft.pipeline == "sft":
        step.put(step.value, f"actor_train.data_args.{word}")
        if step.draft.their("validation.data_args.file_name"):
            step.put(step.value, f"validation.data_args.{word}")


@conversion
def dpo_batch(step: Step) -> None:
    """Pairs of an optimizer step: settled at the end, when the ranks are known."""
    step.draft.memo["pairs"] = (step.value, step.use)
    step.use.ours = ("actor_train.training_args.gradient_accumulation_steps",)


@conversion
def distill_weight(step: Step) -> None:
    """The teacher's weight, and the rows' own."""
    share: Any = step.value
    if isinstance(share, (int, float)) and share > 0:
        step.put(float(share), "distill.coef")
        step.put(round(1.0 - float(share), 10), "distill.sft_coef")
    else:
        step.absent("a teacher of weight 0 teaches nothing")


@last
def skew(step: Step) -> None:
    """The share of the other distribution in a skewed divergence."""
    if str(step.draft.get("distill.divergence", "")).startswith("skewed"):
        step.put(step.value, "distill.divergence_args.skew")
    else:
        step.dead("no skewed divergence reads it")


@conversion
def opd(step: Step) -> None:
    """On-policy distillation by a switch."""
    if step.value:
        step.use.ours = ("pipeline",)
        step.use.fate, step.use.note = "translated", "pipeline: distill"
    else:
        step.dead("false asks for nothing")
