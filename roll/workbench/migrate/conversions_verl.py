"""Conversions of values of verl: data and names, the algorithm, rewards, fine-tuning."""

from __future__ import annotations

from roll.catalog.losses import LOSSES
from roll.catalog.trackers import TRACKERS
from roll.workbench.migrate.conversions import conversion, first, last, mapped
from roll.workbench.migrate.draft import Step

DOMAIN = "all"
"""The one domain that rows of any data source belong to."""


# --- data and names --------------------------------------------------------------------------------------------------


@conversion
def prompt_key(step: Step) -> None:
    """The column with the prompt."""
    if step.value in ("prompt", "messages", None):
        step.dead(f"the column {step.value or 'prompt'} is found by itself")
        return
    for place in step.places:
        if place.startswith("actor_train") or step.draft.their("data.val_files"):
            step.put(step.value, place)
    step.use.fate, step.use.note = "translated", ""


@conversion
def fn_key(step: Step) -> None:
    """The column that says whose a row is; one domain takes all."""
    if step.value in ("data_source", None):
        step.dead("data_source is found by itself, and one domain takes all rows")
        return
    for place in step.places:
        if place.startswith("actor_train") or step.draft.their("data.val_files"):
            step.put(step.value, place)
    step.use.fate, step.use.note = "translated", ""


@conversion
def custom_class(step: Step) -> None:
    """A data set class of the user's own."""
    path, name = (step.draft.their(f"data.custom_cls.{word}") for word in ("path", "name"))
    if path is None or name is None:
        step.dead("no class")
    else:
        file = path if str(path).endswith(".py") else f"{str(path).removeprefix('pkg://')}"
        step.put(f"{file}:{name}", "actor_train.data_args.dataset")
        step.decide("a class here yields rows, verl's is a torch Dataset of tokens: see docs/data.md")


@conversion
def name(step: Step) -> None:
    """A name without slashes."""
    step.put(str(step.value).strip().replace("/", "_") if step.value is not None else None)


@first
def loggers(step: Step) -> None:
    """Trackers by our names."""
    given = step.value if isinstance(step.value, list) else [step.value]
    ours = {"console": "stdout", "file": "jsonl"}
    found = [ours.get(str(one), str(one)) for one in given if one is not None]
    known = [one for one in dict.fromkeys(found) if one in TRACKERS]
    step.put(known or ["stdout"])
    if gone := [one for one in found if one not in TRACKERS]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@last
def project(step: Step) -> None:
    """A project's name, for trackers that have projects."""
    names = step.draft.get("track_with", ())
    takers = [one for one in names or () if one in TRACKERS and "project" in TRACKERS[one].options]
    for taker in takers:
        step.put(step.value, f"tracker_kwargs.{taker}.project")
    if not takers:
        step.dead("no tracker of the file has projects")


@conversion
def resume(step: Step) -> None:
    """Where a run resumes."""
    mode, path = step.draft.their("trainer.resume_mode", "auto"), step.draft.their("trainer.resume_from_path")
    path = path or step.draft.their("trainer.resume_path")
    if step.last == "resume_mode":
        if mode == "resume_path" and path:
            step.use.ours = ("resume_from_checkpoint",)
        else:
            step.put(False if mode == "disable" else "auto")
    elif mode == "resume_path" or (step.last == "resume_path" and path):
        step.put(path)
        step.decide("checkpoints of verl aren't read; start from its exported model as pretrain")
    else:
        step.dead(f"resume_mode is {mode}")


@conversion
def val_dir(step: Step) -> None:
    """A folder for validation samples."""
    if step.value is None:
        step.dead("null asks for none")
        return
    if not step.draft.their("trainer.log_val_generations"):
        step.put(64, "log_val_generations")
    step.decide("validation samples go to the log and the trackers")


# --- algorithm -------------------------------------------------------------------------------------------------------


@conversion
def verl_estimator(step: Step) -> None:
    """An estimator; grpo without division by the deviation is dr_grpo."""
    value = mapped(step)
    if value == "grpo" and step.draft.their("algorithm.norm_adv_by_std_in_grpo", True) is False:
        value = "dr_grpo"
    step.put(value)
    if step.value == "grpo_passk":
        step.decide("pass_at_k is nearest; there the best response has what it is better than the second")


@conversion
def no_std(step: Step) -> None:
    """Whether grpo divides by the deviation."""
    if step.draft.their("algorithm.adv_estimator", "gae") != "grpo":
        step.dead("it is about grpo")
    else:
        step.use.ours = ("adv_estimator",)


