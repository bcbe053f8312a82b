"""Files of Alibaba's ROLL: conversions of the run, of roles and of the policy, and what is settled at the end."""

from __future__ import annotations

from typing import Any

from roll.catalog.trackers import TRACKERS
from roll.configs.parsing.roll_names import SCORING
from roll.configs.rules.megatron_fields import refused_fields
from roll.workbench.migrate.alibaba_roll_tasks import drop, finish_tasks
from roll.workbench.migrate.conversions import conversion, first, is_engine, last, list_, mapped, positive
from roll.workbench.migrate.draft import Draft, Step

_RLVR_ONLY = ("difficulty_loss_weight", "length_loss_weight", "max_len_mask", "difficulty_mask", "error_max_len_clip",
              "rl_loss_coef")  # fmt: skip
_OF_VARIANT: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.1}, "topr": {"topr_level": "token"},
    "kimi15": {"kimi15_tau": 0.1, "kimi15_level": "token"}, "tis": {"tis_lower_bound": 0.0, "tis_upper_bound": 1.0},
}  # fmt: skip
"""Numbers that a `pg_variant` has in ROLL's ActorPGWorker, whatever a file says."""


@last
def run_steps(step: Step) -> None:
    """Steps of the run; ROLL's fine-tuning and distillation pass over epochs."""
    if step.draft.pipeline == "sft" and ("student" in step.draft.theirs or step.use in step.draft.report.filled):
        step.dead("ROLL's distillation passes over num_train_epochs, whatever max_steps is")
    else:
        positive(step)


@last
def epochs(step: Step) -> None:
    """Passes over the rows, which RLVR and environments don't count."""
    draft, limit = step.draft, step.draft.their("max_steps", 0)
    if draft.pipeline not in ("sft", "dpo"):
        step.dead("max_steps decides")
    elif draft.pipeline == "sft" and "student" not in draft.theirs and isinstance(limit, int) and limit > 0:
        step.dead(f"max_steps ({limit}) decides")
    else:
        step.put(int(step.value) if isinstance(step.value, float) else step.value)
        if draft.pipeline == "sft":
            draft.put("max_steps", None)


@last
def tracker_option(step: Step) -> None:
    """An option of the tracker that has it."""
    names = step.draft.get("track_with", ())
    names = [names] if isinstance(names, str) else list(names or ())
    takers = [name for name in names if name in TRACKERS and step.last in TRACKERS[name].options]
    for name in takers:
        step.put(step.value, f"tracker_kwargs.{name}.{step.last}")
    if not takers:
        step.dead(f"{', '.join(map(str, names)) or 'stdout'} has no such option")


@first
def roll_strategy(step: Step) -> None:
    """A backend; roles that score have one that scores."""
    value, role = step.value, step.role
    if role in ("reference", "teacher") and value in SCORING:
        step.put(SCORING[value])
        same = "hf_infer as a role that scores is fsdp2_infer: the same model behind the same forward pass"
        step.decide(same if value == "hf_infer" else f"{role} doesn't train")
    elif role == "actor_train" and str(value).startswith("diffusion"):
        step.absent("models of text only")
    else:
        step.put(value)


@conversion
def attention(step: Step) -> None:
    """An attention kernel, for backends that have a choice."""
    name = step.draft.strategies.get(step.role, "")
    if is_engine(name) or name.startswith("megatron"):
        (step.dead if is_engine(name) else step.decide)(f"{name} has attention of its own")
    else:
        step.put(mapped(step))


@conversion
def checkpointing(step: Step) -> None:
    """Gradient checkpointing, for roles that train."""
    if is_engine(name := step.draft.strategies.get(step.role, "")):
        step.decide(f"{name} has no backward pass, so there is nothing to recompute")
    elif step.role not in ("actor_train", "critic"):
        step.dead(f"{step.role} has no backward pass")
    else:
        step.put(bool(step.value))


@conversion
def lora(step: Step) -> None:
    """Adapters of the role that trains: where there are targets, of rank 8 and with twice the rank as alpha."""
    section, place = step.use.key.rpartition(".")[0], f"{step.role}.model_args"
    targets, rank = (step.draft.their(f"{section}.lora_{key}", other) for key, other in (("target", ""), ("rank", 8)))
    alpha = step.draft.their(f"{section}.lora_alpha") or (2 * rank if isinstance(rank, int) else None)
    if step.role not in ("actor_train", "critic"):
        step.decide("adapters are of the role that trains; the engine gets them merged")
    elif not targets:
        step.dead("no adapters: ROLL adds them where lora_target is given")
    elif not step.last.endswith("target"):
        step.put(alpha if step.last == "lora_alpha" else step.value)
    elif isinstance(targets, str) and set("*$|(") & set(targets):
        step.absent("layers are named, not matched by a pattern")
    else:
        if targets in ("all", ["all"]):
            step.put("all-linear")
            step.decide("all is all-linear; neither a router nor fused experts get adapters")
        elif isinstance(targets, str) and "," in targets:
            list_(step)
        else:
            step.put(targets)
        step.put(rank, f"{place}.lora_rank")
        step.put(alpha, f"{place}.lora_alpha")


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


