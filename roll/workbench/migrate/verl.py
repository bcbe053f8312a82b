"""Conversions of values of verl 0.9.1, and of names that older releases have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roll.catalog.estimators import ESTIMATORS
from roll.catalog.losses import LOSSES
from roll.catalog.trackers import TRACKERS
from roll.workbench.migrate.conversions import (
    CONVERSIONS,
    FIRST,
    LAST,
    SCHEDULES,
    conversion,
    first,
    is_engine,
    last,
    mapped,
    with_lora,
)  # fmt: skip
from roll.workbench.migrate.draft import NOTHING, Draft, Step, at
from roll.workbench.migrate.overrides import Unexpanded
from roll.workbench.migrate.table import DOMAIN

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_REWARD = f"rewards.{DOMAIN}"
Found = dict[str, tuple[str, str, dict[str, Any]]]
"""By their word: its fate, why, and values by our places."""


def theirs(draft: Draft, key: str) -> Any:
    """Return what verl takes for a key: the file's value, or the default."""
    value = at(draft.theirs, key, NOTHING)
    return draft.memo["theirs"].get(key) if value is NOTHING else value


def has_critic(draft: Draft) -> bool:
    """Return whether the job trains a critic."""
    return bool(theirs(draft, "algorithm.adv_estimator") == "gae")


def _sibling(step: Step, word: str) -> Any:
    return theirs(step.draft, f"{step.use.key.rpartition('.')[0]}.{word}")


def _settle(step: Step, found: Found, otherwise: str) -> None:
    """Write what was found for the key's last word."""
    fate, why, puts = found.get(step.last, ("dead", otherwise, {}))
    for place, value in puts.items():
        step.put(value, place)
    if fate in ("dead", "absent"):
        getattr(step, fate)(why)
    else:
        step.use.fate, step.use.note = fate, why  # type: ignore[assignment]


def _only_if(step: Step, on: bool, why: str) -> bool:
    """Count the key as dropped unless `on`."""
    if not on:
        step.dead(why)
    return on


def _if(on: Any, value: Any) -> Any:
    return value if on else NOTHING


def _backend(step: Step, key: str) -> Any:
    return step.draft.get(f"{step.role}.strategy_args.strategy_config.{key}", 1)


def _generates(step: Step) -> bool:
    return is_engine(step.draft.strategies.get("actor_infer", ""))


def _number(step: Step) -> bool:
    return isinstance(step.value, (int, float)) and step.value > 0


_SIMPLE: dict[str, tuple[Callable[[Step], Any], str]] = {
    "engine": (mapped, ""),
    "engine_strategy": (lambda step: _if(step.use.key in ("engine.strategy", "model_engine"), mapped(step)),
                        "the role's own strategy says it"),
    "name": (lambda step: str(step.value).strip().replace("/", "_") if step.value is not None else None, ""),
    "from_step": (lambda step: max(0, step.value - 1), ""),
    "positive_or_default": (lambda step: _if(_number(step), step.value), "it leaves the default"),
    "keep_one": (lambda step: _if(step.value, 1), "false asks for nothing"),
    "address": (lambda step: _if(step.value is not None, step.value), "null asks for none"),
    "timeline": (lambda step: _if(step.value is not None, True), "null asks for none"),
    "val_dir": (lambda step: _if(step.value is not None, step.draft.their("trainer.log_val_generations") or 64),
                "null asks for none"),
    "fire": (lambda step: _if(step.value, 30.0), "false asks for nothing"),
    "load_format": (lambda step: _if(_generates(step), "dummy" if "dummy" in str(step.value) else "auto"), "no engine"),
    "half_cosine": (lambda step: _if(step.value not in (None, 0.5), step.value), "half a cosine is what cosine does"),
    "incr_style": (lambda step: _if(step.value not in (None, "constant"), step.value), "constant is without it"),
    "wsd_style": (lambda step: _if(str(_sibling(step, "lr_decay_style")).lower() == "wsd", step.value),
                  "only lr_decay_style: WSD reads it"),
    "warmup_ratio": (lambda step: _if(not step.draft.get(f"{step.role}.training_args.warmup_steps"), step.value or 0.0),
                     "lr_warmup_steps says it"),
    "tokenizer": (lambda step: _if(step.value and step.role in ("actor_train", "reward_model"), step.value),
                  "it is the model's, or that of actor_train"),
    "of_training": (lambda step: _if(step.value is not None and step.role in ("actor_train", "critic"), step.value),
                    "null, or it doesn't train"),
    "recompute_modules": (lambda step: _if(_backend(step, "recompute_granularity") == "selective", step.value),
                          "only recompute_granularity: selective reads it"),
    "sequence_parallel": (lambda step: _if(not step.value or _backend(step, "tensor_model_parallel_size") != 1,
                                           step.value), "tensor_model_parallel_size is 1"),
    "each_domain": (lambda step: _if(step.value and step.draft.get(f"{_REWARD}.name") != "reward_model", step.value),
                    "the default does"),
}  # fmt: skip
"""Conversions that write a value, or drop the key for a reason where that is `NOTHING`."""


