"""Conversions of arguments of TRL."""

from __future__ import annotations

from roll.catalog.entries import OWN_PATH
from roll.catalog.rewards import REWARDS
from roll.catalog.trackers import TRACKERS
from roll.migrate.conversions import conversion, first, mapped
from roll.migrate.conversions_verl import DOMAIN
from roll.migrate.draft import Step


@first
def report_to(step: Step) -> None:
    """Trackers."""
    given = step.value if isinstance(step.value, list) else [step.value]
    known = [one for one in given if one in TRACKERS]
    step.put(["stdout", *known])
    if gone := [str(one) for one in given if one not in (*TRACKERS, "none", None)]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@conversion
def deepspeed_file(step: Step) -> None:
    """A file with DeepSpeed's keys."""
    step.draft.put("actor_train.strategy_args.strategy_name", "deepspeed_train", step.use)
    step.decide(
        "deepspeed_train; copy that file's keys into actor_train.strategy_args.strategy_config, or name a preset"
    )


@conversion
def peft(step: Step) -> None:
    """Adapters."""
    if not step.draft.their("use_peft", False):
        step.dead("use_peft is off")
    elif step.last == "use_peft":
        if step.draft.their("lora_r") is None:
            step.put(16)
        step.use.fate, step.use.note = "translated", ""
        step.use.ours = step.places
    else:
        step.put(step.value)


@conversion
def trl_batch(step: Step) -> None:
    """Completions of a generation: settled at the end."""
    if step.value is None:
        step.dead("null leaves it to the batch of an optimizer step")
    else:
        step.draft.memo[step.last] = (step.value, step.use)
        step.use.ours = (step.place,)


@conversion
def trl_beta(step: Step) -> None:
    """The KL term, or DPO's constant."""
    if step.draft.knows("beta"):
        step.put(step.value, "beta")
    elif step.value:
        step.put(step.value, "kl_loss_coef")
        step.put(True, "use_kl_loss")
    else:
        step.dead("0 is no KL term")


@conversion
def trl_loss(step: Step) -> None:
    """A way to aggregate, or DPO's loss."""
    value = step.value[0] if isinstance(step.value, list) and step.value else step.value
    if step.draft.knows("loss_type"):
        step.put(value, "loss_type")
    elif value in step.row.values:
        step.put(mapped(step))
    elif value == "cispo":
        step.put("cispo", "policy_loss")
    else:
        step.absent("see policy_loss and loss_agg_mode")


@conversion
def scale_rewards(step: Step) -> None:
    """Whether advantages are divided by the deviation."""
    if step.value in (False, "none"):
        step.put("dr_grpo")
    elif step.value == "batch":
        step.put("grpo")
        step.decide("deviations are those of the group")
    else:
        step.put("grpo")


@first
def reward_funcs(step: Step) -> None:
    """A reward function."""
    given = step.value if isinstance(step.value, list) else [step.value]
    name = str(given[0])
    path = name if OWN_PATH.match(name) else ":".join(name.rsplit(".", 1)) if "." in name else name
    step.put(path, f"rewards.{DOMAIN}.name")
    if path not in REWARDS and not OWN_PATH.match(path):
        step.decide(f"{name} becomes a function by its path: path/to/file.py:{name}")
        step.draft.put(f"rewards.{DOMAIN}.name", f"rewards.py:{name}", step.use)
    if len(given) > 1:
        step.decide("the first one; several are the `parts` of rewards.<domain>.name: weighted")


@first
def trl_reward_model(step: Step) -> None:
    """A model that scores."""
    step.put(step.value)
    step.draft.put(f"rewards.{DOMAIN}.name", "reward_model", step.use)


@conversion
def trl_correction(step: Step) -> None:
    """Truncated importance weights."""
    if not step.draft.their("vllm_importance_sampling_correction", True):
        step.dead("no correction is asked for")
        return
    section = "train_infer_correction.importance_upper"
    if step.last.endswith("cap"):
        step.put(step.value, section)
    elif not step.draft.has(section):
        step.draft.put(section, step.draft.their("vllm_importance_sampling_cap", 2.0), step.use)
        step.use.ours = ("train_infer_correction",)