@conversion
def roll_estimator(step: Step) -> None:
    """An estimator; agentic's grpo compares rewards by reward_normalization."""
    value, gamma = step.value, step.draft.their("gamma", 1)
    if value == "agentic_reinforce" and gamma != 1:
        step.absent("it discounts from turn to turn; with gamma 1 it is reinforce")
    elif value == "agentic_reinforce" or (value == "grpo" and step.draft.pipeline == "agentic"):
        step.put("reinforce")
        step.decide(f"{value} in environments is reinforce with rewards that reward_normalization compares")
    else:
        step.put(value)


@conversion
def agg_mode(step: Step) -> None:
    """How token losses become one number."""
    step.put(step.value)
    if step.value == "seq-mean-token-sum-norm":
        step.decide("a mean over rows, divided by response_length; in ROLL a sum, divided by sequence_length")


@last
def roll_dual_clip(step: Step) -> None:
    """A bound of the losses of tokens with negative advantage, which follows from the clip range."""
    clip, loss = step.draft.get("pg_clip", 0.2), step.draft.get("policy_loss", "ppo")
    if step.value and loss == "gspo":
        step.absent("the bound is of policy_loss ppo")
        return
    step.put(step.value)
    if step.value and isinstance(clip, float | int) and not step.draft.has("dual_clip_c"):
        step.put(round(1 + 2 * clip, 10), "dual_clip_c")


@last
def clip_range(step: Step) -> None:
    """Whether the two bounds count; each is 0.2 where it isn't given."""
    for key in step.places if step.value else ():
        step.put(step.draft.get(key, 0.2), key)
    if not step.value:
        step.dead("pg_clip counts")


@last
def topr_weight(step: Step) -> None:
    """A loss of positive or negative samples: TOPR where it stands alone."""
    if step.draft.pipeline == "agentic" or not step.value or step.value == 0:
        step.dead("ROLL reads it in RLVR only" if step.value else "0 asks for nothing")
    elif step.draft.their("rl_loss_coef", 1) != 0:
        step.absent("there is no such term beside the policy loss; see policy_loss: topr")
    else:
        for place, value in (("policy_loss", "topr"), ("topr_level", "token"), (step.places[-1], step.value)):
            step.put(value, place)
        for other in ("topr_positive_weight", "topr_negative_weight"):
            step.draft.put(other, step.draft.get(other, 0.0))
        step.decide("policy_loss topr, as rl_loss_coef is 0; samples are positive by advantage, in ROLL by score")


@conversion
def pg_variant(step: Step) -> None:
    """A loss of ROLL's other worker, with the numbers that it has there."""
    if "pg_worker" not in str(step.draft.their(f"{step.use.key.rpartition('.')[0]}.worker_cls", "")):
        step.dead("ROLL's ActorWorker doesn't read it: worker_cls isn't ActorPGWorker")
        return
    step.put(mapped(step))
    for place, value in _OF_VARIANT.get(str(step.value), {}).items():
        step.put(value, place)
    if step.value == "topr":
        step.decide("a sample is positive by its advantage, in ROLL by its score")


@last
def norm_type(step: Step) -> None:
    """The level that rewards are normalised at, for the mean and the deviation."""
    mean, deviation = (step.draft.their(f"norm_{kind}_type") for kind in ("mean", "std"))
    mean, deviation = (None if value == "None" else value for value in (mean, deviation))
    if step.draft.their("adv_estimator") == "grpo" or not (mean or deviation) or step.draft.pipeline == "agentic":
        step.dead("grpo compares within groups" if mean or deviation else "null asks for nothing")
    elif mean and deviation and mean != deviation:
        step.absent(f"one level for both: the mean is of the {mean}, the deviation of the {deviation}")
    else:
        step.put(mean or deviation)
        if not (mean and deviation):
            step.put(True, "reward_shift" if mean else "reward_scale")


@conversion
def is_weight(step: Step) -> None:
    """Importance weights between sampler and trainer."""
    if not step.draft.their("train_infer_correction.is_weight.enabled", False):
        step.dead("is_weight isn't enabled")
    elif step.last != "enabled":
        step.put(step.value)
    else:
        step.use.ours = ("train_infer_correction",)
        if not step.draft.has("train_infer_correction.importance_upper"):
            step.draft.put("train_infer_correction.importance_upper", 1.2, step.use)