def _carry_out(step: Step) -> None:
    value, why = _SIMPLE[step.row.how]
    found = value(step)
    step.dead(why) if found is NOTHING else step.put(found)


CONVERSIONS.update(dict.fromkeys(_SIMPLE, _carry_out))
FIRST.update({"engine", "engine_strategy"})
LAST.update({"keep_one", "address", "warmup_ratio", "recompute_modules", "sequence_parallel", "each_domain"})


# --- data, names, folders --------------------------------------------------------------------------------------------


@conversion
def of_rows(step: Step) -> None:
    """A column, where it isn't the one that is found by itself."""
    if _only_if(step, step.value not in ("prompt", "messages", "data_source", None), "it is found by itself"):
        _where_rows_are(step, step.value)


def _where_rows_are(step: Step, value: Any) -> None:
    for place in step.places:
        if not place.startswith("validation") or step.draft.their("data.val_files"):
            step.put(value, place)
    step.use.fate, step.use.note = "translated", ""


@first
def loggers(step: Step) -> None:
    """Trackers by our names."""
    given = step.value if isinstance(step.value, list) else [step.value]
    found = [{"console": "stdout", "file": "jsonl"}.get(str(one), str(one)) for one in given if one is not None]
    step.put([one for one in dict.fromkeys(found) if one in TRACKERS] or ["stdout"])
    if gone := [one for one in found if one not in TRACKERS]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@last
def project(step: Step) -> None:
    """A project's name, for trackers that have projects."""
    takers = [
        one for one in step.draft.get("track_with", ()) or () if "project" in getattr(TRACKERS.get(one), "options", ())
    ]
    for taker in takers:
        step.put(step.value, f"tracker_kwargs.{taker}.project")
    _only_if(step, bool(takers), "no tracker of the file has projects")


@conversion
def resume(step: Step) -> None:
    """Where a run resumes."""
    mode = theirs(step.draft, "trainer.resume_mode")
    path = step.draft.their("trainer.resume_from_path") or step.draft.their("trainer.resume_path")
    if step.last == "resume_mode" and not (mode == "resume_path" and path):
        step.put(False if mode == "disable" else "auto")
    elif step.last == "resume_mode":
        step.use.ours = ("resume_from_checkpoint",)
    elif _only_if(step, mode == "resume_path" or (step.last == "resume_path" and bool(path)), f"resume_mode is {mode}"):
        step.put(path)
        step.decide("checkpoints of verl aren't read; start from its exported model as pretrain")


@conversion
def contents(step: Step) -> None:
    """What a checkpoint holds, or what of it is loaded; the actor's counts for all roles."""
    wanted, state = step.value if isinstance(step.value, list) else [step.value], ["model", "optimizer", "extra"]
    if step.value is None or sorted(map(str, wanted)) == sorted(state):
        step.dead("model, optimizer and extra are the default")
    elif _only_if(step, not step.use.key.startswith("critic."), "a checkpoint holds all roles; the actor's counts"):
        loaded = [word for word in wanted if word in state or step.last != "load_contents"]
        step.put(loaded)
        if loaded != wanted:
            step.decide("hf_model is saved, never loaded")


@conversion
def profiled(step: Step) -> None:
    """What a profile is made with, where steps are profiled."""
    if not step.draft.their("global_profiler.steps"):
        step.dead("no step is profiled")
    elif step.value is None or (step.last == "tool" and mapped(step) == step.value and step.value != "torch"):
        step.quiet("tools are torch, memory and nsight")
    else:
        step.put(mapped(step))


# --- algorithm -------------------------------------------------------------------------------------------------------


