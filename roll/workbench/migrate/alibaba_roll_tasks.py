"""Files of Alibaba's ROLL: conversions of rewards, environments and rows, and what is settled about them at the end."""

from __future__ import annotations

from typing import Any

from roll.catalog.entries import OWN_PATH
from roll.catalog.envs import ENVS
from roll.configs.schema.turn_templates import OTHER_NAMES, SYSTEM_NAMES, TURN_NAMES, names_in
from roll.workbench.migrate.conversions import DTYPES, conversion, first, last
from roll.workbench.migrate.draft import Draft, Step
from roll.workbench.migrate.overrides import leaves_of

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule", "CodeSandboxRewardWorker": "code", "GeneralRuleRewardWorker": "ifeval",
    "IfEvalRuleRewardWorker": "ifeval", "CrossThinkQARuleRewardWorker": "choice",
    "MultipleChoiceBooleanRuleRewardWorker": "choice", "GeneralValRuleRewardWorker": "exact",
    "LLMJudgeRewardWorker": "judge", "ModelRewardWorker": "reward_model",
}  # fmt: skip
"""Our rewards by ROLL's reward workers."""
ENV_TYPES = {"sokoban": "sokoban-v1", "frozen_lake": "frozen_lake-v1", "countdown": "countdown-v1"}
"""Our environments by ROLL's."""


def _domain(step: Step) -> str:
    return f"rewards.{step.use.key.split('.')[1]}"


@first
def reward_class(step: Step) -> None:
    """A reward worker by the reward that does its work."""
    cls = str(step.value).rpartition(".")[2]
    name = REWARD_CLASSES.get(cls)
    step.put(name or "none")
    if name == "choice":
        step.decide(f"{cls} is choice, which takes nothing off for repetition")
    elif name:
        step.use.fate, step.use.note = "translated", f"{cls} is {name}; docs/rewards.md says what it reads"
    else:
        step.decide(f"nothing here is {cls}: name a reward, or a function of your own as path/to/file.py:function")
        step.draft.report.missing.append(f"{_domain(step)}.name: a reward in place of {cls}")


@conversion
def reward_option(step: Step) -> None:
    """What some of ROLL's reward workers read."""
    if step.value and step.last == "format_pattern":
        step.put(step.value, f"{_domain(step)}.reward_kwargs.pattern")
    elif step.value and "CrossThinkQA" in str(step.draft.their(f"{_domain(step)}.worker_cls")):
        step.absent("a reward takes its own options in reward_kwargs")
    else:
        step.dead("ROLL's reward of this class doesn't read it" if step.value else "it asks for nothing")


def _judges(step: Step) -> bool:
    return str(step.draft.their(f"{_domain(step)}.worker_cls", "")).endswith("LLMJudgeRewardWorker")


@conversion
def of_judge(step: Step) -> None:
    """A key of the model that grades; rewards that are functions have none."""
    key, value = step.use.key, step.value
    remote = step.draft.their(f"{_domain(step)}.judge_model_type") == "api"
    if not _judges(step):
        step.dead("a reward is a function, which has no model, backend or devices of its own")
    elif value is None:
        step.dead("null leaves the default")
    elif key.endswith("strategy_name"):
        step.put(value if value in ("vllm", "sglang") else "hf_infer")
    elif key.endswith(("judge_model_name", "judge_api_url")) != remote:
        step.dead("the judge is behind an endpoint" if remote else "the judge is an engine of the run")
    elif ".strategy_config." in key:
        step.put(value, f"judge.strategy_args.strategy_config.{key.split('.strategy_config.')[1]}")
    elif step.draft.made_by.get(step.place, step.use).value != value:
        step.absent("another domain's judge has another: there is one")
    else:
        step.put(DTYPES.get(str(value), value) if key.endswith("dtype") else value)


@conversion
def judge_prompt(step: Step) -> None:
    """What the judge reads; a name of ROLL's isn't known here."""
    if not _judges(step):
        step.dead("no judge grades this domain")
    elif "{response}" in str(step.value):
        step.put(step.value)
    else:
        step.absent("it names a text of ROLL's: write that, with {response}, or reference, which compares responses")


