"""Conversions of values of verl 0.9.1, and of names that older releases have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.configs.catalog.tracker_table import TRACKERS
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
from roll.workbench.migrate.draft import Draft, Step
from roll.workbench.migrate.overrides import NOTHING, Unexpanded, at
from roll.workbench.migrate.table import DOMAIN

ACTOR = "actor_rollout_ref.actor"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_REWARD = f"rewards.{DOMAIN}"


def theirs(draft: Draft, key: str) -> Any:
    """Return what verl takes for a key: the file's value, or the default."""
    value = at(draft.theirs, key, NOTHING)
    return draft.peer_defaults.get(key) if value is NOTHING else value


def has_critic(draft: Draft) -> bool:
    """Return whether the job trains a critic."""
    return bool(theirs(draft, "algorithm.adv_estimator") == "gae")


def sibling(step: Step, word: str) -> Any:
    """Return what verl takes for another key of the same section."""
    return theirs(step.draft, f"{step.use.key.rpartition('.')[0]}.{word}")


def only_if(step: Step, on: bool, why: str) -> bool:
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
    "fire": (lambda step: _if(step.value, 30.0), "false asks for nothing"),
    "load_format": (lambda step: _if(_generates(step), "dummy" if "dummy" in str(step.value) else "auto"), "no engine"),
    "half_cosine": (lambda step: _if(step.value not in (None, 0.5), step.value), "half a cosine is what cosine does"),
    "wsd_style": (lambda step: _if(str(sibling(step, "lr_decay_style")).lower() == "wsd", step.value),
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
    """Write the value as it is meant here, or nothing where it has no effect."""
    value, why = _SIMPLE[step.row.how]
    result = value(step)
    step.dead(why) if result is NOTHING else step.put(result)


CONVERSIONS.update(dict.fromkeys(_SIMPLE, _carry_out))
FIRST.update({"engine", "engine_strategy"})
LAST.update({"keep_one", "address", "warmup_ratio", "recompute_modules", "sequence_parallel", "each_domain"})


@conversion
def of_rows(step: Step) -> None:
    """Translate a column, where it isn't the one that is found by itself."""
    if only_if(step, step.value not in ("prompt", "messages", "data_source", None), "it is found by itself"):
        _where_rows_are(step, step.value)


@conversion
def of_images(step: Step) -> None:
    """Translate the column of pictures, where it isn't the default, which rows of text have too."""
    if only_if(step, step.value not in ("images", None), "write data_args.images: images if rows have pictures"):
        _where_rows_are(step, step.value)


def _where_rows_are(step: Step, value: Any) -> None:
    for key_path in step.key_paths:
        if key_path.startswith("actor_train") or (
            key_path.startswith("validation") and step.draft.their("data.val_files")
        ):
            step.put(value, key_path)
    step.use.fate, step.use.note = "translated", ""


@first
def loggers(step: Step) -> None:
    """Translate trackers by our names."""
    names = step.value if isinstance(step.value, list) else [step.value]
    trackers = [{"console": "stdout", "file": "jsonl"}.get(str(one), str(one)) for one in names if one is not None]
    step.put([one for one in dict.fromkeys(trackers) if one in TRACKERS] or ["stdout"])
    if gone := [one for one in trackers if one not in TRACKERS]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@last
def project(step: Step) -> None:
    """Translate a project's name, for trackers that have projects."""
    trackers = step.draft.get("track_with", ()) or ()
    takers = [one for one in trackers if "project" in getattr(TRACKERS.get(one), "options", ())]
    for taker in takers:
        step.put(step.value, f"tracker_kwargs.{taker}.project")
    only_if(step, bool(takers), "no tracker of the file has projects")


@conversion
def resume(step: Step) -> None:
    """Translate where a run resumes."""
    mode = theirs(step.draft, "trainer.resume_mode")
    path = step.draft.their("trainer.resume_from_path") or step.draft.their("trainer.resume_path")
    if step.last == "resume_mode" and not (mode == "resume_path" and path):
        step.put(False if mode == "disable" else "auto")
    elif step.last == "resume_mode":
        step.use.ours = ("resume_from_checkpoint",)
    elif only_if(step, mode == "resume_path" or (step.last == "resume_path" and bool(path)), f"resume_mode is {mode}"):
        step.put(path)
        step.decide("checkpoints of verl aren't read; start from its exported model as pretrain")


@conversion
def contents(step: Step) -> None:
    """Translate what a checkpoint holds, or what of it is loaded; the actor's counts for all roles."""
    wanted, state = step.value if isinstance(step.value, list) else [step.value], ["model", "optimizer", "extra"]
    if step.value is None or sorted(map(str, wanted)) == sorted(state):
        step.dead("model, optimizer and extra are the default")
    elif only_if(step, not step.use.key.startswith("critic."), "a checkpoint holds all roles; the actor's counts"):
        loaded = [word for word in wanted if word in state or step.last != "load_contents"]
        step.put(loaded)
        if loaded != wanted:
            step.decide("hf_model is saved, never loaded")


def _function(draft: Draft) -> str:
    """Return the section that names a reward function; the one at the top counts."""
    sections = ("custom_reward_function", "reward.custom_reward_function")
    return next((section for section in sections if draft.their(f"{section}.path")), "")


@first
def custom_function(step: Step) -> None:
    """Translate a function of the user's own."""
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
    """Translate an argument of that function."""
    section = _function(step.draft)
    if only_if(step, bool(section) and step.use.key.startswith(section), "no function takes it"):
        step.put(step.value, f"{_REWARD}.reward_kwargs.{step.use.key.partition('.reward_kwargs.')[2]}")


def _manager(draft: Draft) -> Any:
    return draft.their("reward_model.reward_manager") or theirs(draft, "reward.reward_manager.name")


@conversion
def overlong(step: Step) -> None:
    """Translate the soft penalty near the length limit."""
    on = sibling(step, "overlong_buffer_cfg.enable" if step.last == "max_resp_len" else "enable")
    if not on or ("reward_kwargs" in step.use.key and _manager(step.draft) != "dapo"):
        step.dead("the penalty is off" if not on else "only the reward manager dapo reads it")
    elif step.last == "enable":
        step.put(1.0, "overlong_shaping.penalty") if not step.draft.has("overlong_shaping") else None
        step.use.ours = ("overlong_shaping",)
    elif step.last != "max_resp_len":
        step.put(step.value)
    elif only_if(step, step.value != theirs(step.draft, "data.max_response_length"), "it is response_length"):
        step.absent("the penalty ends at response_length")


@conversion
def reward_manager(step: Step) -> None:
    """Translate who calls the reward function."""
    known = ("naive", "dapo", "prime", "batch", "limited", "rate_limited", "gdpo", "remote", "register", None)
    if only_if(step, step.value not in known, "functions are called by the run, one by one or in lists"):
        step.absent("a manager of your own becomes a reward function")


@first
def reward_model(step: Step) -> None:
    """Translate whether a model scores."""
    if only_if(step, bool(step.value), "false asks for none"):
        if _function(step.draft):
            step.absent("the function is told where the model is served; a judge, or weights of both, do it here")
        else:
            step.put("reward_model")


@conversion
def sft_column(step: Step) -> None:
    """Translate a column, or one inside a column, of releases before 0.9."""
    of = "prompt" if step.last.startswith("prompt") else "response"
    column = step.draft.their(f"data.{of}_key", "question" if of == "prompt" else "answer")
    keys = step.draft.their(f"data.{of}_dict_keys")
    inside = [str(key) for key in (keys if isinstance(keys, list) else []) if str(key) != str(column)]
    if only_if(step, not step.draft.their("data.multiturn.enable") and step.value not in (None, []), "rows say it"):
        _where_rows_are(step, f"{column}.{inside[0]}" if inside else str(column))


@conversion
def sft_messages(step: Step) -> None:
    """Translate rows that are conversations, which all of 0.9.1 are."""
    data = step.draft.theirs.get("data", {})
    pairs = not step.draft.their("data.multiturn.enable") and {"prompt_key", "response_key"} & set(data)
    if only_if(step, not pairs, "rows are prompts with responses"):
        step.put("all", "train_on")
        older = step.draft.their("data.multiturn.messages_key")
        _where_rows_are(step, older or theirs(step.draft, "data.messages_key"))


@conversion
def thinking(step: Step) -> None:
    """Translate whether templates think, in rows that don't say it."""
    if only_if(step, step.value not in (None, "none", "None"), "none leaves it to the template"):
        step.put(step.value, "chat_template_kwargs.enable_thinking")


@conversion
def engine_option(step: Step) -> None:
    """Translate an option of vLLM, and its name with SGLang."""
    engine, word, value = step.draft.strategies.get("actor_infer", ""), step.last, step.value
    sglang = {"pipeline_model_parallel_size": "pp_size", "gpu_memory_utilization": "mem_fraction_static"}
    if word == "free_cache_engine" and engine == "vllm":
        # Theirs keep a copy of the weights in host memory, which here the next sync would overwrite.
        step.put(None if value else 0)
        step.use.fate, step.use.note = "translated", ""
    elif value is None or not _generates(step) or (value == 1 and word[:6] in ("expert", "pipeli")):
        step.dead("the default, or not of this engine")
    elif word == "tensor_model_parallel_size":
        for key_path in step.key_paths:
            step.put(value, key_path)
    elif engine == "vllm":
        step.put(True if word == "expert_parallel_size" else value)
    elif only_if(step, word in sglang, "it is vLLM's, and the engine is sglang"):
        step.put(value, f"{_ENGINE}.{sglang[word]}")


@conversion
def engine_kwargs(step: Step) -> None:
    """Translate an argument of the engine itself."""
    of, dot, word = step.use.key.partition("engine_kwargs.")[2].partition(".")
    engine = step.draft.strategies.get("actor_infer", "")
    takes = step.value not in (None, {}) and (not dot or of == engine) and _generates(step)
    if only_if(step, takes, f"null leaves the engine's choice, or the engine is {engine or 'another'}"):
        step.put(step.value, f"{_ENGINE}.{word or of}")


@conversion
def mini_batch(step: Step) -> None:
    """Leave prompts of a mini-batch, or rows of one of fine-tuning, until the ranks are known."""
    step.draft.memo[f"mini:{step.role}"] = (step.value, step.use)
    step.use.ours = (step.key_path,)


@conversion
def of_all_devices(step: Step) -> None:
    """Leave responses of a pass over all devices to be settled at the end."""
    if only_if(step, step.value is not None, "null leaves it to the number per device"):
        step.draft.memo.setdefault("micro", {})[step.key_path] = (step.value, step.use)
        step.use.ours = (step.key_path,)


@last
def token_budget(step: Step) -> None:
    """Translate tokens of a pass of one device; the ranks of a sequence add up."""
    way, draft = step.key_path.rpartition("_")[2], step.draft
    on = step.value is not None and draft.get(f"{step.role}.use_dynamic_batching_in_{way}")
    if only_if(step, bool(on), "dynamic batching is off"):
        sizes = draft.get(f"{step.role}.model_args.ulysses_size", 1), _backend(step, "context_parallel_size")
        ranks = max(size for size in (1, *sizes) if isinstance(size, int))
        step.put(step.value * ranks if isinstance(step.value, int) else step.value)
        if ranks > 1:
            step.note(f"times the {ranks} ranks that share a sequence")


@conversion
def verl_schedule(step: Step) -> None:
    """Translate a learning rate schedule; the deprecated warmup_style counts where it is given."""
    value = str(step.value)
    known = SCHEDULES.get(value) or SCHEDULES.get(value.lower()) or SCHEDULES.get(value.replace("_", "-"))
    if step.value is None or (step.last == "lr_scheduler_type" and sibling(step, "warmup_style")):
        step.dead("another key says it")
    elif known is None:
        step.absent("there is no such schedule")
    else:
        step.put(known)


@last
def min_lr(step: Step) -> None:
    """Translate the lowest rate as a share of the peak."""
    peak = step.draft.get(f"{step.role}.training_args.learning_rate") or sibling(step, "lr")
    if not step.value:
        step.dead("0 is the default")
    elif isinstance(peak, (int, float)) and peak and isinstance(step.value, (int, float)):
        step.put(round(step.value / peak, 12))
        step.use.fate, step.use.note = "translated", f"a share of the peak {peak:g}"
    else:
        step.absent("there is no learning rate to take a share of")


@last
def verl_targets(step: Step) -> None:
    """Translate layers with adapters; all of them are fewer here in mixtures of experts."""
    note = step.row.note
    with_lora(step)
    if step.use.fate == "decided" and step.value != "all-linear":
        step.use.fate, step.use.note = "translated", ""
    elif step.use.fate == "decided":
        step.decide(note)


@conversion
def betas(step: Step) -> None:
    """Translate both of Adam's constants."""
    first_, second = map(float, step.value)
    step.put(first_)
    step.put(second, step.key_paths[1])


@conversion
def master_dtype(step: Step) -> None:
    """Translate the type that weights are trained in."""
    trains = step.role in ("actor_train", "critic") and str(step.value) not in ("fp32", "float32", "None")
    if only_if(step, trains, "weights that are trained are fp32"):
        step.decide("weights that are trained stay fp32; dtype is that of the forward pass")


@conversion
def each_role(step: Step) -> None:
    """Translate a key of every role that has the policy's model."""
    has_reference = theirs(step.draft, f"{ACTOR}.use_kl_loss") or theirs(step.draft, "algorithm.use_kl_in_reward")
    for key_path in step.key_paths:
        if step.draft.knows(key_path) and (not key_path.startswith("reference.") or has_reference):
            step.put(step.value, key_path)