@conversion
def verl_estimator(step: Step) -> None:
    """An estimator; grpo without division by the deviation is dr_grpo, and verl whitens the advantages of gae."""
    value = mapped(step)
    if value == "grpo" and theirs(step.draft, "algorithm.norm_adv_by_std_in_grpo") is False:
        value = "dr_grpo"
    if step.value == "grpo_passk":
        step.absent("there the best response has what it is better than the second; pass_at_k here is another one")
    elif value not in ESTIMATORS:
        step.absent("an estimator of your own is a function here: path/to/file.py:name")
    else:
        step.put(value)
        if value == "gae":
            step.put(True, "whiten_advantages")
        if value == "gpg":
            step.decide("scaled by the rows in groups with signal; there by the rows whose score isn't 0")
        if step.value == "tir_optimal_token_baseline":
            step.decide("optimal_token_baseline tells no turns apart")


@conversion
def no_std(step: Step) -> None:
    """Whether grpo divides by the deviation."""
    if _only_if(step, str(theirs(step.draft, "algorithm.adv_estimator")).startswith("grpo"), "it is about grpo"):
        step.use.ours = ("adv_estimator",)


@conversion
def kl_adaptive(step: Step) -> None:
    """The adaptive controller of the KL in the reward, or a constant of it."""
    on = _sibling(step, "type") == "adaptive" and theirs(step.draft, "algorithm.use_kl_in_reward")
    if _only_if(step, bool(on), "the coefficient is fixed, or no KL is in the reward"):
        step.put(_sibling(step, "target_kl") if step.last == "type" else step.value)
        if step.last == "type":
            step.decide("it looks at the mean of all tokens, there at the mean of the responses' means")


@conversion
def pf_ppo(step: Step) -> None:
    """Policy filtration, which verl has with gae alone."""
    method = theirs(step.draft, "algorithm.pf_ppo.reweight_method")
    if not theirs(step.draft, "algorithm.use_pf_ppo") or not has_critic(step.draft):
        step.dead("use_pf_ppo is off, or adv_estimator isn't gae")
    elif step.last == "use_pf_ppo":
        step.put(method, "pf_ppo.reweight_method")
    elif _only_if(step, step.last != "weight_pow" or method == "pow", "only reweight_method: pow reads it"):
        step.put(step.value)


@conversion
def filter_groups(step: Step) -> None:
    """Dynamic sampling."""
    if not _sibling(step, "enable"):
        step.dead("groups aren't filtered")
    elif step.last == "enable":
        step.put("std_filter")
        step.decide("groups of equal scores are dropped: std_filter")
    elif _only_if(step, step.value not in ("acc", "score", "reward", "seq_reward", "seq_final_reward", None),
                  "groups are filtered by their scores"):  # fmt: skip
        step.absent("groups are filtered by their scores")


_UNITS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


def _rejection(options: Any, spec: Any, lower: Any) -> dict[str, Any]:
    """Return what rejects, by our keys; raise `ValueError` where one section can't say it."""
    names, specs = ([part.strip() for part in (value if isinstance(value, list) else str(value).split(","))]
                    for value in (options, [*map(str, spec)] if isinstance(spec, list) else spec))  # fmt: skip
    names = [word for word in dict.fromkeys(names) if word]
    found: dict[str, Any] = {}
    for option, bounds in zip(names, specs * len(names) if len(specs) == 1 else specs, strict=True):
        unit, _, kind = option.rpartition("_")
        low, _, high = bounds.rpartition("_")
        if unit in _UNITS and kind == "k1":  # of -log ratio: their bounds are those of its reciprocal
            new = {"level": _UNITS[unit], "ratio_low": round(1 / float(high), 9),
                   "ratio_high": round(1 / float(low) if low else float(high), 9)}  # fmt: skip
        elif option in ("token", "sequence", "geometric"):  # before 0.8
            new = {"level": option, "ratio_low": round(float(lower or 1 / float(high)), 9), "ratio_high": float(high)}
        elif unit in _UNITS and kind in ("k2", "k3"):
            new = {"level": _UNITS[unit], "divergence": kind, "divergence_high": float(high)}
        elif unit == "seq_max" and kind in ("k2", "k3"):
            new = {"divergence": kind, "row_divergence_high": float(high)}
        else:
            raise ValueError(f"there is no filter {option}")
        if any(found.get(key, value) != value for key, value in new.items()):
            raise ValueError("one level, one kind of divergence and one bound of each kind are for all filters")
        found |= new
    if not found.get("ratio_low", 0) < 1 < found.get("ratio_high", 2):
        raise ValueError("a ratio is bounded on both sides of 1")
    return found


