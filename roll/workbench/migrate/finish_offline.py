"""What is settled at the end of fine-tuning with verl, and of TRL's trainers."""

from __future__ import annotations

from roll.workbench.migrate.conversions_verl import DOMAIN
from roll.workbench.migrate.draft import Draft
from roll.workbench.migrate.sizes import data_parallel


def finish_sft(draft: Draft) -> None:
    """Devices, the batch, columns."""
    nodes, each = draft.get("num_nodes", 1), draft.get("num_gpus_per_node", 1)
    count = nodes * each if isinstance(nodes, int) and isinstance(each, int) and 0 < nodes * each <= 8192 else 1
    draft.put("actor_train.device_mapping", f"0-{count - 1}" if count > 1 else [0])
    draft.report.decisions.append(f"actor_train.device_mapping: all {count} devices")
    for key, default in (("strategy_args.strategy_name", "fsdp2_train"), ("model_args.dtype", "bf16")):
        if not draft.has(f"actor_train.{key}"):
            draft.put(f"actor_train.{key}", default)
            draft.report.decisions.append(f"actor_train.{key}: {default}, as in verl")
    _batch(draft, count)
    _columns(draft)
    strategy = str(draft.get("actor_train.strategy_args.strategy_name"))
    if draft.get("actor_train.model_args.ulysses_size", 1) != 1 and strategy.startswith("megatron"):
        draft.abandon("actor_train.model_args.ulysses_size", "megatron_* has context_parallel_size")
    if not draft.has("output_dir"):
        name = draft.get("exp_name", "sft")
        name = "${exp_name}" if name == "???" else name
        draft.put("output_dir", f"output/{name}")
        draft.report.decisions.append(f"output_dir: output/{name}")
    if not draft.has("actor_train.data_args.file_name"):
        draft.report.missing.append("actor_train.data_args.file_name: the training rows (data.train_files)")


def _batch(draft: Draft, count: int) -> None:
    """Rows of an optimizer step: per device x accumulation x ranks."""
    args = "actor_train.training_args"
    place = f"{args}.per_device_train_batch_size"
    found = draft.memo.get(f"micro:{place}")
    if found:
        value, use = found
        if not isinstance(value, int) or "micro_batch_size_per_gpu" in draft.theirs.get("data", {}):
            use.fate, use.ours, use.note = "dead", (), "the number per device says it"
        else:
            draft.put(place, max(1, value // count), use)
            use.note = f"of all devices: {value} / {count}"
    rows, use = draft.memo.get("rows", (256, None))
    ranks, per_device = data_parallel(draft, "actor_train"), draft.get(place, 1)
    if not isinstance(rows, int) or not isinstance(per_device, int):
        return
    wide = max(1, min(per_device, rows // ranks))
    deep = max(1, rows // (wide * ranks))
    draft.put(place, wide, draft.made_by.get(place))
    draft.put(f"{args}.gradient_accumulation_steps", deep, use)
    if use is not None:
        use.note = f"{wide} per device x {deep} accumulation x {ranks} data-parallel = {wide * deep * ranks} rows"
        use.fate = "translated" if wide * deep * ranks == rows else "decided"


def _columns(draft: Draft) -> None:
    """Columns that verl has by default."""
    if draft.has("actor_train.data_args.messages") or "messages_key" in draft.theirs.get("data", {}):
        return
    for key, default in (("prompt", "question"), ("response", "answer")):
        if not draft.has(f"actor_train.data_args.{key}"):
            draft.put(f"actor_train.data_args.{key}", default)
            draft.report.decisions.append(f"actor_train.data_args.{key}: {default}, verl's default column")
            if draft.has("validation"):
                draft.put(f"validation.data_args.{key}", default)


def finish_trl(draft: Draft) -> None:
    """The batch in prompts, a domain, an engine."""
    if draft.pipeline in ("rlvr", "distill"):
        _rollouts(draft)
    elif not draft.has("sequence_length"):
        draft.put("sequence_length", 1024)
        draft.report.decisions.append("sequence_length: 1024, TRL's default max_length")
    if not draft.has("actor_train.data_args.file_name"):
        draft.report.missing.append("actor_train.data_args.file_name: the data, which TRL's script loads itself")
    adapters = draft.get("actor_train.model_args.lora_rank")
    compares = draft.pipeline == "dpo" and draft.get("loss_type", "sigmoid") not in ("orpo", "simpo")
    if compares and not draft.has("reference") and not adapters:
        _copied(draft)
    if draft.pipeline == "sft" and not draft.has("actor_train.data_args.messages"):
        draft.put("actor_train.data_args.messages", "messages")
        draft.report.decisions.append("actor_train.data_args.messages: messages, the column of conversations")
    if not draft.has("actor_train.training_args.per_device_train_batch_size"):
        draft.put("actor_train.training_args.per_device_train_batch_size", 8)
        draft.report.decisions.append("per_device_train_batch_size: 8, the default of TRL's trainers")
    if draft.pipeline in ("dpo", "reward_model"):
        key = "actor_train.training_args.per_device_train_batch_size"
        value = draft.get(key)
        if isinstance(value, int):
            draft.put(key, 2 * value)
            draft.report.decisions.append(f"{key}: {2 * value} sequences, {value} pairs")


def _copied(draft: Draft) -> None:
    """The model that TRL copies as the reference, in the same type."""
    kind = draft.get("actor_train.model_args.dtype")
    draft.put("reference", {} if kind is None else {"model_args": {"dtype": kind}})
    draft.report.decisions.append("reference: the starting model, which TRL copies by itself")


def _rollouts(draft: Draft) -> None:
    args = "actor_train.training_args"
    per_device, passes = (draft.get(f"{args}.{key}", default) for key, default in
                          (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)))  # fmt: skip
    n = draft.get("num_return_sequences_in_group", 8)
    if isinstance(per_device, int) and isinstance(passes, int) and isinstance(n, int) and n > 0:
        keys = [key for key in ("generation_batch_size", "steps_per_generation") if key in draft.memo]
        given = draft.memo[keys[0]] if keys else None
        completions = per_device * passes
        if given is not None and isinstance(given[0], int):
            completions = given[0] if given[1].key == "generation_batch_size" else per_device * given[0]
            given[1].ours, given[1].note = ("rollout_batch_size",), f"{completions} completions / {n} = prompts"
        draft.put("rollout_batch_size", max(1, completions // n))
        draft.report.decisions.append(
            f"rollout_batch_size: {max(1, completions // n)} prompts of {n} completions for one device; TRL takes its "
            "processes from accelerate: set actor_train.device_mapping, num_gpus_per_node and this for yours"
        )
    if not draft.has(f"rewards.{DOMAIN}.name") and draft.pipeline == "rlvr":
        draft.put(f"rewards.{DOMAIN}.name", "none")
        draft.report.missing.append(f"rewards.{DOMAIN}.name: the reward, which TRL's script passes as reward_funcs")
    if draft.has("rewards"):
        draft.put(f"rewards.{DOMAIN}.tag_included", "*")
    kind = draft.get("actor_train.model_args.dtype")
    if kind in ("bf16", "fp16") and not draft.has("actor_infer.model_args.dtype"):
        draft.put("actor_infer.model_args.dtype", kind)
        draft.report.decisions.append(f"actor_infer.model_args.dtype: {kind}, as the trainer computes")
    if draft.get("use_kl_loss") and not draft.has("reference") and not draft.get("actor_train.model_args.lora_rank"):
        _copied(draft)