@conversion
def kl_type(step: Step) -> None:
    """Fixed or adaptive."""
    if step.value == "adaptive" and step.draft.their("algorithm.use_kl_in_reward", False):
        step.put(step.draft.their("algorithm.kl_ctrl.target_kl", 0.1))
    else:
        step.dead("fixed is the default here" if step.value != "adaptive" else "no KL is in the reward")


@conversion
def kl_adaptive(step: Step) -> None:
    """A constant of the adaptive controller."""
    adaptive = step.draft.their("algorithm.kl_ctrl.type", "fixed") == "adaptive"
    if adaptive and step.draft.their("algorithm.use_kl_in_reward", False):
        step.put(step.value)
    else:
        step.dead("only kl_ctrl.type: adaptive reads it")


@conversion
def pf_ppo(step: Step) -> None:
    """Policy filtration."""
    if not step.draft.their("algorithm.use_pf_ppo", False):
        step.dead("use_pf_ppo is off")
    elif step.last == "use_pf_ppo":
        step.draft.put("pf_ppo.reweight_method", step.draft.their("algorithm.pf_ppo.reweight_method", "pow"), step.use)
        step.use.ours = ("pf_ppo",)
    elif step.last == "weight_pow" and step.draft.their("algorithm.pf_ppo.reweight_method", "pow") != "pow":
        step.dead("only reweight_method: pow reads it")
    else:
        step.put(step.value)


@conversion
def filter_groups(step: Step) -> None:
    """Dynamic sampling."""
    if step.value:
        step.put("std_filter", f"rewards.{DOMAIN}.query_filter_config.type")
        step.decide("groups of equal scores are dropped: std_filter")
    else:
        step.dead("false asks for nothing")


@conversion
def gen_batches(step: Step) -> None:
    """A budget of dynamic sampling; 0 is none there."""
    if not isinstance(step.value, int) or step.value <= 0:
        step.dead("0 is no bound; the default here is 10")
    else:
        step.put(step.value)


@conversion
def correction(step: Step) -> None:
    """Importance weights and rejection between sampler and trainer."""
    theirs = step.use.key.rpartition(".")[0]
    level, rejects = (step.draft.their(f"{theirs}.{word}") for word in ("rollout_is", "rollout_rs"))
    level = step.draft.their(f"{theirs}.rollout_is_level") if level is True else level
    threshold = step.draft.their(f"{theirs}.rollout_is_threshold")
    if not level and not rejects and not (theirs == "algorithm" and threshold):
        step.dead("no correction is asked for")
        return
    section = "train_infer_correction"
    if not step.draft.has(f"{section}.level"):
        step.draft.put(f"{section}.level", level or rejects or "token", step.use)
        step.draft.put(f"{section}.importance_upper", (threshold or 2.0) if level or not rejects else None)
    if step.last in ("rollout_is", "rollout_rs", "rollout_is_level"):
        step.use.ours = (f"{section}.level",)
        if rejects and level and rejects != level:
            step.decide(f"one level for both: {level}")
    elif step.last == "rollout_rs_threshold" and rejects and isinstance(step.value, (int, float)):
        step.put(step.value)
        if step.draft.their(f"{theirs}.rollout_rs_threshold_lower") is None:
            step.draft.put(f"{section}.ratio_low", round(1 / step.value, 6))
    elif step.last.startswith("rollout_rs") and not rejects:
        step.dead("rollout_rs is off")
    elif step.last == "rollout_is_threshold" and not level and rejects:
        step.dead("rollout_is is off")
    else:
        step.put(step.value)


@conversion
def loss_arg(step: Step) -> None:
    """An option of a loss that is a covariance loss."""
    names = {"clip_cov_ratio": "cov_ratio", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high",
             "kl_cov_ratio": "cov_ratio", "ppo_kl_coef": "kl_coef"}  # fmt: skip
    wanted = "kl_cov" if step.last in ("kl_cov_ratio", "ppo_kl_coef") else "clip_cov"
    mode = str(step.draft.their("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")).replace("-", "_")
    if mode == wanted and names[step.last] in LOSSES[wanted].options:
        step.put(step.value, f"policy_loss_args.{names[step.last]}")
    else:
        step.dead(f"only loss_mode {wanted} reads it")


@conversion
def dual_clip(step: Step) -> None:
    """The bound of the dual clip, which is always on there."""
    mode = str(step.draft.their("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"))
    if mode != "vanilla":
        step.dead(f"loss_mode {mode} doesn't read it")
    else:
        step.put(step.value, "dual_clip_c")
        step.put(True, "dual_clip_loss")