@first
def env_type(step: Step) -> None:
    """A kind of environment."""
    name = str(step.value)
    step.put(ENV_TYPES.get(name, name))
    if name not in ENV_TYPES and name not in ENVS and not OWN_PATH.match(name):
        step.decide(f"no bundled environment is {name}: write a class of your own as path/to/file.py:Class")
        step.draft.report.missing.append(f"{step.place}: an environment in place of {name}")


def _env(step: Step) -> tuple[str, Any]:
    """Name and class of the environment that a key is of; no class for one of the user's own."""
    from roll.utils.importing import load_object

    name = str(step.draft.get(".".join([*step.use.key.split(".")[:2], "env_type"])))
    return name, load_object(ENVS[name].path, key="env_type") if name in ENVS else None


@conversion
def env_option(step: Step) -> None:
    """An argument of a bundled environment, which a row may name; one of the user's own has any."""
    from inspect import signature

    (name, cls), theirs = _env(step), step.use.key.split(".")[3]
    word = step.place.split(".")[3] if step.place.count(".") > 2 else theirs
    if cls is not None and word not in signature(cls).parameters:
        step.places = (step.use.key,)  # not the section, which has others
        step.absent(f"{name} has no such argument: roll envs list shows those it has")
    elif step.value is None:
        step.dead("null leaves the default")
    else:
        step.put(step.value, step.use.key if cls is None or word == theirs else step.place)


@last
def env_manager(step: Step) -> None:
    """What a training row is, by the class that plays."""
    cls = str(step.value).rpartition(".")[2]
    unit = "concat" if "Concat" in cls else "step" if "Step" in cls else "trajectory" if "Traj" in cls else ""
    now = step.draft.get("sample_unit")
    if not unit or "Native" in cls:
        step.absent("code of your own goes into environments and rollouts; sample_unit says what a row is")
    elif now not in (None, unit):
        step.absent(f"one sample_unit for all environments, here {now} and {unit}")
    else:
        step.put(unit)


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
        else:
            text = text.replace("{" + name + "}", "(above)" if name == "history" else f"({name})")
            gone.append("earlier turns are messages of their own, so {history} is left out" if name == "history" else
                        f"there is no {{{name}}}")  # fmt: skip
    step.put(text)
    if gone:
        step.decide("; ".join(gone))


@conversion
def action_pattern(step: Step) -> None:
    """Where the action is in a response; thoughts in front of it are thinking_tags."""
    if str(step.value).startswith("<think>") and "<answer>" in str(step.value):
        step.put("<answer>(.*?)</answer>")
        step.put(["<think>", "</think>"], f"{step.place.rpartition('.')[0]}.thinking_tags")
        step.decide("thoughts in front of the action are thinking_tags")
    else:
        step.put(step.value)


@last
def format_penalty(step: Step) -> None:
    """A penalty of the environment is one of the manager."""
    tag, tags = step.use.key.split(".")[1], step.draft.get("train_env_manager.tags")
    now = step.draft.get(step.place)
    if tags and tag not in ([tags] if isinstance(tags, str) else tags):
        step.dead("it isn't played in training")
    elif now not in (None, step.value):
        step.absent(f"one penalty for all environments of a manager, here {now} and {step.value}")
    else:
        step.put(step.value)


@conversion
def action_lookup(step: Step) -> None:
    """Names of actions: numbers by names there, names by names here."""
    entries = step.value if isinstance(step.value, dict) else {}
    own = {str(action).lower() for action in getattr(_env(step)[1], "actions", ())}
    if entries and all(isinstance(key, str) and not key.isdigit() for key in entries):
        step.put(entries)
    elif {str(name).lower() for name in entries.values()} <= own:
        step.dead("actions have these names in the environment itself")
    else:
        step.absent("write what the policy may call an action, and what the environment calls it")


@conversion
def manager_sampling(step: Step) -> None:
    """Sampling of environments, which ROLL takes where actor_infer has none."""
    if step.draft.their("actor_infer.generating_args") is not None:
        step.dead("actor_infer.generating_args says it, in ROLL too")
    else:
        step.put(step.value, step.place if "val_" in step.use.key else f"actor_infer.generating_args.{step.last}")


