"""Conversions of arguments of TRL."""

from __future__ import annotations

from roll.catalog.entries import OWN_PATH
from roll.catalog.rewards import REWARDS
from roll.catalog.trackers import TRACKERS
from roll.catalog.validation_metrics import better_of
from roll.workbench.migrate.conversions import conversion, first, mapped
from roll.workbench.migrate.draft import Step
from roll.workbench.migrate.table import DOMAIN


@first
def report_to(step: Step) -> None:
    """Trackers."""
    given = step.value if isinstance(step.value, list) else [step.value]
    known = [one for one in given if one in TRACKERS]
    step.put(["stdout", *known])
    if gone := [str(one) for one in given if one not in (*TRACKERS, "none", None)]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@conversion
def linear_warmup(step: Step) -> None:
    """The shape of a warm-up."""
    if step.value in (None, "linear"):
        step.dead("the warm-up is linear")
    else:
        step.absent(f"the warm-up is linear, not {step.value}")


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
        step.note("")
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
        step.note("")
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


@conversion
def trl_dataset(step: Step) -> None:
    """A file, or a data set of the hub with its configuration and split."""
    location = step.value
    if _of_hub(location):
        config, split = (step.draft.their(key) for key in ("dataset_config", "dataset_train_split"))
        location += f"/{config}" if config not in (None, "default") else ""
        location += f"#{split}" if split not in (None, "train") else ""
    step.put(location)
    step.note("")


@conversion
def of_trl_dataset(step: Step) -> None:
    """A part of that address."""
    if not _of_hub(step.draft.their("dataset_name")):
        step.dead("only data sets of the hub have it")
    elif step.value in (None, "default", "train"):
        step.dead("it is so without being said")
    else:
        step.use.ours, step.use.note = (step.place,), ""


_BEST = {
    "loss": "val/loss", "rewards/accuracies": "val/accuracy", "accuracy": "val/accuracy",
    "rewards/margins": "val/margin", "margin": "val/margin", "mean_token_accuracy": "val/token_accuracy",
    "reward": f"val/{DOMAIN}/reward",
}  # fmt: skip
"""Metrics of TRL's trainers in evaluation, by ours."""


@conversion
def best_metric(step: Step) -> None:
    """A metric of evaluation, and which way is better."""
    name = str(step.value).removeprefix("eval_")
    draft, metric = step.draft, _BEST.get(name)
    known = {"loss": ("sft", "dpo", "reward_model"), "mean_token_accuracy": ("sft",), "reward": ("rlvr",)}
    if metric is None or draft.pipeline not in known.get(name, ("dpo", "reward_model")):
        step.absent("no validation here gives it; see save_best in docs/checkpoints.md")
        return
    # As transformers has it: higher is better, but for names that end in loss.
    greater = draft.their("greater_is_better", not name.endswith("loss"))
    usual = better_of(metric) == "higher"
    step.put(metric if bool(greater) is usual else f"{'max' if greater else 'min'}:{metric}")


@conversion
def best_at_end(step: Step) -> None:
    """The best model, by the loss where no metric is named."""
    if not step.value:
        step.dead("it is off")
    elif step.draft.their("metric_for_best_model") is not None:
        step.dead("metric_for_best_model says which one is kept; roll export RUN --step best writes it")
    elif step.draft.pipeline in ("sft", "dpo", "reward_model"):
        step.put("val/loss")
    else:
        step.absent("no validation here gives a loss; see save_best in docs/checkpoints.md")


def _of_hub(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.count("/") == 1
        and not name.startswith((".", "~", "/"))
        and (not name.endswith((".jsonl", ".json", ".parquet", ".csv", ".tsv")))
    )


@first
def reward_funcs(step: Step) -> None:
    """A reward function, or a weighted sum of several."""
    given = step.value if isinstance(step.value, list) else [step.value]
    weights = step.draft.their("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(given) else [1.0] * len(given)
    place = f"rewards.{DOMAIN}.name"
    paths = [_path(str(name)) for name in given]
    if guessed := [str(name) for name, path in zip(given, paths, strict=True) if path == f"rewards.py:{name}"]:
        step.decide(f"functions by their paths: path/to/file.py:{', '.join(guessed)}; here rewards.py")
    if len(given) == 1:
        step.put(paths[0], place)
        return
    step.put("weighted", place)
    for number, (name, path, weight) in enumerate(zip(given, paths, weights, strict=True), 1):
        label = str(name).rpartition(".")[2].rpartition(":")[2]
        label = label if label.isidentifier() else f"part{number}"
        part = f"rewards.{DOMAIN}.parts.{label}"
        part = f"{part}{number}" if step.draft.has(part) else part
        step.draft.put(f"{part}.name", path, step.use)
        step.draft.put(f"{part}.weight", weight, step.use)
    step.use.ours = (*step.use.ours, f"rewards.{DOMAIN}.parts")


def _path(name: str) -> str:
    path = name if OWN_PATH.match(name) else ":".join(name.rsplit(".", 1)) if "." in name else name
    return path if path in REWARDS or OWN_PATH.match(path) else f"rewards.py:{name}"


@conversion
def reward_weights(step: Step) -> None:
    """Weights of several functions, which `reward_funcs` has written."""
    functions = step.draft.their("reward_funcs")
    if isinstance(functions, list) and isinstance(step.value, list) and len(functions) == len(step.value) > 1:
        step.use.ours = (f"rewards.{DOMAIN}.parts",)
    elif step.value is None:
        step.dead("null weighs all alike")
    else:
        step.absent("not as many as reward_funcs in this file: write rewards.<domain>.parts.<name>.weight")


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
