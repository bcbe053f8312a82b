"""Conversions of verl's algorithm: advantages, correction between sampler and trainer, losses, a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.catalog.estimator_table import ESTIMATORS
from roll.configs.catalog.loss_table import LOSSES
from roll.workbench.migrate.conversions import conversion, last, mapped
from roll.workbench.migrate.draft import Draft, Step
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.verl import ACTOR, has_critic, only_if, sibling, theirs

CORRECTION = "algorithm.rollout_correction"
Fates = dict[str, tuple[str, str, dict[str, Any]]]
"""By their word: its fate, why, and values by our places."""


def _settle(step: Step, fates: Fates, otherwise: str) -> None:
    """Write what was found for the key's last word."""
    fate, why, puts = fates.get(step.last, ("dead", otherwise, {}))
    for key_path, value in puts.items():
        step.put(value, key_path)
    if fate in ("dead", "absent"):
        getattr(step, fate)(why)
    else:
        step.use.fate, step.use.note = fate, why  # type: ignore[assignment]


@conversion
def verl_estimator(step: Step) -> None:
    """Translate an estimator; grpo without division by the deviation is dr_grpo, and verl whitens gae's advantages."""
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
    """Translate whether grpo divides by the deviation."""
    if only_if(step, str(theirs(step.draft, "algorithm.adv_estimator")).startswith("grpo"), "it is about grpo"):
        step.use.ours = ("adv_estimator",)


@conversion
def kl_adaptive(step: Step) -> None:
    """Translate the adaptive controller of the KL in the reward, or a constant of it."""
    on = sibling(step, "type") == "adaptive" and theirs(step.draft, "algorithm.use_kl_in_reward")
    if only_if(step, bool(on), "the coefficient is fixed, or no KL is in the reward"):
        step.put(sibling(step, "target_kl") if step.last == "type" else step.value)
        if step.last == "type":
            step.decide("it looks at the mean of all tokens, there at the mean of the responses' means")


@conversion
def pf_ppo(step: Step) -> None:
    """Translate policy filtration, which verl has with gae alone."""
    method = theirs(step.draft, "algorithm.pf_ppo.reweight_method")
    if not theirs(step.draft, "algorithm.use_pf_ppo") or not has_critic(step.draft):
        step.dead("use_pf_ppo is off, or adv_estimator isn't gae")
    elif step.last == "use_pf_ppo":
        step.put(method, "pf_ppo.reweight_method")
    elif only_if(step, step.last != "weight_pow" or method == "pow", "only reweight_method: pow reads it"):
        step.put(step.value)


@conversion
def filter_groups(step: Step) -> None:
    """Translate dynamic sampling."""
    if not sibling(step, "enable"):
        step.dead("groups aren't filtered")
    elif step.last == "enable":
        step.put("std_filter")
        step.decide("groups of equal scores are dropped: std_filter")
    elif only_if(step, step.value not in ("acc", "score", "reward", "seq_reward", "seq_final_reward", None),
                  "groups are filtered by their scores"):  # fmt: skip
        step.absent("groups are filtered by their scores")


_UNITS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}


def _rejection(options: Any, spec: Any, lower: Any) -> dict[str, Any]:
    """Return what rejects, by our keys; raise `ValueError` where one section can't say it."""
    names, specs = ([part.strip() for part in (value if isinstance(value, list) else str(value).split(","))]
                    for value in (options, [*map(str, spec)] if isinstance(spec, list) else spec))  # fmt: skip
    names = [word for word in dict.fromkeys(names) if word]
    result: dict[str, Any] = {}
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
        if any(result.get(key, value) != value for key, value in new.items()):
            raise ValueError("one level, one kind of divergence and one bound of each kind are for all filters")
        result |= new
    if not result.get("ratio_low", 0) < 1 < result.get("ratio_high", 2):
        raise ValueError("a ratio is bounded on both sides of 1")
    return result


