"""What is settled at the end of TRL's trainers."""

from __future__ import annotations

from roll.workbench.migrate.draft import Draft
from roll.workbench.migrate.table import DOMAIN


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
