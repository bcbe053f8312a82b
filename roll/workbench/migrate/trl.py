"""TRL: which trainer a file is for, its keys that take more than a row, and what is settled at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.catalog.validation_metrics import better_of
from roll.workbench.migrate import peers
from roll.workbench.migrate.conversions import DTYPES, conversion, first
from roll.workbench.migrate.draft import Draft, Step, coerced
from roll.workbench.migrate.overrides import at
from roll.workbench.migrate.report import KeyUse
from roll.workbench.migrate.table import DOMAIN
from roll.workbench.migrate.trl_devices import count_of, place

TRAINERS = {"SFTConfig": "sft", "DPOConfig": "dpo", "GRPOConfig": "rlvr", "RLOOConfig": "rlvr", "KTOConfig": "dpo",
            "RewardConfig": "reward_model", "DistillationConfig": "distill"}  # fmt: skip
"""Classes of arguments by our pipelines; of two that know as many keys of a file the first is taken."""
_OLDER = {"SFTConfig": "max_seq_length", "DPOConfig": "rpo_alpha reference_free simpo_gamma max_prompt_length",
          "GRPOConfig": "use_liger_loss max_prompt_length", "DistillationConfig": "lmbda seq_kd"}  # fmt: skip
"""Keys of releases before, or of TRL's experimental trainers."""
_LOSSES = {"SFTConfig": "nll dft chunked_nll", "KTOConfig": "kto apo_zero_unpaired",
           "GRPOConfig": "grpo dapo bnpo dr_grpo cispo sapo luspo vespo"}  # fmt: skip
_PAIRS = {"loss": "val/loss", "rewards/accuracies": "val/accuracy", "accuracy": "val/accuracy",
          "rewards/margins": "val/margin", "margin": "val/margin"}  # fmt: skip
_BEST = {"sft": {"loss": "val/loss", "mean_token_accuracy": "val/token_accuracy"}, "dpo": _PAIRS,
         "reward_model": _PAIRS, "rlvr": {"reward": f"val/{DOMAIN}/reward"}}  # fmt: skip
"""Metrics of TRL's trainers in evaluation, by ours."""
_ARGS, _MODEL, _DATA = (f"actor_train.{name}_args" for name in ("training", "model", "data"))
_ALL_TOKENS = ("TRL learns all tokens of messages and texts, system and user too, and of prompt/completion rows the "
               "completion (with completion_only_loss: false all); here the assistant's: last or all")  # fmt: skip