def _corrected(draft: Draft) -> Fates:
    """Return what importance weights and rejection become, which are one section here."""
    old, new = (at(draft.theirs, path, {}) for path in ("algorithm", CORRECTION))
    keys = {**old, **(new if isinstance(new, Mapping) else {})}
    level, options, spec = keys.get("rollout_is"), keys.get("rollout_rs"), keys.get("rollout_rs_threshold")
    level = keys.get("rollout_is_level", "token") if level is True else level
    bypass, reinforces = _bypass(draft)
    fates: Fates = {}
    if bypass:
        why = "old log-probs are those of a forward pass here: weights and filters are of the policy before the step, "
        fates["bypass_mode"] = fates["bypass_old_logprob_for_rollout"] = (
            ("decided", f"{why}which is the same where a step is one mini-batch", {}) if reinforces else
            ("absent", f"{why}and so is the clip; there it is around the sampler", {}))  # fmt: skip
        for word in ("loss_type", "use_policy_gradient", "use_pure_rollout_correction"):
            fates[word] = ("translated", "", {"policy_loss": "reinforce"} if reinforces else {})
    section, icepop = "train_infer_correction", False
    if level and not (bypass and not reinforces):
        threshold = keys.get("rollout_is_threshold", theirs(draft, f"{CORRECTION}.rollout_is_threshold"))
        low, _, high = str(2.0 if threshold is None else threshold).rpartition("_")
        puts: dict[str, Any] = {f"{section}.importance_upper": float(high)}
        if icepop := bool(low):
            puts |= {f"{section}.rejection": "icepop", f"{section}.ratio_low": float(low),
                     f"{section}.ratio_high": float(high)}  # fmt: skip
        fates["rollout_is"] = fates["rollout_is_level"] = ("translated", "", {f"{section}.level": level, **puts})
        if keys.get("rollout_is_mode", "truncate") != "truncate":
            fates["rollout_is_mode"] = ("absent", "weights are cut off at their cap; to reject, see rejection", {})
        fates["rollout_is_threshold"] = ("translated", "icepop: weights outside are 0" if icepop else "", puts)
        mean = f"{section}.importance_mean_one"
        note = "over the mean of all tokens, there of all rows" if level == "sequence" else ""
        fates["rollout_is_batch_normalize"] = (
            "decided" if note and keys.get("rollout_is_batch_normalize") else "translated", note,
            {mean: bool(keys.get("rollout_is_batch_normalize"))})  # fmt: skip
    if options:
        try:
            rejects = _rejection(options, spec, keys.get("rollout_rs_threshold_lower"))
            if icepop:
                raise ValueError("icepop and a filter don't go together here")
        except (ValueError, TypeError) as error:
            fates["rollout_rs"] = ("absent", str(error), {})
            fates["rollout_rs_threshold"] = ("dead", "see rollout_rs", {})
            return fates
        weights = {} if "rollout_is" in fates else {f"{section}.importance_upper": None}
        puts = {f"{section}.{key}": value for key, value in rejects.items()}
        fates["rollout_rs"] = ("translated", "", {**weights, **puts})
        if not weights and rejects.get("level", level) != level:
            why = f"weights are by {level}, the filter is by {rejects['level']}, and one level is for both"
            fates["rollout_rs"] = ("absent", why, {})
            del puts[f"{section}.level"]
        fates["rollout_rs_threshold"] = fates["rollout_rs_threshold_lower"] = ("translated", "", puts)
    return fates


def _bypass(draft: Draft) -> tuple[bool, bool]:
    """Return whether the sampler's log-probs are the old ones, and whether the loss then is that of REINFORCE."""
    on = {word for word in ("bypass_mode", "bypass_old_logprob_for_rollout", "use_policy_gradient",
          "use_pure_rollout_correction") if theirs(draft, f"{CORRECTION}.{word}")}  # fmt: skip
    reinforces = theirs(draft, f"{CORRECTION}.loss_type") == "reinforce" or any("use_" in word for word in on)
    return any("bypass" in word for word in on), reinforces