@conversion
def clip(step: Step) -> None:
    """The bound of the gradient's norm; the actor's rules."""
    if step.use.key.startswith(("critic.", "actor_rollout_ref.ref")) or (
        step.draft.their("actor_rollout_ref.actor.grad_clip") is not None and "actor" in step.use.key
        and step.draft.their("actor_rollout_ref.actor.grad_clip") != step.value
    ):  # fmt: skip
        step.dead("max_grad_norm is one bound for all roles, the actor's")
    else:
        step.put(step.value)


# --- rewards ---------------------------------------------------------------------------------------------------------


@first
def custom_function(step: Step) -> None:
    """A function of the user's own."""
    path = step.draft.their("custom_reward_function.path")
    if not path:
        step.dead("no function")
    else:
        path = str(path).removeprefix("pkg://")
        path = path if path.endswith(".py") or ":" in path else f"{path.replace('/', '.')}"
        step.put(f"{path}:{step.draft.their('custom_reward_function.name', 'compute_score')}", f"rewards.{DOMAIN}.name")


@conversion
def custom_kwargs(step: Step) -> None:
    """An argument of that function."""
    if not step.draft.their("custom_reward_function.path"):
        step.dead("no function")
    else:
        word = step.use.key.removeprefix("custom_reward_function.reward_kwargs.")
        step.put(step.value, f"rewards.{DOMAIN}.reward_kwargs.{word}")


@conversion
def overlong(step: Step) -> None:
    """The soft penalty near the length limit."""
    if not step.draft.their(f"{step.use.key.rpartition('.')[0]}.enable", False):
        step.dead("the penalty is off")
    elif step.last == "enable":
        step.use.ours = ("overlong_shaping",)
        if not step.draft.has("overlong_shaping"):
            step.draft.put("overlong_shaping.penalty", 1.0, step.use)
    else:
        step.put(step.value)


@conversion
def reward_manager(step: Step) -> None:
    """Who calls the reward function."""
    if str(step.value) in ("naive", "dapo", "prime", "batch", "None", "limited"):
        step.dead("functions are called by the run, one by one or in lists, as they can")
    else:
        step.absent("a function scores a domain; a manager of your own becomes one")


@last
def each_domain(step: Step) -> None:
    """A key of every domain that a function scores."""
    name_ = step.draft.get(f"rewards.{DOMAIN}.name", "math_rule")
    if step.value is None or name_ == "reward_model":
        step.dead("the default does")
    else:
        step.put(step.value, f"rewards.{DOMAIN}.{step.place.rpartition('.')[2]}")


@conversion
def sandbox_url(step: Step) -> None:
    """A sandbox server."""
    if step.value is None:
        step.dead("null leaves the sandbox of this machine")
    else:
        step.absent("its server speaks another protocol; sandbox: auto runs code on this machine, see docs/sandbox.md")


@first
def reward_model(step: Step) -> None:
    """Whether a model scores."""
    if step.value:
        step.put("reward_model", f"rewards.{DOMAIN}.name")
    else:
        step.dead("false asks for none")


@conversion
def critic(step: Step) -> None:
    """Whether there is a critic."""
    step.dead("adv_estimator decides whether there is a critic")


# --- fine-tuning -----------------------------------------------------------------------------------------------------


@conversion
def sft_column(step: Step) -> None:
    """A column, or one inside a column."""
    multiturn = step.draft.their("data.multiturn.enable", False)
    of = "prompt" if step.last.startswith("prompt") else "response"
    column = step.draft.their(f"data.{of}_key", "question" if of == "prompt" else "answer")
    keys = step.draft.their(f"data.{of}_dict_keys")
    if multiturn or step.value in (None, []):
        step.dead("rows are conversations" if multiturn else "the column is the text itself")
        return
    inside = [str(key) for key in (keys if isinstance(keys, list) else []) if str(key) != str(column)]
    value = f"{column}.{inside[0]}" if inside else str(column)
    for place in step.places:
        if place.startswith("actor_train") or step.draft.their("data.val_files"):
            step.put(value, place)
    step.use.fate, step.use.note = "translated", ""


@conversion
def sft_messages(step: Step) -> None:
    """Rows that are conversations."""
    if not step.draft.their("data.multiturn.enable", False):
        step.dead("rows are prompts with responses")
        return
    key = step.draft.their("data.multiturn.messages_key", "messages")
    for place in ("actor_train.data_args.messages", "validation.data_args.messages"):
        if place.startswith("actor_train") or step.draft.their("data.val_files"):
            step.put(key, place)
