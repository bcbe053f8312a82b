"""Files of Alibaba's ROLL: conversions of rewards, environments and rows, and what is settled about them at the end."""

from __future__ import annotations

from inspect import signature
from typing import Any

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.env_table import ENVS
from roll.configs.schema.env_config import OTHER_NAMES, SYSTEM_NAMES, TURN_NAMES, names_in
from roll.workbench.migrate.conversions import DTYPES, conversion, first, last, mapped
from roll.workbench.migrate.draft import Draft, Step
from roll.workbench.migrate.overrides import leaves_of
from roll.workbench.migrate.report import shown

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule", "CodeSandboxRewardWorker": "code", "GeneralRuleRewardWorker": "ifeval",
    "IfEvalRuleRewardWorker": "ifeval", "CrossThinkQARuleRewardWorker": "choice",
    "MultipleChoiceBooleanRuleRewardWorker": "choice", "GeneralValRuleRewardWorker": "exact",
    "LLMJudgeRewardWorker": "judge", "ModelRewardWorker": "reward_model",
}  # fmt: skip
"""Our rewards by ROLL's reward workers."""
ENV_TYPES = {"sokoban": "sokoban-v1", "frozen_lake": "frozen_lake-v1", "countdown": "countdown-v1"}
"""Our environments by ROLL's."""
_COLUMNS = {"prompt_key": "sft_train", "response_key": "sft_train", "question_key": "student", "answer_key": "student"}
"""Keys of columns, by the role whose pipeline reads them."""


def put_unless(step: Step, *cases: tuple[Any, str, str]) -> None:
    """Write the value unless one of the cases holds: whether it does, what becomes of the key, and why."""
    for holds, fate, why in cases:
        if holds:
            getattr(step, fate)(why)
            return
    step.put(mapped(step))


def levels(step: Step) -> tuple[Any, Any]:
    """Return the levels that the mean and the deviation of rewards are of; None for none."""
    section = step.use.key.removesuffix(step.last)
    mean, deviation = (step.draft.their(f"{section}norm_{kind}_type") for kind in ("mean", "std"))
    return (None if mean == "None" else mean), (None if deviation == "None" else deviation)


def _one_for_all(step: Step, value: Any, why: str) -> None:
    """Write a value that several keys of the file may say, and only one way."""
    now = step.draft.get(step.key_path)
    step.absent(f"{why}, here {now} and {value}") if now not in (None, value) else step.put(value)


def _domain(step: Step) -> str:
    return f"rewards.{step.use.key.split('.')[1]}"


@first
def reward_class(step: Step) -> None:
    """Translate a reward worker by the reward that does its work."""
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
    """Translate what some of ROLL's reward workers read."""
    if step.value and step.last == "format_pattern":
        step.put(step.value, f"{_domain(step)}.reward_kwargs.pattern")
    elif step.value and "CrossThinkQA" in str(step.draft.their(f"{_domain(step)}.worker_cls")):
        step.absent("a reward takes its own options in reward_kwargs")
    else:
        step.dead("ROLL's reward of this class doesn't read it" if step.value else "it asks for nothing")


@conversion
def of_judge(step: Step) -> None:
    """Translate a key of the model that grades; rewards that are functions have none."""
    key, value, domain = step.use.key, step.value, _domain(step)
    remote = step.draft.their(f"{domain}.judge_model_type") == "api"
    if not str(step.draft.their(f"{domain}.worker_cls", "")).endswith("LLMJudgeRewardWorker"):
        step.dead("a reward is a function, which has no model, backend or devices of its own")
    elif value is None:
        step.dead("null leaves the default")
    elif key.endswith("strategy_name"):
        step.put(value if value in ("vllm", "sglang") else "hf_infer")
    elif key.endswith("judge_prompt") and "{response}" not in str(value):
        step.absent("it names a text of ROLL's: write that, with {response}, or reference, which compares responses")
    elif not key.endswith("judge_prompt") and key.endswith(("judge_model_name", "judge_api_url")) != remote:
        step.dead("the judge is behind an endpoint" if remote else "the judge is an engine of the run")
    elif ".strategy_config." in key:
        step.put(value, f"judge.strategy_args.strategy_config.{key.split('.strategy_config.')[1]}")
    elif step.draft.made_by.get(step.key_path, step.use).value != value:
        step.absent("another domain's judge has another: there is one")
    else:
        step.put(DTYPES.get(str(value), value) if key.endswith("dtype") else value)


