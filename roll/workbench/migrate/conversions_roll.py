"""Conversions of values of Alibaba's ROLL: roles, policy, data."""

from __future__ import annotations

from typing import Any

from roll.catalog.trackers import TRACKERS
from roll.configs.parsing.roll_names import SCORING
from roll.configs.rules.megatron_fields import refused_fields
from roll.workbench.migrate.conversions import conversion, first, is_engine, last, list_, mapped
from roll.workbench.migrate.draft import Step


@first
def roll_strategy(step: Step) -> None:
    """A backend; roles that score have one that scores."""
    value, role = step.value, step.role
    if role in ("reference", "teacher", "reward_model") and value in SCORING:
        step.put(SCORING[value])
        if value == "hf_infer":
            step.decide("hf_infer as a role that scores is fsdp2_infer: the same model behind the same forward pass")
        else:
            step.decide(f"{role} doesn't train")
    elif role == "reward_model" and value == "megatron_infer":
        step.put("fsdp2_infer")
        step.decide("megatron_infer scores no rewards")
    elif role == "actor_train" and str(value).startswith("diffusion"):
        step.absent("models of text only")
    else:
        step.put(value)
        step.use.fate, step.use.note = "translated", ""


@conversion
def strategy_config(step: Step) -> None:
    """A whole section in one word."""
    if not step.value:
        step.dead("null leaves the backend's defaults")
    else:
        step.put(step.value)


@conversion
def slots(step: Step) -> None:
    """Device slots; null is a role on the CPU there, and the default here."""
    if step.value is None:
        step.dead("null leaves the default")
    else:
        step.put(step.value)


@conversion
def per_worker(step: Step) -> None:
    """Devices of one engine: written at the end, when its sizes are known."""
    name = step.draft.strategies.get(step.role, "")
    if is_engine(name):
        step.draft.memo[f"per_worker:{step.role}"] = step.use
        step.use.fate, step.use.note = "translated", ""
        step.put(step.value)
    else:
        step.dead(f"{name or step.role} uses one device per rank")


@conversion
def attention(step: Step) -> None:
    """An attention kernel, for backends that have a choice."""
    value, name = mapped(step), step.draft.strategies.get(step.role, "")
    if is_engine(name):
        step.dead(f"{name} has attention of its own")
    elif name.startswith("megatron"):
        step.decide(f"{name} has attention of its own, chosen by transformer_impl")
    else:
        step.put(value)
        if step.place == step.use.key:
            step.use.fate, step.use.note = "translated", ""
        else:
            step.use.fate, step.use.note = "translated", "its name here"


@conversion
def checkpointing(step: Step) -> None:
    """Gradient checkpointing, for roles that train."""
    name = step.draft.strategies.get(step.role, "")
    if is_engine(name):
        step.decide(f"{name} has no backward pass, so there is nothing to recompute")
    elif step.role not in ("actor_train", "critic"):
        step.dead(f"{step.role} has no backward pass")
    else:
        step.put(bool(step.value))
        step.use.fate, step.use.note = "translated", ""


@conversion
def lora(step: Step) -> None:
    """Adapters of the role that trains."""
    args = f"{step.role}.model_args"
    wanted = step.draft.their(f"{step.use.key.rpartition('.')[0]}.lora_target")
    if step.role not in ("actor_train", "critic"):
        step.decide("adapters are of the role that trains; the engine gets them merged")
    elif step.value in (None, "") or (step.place == f"{args}.lora_rank" and not wanted and not step.value):
        step.dead("no adapters")
    elif step.place.endswith("lora_target"):
        if step.value in ("all", ["all"]):
            step.put("all-linear")
            step.decide("all is all-linear")
        elif isinstance(step.value, str) and set("*$|(") & set(step.value):
            step.absent("layers are named, not matched by a pattern")
        elif isinstance(step.value, str) and "," not in step.value:
            step.put(step.value)
            step.use.fate, step.use.note = "translated", ""
        else:
            list_(step)
    else:
        step.put(step.value)
        step.use.fate, step.use.note = "translated", ""