def _corrected(draft: Draft) -> Found:
    """What importance weights and rejection become, which are one section here."""
    old, new = (at(draft.theirs, path, {}) for path in ("algorithm", CORRECTION))
    given = {**old, **(new if isinstance(new, Mapping) else {})}
    level, options, spec = given.get("rollout_is"), given.get("rollout_rs"), given.get("rollout_rs_threshold")
    level = given.get("rollout_is_level", "token") if level is True else level
    bypass, reinforces = _bypass(draft)
    found: Found = {}
    if bypass:
        why = "old log-probs are those of a forward pass here: weights and filters are of the policy before the step, "
        found["bypass_mode"] = found["bypass_old_logprob_for_rollout"] = (
            ("decided", f"{why}which is the same where a step is one mini-batch", {}) if reinforces else
            ("absent", f"{why}and so is the clip; there it is around the sampler", {}))  # fmt: skip
        for word in ("loss_type", "use_policy_gradient", "use_pure_rollout_correction"):
            found[word] = ("translated", "", {"policy_loss": "reinforce"} if reinforces else {})
    section, icepop = "train_infer_correction", False
    if level and not (bypass and not reinforces):
        threshold = given.get("rollout_is_threshold", theirs(draft, f"{CORRECTION}.rollout_is_threshold"))
        low, _, high = str(2.0 if threshold is None else threshold).rpartition("_")
        puts: dict[str, Any] = {f"{section}.importance_upper": float(high)}
        if icepop := bool(low):
            puts |= {f"{section}.rejection": "icepop", f"{section}.ratio_low": float(low),
                     f"{section}.ratio_high": float(high)}  # fmt: skip
        found["rollout_is"] = found["rollout_is_level"] = ("translated", "", {f"{section}.level": level, **puts})
        found["rollout_is_threshold"] = ("translated", "icepop: weights outside are 0" if icepop else "", puts)
        mean = f"{section}.importance_mean_one"
        note = "over the mean of all tokens, there of all rows" if level == "sequence" else ""
        found["rollout_is_batch_normalize"] = (
            "decided" if note and given.get("rollout_is_batch_normalize") else "translated", note,
            {mean: bool(given.get("rollout_is_batch_normalize"))})  # fmt: skip
    if options:
        try:
            rejects = _rejection(options, spec, given.get("rollout_rs_threshold_lower"))
            if icepop:
                raise ValueError("icepop and a filter don't go together here")
        except (ValueError, TypeError) as error:
            found["rollout_rs"] = ("absent", str(error), {})
            found["rollout_rs_threshold"] = ("dead", "see rollout_rs", {})
            return found
        weights = {} if "rollout_is" in found else {f"{section}.importance_upper": None}
        puts = {f"{section}.{key}": value for key, value in rejects.items()}
        found["rollout_rs"] = ("translated", "", {**weights, **puts})
        if not weights and rejects.get("level", level) != level:
            why = f"weights are by {level}, the filter is by {rejects['level']}, and one level is for both"
            found["rollout_rs"] = ("absent", why, {})
            del puts[f"{section}.level"]
        found["rollout_rs_threshold"] = found["rollout_rs_threshold_lower"] = ("translated", "", puts)
    return found


def _bypass(draft: Draft) -> tuple[bool, bool]:
    """Whether the sampler's log-probs are the old ones, and whether the loss then is that of REINFORCE."""
    on = {word for word in ("bypass_mode", "bypass_old_logprob_for_rollout", "use_policy_gradient",
          "use_pure_rollout_correction") if theirs(draft, f"{CORRECTION}.{word}")}  # fmt: skip
    reinforces = theirs(draft, f"{CORRECTION}.loss_type") == "reinforce" or any("use_" in word for word in on)
    return any("bypass" in word for word in on), reinforces


@last
def correction(step: Step) -> None:
    """Importance weights and rejection between sampler and trainer."""
    memo = step.draft.memo
    if "correction" not in memo:
        memo["correction"] = _corrected(step.draft)
    _settle(step, memo["correction"], "no correction is asked for")