@last
def correction(step: Step) -> None:
    """Translate importance weights and rejection between sampler and trainer."""
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
    """Translate a policy loss."""
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
    """Translate a number of the loss, which each has under a name of its own."""
    mode = _mode(step.draft)
    ours, key_paths = MODES.get(mode, ("", {}))
    sides = ("clip_ratio_low", "clip_ratio_high")
    if step.last == "clip_ratio" and "clip_ratio_low" in key_paths:
        counts = [word for word in sides if theirs(step.draft, f"{ACTOR}.{word}") is None]
        for word in counts:
            step.put(step.value, key_paths[word])
        only_if(step, bool(counts), "clip_ratio_low and clip_ratio_high count, which are 0.2 where a file has neither")
    elif step.last not in key_paths:
        step.dead(f"loss_mode {mode} doesn't read it")
    elif step.value is None:
        step.dead("clip_ratio says it")
    elif mode.startswith("dppo") and len({theirs(step.draft, f"{ACTOR}.{word}") for word in sides}) > 1:
        step.absent("one threshold is for both signs of the advantage")
    elif step.use not in step.draft.report.filled or step.value != _default(step.draft, ours, key_paths[step.last]):
        step.put(step.value, key_paths[step.last])
    if step.last == "clip_ratio_c" and mode == "vanilla":
        step.put(True, "dual_clip_loss")


def _default(draft: Draft, loss: str, key_path: str) -> Any:
    section, _, option = key_path.rpartition(".")
    if section:
        return LOSSES[loss].options[option].default
    return draft.default("pg_clip" if key_path.startswith("pg_clip") else key_path)


@conversion
def loss_agg(step: Step) -> None:
    """Translate how the loss is aggregated; two losses of verl ignore it."""
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
    """Translate what seq-mean-token-sum-norm divides by."""
    read = theirs(step.draft, f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm" and step.value is not None
    other = read and step.value != theirs(step.draft, "data.max_response_length")
    if only_if(step, other, "it is response_length, or nothing reads it"):
        step.absent("seq-mean-token-sum-norm divides by response_length; scale learning_rate, or write a loss")


@conversion
def kl_loss(step: Step) -> None:
    """Translate the KL in the loss, which verl doesn't weigh by the ratio to the sampler."""
    step.put(step.value)
    if step.last == "use_kl_loss" and step.value:
        step.put(False, "kl_loss_ratio")
    elif step.last == "kl_loss_type" and step.value in ("kl", "k1") and theirs(step.draft, f"{ACTOR}.use_kl_loss"):
        step.decide("its gradient is that of mse; there it is that of k1, which is 0 on average")


@last
def as_the_actor(step: Step) -> None:
    """Check what actor and critic have in common here."""
    now = step.draft.get(step.key_path, step.draft.default(step.key_path))
    if step.last == "loss_scale_factor":
        now = theirs(step.draft, f"{ACTOR}.loss_scale_factor")
    if not has_critic(step.draft):
        step.dead("there is no critic")
    elif only_if(step, step.value not in (None, now), "it is that of the actor"):
        step.absent(f"it is {now} for the actor, and one for both")


@last
def clip_grad(step: Step) -> None:
    """Translate the bound of the gradient's norm; the actor's rules."""
    if step.use.key.startswith("critic."):
        as_the_actor(step)
    else:
        step.put(step.value)
        step.use.fate, step.use.note = "translated", ""


@conversion
def grad_clip(step: Step) -> None:
    """Translate a bound that 0.9.1 doesn't read."""
    bound = sibling(step, "optim.clip_grad")
    if step.value in (None, bound):
        step.dead("optim.clip_grad says it")
    elif only_if(step, has_critic(step.draft) or not step.use.key.startswith("critic."), "there is no critic"):
        step.decide(f"0.9.1 doesn't read it: the bound is optim.clip_grad, {bound}. For a job of 0.7 or before set "
                    f"max_grad_norm: {step.value}")  # fmt: skip


@conversion
def distillation(step: Step) -> None:
    """Translate a teacher on what the student samples."""
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
    elif only_if(step, step.last in written or (step.last == "topk" and use == "loss"), "distill.use_as says it"):
        step.put(written.get(step.last, step.value))