@first
def env_type(step: Step) -> None:
    """Translate a kind of environment."""
    name = str(step.value)
    step.put(ENV_TYPES.get(name, name))
    if name not in ENV_TYPES and name not in ENVS and not OWN_PATH.match(name):
        step.decide(f"no bundled environment is {name}: write a class of your own as path/to/file.py:Class")
        step.draft.report.missing.append(f"{step.key_path}: an environment in place of {name}")


def _env(step: Step) -> tuple[str, Any]:
    """Name and class of the environment that a key is of; no class for one of the user's own."""
    from roll.utils.importing import load_object

    name = str(step.draft.get(".".join([*step.use.key.split(".")[:2], "env_type"])))
    return name, load_object(ENVS[name].path, key="env_type") if name in ENVS else None


@conversion
def env_option(step: Step) -> None:
    """Translate an argument of a bundled environment, which a row may name; one of the user's own has any."""
    (name, cls), theirs = _env(step), step.use.key.split(".")[3]
    word = step.key_path.split(".")[3] if step.key_path.count(".") > 2 else theirs
    unknown = cls is not None and word not in signature(cls).parameters
    if unknown or cls is None or word == theirs:
        step.key_paths = (step.use.key,)  # not the section, which has others
    put_unless(step, (unknown, "absent", f"{name} has no such argument: roll envs list shows those it has"),
               (step.value is None, "dead", "null leaves the default"))  # fmt: skip


@last
def env_manager(step: Step) -> None:
    """Translate what a training row is, by the class that plays."""
    cls = str(step.value).rpartition(".")[2]
    unit = "concat" if "Concat" in cls else "step" if "Step" in cls else "trajectory" if "Traj" in cls else ""
    if not unit or "Native" in cls:
        step.absent("code of your own goes into environments and rollouts; sample_unit says what a row is")
    else:
        _one_for_all(step, unit, "one sample_unit for all environments")


@conversion
def env_template(step: Step) -> None:
    """Translate a text with slots, which have other names here."""
    text = step.value if isinstance(step.value, str) else ""
    known = SYSTEM_NAMES if step.key_path.endswith("system_template") else TURN_NAMES
    gone = []
    for name in dict.fromkeys(names_in(text)):
        new = OTHER_NAMES.get(name, {"current_step": "step"}.get(name, name))
        if new not in known:
            new = "above" if name == "history" else name
            gone.append("earlier turns are messages of their own, so {history} is left out" if name == "history" else
                        f"there is no {{{name}}}")  # fmt: skip
        text = text.replace("{" + name + "}", f"({new})" if new not in known else "{" + new + "}")
    step.put(text) if isinstance(step.value, str) else step.dead("null leaves the default")
    if gone:
        step.decide("; ".join(gone))


@conversion
def action_pattern(step: Step) -> None:
    """Translate where the action is in a response; thoughts in front of it are thinking_tags."""
    if str(step.value).startswith("<think>") and "<answer>" in str(step.value):
        step.put("<answer>(.*?)</answer>")
        step.put(["<think>", "</think>"], f"{step.key_path.rpartition('.')[0]}.thinking_tags")
        step.decide("thoughts in front of the action are thinking_tags")
    else:
        step.put(step.value)