_CLIP = {"clip_ratio": "pg_clip", "clip_ratio_low": "pg_clip_low", "clip_ratio_high": "pg_clip_high"}
_ARGS = "policy_loss_args"
MODES: dict[str, tuple[str, dict[str, str]]] = {
    "vanilla": ("ppo", {**_CLIP, "clip_ratio_c": "dual_clip_c"}),
    "gspo": ("gspo", _CLIP),
    "clip_cov": ("clip_cov", {**_CLIP, "clip_cov_ratio": f"{_ARGS}.cov_ratio", "clip_cov_lb": f"{_ARGS}.cov_low",
                              "clip_cov_ub": f"{_ARGS}.cov_high"}),
    "kl_cov": ("kl_cov", {"kl_cov_ratio": f"{_ARGS}.cov_ratio", "ppo_kl_coef": f"{_ARGS}.kl_coef"}),
    "geo_mean": ("gmpo", {"clip_ratio_low": f"{_ARGS}.clip_low", "clip_ratio_high": f"{_ARGS}.clip_high"}),
    "cispo": ("cispo", {"clip_ratio_low": "cispo_epsilon_low", "clip_ratio_high": "cispo_epsilon_high"}),
    "sapo": ("sapo", {"tau_pos": "sapo_tau_positive", "tau_neg": "sapo_tau_negative"}),
    "dppo_tv": ("dppo", {"clip_ratio_low": f"{_ARGS}.threshold", "clip_ratio_high": f"{_ARGS}.threshold"}),
    "dppo_kl": ("dppo", {"clip_ratio_low": f"{_ARGS}.threshold", "clip_ratio_high": f"{_ARGS}.threshold"}),
    "dro": ("kimi15", {"dro_beta": "kimi15_tau"}),
    "gpg": ("reinforce", {}),
}  # fmt: skip
"""Losses of verl: ours, and where its keys go."""
_PICKED = "tokens are picked in the whole mini-batch, there in each pass"
_LOSS_NOTES = {
    "clip_cov": _PICKED, "kl_cov": _PICKED,
    "dppo_tv": "its ratio isn't cut off at clip_ratio_c", "dppo_kl": "its ratio isn't cut off at clip_ratio_c",
    "geo_mean": "the mean of all responses; verl adds up the means of passes, so its gradient grows with their number",
}  # fmt: skip


def _mode(draft: Draft) -> str:
    bypass, reinforces = _bypass(draft)
    mode = str(theirs(draft, f"{ACTOR}.policy_loss.loss_mode") or "vanilla").replace("-", "_")
    return mode if not bypass else "gpg" if reinforces else "vanilla"


@conversion
def loss_mode(step: Step) -> None:
    """A policy loss."""
    mode = _mode(step.draft)
    if _bypass(step.draft)[0]:
        step.dead("bypass_mode has its own loss")
    elif mode not in MODES or (mode == "dro" and not theirs(step.draft, f"{ACTOR}.policy_loss.dro_beta")):
        step.absent("a loss of your own is a function here: path/to/file.py:name; dro needs dro_beta")
    else:
        step.put(MODES[mode][0])
        if mode == "dro":
            step.put("token", "kimi15_level")
        if mode.startswith("dppo"):
            step.put(mode.removeprefix("dppo_"), f"{_ARGS}.divergence")
        if mode in _LOSS_NOTES:
            step.decide(_LOSS_NOTES[mode])


