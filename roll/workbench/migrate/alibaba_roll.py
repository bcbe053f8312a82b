"""Files of Alibaba's ROLL: conversions of the run, of roles and of the policy, and what is settled at the end."""

from __future__ import annotations

from typing import Any

from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.parsing.roll_presets import SCORING
from roll.configs.rules.megatron_fields import refused_fields
from roll.workbench.migrate.alibaba_roll_tasks import drop, finish_tasks, levels, put_unless, settled
from roll.workbench.migrate.conversions import conversion, first, is_engine, last, list_, mapped
from roll.workbench.migrate.draft import Draft, Step

_RLVR_ONLY = ("difficulty_loss_weight", "length_loss_weight", "max_len_mask", "difficulty_mask", "error_max_len_clip",
              "rl_loss_coef")  # fmt: skip
_OF_VARIANT: dict[str, dict[str, Any]] = {
    "cispo": {"cispo_epsilon_low": 0.1, "cispo_epsilon_high": 0.1}, "topr": {"topr_level": "token"},
    "kimi15": {"kimi15_tau": 0.1, "kimi15_level": "token"}, "tis": {"tis_lower_bound": 0.0, "tis_upper_bound": 1.0},
}  # fmt: skip
"""Numbers that a `pg_variant` has in ROLL's ActorPGWorker, whatever a file says."""
_CORRECTION = "train_infer_correction"


@last
def tracker_option(step: Step) -> None:
    """Translate an option of the tracker that has it."""
    names = step.draft.get("track_with", ())
    names = [names] if isinstance(names, str) else list(names or ())
    takers = [name for name in names if name in TRACKERS and step.last in TRACKERS[name].options]
    for name in takers:
        step.put(step.value, f"tracker_kwargs.{name}.{step.last}")
    if not takers:
        step.dead(f"{', '.join(map(str, names)) or 'stdout'} has no such option")


@first
def roll_strategy(step: Step) -> None:
    """Translate a backend; roles that score get one that scores."""
    if step.role in ("reference", "teacher") and step.value in SCORING:
        step.put(SCORING[step.value])
        same = "hf_infer as a role that scores is fsdp2_infer: the same model behind the same forward pass"
        step.decide(same if step.value == "hf_infer" else f"{step.role} doesn't train")
    else:
        images = step.role == "actor_train" and str(step.value).startswith("diffusion")
        put_unless(step, (images, "absent", "models of text only"))


@conversion
def attention(step: Step) -> None:
    """Translate an attention kernel, for backends that have a choice."""
    own = f"{(name := step.draft.strategies.get(step.role, ''))} has attention of its own"
    put_unless(step, (is_engine(name), "dead", own), (name.startswith("megatron"), "decide", own))


@conversion
def checkpointing(step: Step) -> None:
    """Translate gradient checkpointing, for roles that train."""
    name, why = step.draft.strategies.get(step.role, ""), f"{step.role} has no backward pass"
    put_unless(step, (is_engine(name), "decide", why), (step.role not in ("actor_train", "critic"), "dead", why))


@conversion
def lora(step: Step) -> None:
    """Translate adapters of the role that trains: with targets, rank 8 and twice the rank as alpha."""
    section, model_args = step.use.key.rpartition(".")[0], f"{step.role}.model_args"
    targets, rank = (step.draft.their(f"{section}.lora_{key}", other) for key, other in (("target", ""), ("rank", 8)))
    rank = int(rank) if str(rank).isdecimal() else rank
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
        else:
            list_(step) if isinstance(targets, str) and "," in targets else step.put(targets)
        step.put(rank, f"{model_args}.lora_rank")
        step.put(alpha, f"{model_args}.lora_alpha")


@conversion
def backend_option(step: Step) -> None:
    """Translate a key of one backend, which another hasn't."""
    name, word = step.draft.strategies.get(step.role, "the backend"), step.use.key.partition(".strategy_config.")[2]
    step.key_paths = (f"{step.key_path}.{word}" if step.row.key.endswith("**") else step.key_path,)
    unknown = not step.draft.knows(step.key_path)
    put_unless(step, (step.value is None, "dead", "null leaves the default"),
               (unknown, "absent", f"{name} has no {word or step.last}"))  # fmt: skip


@conversion
def additional(step: Step) -> None:
    """Translate another field of Megatron's TransformerConfig."""
    name, step.key_paths = step.draft.strategies.get(step.role, ""), (f"{step.key_path}.{step.last}",)
    wrong = refused_fields({step.last: step.value}).get(step.last, "")
    # What the model or another key says anyway isn't missed.
    needless = wrong.startswith(("would have no effect", "already set"))
    put_unless(step, (not name.startswith("megatron"), "dead", f"it is Megatron's, and {step.role} is on {name}"),
               (step.value is None, "dead", "null leaves Megatron's default"),
               (needless, "dead", wrong), (wrong, "absent", wrong))  # fmt: skip