def trainers_of(tree: Mapping[str, Any], job: str = "") -> list[str]:
    """Return the classes of arguments that know most keys of a file, or that its `job`, a command of TRL, is for."""
    if named := [name for name in TRAINERS if name.lower() == f"{'distillation' if job == 'gkd' else job}config"]:
        return named
    table, loss, scores = peers.table("trl"), tree.get("loss_type"), {}
    common = {key for name in ("TrainingArguments", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig")
              for key in table[name]}  # fmt: skip
    owner = next((name for name, words in _LOSSES.items() if str(loss) in words.split()), "DPOConfig") if loss else ""
    for name in TRAINERS:
        own = {*table[name], *table.get(name.replace("Config", "ScriptArguments"), ())} - common
        scores[name] = len(tree.keys() & (own | set(_OLDER.get(name, "").split()))) + 100 * (name == owner)
    return [name for name in TRAINERS if scores[name] == max(scores.values())]


def taken(draft: Draft, key: str) -> Any:
    """Return what the trainer takes for a key: what the file says, texts of numbers as numbers, else its default."""
    explicit = coerced(bool | float | None, at(draft.theirs, key))
    return draft.peer_defaults.get(key) if explicit is None else explicit


def is_for(draft: Draft, name: str) -> bool:
    """Return whether the file is for this trainer."""
    return trainers_of(draft.theirs, draft.job)[0] == f"{name}Config"


def ask(draft: Draft, key_path: str, key: str, value: str, note: str) -> None:
    """Have the new file ask for a place for a key that the file leaves out."""
    draft.ask(KeyUse(key=key, value=value, fate="absent", note=note), key_path)


def _written(step: Step) -> None:
    """Count a key as translated to where another one has written it."""
    step.use.fate, step.use.ours, step.use.note = "translated", (step.key_path,), ""


@conversion
def only(step: Step) -> None:
    """Accept values that ask for nothing here, with why; others have no counterpart, or are decided if the row is."""
    value, otherwise = taken(step.draft, step.use.key), step.decide if step.row.fate == "decided" else step.absent
    why = None if isinstance(value, (list, dict)) else step.row.values.get(value)
    otherwise(step.row.note) if why is None else step.dead(why)


@first
def report_to(step: Step) -> None:
    """Translate trackers."""
    trackers = step.value if isinstance(step.value, list) else [step.value]
    if trackers in ([None], ["none"]):
        step.dead("trackers that are built in stay")
        return
    step.put(["stdout", *(one for one in trackers if one in TRACKERS)])
    if gone := [str(one) for one in trackers if one not in (*TRACKERS, "none", None)]:
        step.decide(f"there is no tracker {', '.join(gone)} here")


@conversion
def lengths(step: Step) -> None:
    """Translate passes, which `max_steps` overrides; a warm-up in steps or below 1 as a share; the longest row."""
    key, number = step.last, taken(step.draft, step.last)
    if key.endswith("_length"):
        if not step.draft.knows(step.key_path):
            step.absent("a row has one bound, for all of it") if step.value else step.dead("it bounds nothing")
        elif step.value is None and key != "max_prompt_length":
            step.absent("null is no bound in TRL: write the longest that there is")
        else:
            step.put(number)
    elif not key.startswith("warmup"):
        if taken(step.draft, "max_steps") > 0:
            step.dead("max_steps decides in TRL")
        else:
            step.absent("passes are whole here: write max_steps") if number % 1 else step.put(int(number))
    elif number and taken(step.draft, "lr_scheduler_type") == "constant":
        step.dead("transformers' constant has no warm-up")
    else:
        step.put(number, f"{_ARGS}.warmup_ratio") if 0 < number < 1 else step.put(number // 1)
        if number:
            step.note("of w warm-up steps the first step has 1 / (w + 1) of the peak here, in TRL a rate of 0")


@conversion
def share_of_peak(step: Step) -> None:
    """Translate the lowest rate into a share of the peak."""
    peak = taken(step.draft, "learning_rate")
    step.put(round((taken(step.draft, step.use.key) or 0) / peak, 12))
    step.use.fate, step.use.note = "translated", f"a share of the peak {peak:g}"


@conversion
def precision(step: Step) -> None:
    """Translate the type that is computed in: bf16 unless fp16 says otherwise, else that of the weights."""
    draft, fp16, bf16 = step.draft, taken(step.draft, "fp16"), taken(step.draft, "bf16")
    own = [draft.their(f"{prefix}dtype") for prefix in ("model_init_kwargs.", "model_init_kwargs.torch_", "torch_", "")]
    weights = DTYPES.get(str(next(filter(None, own), "float32")), "fp32")
    if step.use in draft.report.filled and step.last != "bf16":
        step.dead("bf16 says it")
        return
    step.put("bf16" if bf16 or (bf16 is None and not fp16) else "fp16" if fp16 else weights)
    if step.last.endswith("dtype") and weights != "fp32":
        step.decide("of the computation; weights that are trained are kept in fp32 here, in TRL in this type")


@conversion
def deepspeed_file(step: Step) -> None:
    """Translate DeepSpeed's keys, or a file with them."""
    if not step.value:
        step.dead("DeepSpeed is off")
        return
    step.put("deepspeed_train", "actor_train.strategy_args.strategy_name")
    step.use.ours = ()
    step.decide("deepspeed_train; copy its keys into actor_train.strategy_args.strategy_config, or name a preset")


@conversion
def peft(step: Step) -> None:
    """Translate adapters, with peft's own defaults; its own choice of layers goes by the model's family."""
    draft, key = step.draft, step.last
    alpha, rank, rooted = (taken(draft, name) for name in ("lora_alpha", "lora_r", "use_rslora"))
    model = str(taken(draft, "model_name_or_path")).lower()
    if not taken(draft, "use_peft"):
        step.dead("use_peft is off")
    elif key == "use_peft":
        _written(step)
    elif key in ("lora_alpha", "use_rslora"):
        # rsLoRA's alpha / sqrt(r) is (alpha sqrt(r)) / r.
        wanted = rooted or key == "lora_alpha"
        step.put(alpha * (rank**0.5 if rooted else 1)) if wanted else step.dead("alpha / r scales them")
    elif key == "lora_dropout" and taken(draft, "disable_dropout"):
        step.put(0.0)
        step.note("disable_dropout turns it off in TRL")
    elif key != "lora_target_modules" or step.value is not None:
        step.put(step.value)
        if "all-linear" in str(step.value) and re.search(r"moe|mixtral|a\d+b", model):
            step.decide("experts and router stay as they are here; peft adapts them too")
    elif re.search(r"qwen[23]|llama|mistral|mixtral|gemma-?[123]?-|smollm|opt-", model):
        step.put(["q_proj", "v_proj"])
        step.note("what peft takes for this family")
    else:
        ask(draft, step.key_path, key, "what peft takes for this model's family",
            "peft has it in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING")  # fmt: skip


@conversion
def events(step: Step) -> None:
    """Translate checkpoints and validations by steps, the latter by `logging_steps` by default; rows of trackers."""
    kind, _, word = step.last.replace("evaluation", "eval").partition("_")
    strategy, every = taken(step.draft, f"{kind}_strategy"), taken(step.draft, f"{kind}_steps")
    every = taken(step.draft, "logging_steps") if every is None else every
    if kind == "save" and strategy != "steps":
        if word == "strategy" and strategy == "epoch":
            step.absent("checkpoints come by steps: how many steps has an epoch of these rows?")
        else:
            step.dead("save_best says it" if strategy == "best" else "save_strategy is not steps")
    elif kind == "eval" and strategy == "no":
        step.dead("eval_strategy is no")
    elif kind == "save" and word == "steps" and every < 1:
        step.absent("steps, no share of them")
    elif kind != "save" and (every < 1 or (kind == "eval" and strategy != "steps")):
        step.quiet("they come by steps")
    else:
        _written(step) if word == "strategy" else step.put(every // 1)


@conversion
def best_metric(step: Step) -> None:
    """Translate a metric of evaluation, and which way is better; the loss for a best model at the end."""
    draft, metric = step.draft, step.draft.their("metric_for_best_model")
    name = "loss" if metric is None else str(metric).removeprefix("eval_")
    key_path = _BEST.get(draft.pipeline, {}).get(name)
    if not step.value:
        step.dead("it is off")
    elif step.last != "metric_for_best_model" and metric is not None:
        step.dead("metric_for_best_model says which one is kept; roll export RUN --step best writes it")
    elif key_path is None:
        step.absent("no validation here gives it; see save_best in docs/checkpoints.md")
    else:
        # As transformers has it: higher is better, but for names that end in loss.
        greater = bool(draft.their("greater_is_better", not name.endswith("loss")))
        usual = (better_of(key_path) == "higher") is greater
        step.put(key_path if usual else f"{'max' if greater else 'min'}:{key_path}")


def _address(path: Any, config: Any, split: Any) -> Any:
    """Return a data set of the hub with its configuration and split, or a file as it is."""
    if not re.fullmatch(r"[^./~][^/]*/[^/]+(?<!\.jsonl)(?<!\.json)(?<!\.parquet)(?<!\.csv)(?<!\.tsv)", str(path)):
        return path
    path += f"/{config}" if config not in (None, "default") else ""
    return path + (f"#{split}" if split not in (None, "train") else "")


@conversion
def trl_dataset(step: Step) -> None:
    """Translate training rows, by name, configuration and split; those held out by `dataset_test_split`."""
    draft = step.draft
    name, config, split = (draft.their(key) for key in ("dataset_name", "dataset_config", "dataset_train_split"))
    if step.last == "dataset_name" and name is not None:
        step.put(_address(name, config, split))
        step.note("")
    elif step.last == "dataset_test_split" and taken(draft, "eval_strategy") == "no":
        step.dead("eval_strategy is no")
    elif _address(name, None, "x") == name:
        step.dead("only data sets of the hub have it")
    else:
        step.dead("it is so without being said") if step.value in (None, "default", "train") else _written(step)


@conversion
def mixture(step: Step) -> None:
    """Translate several data sets, one after the other."""
    entries = step.value or []
    if any(entry.keys() - {"path", "name", "split", "columns"} for entry in entries):
        step.absent("of a data set only path, name and split are read: file_name takes the files")
    elif entries:
        step.put([_address(entry["path"], entry.get("name"), entry.get("split")) for entry in entries])


@conversion
def order(step: Step) -> None:
    """Translate the order of rows; trainers of rows draw it by train_sampling_strategy, not by shuffle_dataset."""
    draft, value, plays = step.draft, step.value, step.draft.pipeline in ("rlvr", "distill")
    if step.last.endswith("streaming"):
        step.absent("streamed rows come shuffled within a buffer at most") if value else step.dead("it is off")
    elif (step.last == "shuffle_dataset") is plays:
        step.absent("rows aren't sorted by length") if value == "group_by_length" else \
            step.put(bool(value) if plays else value == "random")  # fmt: skip
    elif not plays and value and taken(draft, "train_sampling_strategy") == "sequential":
        step.absent("no order is drawn once for all epochs")
    else:
        step.dead("the sampler has an order of its own" if plays else "the sampler shuffles whatever this says")


@conversion
def train_on(step: Step) -> None:
    """Translate which tokens are learnt."""
    assistant, completion = (taken(step.draft, f"{key}_only_loss") for key in ("assistant", "completion"))
    if completion or (step.last == "assistant_only_loss" and assistant):
        step.put("last" if completion else "all")
    elif step.value is False and step.use in step.draft.report.uses and not assistant:
        step.absent(_ALL_TOKENS)
    else:
        step.dead("the data decide" if not assistant else "assistant_only_loss says it")


@conversion
def packs(step: Step) -> None:
    """Put rows end to end; in TRL `packing` also makes several rows one."""
    if not step.value:
        step.dead("it is off")
        return
    step.put(True, "actor_train.use_sequence_packing")
    if step.last == "packing":
        step.absent("TRL fills rows of max_length with several of the file, so an optimizer step has more of them: "
                    "here it counts rows of the file; write how many")  # fmt: skip


def finish_trl(draft: Draft) -> None:
    """Finish the trainer, the batch in prompts, a domain, held-out rows, a reference."""
    trainers, decisions = trainers_of(draft.theirs, draft.job), draft.report.decisions
    also = f"; its keys fit {', '.join(trainers[1:])} too" if trainers[1:] else ""
    decisions.append(f"pipeline: {draft.pipeline}, for the trainer of TRL's {trainers[0]}{also}")
    plays = draft.pipeline in ("rlvr", "distill")
    _rollouts(draft) if plays else _rows(draft)
    if not draft.has(f"{_DATA}.template"):
        decisions.append(f"{_DATA}.template: native, the model's chat template, also around prompts that are text, "
                         "which TRL takes as they are: plain does so")  # fmt: skip
    if not draft.has(f"{_DATA}.file_name"):
        draft.report.missing.append(f"{_DATA}.file_name: the data, which TRL's script loads itself")
    _held_out(draft)
    compares = draft.get("use_kl_loss") or draft.get("add_token_level_kl") or (
        draft.pipeline == "dpo" and draft.get("loss_type") not in ("orpo", "simpo"))  # fmt: skip
    if compares and not draft.has("reference") and not draft.get(f"{_MODEL}.lora_rank"):
        draft.put("reference", {})
        decisions.append("reference: the starting model, which TRL copies by itself")
    kind = draft.get(f"{_MODEL}.dtype")
    for role in ("actor_infer", "reference", "teacher"):
        if kind in ("bf16", "fp16") and (draft.has(role) or (plays and role == "actor_infer")):
            draft.put(f"{role}.model_args.dtype", kind)
            decisions.append(f"{role}.model_args.dtype: {kind}, as the trainer computes")


def _rows(draft: Draft) -> None:
    """Finish pairs, tokens and lengths of trainers that learn from rows."""
    say, key_path, pipeline = draft.report.decisions.append, f"{_ARGS}.per_device_train_batch_size", draft.pipeline
    value, loss = draft.get(key_path), taken(draft, "loss_type")
    if pipeline == "dpo" and draft.theirs.get("loss_type") is None:
        draft.put("loss_type", loss[0] if isinstance(loss, list) else loss)
        say(f"loss_type: {draft.get('loss_type')}, by default")
    if isinstance(value, int) and pipeline != "sft" and not is_for(draft, "KTO"):
        draft.put(key_path, 2 * value, draft.made_by.get(key_path))
        say(f"{key_path}: {2 * value} sequences, {value} pairs")
    draft.put("truncation", "filter" if pipeline == "reward_model" else "right")
    say(f"truncation: {draft.get('truncation')}, what TRL does to rows of more than max_length tokens")
    say(f"the batch is {place(draft)}; epochs follow each other without a smaller batch between them")
    if pipeline == "reward_model":
        say("the head starts at 0 here, in TRL at random; a response that is text ends with </s> in TRL, where it is "
            "scored, and here with its last token")  # fmt: skip
    else:
        say("what the chat template writes behind the token that ends a response, as ChatML's line feed, is learnt in "
            "TRL, not here")  # fmt: skip
    if is_for(draft, "KTO"):
        say("the KL of kto is that of all rows of a step, in TRL of those of a micro-batch")
    unresolved = {key_path for use, key_path in draft.unresolved if use in draft.report.uses}
    if pipeline == "sft" and not draft.has("train_on") and "train_on" not in unresolved:
        ask(draft, "train_on", "completion_only_loss", "by the data", _ALL_TOKENS)


def _rollouts(draft: Draft) -> None:
    """Finish the prompts of a step, its optimizer steps, rewards, a teacher."""
    say, name, mode = draft.report.decisions.append, f"rewards.{DOMAIN}.name", str(draft.get("loss_agg_mode"))
    per_device, passes, rounds, n = (draft.get(key, 1) for key in (
        f"{_ARGS}.per_device_train_batch_size", f"{_ARGS}.gradient_accumulation_steps", "ppo_epochs",
        "num_return_sequences_in_group"))  # fmt: skip
    n = n if draft.has("num_return_sequences_in_group") or draft.pipeline == "distill" else 8
    updates, loss, devices, placed = 1.0, taken(draft, "loss_type"), count_of(draft), place(draft)
    if all(isinstance(size, int) and size > 0 for size in (per_device, passes, n, rounds)):
        size, use = next((draft.memo[key] for key in ("generation_batch_size", "steps_per_generation")
                          if key in draft.memo), (passes, None))  # fmt: skip
        completions = size if use and use.key == "generation_batch_size" else per_device * devices * size
        prompts = max(1, completions // n)
        draft.put("rollout_batch_size", prompts)
        if use is not None:
            use.note = f"{completions} completions / {n} = prompts"
        more = ", and this" if placed.endswith("yours") else ""
        say(f"rollout_batch_size: {prompts} prompts of {n} completions {placed}{more}")
        if completions % n:
            ask(draft, "rollout_batch_size", "num_generations", f"{n}, {completions} completions of all devices",
                "no whole groups, so TRL runs it on others: write the prompts of a step of all of them")  # fmt: skip
        say(f"the last prompts of an epoch that don't fill a batch of {prompts} are left out in TRL, here they are in "
            "the next batch")  # fmt: skip
        if completions > per_device * devices * passes and loss in ("dapo", "cispo"):
            say(f"loss_type {loss}: an optimizer step divides by its own tokens; in TRL by the mean of the "
                "generation's steps")  # fmt: skip
        updates = completions / (per_device * devices * passes) * rounds
    _in_steps(draft, updates)
    if draft.get("max_len_mask") and (mode.startswith("seq-mean") or is_for(draft, "RLOO")):
        say("max_len_mask: a response that is left out isn't one of the mean over responses; in TRL it counts as 0")
    if not draft.has("prompt_length"):
        say("prompt_length: 1024; TRL has no bound for prompts, a longer one is an error here")
    if draft.pipeline == "distill":
        draft.put("distill", {"use_as": "loss", "top_k": None, **draft.get("distill", {})})
        say("distill: use_as: loss, top_k: null, the divergence over the whole vocabulary as in TRL")
    elif not draft.has(name):
        draft.put(name, "none")
        draft.report.missing.append(f"{name}: the reward, which TRL's script passes as reward_funcs")
    if draft.has("rewards"):
        draft.put(f"rewards.{DOMAIN}.tag_included", "*")


def _in_steps(draft: Draft, updates: float) -> None:
    """Count in steps: a step here may have several of TRL's. In RLOO's all but the first clip another ratio."""
    for key in ("max_steps", "save_steps", "eval_steps", "logging_steps"):
        value = draft.get(key)
        if updates > 1 and isinstance(value, int) and value > 0:
            draft.put(key, max(1, round(value / updates)), draft.made_by.get(key))
            draft.report.decisions.append(
                f"{key}: {draft.get(key)}, of {updates:g} optimizer steps each; TRL counts {value} of these"
            )
    if is_for(draft, "RLOO"):
        draft.put("adv_estimator", "rloo")
        draft.put("loss_agg_mode", "seq-mean-token-sum")
        draft.report.decisions.append("adv_estimator: rloo, loss_agg_mode: seq-mean-token-sum, as TRL's RLOO has them")
        if updates > 1:
            ask(draft, "policy_loss", "num_iterations", f"{updates:g} optimizer steps per generation",
                 "TRL clips the ratio of the whole response, a product; ppo's is each token's")  # fmt: skip


def _held_out(draft: Draft) -> None:
    """Name the split that TRL's scripts evaluate on."""
    name, key_path = draft.their("dataset_name"), "validation.data_args.file_name"
    if not draft.get("eval_steps") or draft.get("validation_share"):
        return
    if _address(name, None, "x") != name:
        draft.put(key_path, _address(name, draft.their("dataset_config"), taken(draft, "dataset_test_split")))
        draft.report.decisions.append(f"{key_path}: {draft.get(key_path)}, which TRL's script evaluates on")
        if draft.pipeline == "rlvr":
            count = taken(draft, "num_generations_eval") or taken(draft, "num_generations")
            draft.put("validation.generating_args.temperature", taken(draft, "temperature"))
            draft.put("validation.generating_args.num_return_sequences", count)