@last
def format_penalty(step: Step) -> None:
    """Translate a penalty of the environment into one of the manager."""
    tag, tags = step.use.key.split(".")[1], step.draft.get("train_env_manager.tags")
    if tags and tag not in ([tags] if isinstance(tags, str) else tags):
        step.dead("it isn't played in training")
    else:
        _one_for_all(step, step.value, "one penalty for all environments of a manager")


@conversion
def manager_sampling(step: Step) -> None:
    """Translate sampling of environments, which ROLL takes where actor_infer has none."""
    if "val_" not in step.use.key:
        step.key_paths = (f"actor_infer.generating_args.{step.last}",)
    has_own = step.draft.their("actor_infer.generating_args") is not None
    put_unless(step, (has_own, "dead", "actor_infer.generating_args says it, in ROLL too"))


@conversion
def stated(step: Step) -> None:
    """Write nothing; the row says what is done instead."""
    step.decide(step.row.note)


@last
def env_norm(step: Step) -> None:
    """Translate the level that rewards of episodes are compared at: of the grouping, or of the batch."""
    mean, deviation = levels(step)
    if not mean and not deviation:
        step.dead("null asks for nothing")
    elif not mean or mean == "running" or deviation not in (None, mean):
        step.absent(f"mean and deviation are of one level, not the mean of {mean}, the deviation of {deviation}")
    else:
        if mean == "batch" or step.draft.their("reward_normalization.grouping") is None:
            step.put("batch" if mean == "batch" else "traj_group")
        step.put("mean_std" if deviation else "mean", step.key_paths[1])


@last
def max_new_tokens(step: Step) -> None:
    """Translate a bound of responses, which RLVR works out itself; the longest response bounds it."""
    limit = step.draft.get("response_length")
    if step.draft.pipeline != "agentic" and step.role in ("actor_infer", "validation"):
        step.dead("ROLL takes sequence_length less prompt_length")
    elif step.role != "judge" and isinstance(limit, int) and isinstance(step.value, int) and step.value > limit:
        step.put(limit)
        step.decide(f"at most response_length ({limit})")
    else:
        step.put(step.value)


@last
def column(step: Step) -> None:
    """Translate a column of training and validation rows, named by a key of the pipeline's own."""
    reader = _COLUMNS.get(step.last)
    other = reader and reader not in step.draft.theirs
    put_unless(step, (other, "dead", f"ROLL reads it where there is a {reader}"),
               (step.value is None, "dead", "null lets the column be found"))  # fmt: skip
    if step.use.ours and step.draft.their("validation.data_args.file_name"):
        step.put(step.value, step.key_path.replace("actor_train", "validation"))


@conversion
def distill_weight(step: Step) -> None:
    """Translate the teacher's weight, and the rows' own."""
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
    """Translate the share of the other distribution, of skewed divergences."""
    step.key_paths = ("distill.divergence_args.skew",)
    skewed = str(step.draft.get("distill.divergence")).startswith("skewed")
    put_unless(step, (not skewed, "dead", "no skewed divergence reads it"))


@conversion
def opd(step: Step) -> None:
    """Translate on-policy distillation by a switch."""
    if not step.value:
        step.dead("false asks for nothing")
    elif step.draft.pipeline != "distill":
        step.absent("a teacher on what is sampled is of pipeline: distill")
    elif step.last == "use_opd":
        step.put(1.0, "distill.reward_coef")
        step.decide("pipeline: distill, where the advantages of the rewards count as well")
    else:
        step.use.ours, step.use.fate = ("pipeline",), "translated"


def drop(draft: Draft, key_path: str, when: Any, why: str) -> None:
    """Take out a key or section in a case in which ROLL doesn't read it either."""
    if when and draft.has(key_path):
        draft.abandon(key_path, why)


def settled(draft: Draft, key_path: str, value: Any, why: str) -> None:
    """Write what no key of the file says, and say why."""
    draft.put(key_path, value)
    draft.report.decisions.append(f"{key_path}: {shown(value)}, {why}")


