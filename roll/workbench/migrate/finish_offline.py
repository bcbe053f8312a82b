"""What is settled at the end of fine-tuning with verl."""

from __future__ import annotations

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