@conversion
def stated(step: Step) -> None:
    """Nothing is written; the row says what is done instead."""
    step.decide(step.row.note)


@last
def env_norm(step: Step) -> None:
    """The level that rewards of episodes are compared at: of the grouping, or of the batch."""
    section = "reward_normalization"
    mean, deviation = (step.draft.their(f"{section}.norm_{kind}_type") for kind in ("mean", "std"))
    mean, deviation = (None if value == "None" else value for value in (mean, deviation))
    if not mean and not deviation:
        step.dead("null asks for nothing")
    elif not mean or mean == "running" or deviation not in (None, mean):
        step.absent(f"mean and deviation are of one level, not the mean of {mean}, the deviation of {deviation}")
    else:
        given = step.draft.their(f"{section}.grouping") is not None
        if mean == "batch" or not given:
            step.put("batch" if mean == "batch" else "traj_group", f"{section}.grouping")
        step.put("mean_std" if deviation else "mean", f"{section}.method")


@last
def max_new_tokens(step: Step) -> None:
    """A bound of responses, which RLVR works out itself; the longest response bounds it."""
    limit = step.draft.get("response_length")
    if step.draft.pipeline != "agentic" and step.role in ("actor_infer", "validation"):
        step.dead("ROLL takes sequence_length less prompt_length")
    elif step.role != "judge" and isinstance(limit, int) and isinstance(step.value, int) and step.value > limit:
        step.put(limit)
        step.decide(f"at most response_length ({limit})")
    else:
        step.put(step.value)


@conversion
def both_data(step: Step) -> None:
    """A column of training and validation rows; defaults are of ROLL's fine-tuning or of its distillation."""
    rows = "student" if step.last in ("question_key", "answer_key") else "sft_train"
    if step.value is None:
        step.dead("null lets the column be found")
    elif step.use not in step.draft.report.filled or rows in step.draft.theirs:
        step.put(step.value)
        if step.draft.their("validation.data_args.file_name"):
            step.put(step.value, step.place.replace("actor_train", "validation"))


@conversion
def distill_weight(step: Step) -> None:
    """The teacher's weight, and the rows' own."""
    share: Any = step.value
    if step.use in step.draft.report.filled and "student" not in step.draft.theirs:
        return  # a default of distillation from rows
    if isinstance(share, (int, float)) and share > 0:
        step.put(float(share), "distill.coef")
        step.put(round(1.0 - float(share), 10), "distill.sft_coef")
    else:
        step.absent("a teacher of weight 0 teaches nothing")


@last
def skew(step: Step) -> None:
    """The share of the other distribution, of skewed divergences."""
    if str(step.draft.get("distill.divergence")).startswith("skewed"):
        step.put(step.value, "distill.divergence_args.skew")
    else:
        step.dead("no skewed divergence reads it")


@conversion
def opd(step: Step) -> None:
    """On-policy distillation by a switch."""
    if not step.value:
        step.dead("false asks for nothing")
    elif step.draft.pipeline != "distill":
        step.absent("a teacher on what is sampled is of pipeline: distill")
    elif step.last == "use_opd":
        step.put(1.0, "distill.reward_coef")
        step.decide("pipeline: distill, where the advantages of the rewards count as well")
    else:
        step.use.ours, step.use.fate = ("pipeline",), "translated"


def drop(draft: Draft, place: str, when: Any, why: str) -> None:
    """Take out a key or section in a case in which ROLL doesn't read it either."""
    if when and draft.has(place):
        draft.abandon(place, why)


def finish_tasks(draft: Draft) -> None:
    """Settle lengths, environments, rows."""
    finish = {"agentic": _games, "rlvr": _prompts, "distill": _prompts}.get(draft.pipeline, _rows)
    finish(draft, *(draft.get(f"{key}_length") for key in ("sequence", "prompt", "response")))
    place, sizes = "actor_infer.strategy_args.strategy_config.max_model_len", ("prompt_length", "response_length")
    longest = sum(size for key in sizes if isinstance(size := draft.get(key), int))
    if isinstance(limit := draft.get(place), int) and limit < longest:
        draft.put(place, longest)
        draft.report.decisions.append(f"{place}: {longest}, the run's longest sequence; {limit} was given")