@last
def epochs(step: Step) -> None:
    """Passes over the rows, where no number of steps is given."""
    their_steps = step.draft.their("max_steps", 0)
    if not step.draft.knows("num_train_epochs"):
        step.dead("environments have no epochs; max_steps decides")
    elif step.draft.has("num_train_epochs"):
        step.dead("num_train_epochs at the top level says it")
    elif isinstance(their_steps, int) and their_steps > 0:
        step.dead(f"max_steps ({their_steps}) decides")
    else:
        step.put(int(step.value) if isinstance(step.value, (int, float)) else step.value, "num_train_epochs")
        step.draft.put("max_steps", None)
        step.use.fate, step.use.note = "translated", ""


@conversion
def column(step: Step) -> None:
    """A column; null lets it be found."""
    if step.value is None:
        step.dead("null lets the column be found")
    else:
        step.put(step.value)


@conversion
def response(step: Step) -> None:
    """What the reward compares against, or the text to learn."""
    section = step.place.rpartition(".")[0]
    place = f"{section}.response" if step.draft.knows(f"{section}.response") else f"{section}.ground_truth"
    if step.value is None or not step.draft.knows(place):
        step.dead("there is no such column here")
    else:
        step.put(step.value, place)


@last
def max_new_tokens(step: Step) -> None:
    """A bound of responses; the longest one bounds it."""
    limit = step.draft.get("response_length")
    value = step.value
    if not isinstance(value, int) or not isinstance(limit, int) or value <= limit:
        step.put(value)
    else:
        step.put(limit)
        step.decide(f"at most response_length ({limit})")


@last
def returned(step: Step) -> None:
    """Responses per prompt: the group's size rules in training."""
    if step.role == "actor_infer":
        size = "train_env_manager.group_size" if step.draft.pipeline == "agentic" else "num_return_sequences_in_group"
        step.dead(f"{size} says it")
    else:
        step.put(step.value)
        step.use.fate, step.use.note = "translated", ""


@conversion
def additional(step: Step) -> None:
    """Another field of Megatron's TransformerConfig."""
    name = step.draft.strategies.get(step.role, "")
    if not name.startswith("megatron"):
        step.dead(f"it is Megatron's, and {step.role} is on {name or 'another backend'}")
    elif step.value is None:
        step.dead("null leaves Megatron's default")
    elif wrong := refused_fields({step.last: step.value}).get(step.last):
        # What the model or another key says anyway isn't missed.
        (step.dead if wrong.startswith(("would have no effect", "already set")) else step.absent)(wrong)
    else:
        step.put(step.value, f"{step.place}.{step.last}")


@conversion
def megatron_only(step: Step) -> None:
    """A key of Megatron's strategy_config."""
    if step.value is None:
        step.dead("null leaves the default")
    elif step.draft.strategies.get(step.role, "") == "megatron_train":
        step.put(step.value)
    else:
        step.absent("it is megatron_train's")


@last
def log_dir(step: Step) -> None:
    """Where a tracker writes."""
    if step.draft.has("logging_dir"):
        step.dead(f"trackers write below logging_dir, {step.draft.get('logging_dir')}")
    else:
        step.put(step.value, "logging_dir")
        step.use.fate, step.use.note = "translated", ""


@last
def tracker_option(step: Step) -> None:
    """An option of the tracker that has it."""
    names = step.draft.get("track_with", ())
    names = [names] if isinstance(names, str) else list(names or ())
    takers = [name for name in names if name in TRACKERS and step.last in TRACKERS[name].options]
    if step.value is None:
        step.dead("null leaves the default")
    elif not takers:
        step.dead(f"{', '.join(map(str, names)) or 'stdout'} has no such option")
    for name in takers if step.value is not None else ():
        step.put(step.value, f"tracker_kwargs.{name}.{step.last}")


# --- policy ----------------------------------------------------------------------------------------------------------


@conversion
def roll_estimator(step: Step) -> None:
    """An estimator; agentic's grpo compares rewards by reward_normalization."""
    value = step.value
    if step.draft.pipeline == "agentic" and value in ("grpo", "agentic_reinforce", "reinforce"):
        step.put("reinforce")
        if value != "reinforce":
            step.decide(f"{value} in environments is reinforce with rewards that reward_normalization compares")
    else:
        step.put(value)