@conversion
def roll_estimator(step: Step) -> None:
    """Translate an estimator; agentic's grpo compares rewards by reward_normalization."""
    value, gamma = step.value, step.draft.their("gamma", 1)
    if step.draft.pipeline == "distill" and not step.draft.their("use_opd"):
        value = "reinforce"  # ROLL sets it, as no reward counts
    if value == "agentic_reinforce" and gamma != 1:
        step.absent("it discounts from turn to turn; with gamma 1 it is reinforce")
    elif value == "agentic_reinforce" or (value == "grpo" and step.draft.pipeline == "agentic"):
        step.put("reinforce")
        step.decide(f"{value} in environments is reinforce with rewards that reward_normalization compares")
    else:
        step.put(value)


@last
def roll_dual_clip(step: Step) -> None:
    """Translate a bound of the losses of tokens with negative advantage, which follows from the clip range."""
    clip, of_ppo = step.draft.get("pg_clip", 0.2), step.draft.get("policy_loss") != "gspo"
    put_unless(step, (step.value and not of_ppo, "absent", "the bound is of policy_loss ppo"))
    if step.value and of_ppo and isinstance(clip, float | int) and not step.draft.has("dual_clip_c"):
        step.put(round(1 + 2 * clip, 10), "dual_clip_c")


@last
def clip_range(step: Step) -> None:
    """Translate whether the two bounds count; each is 0.2 where it isn't given."""
    for key in step.key_paths if step.value else ():
        step.put(step.draft.get(key, 0.2), key)
    if not step.value:
        step.dead("pg_clip counts")


@last
def topr_weight(step: Step) -> None:
    """Translate a loss of positive or negative samples: TOPR where it stands alone."""
    if step.draft.pipeline == "agentic" or not step.value:
        step.dead("ROLL reads it in RLVR only" if step.value else "0 asks for nothing")
    elif step.draft.their("rl_loss_coef", 1) != 0:
        step.absent("there is no such term beside the policy loss; see policy_loss: topr")
    else:
        for key_path, value in (("policy_loss", "topr"), ("topr_level", "token"), (step.key_paths[-1], step.value)):
            step.put(value, key_path)
        for other in ("topr_positive_weight", "topr_negative_weight"):
            step.draft.put(other, step.draft.get(other, 0.0))
        step.decide("policy_loss topr, as rl_loss_coef is 0; samples are positive by advantage, in ROLL by score")


@conversion
def pg_variant(step: Step) -> None:
    """Translate a loss of ROLL's other worker, with the numbers that it has there."""
    if "pg_worker" not in str(step.draft.their(f"{step.use.key.rpartition('.')[0]}.worker_cls", "")):
        step.dead("ROLL's ActorWorker doesn't read it: worker_cls isn't ActorPGWorker")
        return
    for key_path, value in {step.key_path: mapped(step), **_OF_VARIANT.get(str(step.value), {})}.items():
        step.put(value, key_path)
    if step.value == "topr":
        step.decide("a sample is positive by its advantage, in ROLL by its score")


@last
def norm_type(step: Step) -> None:
    """Translate the level that rewards are normalised at, for the mean and the deviation."""
    mean, deviation = levels(step)
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
    """Translate importance weights between sampler and trainer."""
    off = not step.draft.their(f"{_CORRECTION}.is_weight.enabled", False)
    if step.last != "enabled" or off:
        put_unless(step, (off, "dead", "is_weight isn't enabled"))
    else:
        step.use.ours = (_CORRECTION,)
        if not step.draft.has(f"{_CORRECTION}.importance_upper"):
            step.draft.put(f"{_CORRECTION}.importance_upper", 1.2, step.use)