@conversion
def loss_option(step: Step) -> None:
    """A number of the loss, which each has under a name of its own."""
    mode = _mode(step.draft)
    ours, places = MODES.get(mode, ("", {}))
    both = [theirs(step.draft, f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
    both = [theirs(step.draft, f"{ACTOR}.clip_ratio") if bound is None else bound for bound in both]
    if step.last == "clip_ratio" and "clip_ratio_low" in places:
        counts = [f"clip_ratio_{side}" for side in ("low", "high")
                  if theirs(step.draft, f"{ACTOR}.clip_ratio_{side}") is None]  # fmt: skip
        for word in counts:
            step.put(step.value, places[word])
        _only_if(step, bool(counts), "clip_ratio_low and clip_ratio_high count, which are 0.2 where a file has neither")
    elif step.last not in places:
        step.dead(f"loss_mode {mode} doesn't read it")
    elif step.value is None:
        step.dead("clip_ratio says it")
    elif mode.startswith("dppo") and both[0] != both[1]:
        step.absent("one threshold is for both signs of the advantage")
    elif step.use not in step.draft.report.filled or step.value != _default(step.draft, ours, places[step.last]):
        step.put(step.value, places[step.last])
    if step.last == "clip_ratio_c" and mode == "vanilla":
        step.put(True, "dual_clip_loss")


def _default(draft: Draft, loss: str, place: str) -> Any:
    section, _, option = place.rpartition(".")
    if section:
        return LOSSES[loss].options[option].default
    return draft.default("pg_clip" if place.startswith("pg_clip") else place)


@conversion
def loss_agg(step: Step) -> None:
    """How the loss is aggregated; two losses of verl don't ask."""
    mode, own = _mode(step.draft), "seq-mean-token-mean"
    if mode in ("sapo", "geo_mean"):
        step.put(own)
        if step.value != own:
            step.decide(f"{mode} is aggregated by {own} whatever is said; there a KL and an entropy term aren't")
    else:
        step.put(step.value)
        if step.value == "seq-mean-token-sum-norm" and theirs(step.draft, f"{ACTOR}.loss_scale_factor") is None:
            step.decide("over response_length; verl 0.9.1 divides by the longest response of a pass")


@last
def loss_scale(step: Step) -> None:
    """What seq-mean-token-sum-norm divides by."""
    read = theirs(step.draft, f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm" and step.value is not None
    other = read and step.value != theirs(step.draft, "data.max_response_length")
    if _only_if(step, other, "it is response_length, or nothing reads it"):
        step.absent("seq-mean-token-sum-norm divides by response_length; scale learning_rate, or write a loss")


@conversion
def kl_loss(step: Step) -> None:
    """The KL in the loss, which verl doesn't weigh by the ratio to the sampler."""
    step.put(step.value)
    if step.last == "use_kl_loss" and step.value:
        step.put(False, "kl_loss_ratio")
    elif step.last == "kl_loss_type" and step.value in ("kl", "k1") and theirs(step.draft, f"{ACTOR}.use_kl_loss"):
        step.decide("its gradient is that of mse; there it is that of k1, which is 0 on average")


@last
def as_the_actor(step: Step) -> None:
    """What actor and critic have in common here."""
    now = step.draft.get(step.place, step.draft.default(step.place))
    if step.last == "loss_scale_factor":
        now = theirs(step.draft, f"{ACTOR}.loss_scale_factor")
    if not has_critic(step.draft):
        step.dead("there is no critic")
    elif _only_if(step, step.value not in (None, now), "it is that of the actor"):
        step.absent(f"it is {now} for the actor, and one for both")


@last
def clip_grad(step: Step) -> None:
    """The bound of the gradient's norm; the actor's rules."""
    if step.use.key.startswith("critic."):
        as_the_actor(step)
    else:
        step.put(step.value)
        step.use.fate, step.use.note = "translated", ""


@conversion
def grad_clip(step: Step) -> None:
    """A bound that 0.9.1 doesn't read."""
    bound = _sibling(step, "optim.clip_grad")
    if step.value in (None, bound):
        step.dead("optim.clip_grad says it")
    elif _only_if(step, has_critic(step.draft) or not step.use.key.startswith("critic."), "there is no critic"):
        step.decide(f"0.9.1 doesn't read it: the bound is optim.clip_grad, {bound}. For a job of 0.7 or before set "
                    f"max_grad_norm: {step.value}")  # fmt: skip


@conversion
def distillation(step: Step) -> None:
    """A teacher on what the student samples."""
    mode, gradient, rewards = (theirs(step.draft, f"distillation.distillation_loss.{word}") for word in
                               ("loss_mode", "use_policy_gradient", "use_task_rewards"))  # fmt: skip
    uses = {("forward_kl_topk", False): "loss", ("k1", True): "advantage", ("kl", True): "advantage"}
    use = uses.get((mode, gradient), "")
    notes = {"loss": "the teacher's likeliest tokens and all others together, verl leaves the others out",
             "advantage": "a part of the advantage, there a loss with a clip of its own"}  # fmt: skip
    written: dict[str, Any] = {"model_path": step.value, "use_task_rewards": 1.0 if rewards else 0.0,
                               "distillation_loss_coef": step.value if rewards else 1.0}  # fmt: skip
    if not theirs(step.draft, "distillation.enabled"):
        step.dead("distillation is off")
    elif step.last == "enabled" and not use:
        step.absent(f"loss_mode {mode} with use_policy_gradient {gradient} is neither of distill.use_as")
    elif step.last == "enabled":
        step.put(use)
        step.decide(notes[use])
    elif step.last == "loss_mode" and use == "loss":
        step.put("forward_kl", "distill.divergence")
    elif _only_if(step, step.last in written or (step.last == "topk" and use == "loss"), "distill.use_as says it"):
        step.put(written.get(step.last, step.value))


# --- rewards ---------------------------------------------------------------------------------------------------------


def _function(draft: Draft) -> str:
    """The section that names a reward function; the one at the top counts."""
    sections = ("custom_reward_function", "reward.custom_reward_function")
    return next((section for section in sections if draft.their(f"{section}.path")), "")


@first
def custom_function(step: Step) -> None:
    """A function of the user's own."""
    section = _function(step.draft)
    path = step.draft.their(f"{section}.path") if section else None
    if not path or not step.use.key.startswith(section) or isinstance(path, Unexpanded):
        step.dead("no function" if not path else f"{section}.path says it")
    else:
        package = str(path).startswith("pkg://")
        path = str(path).removeprefix("pkg://").removeprefix("file://")
        path = path.replace("/", ".") if package else path
        step.put(f"{path}:{step.draft.their(f'{section}.name', 'compute_score')}", f"{_REWARD}.name")


@conversion
def custom_kwargs(step: Step) -> None:
    """An argument of that function."""
    section = _function(step.draft)
    if _only_if(step, bool(section) and step.use.key.startswith(section), "no function takes it"):
        step.put(step.value, f"{_REWARD}.reward_kwargs.{step.use.key.partition('.reward_kwargs.')[2]}")


def _manager(draft: Draft) -> Any:
    return draft.their("reward_model.reward_manager") or theirs(draft, "reward.reward_manager.name")


@conversion
def overlong(step: Step) -> None:
    """The soft penalty near the length limit."""
    on = _sibling(step, "overlong_buffer_cfg.enable" if step.last == "max_resp_len" else "enable")
    if not on or ("reward_kwargs" in step.use.key and _manager(step.draft) != "dapo"):
        step.dead("the penalty is off" if not on else "only the reward manager dapo reads it")
    elif step.last == "enable":
        step.put(1.0, "overlong_shaping.penalty") if not step.draft.has("overlong_shaping") else None
        step.use.ours = ("overlong_shaping",)
    elif step.last != "max_resp_len":
        step.put(step.value)
    elif _only_if(step, step.value != theirs(step.draft, "data.max_response_length"), "it is response_length"):
        step.absent("the penalty ends at response_length")


@conversion
def reward_manager(step: Step) -> None:
    """Who calls the reward function."""
    known = ("naive", "dapo", "prime", "batch", "limited", "rate_limited", "gdpo", "remote", "register", None)
    if _only_if(step, step.value not in known, "functions are called by the run, one by one or in lists"):
        step.absent("a manager of your own becomes a reward function")


@first
def reward_model(step: Step) -> None:
    """Whether a model scores."""
    if _only_if(step, bool(step.value), "false asks for none"):
        if _function(step.draft):
            step.absent("the function is told where the model is served; a judge, or weights of both, do it here")
        else:
            step.put("reward_model")


# --- fine-tuning -----------------------------------------------------------------------------------------------------


@conversion
def sft_column(step: Step) -> None:
    """A column, or one inside a column, of releases before 0.9."""
    of = "prompt" if step.last.startswith("prompt") else "response"
    column = step.draft.their(f"data.{of}_key", "question" if of == "prompt" else "answer")
    keys = step.draft.their(f"data.{of}_dict_keys")
    inside = [str(key) for key in (keys if isinstance(keys, list) else []) if str(key) != str(column)]
    if _only_if(step, not step.draft.their("data.multiturn.enable") and step.value not in (None, []), "rows say it"):
        _where_rows_are(step, f"{column}.{inside[0]}" if inside else str(column))


@conversion
def sft_messages(step: Step) -> None:
    """Rows that are conversations, which all of 0.9.1 are."""
    data = step.draft.theirs.get("data", {})
    pairs = not step.draft.their("data.multiturn.enable") and {"prompt_key", "response_key"} & set(data)
    if _only_if(step, not pairs, "rows are prompts with responses"):
        step.put("all", "train_on")
        key = step.draft.their("data.multiturn.messages_key") or theirs(step.draft, "data.messages_key")
        for place in ("actor_train.data_args.messages", "validation.data_args.messages"):
            if place.startswith("actor_train") or step.draft.their("data.val_files"):
                step.put(key, place)


@conversion
def thinking(step: Step) -> None:
    """Whether templates think, in rows that don't say it."""
    if _only_if(step, step.value not in (None, "none", "None"), "none leaves it to the template"):
        step.put(step.value, "chat_template_kwargs.enable_thinking")


# --- the engine that generates ---------------------------------------------------------------------------------------


@conversion
def engine_option(step: Step) -> None:
    """An option of vLLM, and its name with SGLang."""
    engine, word, value = step.draft.strategies.get("actor_infer", ""), step.last, step.value
    sglang = {"pipeline_model_parallel_size": "pp_size", "gpu_memory_utilization": "mem_fraction_static"}
    if word == "free_cache_engine" and engine == "vllm":
        # Theirs keep a copy of the weights in host memory, which here the next sync would overwrite.
        step.put(None if value else 0)
        step.use.fate, step.use.note = "translated", ""
    elif value is None or not _generates(step) or (value == 1 and word[:6] in ("expert", "pipeli")):
        step.dead("the default, or not of this engine")
    elif word == "tensor_model_parallel_size":
        for place in step.places:
            step.put(value, place)
    elif engine == "vllm":
        step.put(True if word == "expert_parallel_size" else value)
    elif _only_if(step, word in sglang, "it is vLLM's, and the engine is sglang"):
        step.put(value, f"{_ENGINE}.{sglang[word]}")


@conversion
def engine_kwargs(step: Step) -> None:
    """An argument of the engine itself."""
    of, dot, word = step.use.key.partition("engine_kwargs.")[2].partition(".")
    engine = step.draft.strategies.get("actor_infer", "")
    takes = step.value not in (None, {}) and (not dot or of == engine) and _generates(step)
    if _only_if(step, takes, f"null leaves the engine's choice, or the engine is {engine or 'another'}"):
        step.put(step.value, f"{_ENGINE}.{word or of}")


# --- training --------------------------------------------------------------------------------------------------------


@conversion
def mini_batch(step: Step) -> None:
    """Prompts of a mini-batch, or rows of one of fine-tuning: settled at the end, when the ranks are known."""
    step.draft.memo[f"mini:{step.role}"] = (step.value, step.use)
    step.use.ours = (step.place,)


@conversion
def of_all_devices(step: Step) -> None:
    """Responses of a pass over all devices: settled at the end."""
    if _only_if(step, step.value is not None, "null leaves it to the number per device"):
        step.draft.memo[f"micro:{step.place}"] = (step.value, step.use)
        step.use.ours = (step.place,)


@last
def token_budget(step: Step) -> None:
    """Tokens of a pass of one device; the ranks of a sequence add up."""
    way, draft = step.place.rpartition("_")[2], step.draft
    on = step.value is not None and draft.get(f"{step.role}.use_dynamic_batching_in_{way}")
    if _only_if(step, bool(on), "dynamic batching is off"):
        sizes = draft.get(f"{step.role}.model_args.ulysses_size", 1), _backend(step, "context_parallel_size")
        ranks = max(size for size in (1, *sizes) if isinstance(size, int))
        step.put(step.value * ranks if isinstance(step.value, int) else step.value)
        if ranks > 1:
            step.note(f"times the {ranks} ranks that share a sequence")


@conversion
def verl_schedule(step: Step) -> None:
    """A learning rate schedule; the deprecated warmup_style counts where it is given."""
    value = str(step.value)
    known = SCHEDULES.get(value) or SCHEDULES.get(value.lower()) or SCHEDULES.get(value.replace("_", "-"))
    if step.value is None or (step.last == "lr_scheduler_type" and _sibling(step, "warmup_style")):
        step.dead("another key says it")
    elif known is None:
        step.absent("there is no such schedule")
    else:
        step.put(known)


@last
def min_lr(step: Step) -> None:
    """The lowest rate as a share of the peak."""
    peak = step.draft.get(f"{step.role}.training_args.learning_rate") or _sibling(step, "lr")
    if not step.value:
        step.dead("0 is the default")
    elif isinstance(peak, (int, float)) and peak and isinstance(step.value, (int, float)):
        step.put(step.value / peak)
        step.use.fate, step.use.note = "translated", f"a share of the peak {peak:g}"
    else:
        step.absent("there is no learning rate to take a share of")


@last
def verl_targets(step: Step) -> None:
    """Layers with adapters; all of them are fewer here in mixtures of experts."""
    note = step.row.note
    with_lora(step)
    if step.use.fate == "decided" and step.value != "all-linear":
        step.use.fate, step.use.note = "translated", ""
    elif step.use.fate == "decided":
        step.decide(note)


@conversion
def betas(step: Step) -> None:
    """Both of Adam's constants."""
    first_, second = map(float, step.value)
    step.put(first_)
    step.put(second, step.places[1])


@conversion
def master_dtype(step: Step) -> None:
    """The type that weights are trained in."""
    trains = step.role in ("actor_train", "critic") and str(step.value) not in ("fp32", "float32", "None")
    if _only_if(step, trains, "weights that are trained are fp32"):
        step.decide("weights that are trained stay fp32; dtype is that of the forward pass")


@conversion
def each_role(step: Step) -> None:
    """A key of every role that has the policy's model."""
    has_reference = theirs(step.draft, f"{ACTOR}.use_kl_loss") or theirs(step.draft, "algorithm.use_kl_in_reward")
    for place in step.places:
        if step.draft.knows(place) and (not place.startswith("reference.") or has_reference):
            step.put(step.value, place)