def _prompts(draft: Draft, total: Any, prompt: Any, response: Any) -> None:
    """Prompts without their overlong ones; a response has what a prompt leaves of a sequence."""
    data, told = "actor_train.data_args", draft.report.decisions
    rewards: Any = section if isinstance(section := draft.get("rewards"), dict) else {}
    prompt = 1024 if prompt is None else prompt
    if isinstance(total, int) and isinstance(prompt, int) and response != total - prompt > 0:
        draft.put("response_length", total - prompt)
        told.append(f"response_length: {total - prompt}, sequence_length less prompt_length, as ROLL takes it")
    for place in (data, "validation.data_args"):
        drop(draft, f"{place}.prompt", draft.get(f"{place}.messages"), "messages says it")
        if draft.has(place):
            draft.put(f"{place}.filter_overlong_prompts", True)
    told.append("filter_overlong_prompts: true, as ROLL leaves out rows that are longer than prompt_length")
    if draft.get(f"{data}.prompt"):
        draft.put("global_template", "plain")
        told.append("global_template: plain, as ROLL applies no template to a column `prompt`, only to `messages`")
    if len(rewards) == 1 and not draft.get(place := f"rewards.{next(iter(rewards))}.tag_included"):
        draft.put(place, "*")
        told.append(f"{place}: '*', the only domain takes rows of any tag")
    graded = any(path.endswith(".name") and value == "judge" for path, value in leaves_of(rewards))
    drop(draft, "judge", not graded, "no domain is graded by a judge")


def _rows(draft: Draft, total: Any, *_: Any) -> None:
    """Finished rows have one length; ROLL counts pairs, and shuffles where it doesn't fine-tune."""
    data, told = "actor_train.data_args", draft.report.decisions
    place = "actor_train.training_args.per_device_train_batch_size"
    if total is None and isinstance(size := draft.their("response_length"), int):
        draft.put("sequence_length", draft.their("prompt_length", 1024) + size)
        told.append("sequence_length: prompt and response together")
    if draft.pipeline == "dpo" and isinstance(pairs := draft.get(place), int):
        draft.put(place, 2 * pairs)
        told.append(f"{place}: {2 * pairs} sequences, as ROLL counts pairs")
    drop(draft, f"{data}.messages", draft.get(f"{data}.prompt"), "ROLL reads the columns of prompt and response")
    if "sft_train" in draft.theirs:
        draft.put(f"{data}.shuffle", False)
        told.append("shuffle: false, as ROLL's fine-tuning reads rows in their order")


def _games(draft: Draft, total: Any, prompt: Any, response: Any) -> None:
    """An episode has one length there; here the longest response of a turn, and the rest before it."""
    envs: Any = section if isinstance(section := draft.get("custom_envs"), dict) else {}
    bounds = [draft.get("actor_infer.generating_args.max_new_tokens"), response,
              *(env.get("max_tokens_per_step") for env in envs.values() if isinstance(env, dict))]  # fmt: skip
    if isinstance(total, int):
        longest = max([value for value in bounds if isinstance(value, int)], default=min(512, total))
        if not isinstance(response, int):
            response = max(1, min(longest, total - 1))
            draft.put("response_length", response)
        if not isinstance(prompt, int) or prompt + response > total:
            draft.put("prompt_length", max(1, total - response))
        draft.report.decisions.append(
            f"response_length {response} and prompt_length {draft.get('prompt_length')}: the longest response of a "
            f"turn, and what is left of sequence_length {total} for what is before it"
        )
    size = draft.get("val_batch_size", 1)
    drop(draft, "val_batch_size", isinstance(size, int) and size < 1, "below 0 is one round of the environments")
    if draft.has("render_save_dir") and draft.has("val_env_manager") and not draft.get("log_val_generations"):
        draft.put("log_val_generations", 4)
        draft.report.decisions.append("log_val_generations: 4, the validation episodes that render_save_dir shows")