@last
def clip_range(step: Step) -> None:
    """Whether the two bounds count."""
    if not step.value:
        for key in ("pg_clip_low", "pg_clip_high"):
            if step.draft.has(key):
                step.draft.abandon(key, "use_pg_clip_range is false: pg_clip counts")
        step.dead("pg_clip counts")
    else:
        step.dead("a range that is written counts")


@last
def topr(step: Step) -> None:
    """TOPR by a switch."""
    if step.value:
        step.put("topr", "policy_loss")
    else:
        step.dead("false asks for nothing")


@last
def topr_weight(step: Step) -> None:
    """TOPR by a weight."""
    if isinstance(step.value, (int, float)) and step.value > 0:
        step.put("topr", "policy_loss")
        step.put(step.value, "topr_negative_weight")
        if not step.draft.get("rl_loss_coef", 1):
            step.draft.put("rl_loss_coef", 1.0)
    elif step.value:
        step.absent("a weight is a number")
    else:
        step.dead("0 asks for nothing")


@last
def norm_type(step: Step) -> None:
    """The level that rewards are normalised at, for the mean and the deviation."""
    mean, deviation = (step.draft.their(f"norm_{kind}_type") for kind in ("mean", "std"))
    mean, deviation = (None if value in (None, "None") else value for value in (mean, deviation))
    if not step.draft.knows("reward_norm"):
        step.absent("see reward_normalization")
    elif mean is None and deviation is None:
        step.dead("null asks for nothing")
    else:
        step.put(mean or deviation, "reward_norm")
        if mean is None or deviation is None:
            step.put(True, "reward_shift" if deviation is None else "reward_scale")
        elif mean != deviation:
            step.decide(f"one level for both: {mean}, where the deviation was of the {deviation}")


@conversion
def greedy(step: Step) -> None:
    """Greedy validation."""
    if step.value:
        step.put(0.0)
    else:
        step.dead("false asks for nothing")


@conversion
def is_weight(step: Step) -> None:
    """Importance weights between sampler and trainer."""
    if not step.draft.their("train_infer_correction.is_weight.enabled", False):
        step.dead("is_weight isn't enabled")
    elif step.last == "enabled":
        step.use.ours = ("train_infer_correction",)
        if not step.draft.has("train_infer_correction.importance_upper"):
            step.draft.put("train_infer_correction.importance_upper",
                           step.draft.their("train_infer_correction.is_weight.upper_bound", 1.2), step.use)  # fmt: skip
    else:
        step.put(step.value)


@conversion
def is_filters(step: Step) -> None:
    """Filters that reject tokens."""
    given = step.value if isinstance(step.value, list) else []
    rules: Any = [rule for rule in given if isinstance(rule, dict) and rule.get("enabled")]
    if not rules:
        step.dead("no filter is enabled")
        return
    rule = rules[0]
    section = "train_infer_correction"
    if not step.draft.their("train_infer_correction.is_weight.enabled", False):
        step.draft.put(f"{section}.importance_upper", None, step.use)
        step.put(rule.get("agg_type", "token"), f"{section}.level")
    if rule.get("ratio_enabled", True):
        step.put(rule.get("ratio_low", 0.8), f"{section}.ratio_low")
        step.put(rule.get("ratio_high", 1.2), f"{section}.ratio_high")
    if rule.get("diff_enabled"):
        step.put(rule.get("diff_low", -0.2), f"{section}.difference_low")
        step.put(rule.get("diff_high", 0.2), f"{section}.difference_high")
    if len(rules) > 1:
        step.decide("one filter per kind: the first one's bounds")


@last
def profile_mode(step: Step) -> None:
    """A profile of the whole run by a switch: here of a step."""
    if not step.value:
        step.dead("false asks for nothing")
    elif not step.draft.has("profile_steps"):
        step.put([2], "profile_steps")
        step.put("memory" if step.last.endswith("memory") else "torch", "profiler.tools")
    else:
        step.dead("profile_steps says it")