@conversion
def is_filters(step: Step) -> None:
    """Translate filters that reject tokens: all at one level, which is that of the weight too."""
    weight: Any = step.draft.their(f"{_CORRECTION}.is_weight") or {}
    entries = step.value if isinstance(step.value, list) else []
    rules: list[Any] = [rule for rule in entries if isinstance(rule, dict) and rule.get("enabled")]
    units = {rule.get("agg_type", "token") for rule in rules}
    units |= {weight.get("weight_type", "token")} if weight.get("enabled") and rules else set()
    if len(units) != 1:
        several = f"weight and filters have one level, not {', '.join(sorted(units))}"
        step.absent(several) if units else step.dead("no filter is enabled")
        return
    for kind, ours, low, high in (("ratio", "ratio", 0.8, 1.2), ("diff", "difference", -0.2, 0.2)):
        on = [rule for rule in rules if rule.get(f"{kind}_enabled", kind == "ratio")]
        for end, best, default in (("low", max, low), ("high", min, high)) if on else ():
            step.put(best(rule.get(f"{kind}_{end}", default) for rule in on), f"{_CORRECTION}.{ours}_{end}")
    step.put(units.pop(), f"{_CORRECTION}.level")
    if not weight.get("enabled"):
        step.put(None, f"{_CORRECTION}.importance_upper")


def finish_roll(draft: Draft) -> None:
    """Settle the policy, roles, lengths, environments, rows."""
    _policy(draft)
    for role in draft.strategies:
        _megatron(draft, role)
    finish_tasks(draft)
    if draft.get("async_generation_ratio") and not draft.has(_CORRECTION) \
            and draft.get("policy_loss") not in ("topr", "tis", "cispo", "decoupled_ppo"):  # fmt: skip
        settled(draft, "allow_uncorrected_async", True, "as in ROLL nothing corrects for samples of older weights "
                "here; train_infer_correction: {level: token, importance_upper: 2} would")  # fmt: skip


def _policy(draft: Draft) -> None:
    """Note what ROLL doesn't read, and what of its loss no key of the file says."""
    decisions, factor, coef = draft.report.decisions, draft.get("rl_loss_coef", 1), draft.get("kl_loss_coef")
    for key in ("pg_clip_low", "pg_clip_high"):
        drop(draft, key, not draft.their("use_pg_clip_range"), "use_pg_clip_range is false: pg_clip counts")
    for key in _RLVR_ONLY:
        drop(draft, key, draft.pipeline == "agentic", "ROLL reads it in RLVR only")
    if draft.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        decisions.append(
            "loss_agg_mode: a mean over rows, divided by response_length; in ROLL a sum, by sequence_length"
        )
    if draft.get("use_kl_loss"):
        settled(draft, "kl_loss_ratio", False, "as ROLL multiplies the KL by no ratio; true is unbiased")
        if draft.has("rl_loss_coef") and factor != 1 and isinstance(coef, float | int):
            settled(draft, "kl_loss_coef", coef * factor, "as ROLL's rl_loss_coef multiplies the KL too")
    elif draft.has("reference") and not draft.get("add_token_level_kl") and draft.knows("use_kl_loss"):
        decisions.append("reference: kept, but no KL term uses it, so it isn't started")
    if draft.get("policy_loss") == "topr" and not factor:
        draft.put("rl_loss_coef", 1.0)
    if "student" in draft.theirs and not draft.has("max_grad_norm"):
        settled(draft, "max_grad_norm", None, "as ROLL's distillation clips nothing unless it is told to")
    if draft.pipeline in ("sft", "dpo"):
        return
    cut = [f"{key} {value}" for key, value in (("top_p", 0.7), ("top_k", 50))
           if all(draft.their(f"{role}.generating_args.{key}") is None for role in ("actor_infer", "student_infer"))
           and not draft.has(f"actor_infer.generating_args.{key}")]  # fmt: skip
    if cut:
        decisions.append(
            f"{', '.join(cut)}: what ROLL samples with is off, as log-probs are those of the full distribution"
        )
    if (heat := draft.get("actor_infer.generating_args.temperature", 1)) not in (0, 1):
        decisions.append(
            f"log-probs in updates: of logits / temperature ({heat}), as sampled; ROLL's are of the logits"
        )


def _megatron(draft: Draft, role: str) -> None:
    """Drop sizes of 1 that only mean something above it, and layers that are recomputed anyway."""
    config = f"{role}.strategy_args.strategy_config"
    for key, size in (("sequence_parallel", "tensor"), ("virtual_pipeline_model_parallel_size", "pipeline")):
        alone = draft.get(f"{config}.{size}_model_parallel_size", 1) == 1 and draft.get(f"{config}.{key}") != 1
        drop(draft, f"{config}.{key}", alone, f"{size}_model_parallel_size is 1")
    off = draft.get(f"{role}.model_args.disable_gradient_checkpointing")
    drop(draft, f"{config}.recompute_granularity", off, "disable_gradient_checkpointing is true")
    full_layers = draft.get(f"{config}.recompute_granularity", "full") == "full" and not off
    drop(draft, f"{config}.moe_layer_recompute", full_layers, "whole layers are recomputed anyway")