def finish_tasks(draft: Draft) -> None:
    """Settle lengths, environments, rows."""
    finish = {"agentic": _games, "rlvr": _prompts, "distill": _prompts}.get(draft.pipeline, _rows)
    drop(draft, "num_train_epochs", finish is not _rows, "max_steps decides")
    finish(draft, *(draft.get(f"{key}_length") for key in ("sequence", "prompt", "response")))
    key_path, sizes = "actor_infer.strategy_args.strategy_config.max_model_len", ("prompt_length", "response_length")
    longest = sum(size for key in sizes if isinstance(size := draft.get(key), int))
    if isinstance(limit := draft.get(key_path), int) and limit < longest:
        settled(draft, key_path, longest, f"the run's longest sequence; {limit} was given")


def _prompts(draft: Draft, total: Any, prompt: Any, response: Any) -> None:
    """Leave out overlong prompts; a response has what a prompt leaves of a sequence."""
    data = "actor_train.data_args"
    rewards: Any = section if isinstance(section := draft.get("rewards"), dict) else {}
    prompt = 1024 if prompt is None else prompt
    if isinstance(total, int) and isinstance(prompt, int) and response != total - prompt > 0:
        settled(draft, "response_length", total - prompt, "sequence_length less prompt_length, as ROLL takes it")
    if draft.has("validation.data_args") and (column := draft.get(f"{data}.messages")):
        draft.put("validation.data_args.messages", draft.get("validation.data_args.messages", column))
    for data_path in (data, "validation.data_args"):
        drop(draft, f"{data_path}.prompt", draft.get(f"{data_path}.messages"), "messages says it")
        if draft.has(data_path):
            draft.put(f"{data_path}.filter_overlong_prompts", True)
    settled(draft, f"{data}.filter_overlong_prompts", True, "as ROLL leaves out rows longer than prompt_length")
    if draft.get(f"{data}.prompt"):
        settled(draft, "global_template", "plain", "as ROLL templates no column `prompt`, only `messages`")
    if len(rewards) == 1 and not draft.get(data_path := f"rewards.{next(iter(rewards))}.tag_included"):
        settled(draft, data_path, "*", "the only domain takes rows of any tag")
    graded = any(path.endswith(".name") and value == "judge" for path, value in leaves_of(rewards))
    drop(draft, "judge", not graded, "no domain is graded by a judge")


def _rows(draft: Draft, total: Any, *_: Any) -> None:
    """Give finished rows one length; ROLL counts pairs, and shuffles where it doesn't fine-tune."""
    data, steps = "actor_train.data_args", draft.their("max_steps")
    key_path = "actor_train.training_args.per_device_train_batch_size"
    if draft.pipeline == "sft":
        counts = "student" not in draft.theirs and isinstance(steps, int) and steps > 0
        drop(draft, "num_train_epochs", counts, f"max_steps ({steps}) decides")
        drop(draft, "max_steps", not counts, "ROLL passes over num_train_epochs here, whatever max_steps is")
        draft.put("max_steps", steps if counts else None)
    if total is None and isinstance(size := draft.their("response_length"), int):
        settled(draft, "sequence_length", draft.their("prompt_length", 1024) + size, "prompt and response together")
    if draft.pipeline == "dpo" and isinstance(pairs := draft.get(key_path), int):
        settled(draft, key_path, 2 * pairs, "in sequences, as ROLL counts pairs")
    if "sft_train" in draft.theirs:
        settled(draft, f"{data}.shuffle", False, "as ROLL's fine-tuning reads rows in their order")
    if "student" in draft.theirs:
        decision = f"{data}.file_name: ROLL leaves out rows whose column split isn't train; cut them from the file"
        draft.report.decisions.append(decision)


def _games(draft: Draft, total: Any, prompt: Any, response: Any) -> None:
    """Split ROLL's one length of an episode into the longest response of a turn, and the rest before it."""
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
        settled(draft, "log_val_generations", 4, "the validation episodes that render_save_dir shows")
