"""TRL's GRPO and RLOO: losses, clips, advantages, the correction for vLLM, rewards."""

from __future__ import annotations

import re
from typing import Any

from roll.configs.catalog.entries import OWN_PATH
from roll.workbench.migrate.conversions import conversion, first, mapped
from roll.workbench.migrate.draft import Step
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.table import DOMAIN
from roll.workbench.migrate.trl import ask, is_for, taken

_PREFERENCES = ("sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "kto", "simpo", "orpo")
_MEANS = {"grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm",
          "luspo": "seq-mean-token-sum"}  # fmt: skip
"""How TRL's GRPO losses are aggregated; others are means over the tokens of an optimizer step."""


@conversion
def trl_batch(step: Step) -> None:
    """Leave the completions of a generation to be settled at the end."""
    number = taken(step.draft, step.last)
    if number is None:
        step.dead("null leaves it to the batch of an optimizer step")
    elif number < 1 or number % 1:
        step.absent("a whole number of completions or steps")
    else:
        step.draft.memo[step.last] = (int(number), step.use)
        step.use.ours = (step.key_path,)


@conversion
def trl_beta(step: Step) -> None:
    """Translate `beta`, whose meaning depends on the trainer."""
    draft, beta = step.draft, taken(step.draft, "beta")
    step.use.fate, step.use.note = "translated", ""
    if draft.pipeline == "distill":
        step.put({0: "forward_kl", 1: "reverse_kl"}.get(beta, "jensen_shannon"), "distill.divergence")
        if 0 < beta < 1:
            step.put(beta, "distill.divergence_args.beta")
    elif draft.knows("beta"):
        step.put(beta, "beta")
    elif not beta:
        step.dead("0 is no KL term")
    else:
        step.put(True, "add_token_level_kl" if is_for(draft, "RLOO") else "use_kl_loss")
        step.put(beta, "init_kl_coef" if is_for(draft, "RLOO") else "kl_loss_coef")


@conversion
def trl_loss(step: Step) -> None:
    """Translate a loss by the trainer's name of it: of policies, of preferences, of fine-tuning."""
    draft, value = step.draft, taken(step.draft, "loss_type")
    losses = value if isinstance(value, list) else [value]
    step.use.fate, step.use.note = "translated", ""
    if draft.pipeline == "dpo":
        step.key_paths = ("loss_type",)
        if len(losses) != 1 or draft.their("loss_weights") not in (None, [1.0]):
            step.absent("one loss of weight 1 is what there is; cross-entropy goes with loss_type: orpo")
        elif losses[0] not in _PREFERENCES:
            step.absent("there is no such loss here: a function of your own can be one")
        else:
            step.put(losses[0])
    elif draft.pipeline != "rlvr":
        known = value in ("nll", "chunked_nll")
        step.dead("it is the loss here too") if known else step.absent("the loss is the negative log-likelihood")
    else:
        if step.last == "loss_type":
            step.put(_MEANS.get(value, "token-mean"))
        if value == "bnpo":
            step.decide("a mean over the tokens of the whole mini-batch; TRL's is that of means of its micro-batches")
        _policy_loss(step, value)


def _policy_loss(step: Step, value: str) -> None:
    draft, level = step.draft, taken(step.draft, "importance_sampling_level")
    by_sequence = level == "sequence"
    if value == "vespo" or level not in (None, "token", "sequence") or (by_sequence and value in ("sapo", "cispo")):
        draft.drop("loss_agg_mode")
        step.use.ours, step.key_paths = (), ("policy_loss",)
        step.absent("there is no such loss here: policy_loss takes a function of your own")
    elif value == "cispo":
        # TRL: at most epsilon_high itself. cispo's bound here is 1 + cispo_epsilon_high; tis takes one below 1 too.
        cap = taken(draft, "epsilon") if taken(draft, "epsilon_high") is None else taken(draft, "epsilon_high")
        step.put("cispo" if cap > 1 else "tis", "policy_loss")
        step.put(*((round(cap - 1, 12), "cispo_epsilon_high") if cap > 1 else (cap, "tis_upper_bound")))
        step.note(f"the largest weight is epsilon_high, without it epsilon: {cap}")
    elif value == "sapo" or by_sequence:
        step.put("sapo" if value == "sapo" else "gspo", "policy_loss")


@conversion
def trl_clip(step: Step) -> None:
    """Translate the clip's range, where the loss clips."""
    draft, loss, key = step.draft, taken(step.draft, "loss_type"), step.last
    value, high = taken(draft, key), taken(draft, "epsilon_high") or taken(draft, "epsilon")
    if value is None or loss in ("sapo", "vespo") or (loss == "cispo" and key == "delta"):
        step.dead("null bounds nothing more" if value is None else f"{loss} doesn't read it")
    elif loss == "cispo":
        cap = key == "epsilon_high" or draft.their("epsilon_high") is None
        step.use.ours = tuple(
            key_path for key_path in ("cispo_epsilon_high", "tis_upper_bound") if cap and draft.has(key_path)
        )
        step.note("of cispo it is the largest weight" if cap else "epsilon_high says the largest weight")
    elif key == "delta" and (value <= 1 + high or taken(draft, "importance_sampling_level") == "sequence"):
        step.absent("a bound of the ratio within the clip, or of a sequence's")
    elif key == "delta":
        step.put(True, "dual_clip_loss")
        step.put(value)
    else:
        step.absent("between 0 and 1 here") if key == "epsilon" and not 0 < value < 1 else step.put(value)


@conversion
def advantages(step: Step) -> None:
    """Translate what advantages are divided by, with TRL's 1e-4 beside it."""
    gdpo, value = taken(step.draft, "multi_objective_aggregation") == "normalize_then_sum", step.value
    if gdpo is not (step.last == "multi_objective_aggregation"):
        step.dead("normalize_then_sum divides each reward by its own spread" if gdpo else "the sum is normalised")
    elif gdpo or value in (True, "group"):
        step.put("gdpo" if gdpo else "grpo")
        step.put(1e-4, "adv_estimator_args.eps")
    elif value not in (False, None, "none", "batch"):
        step.absent("none, group and batch is what there is")
    else:
        step.put("dr_grpo")
        if value == "batch":
            # r / std(batch) less its mean in the group is TRL's (r - mean of the group) / std(batch).
            step.put("batch", "reward_norm")
            step.put(True, "reward_scale")
            step.decide("the deviation has 1e-06 beside it here, 1e-04 in TRL")


@conversion
def reward_range(step: Step) -> None:
    """Translate a range of rewards around 0."""
    low, high = step.value if isinstance(step.value, list) and len(step.value) == 2 else (0, step.value or 0)
    step.absent("reward_clip is as far below 0 as above") if low != -high else step.put(high or None)


@conversion
def where_read(step: Step) -> None:
    """Translate an option that acts with some losses or with vLLM alone."""
    draft, key, loss = step.draft, step.last, taken(step.draft, "loss_type")
    if key.startswith("vllm_"):
        step.put(mapped(step)) if taken(draft, "use_vllm") else step.dead("use_vllm is off")
    elif key == "label_smoothing":
        read = loss in ("robust", ["robust"])
        step.put(step.value) if read else step.dead("of TRL's losses that are here only robust reads it")
    elif key == "entropy_coef":
        other = loss in _MEANS and step.value
        step.absent("a mean over tokens in TRL, here as the loss is") if other else step.put(step.value)
    elif step.value is None:
        step.dead("null masks nothing")
    elif loss in ("cispo", "sapo", "vespo") or taken(draft, "importance_sampling_level") == "sequence":
        step.absent("of policy_loss ppo alone")
    else:
        step.put(step.value, "policy_loss_args.sequence_mask")
        if taken(draft, "use_vllm"):
            step.decide("by the log-probs of the trainer before the step, in TRL by those of vLLM")


@conversion
def kl_ratio(step: Step) -> None:
    """Translate the KL's factor."""
    draft, acts = step.draft, step.value and taken(step.draft, "beta")
    step.put(step.value)
    if acts and taken(draft, "use_vllm"):
        draft.report.decisions.append("use_bias_correction_kl: the KL's factor is the ratio to the sampler, in "
                                      "TRL that to the weights before the update")  # fmt: skip
    if acts and taken(draft, "importance_sampling_level") == "sequence":
        step.absent("the factor is each token's ratio, in TRL that of the sequence")


@first
def trl_correction(step: Step) -> None:
    """Translate the correction for vLLM's log-probs, on by default."""
    draft, key = step.draft, "vllm_importance_sampling"
    mode, low, high, old = (taken(draft, f"{key}_{word}") for word in ("mode", "clip_min", "clip_max", "cap"))
    level, _, way = str(mode).partition("_")
    high = old if old is not None else at(draft.theirs, f"{key}_clip_max", high)
    if not taken(draft, "use_vllm") or not taken(draft, f"{key}_correction"):
        step.dead("use_vllm is off" if not taken(draft, "use_vllm") else "no correction is asked for")
    elif step.use in draft.report.filled and step.last != f"{key}_correction":
        step.dead(f"{key}_correction says it")
    elif way == "mask" and ((low is not None and not 0 <= low < 1) or (high is not None and high <= 1)):
        step.absent("a filter keeps a ratio of 1: ratio_low < 1 < ratio_high")
    else:
        bounds = {"rejection": "icepop", "ratio_low": low, "ratio_high": high} if way == "mask" else \
            {"importance_lower": low}  # fmt: skip
        for word, value in {"level": level, "importance_upper": 1e9 if high is None else high, **bounds}.items():
            if value is not None:
                step.put(value, f"train_infer_correction.{word}")


@first
def reward_funcs(step: Step) -> None:
    """Translate a reward function, or a weighted sum of several; a model's score is added to them."""
    draft, domain = step.draft, f"rewards.{DOMAIN}"
    functions = [
        str(name) for name in (step.value if isinstance(step.value, list) else [step.value]) if name is not None
    ]
    if models := [name for name in functions if "/" in name and not OWN_PATH.match(name)]:
        step.absent(f"no function but a model, as reward_model_name_or_path takes one: {', '.join(models)}")
        return
    model, weights = draft.their("reward_model_name_or_path") is not None, draft.their("reward_weights")
    weights = (
        weights
        if isinstance(weights, list) and len(weights) == len(functions) + model
        else [1.0] * (len(functions) + 1)
    )
    parts: dict[str, Any] = {}
    for name, weight in zip(functions, weights[model:], strict=False):
        if name != "get_soft_overlong_punishment":
            label = re.split(r"[.:]", name)[-1]
            label = label if label.isidentifier() and label not in parts else f"{label}{len(parts) + 1}"
            parts[label] = {"name": _path(name), "weight": weight}
        elif taken(draft, "max_completion_length") > 1024:
            ask(draft, "overlong_shaping.buffer", "reward_funcs", name,
                "TRL counts the last 256 up to 1280 tokens, overlong_shaping up to response_length")  # fmt: skip
        else:
            draft.report.decisions.append(f"{name} is 0 up to 1024 tokens, so it is left out")
    draft.report.decisions += [f"{domain}: {part['name']} is TRL's: install trl where it is scored"
                               for part in parts.values() if part["name"].startswith("trl.")]  # fmt: skip
    if len(parts) == 1 and not model and all(part["weight"] == 1 for part in parts.values()):
        step.put(next(iter(parts.values()))["name"], f"{domain}.name")
    elif parts:
        step.put("weighted", f"{domain}.name")
        step.put(parts, f"{domain}.parts")
    if guessed := [name for name in functions if _path(name) == f"rewards.py:{name}"]:
        step.decide(f"functions by their paths: path/to/file.py:{', '.join(guessed)}; here rewards.py")


def _path(name: str) -> str:
    if name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment"):
        return f"trl.rewards:{name}"
    path = name if OWN_PATH.match(name) else ":".join(name.rsplit(".", 1))
    return path if OWN_PATH.match(path) else f"rewards.py:{name}"


@conversion
def reward_weights(step: Step) -> None:
    """Drop weights of several functions, which `reward_funcs` has written."""
    funcs, model = (step.draft.their(key) for key in ("reward_funcs", "reward_model_name_or_path"))
    count = (len(funcs) if isinstance(funcs, list) else int(funcs is not None)) + (model is not None)
    if isinstance(step.value, list) and len(step.value) == count:
        step.use.ours = (f"rewards.{DOMAIN}.parts",)
    elif step.value is None:
        step.dead("null weighs all alike")
    else:
        step.absent("not as many as reward_funcs in this file: write rewards.<domain>.parts.<name>.weight")


@first
def trl_reward_model(step: Step) -> None:
    """Translate a model that scores, alone or beside functions."""
    if step.value is None:
        step.dead("there is none")
        return
    weights, domain = step.draft.their("reward_weights"), f"rewards.{DOMAIN}"
    weight = weights[0] if isinstance(weights, list) and weights else 1.0
    beside = bool(step.draft.their("reward_funcs"))
    written = {f"{domain}.rule_weight": 1.0, f"{domain}.reward_model_weight": weight} if beside else {
        f"{domain}.name": "reward_model", **({f"{domain}.weight": weight} if weight != 1 else {})}  # fmt: skip
    for key_path, value in {step.key_path: step.value, **written}.items():
        step.put(value, key_path)