@conversion
def is_filters(step: Step) -> None:
    """Filters that reject tokens: all at one level, which is that of the weight too."""
    weighs = step.draft.their("train_infer_correction.is_weight.enabled", False)
    entries = step.value if isinstance(step.value, list) else []
    rules: list[Any] = [rule for rule in entries if isinstance(rule, dict) and rule.get("enabled")]
    levels = {rule.get("agg_type", "token") for rule in rules}
    if weighs and rules:
        levels.add(step.draft.their("train_infer_correction.is_weight.weight_type", "token"))
    if not rules:
        step.dead("no filter is enabled")
    elif len(levels) > 1:
        step.absent(f"weight and filters have one level, not {', '.join(sorted(levels))}")
    else:
        for kind, ours, low, high in (("ratio", "ratio", 0.8, 1.2), ("diff", "difference", -0.2, 0.2)):
            on = [rule for rule in rules if rule.get(f"{kind}_enabled", kind == "ratio")]
            for end, best, default in (("low", max, low), ("high", min, high)) if on else ():
                value = best(rule.get(f"{kind}_{end}", default) for rule in on)
                step.put(value, f"train_infer_correction.{ours}_{end}")
        step.put(levels.pop(), "train_infer_correction.level")
        if not weighs:
            step.put(None, "train_infer_correction.importance_upper")


def finish_roll(draft: Draft) -> None:
    """Settle the policy, roles, lengths, environments, rows."""
    _policy(draft)
    for role in draft.strategies:
        _megatron(draft, role)
    finish_tasks(draft)
    if draft.get("async_generation_ratio") and not draft.has("train_infer_correction") \
            and draft.get("policy_loss") not in ("topr", "tis", "cispo", "decoupled_ppo"):  # fmt: skip
        draft.put("allow_uncorrected_async", True)
        draft.report.decisions.append(
            "allow_uncorrected_async: true, as in ROLL nothing corrects for samples of older weights here; "
            "train_infer_correction: {level: token, importance_upper: 2} would"
        )


def _policy(draft: Draft) -> None:
    """What ROLL doesn't read, and what of its loss no key of the file says."""
    told, factor, coef = draft.report.decisions, draft.get("rl_loss_coef", 1), draft.get("kl_loss_coef")
    for key in ("pg_clip_low", "pg_clip_high"):
        drop(draft, key, not draft.their("use_pg_clip_range"), "use_pg_clip_range is false: pg_clip counts")
    for key in _RLVR_ONLY:
        drop(draft, key, draft.pipeline == "agentic", "ROLL reads it in RLVR only")
    if draft.get("use_kl_loss"):
        draft.put("kl_loss_ratio", False)
        told.append("kl_loss_ratio: false, as ROLL multiplies the KL by no ratio; true is unbiased")
        if draft.has("rl_loss_coef") and factor != 1 and isinstance(coef, float | int):
            draft.put("kl_loss_coef", coef * factor)
            told.append(f"kl_loss_coef: {coef * factor}, as ROLL's rl_loss_coef multiplies the KL too")
    elif draft.has("reference") and not draft.get("add_token_level_kl") and draft.knows("use_kl_loss"):
        told.append("reference: kept, but no KL term uses it, so it isn't started")
    if draft.get("policy_loss") == "topr" and not factor:
        draft.put("rl_loss_coef", 1.0)
    if "student" in draft.theirs and not draft.has("max_grad_norm"):
        draft.put("max_grad_norm", None)
        told.append("max_grad_norm: null, as ROLL's distillation clips nothing unless it is told to")
    if draft.knows("actor_infer") and (heat := draft.get("actor_infer.generating_args.temperature", 1)) not in (0, 1):
        told.append(f"log-probs in updates: of logits / temperature ({heat}), as sampled; ROLL's are of the logits")


def _megatron(draft: Draft, role: str) -> None:
    """Sizes of 1 that only mean something above it, and layers that are recomputed anyway."""
    config = f"{role}.strategy_args.strategy_config"
    for key, size in (("sequence_parallel", "tensor"), ("virtual_pipeline_model_parallel_size", "pipeline")):
        alone = draft.get(f"{config}.{size}_model_parallel_size", 1) == 1 and draft.get(f"{config}.{key}") != 1
        drop(draft, f"{config}.{key}", alone, f"{size}_model_parallel_size is 1")
    off = draft.get(f"{role}.model_args.disable_gradient_checkpointing")
    drop(draft, f"{config}.recompute_granularity", off, "disable_gradient_checkpointing is true")
    whole = draft.get(f"{config}.recompute_granularity", "full") == "full" and not off
    drop(draft, f"{config}.moe_layer_recompute", whole, "whole layers are recomputed anyway")
