"""What is settled at the end of a file of Alibaba's ROLL."""

from __future__ import annotations

from typing import Any

from roll.workbench.migrate.conversions import is_engine
from roll.workbench.migrate.draft import Draft, leaves_of
from roll.workbench.migrate.sizes import data_parallel

_OF_TRAINING = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "recompute_granularity",
                "recompute_method", "recompute_num_layers")  # fmt: skip


def finish_roll(draft: Draft) -> None:
    """Roles, lengths, environments, rows."""
    _roles(draft)
    _lengths(draft)
    _batch_of_pairs(draft)
    if draft.pipeline == "agentic":
        _environments(draft)
    if draft.pipeline in ("rlvr", "distill"):
        _prompts(draft)
        _domains(draft)
    if draft.pipeline in ("sft", "dpo"):
        _rows(draft)
    _asynchronous(draft)


def _drop(draft: Draft, place: str, why: str) -> None:
    if draft.has(place):
        draft.abandon(place, why)


def _roles(draft: Draft) -> None:
    """Only roles that the run has."""
    if draft.get("adv_estimator", "grpo") not in ("gae", "vapo"):
        _drop(draft, "critic", f"adv_estimator {draft.get('adv_estimator')} has no critic")
    kl = draft.get("use_kl_loss") or draft.get("add_token_level_kl")
    if draft.has("reference") and not kl and draft.pipeline in ("rlvr", "agentic", "distill"):
        draft.report.decisions.append("reference: kept, but no KL term uses it, so it isn't started")
    if not draft.get("add_token_level_kl"):
        for key in ("target_kl", "kl_horizon"):
            _drop(draft, key, "add_token_level_kl is off")
    if not draft.get("target_kl"):
        _drop(draft, "kl_horizon", "target_kl is null")
    if not draft.get("dual_clip_loss"):
        _drop(draft, "dual_clip_c", "dual_clip_loss is off")
    if draft.get("sft_loss_coef") is not None and draft.get("rl_loss_coef") == 0 and not draft.get("sft_loss_coef"):
        draft.put("rl_loss_coef", 1.0)
    for role in ("actor_train", "actor_infer", "reference", "critic", "teacher", "reward_model"):
        _role(draft, role)


def _role(draft: Draft, role: str) -> None:
    """What a role's backend and work leave no place for."""
    name = draft.strategies.get(role, "")
    if draft.get(f"{role}.world_size") is not None and draft.get(f"{role}.device_mapping") is not None:
        _drop(draft, f"{role}.world_size", "device_mapping says it")
    if draft.has(role) and not is_engine(name) and draft.get(f"{role}.num_gpus_per_worker", 1) != 1:
        _drop(draft, f"{role}.num_gpus_per_worker", "one device per rank")
    if role in ("reference", "teacher", "reward_model"):
        for key in _OF_TRAINING:
            _drop(draft, f"{role}.strategy_args.strategy_config.{key}", f"{role} doesn't train")
    if name.startswith("megatron"):
        _megatron(draft, role)


def _megatron(draft: Draft, role: str) -> None:
    """Sizes of 1 that only mean something above it."""
    config = f"{role}.strategy_args.strategy_config"
    if draft.get(f"{config}.tensor_model_parallel_size", 1) == 1 and draft.get(f"{config}.sequence_parallel"):
        _drop(draft, f"{config}.sequence_parallel", "tensor_model_parallel_size is 1")
    stages, virtual = (draft.get(f"{config}.{key}pipeline_model_parallel_size", 1) for key in ("", "virtual_"))
    if stages == 1 and virtual not in (None, 1):
        _drop(draft, f"{config}.virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size is 1")
    off = draft.get(f"{role}.model_args.disable_gradient_checkpointing")
    if off and draft.has(f"{config}.recompute_granularity"):
        _drop(draft, f"{config}.recompute_granularity", "disable_gradient_checkpointing is true")
    granularity = draft.get(f"{config}.recompute_granularity") or (None if off else "full")
    if draft.get(f"{config}.moe_layer_recompute") and granularity == "full":
        _drop(draft, f"{config}.moe_layer_recompute", "whole layers are recomputed anyway")


def _lengths(draft: Draft) -> None:
    """A prompt and a response fit into a sequence."""
    if draft.pipeline not in ("rlvr", "agentic", "distill"):
        _row_lengths(draft)
        return
    total = draft.get("sequence_length")
    if isinstance(total, int):
        (_turn_lengths if draft.pipeline == "agentic" else _prompt_lengths)(draft, total)
    limit = draft.get("response_length", 1024)
    for section in ("actor_infer", "validation", "val_env_manager"):
        place = f"{section}.generating_args.max_new_tokens"
        value = draft.get(place)
        if isinstance(value, int) and isinstance(limit, int) and value > limit:
            draft.put(place, limit)
            draft.report.decisions.append(f"{place}: {limit}, at most response_length; {value} was given")
    place = "actor_infer.strategy_args.strategy_config.max_model_len"
    sizes = [draft.get("prompt_length", 1024), limit, draft.get(place)]
    if not all(isinstance(size, int) for size in sizes):
        return
    longest = draft.get("sequence_length") or sizes[0] + sizes[1]
    if isinstance(longest, int) and sizes[2] < longest:
        draft.report.decisions.append(f"{place}: {longest}, the run's longest sequence; {draft.get(place)} was given")
        draft.put(place, longest)


def _row_lengths(draft: Draft) -> None:
    """Finished rows have one length."""
    for key in ("prompt_length", "response_length"):
        _drop(draft, key, "rows are finished; sequence_length bounds them")
    if draft.has("sequence_length"):
        return
    lengths = [draft.their(key, 0) for key in ("prompt_length", "response_length")]
    total = sum(length for length in lengths if isinstance(length, int))
    if total:
        draft.put("sequence_length", total)
        draft.report.decisions.append(f"sequence_length: {total}, prompt and response together")


def _turn_lengths(draft: Draft, total: int) -> None:
    """An episode has one length there; here the longest response of a turn, and the rest before it."""
    prompt, response = draft.get("prompt_length"), draft.get("response_length")
    bound = draft.get("actor_infer.generating_args.max_new_tokens")
    envs: Any = draft.get("custom_envs") or {}
    steps = [env.get("max_tokens_per_step") for env in envs.values() if isinstance(env, dict)]
    longest = max([value for value in (bound, response, *steps) if isinstance(value, int)], default=min(512, total))
    if not isinstance(response, int):
        response = max(1, min(longest, total - 1))
        draft.put("response_length", response)
    if not isinstance(prompt, int) or prompt + response > total:
        draft.put("prompt_length", max(1, total - response))
    draft.report.decisions.append(
        f"response_length {response} and prompt_length {draft.get('prompt_length')}: the longest response of a turn, "
        f"and what is left of sequence_length {total} for what is before it"
    )


def _prompt_lengths(draft: Draft, total: int) -> None:
    """Prompt and response share a sequence."""
    prompt, response = draft.get("prompt_length", 1024), draft.get("response_length")
    prompt = prompt if isinstance(prompt, int) else 1024
    if not isinstance(response, int):
        response = max(1, total - prompt)
        draft.put("response_length", response)
        draft.report.decisions.append(f"response_length: {response}, sequence_length less prompt_length")
    if prompt + response > total:
        draft.put("sequence_length", prompt + response)
        draft.report.decisions.append(f"sequence_length: {prompt + response}, prompt and response together")


def _batch_of_pairs(draft: Draft) -> None:
    """DPO's batch is in pairs; a pair has two sequences."""
    pairs, use = draft.memo.get("pairs", (None, None))
    if not isinstance(pairs, int):
        return
    args = "actor_train.training_args"
    ranks = data_parallel(draft, "actor_train")
    per_device = draft.get(f"{args}.per_device_train_batch_size", 1)
    wide = min(per_device, max(1, 2 * pairs // ranks)) if isinstance(per_device, int) else 1
    while wide > 1 and (2 * pairs) % (wide * ranks):
        wide -= 1
    deep = max(1, 2 * pairs // (wide * ranks))
    draft.put(f"{args}.per_device_train_batch_size", wide)
    draft.put(f"{args}.gradient_accumulation_steps", deep, use)
    use.fate = "decided"
    product = f"{wide} per device x {deep} accumulation x {ranks} data-parallel"
    use.note = f"{pairs} pairs are {2 * pairs} sequences: {product}"


def _environments(draft: Draft) -> None:
    """Environments that are played, with groups that are whole."""
    envs: Any = draft.get("custom_envs") or {}
    for manager in ("train_env_manager", "val_env_manager"):
        if not draft.has(manager):
            continue
        tags = draft.get(f"{manager}.tags") or []
        for tag in tags if isinstance(tags, list) else [tags]:
            if tag not in envs:
                draft.report.missing.append(f"custom_envs.{tag}: {manager}.tags names it")
        traj = draft.get(f"{manager}.max_traj_per_env")
        if traj == 0:
            draft.put(f"{manager}.max_traj_per_env", -1)
    if draft.has("render_save_dir") and draft.has("val_env_manager") and not draft.get("log_val_generations"):
        draft.put("log_val_generations", 4)
        draft.report.decisions.append("log_val_generations: 4, the validation episodes that render_save_dir shows")
    size = draft.get("val_batch_size")
    if isinstance(size, int) and size < 1:
        _drop(draft, "val_batch_size", "below 0 is one round of the environments")
    if draft.has("val_env_manager") and not draft.get("eval_steps"):
        draft.abandon("val_env_manager", "eval_steps is 0")
    if draft.get("adv_estimator") in ("gigpo", "step_reinforce"):
        _drop(draft, "reward_clip", f"{draft.get('adv_estimator')} takes rewards as they are")
    else:
        for key in ("step_reward_gamma", "step_reward_weight", "episode_reward_weight"):
            if draft.has(key):
                _drop(draft, key, f"adv_estimator {draft.get('adv_estimator')} doesn't read it")


def _prompts(draft: Draft) -> None:
    """One column of prompts; every file once."""
    for section in ("actor_train", "validation"):
        place = f"{section}.data_args"
        if draft.get(f"{place}.prompt") and draft.get(f"{place}.messages"):
            _drop(draft, f"{place}.prompt", "messages says it")


def _domains(draft: Draft) -> None:
    """Shares of domains that there are; tags without two owners."""
    rewards: Any = draft.get("rewards") or {}
    shares: Any = draft.get("actor_train.data_args.domain_interleave_probs")
    if isinstance(shares, dict) and rewards:
        known = {name: share for name, share in shares.items() if name in rewards and share}
        if known.keys() != shares.keys():
            total = sum(known.values())
            fixed = {name: round(share / total, 6) for name, share in known.items()} if total else {}
            if fixed:
                first = next(iter(fixed))
                fixed[first] = round(fixed[first] + 1 - sum(fixed.values()), 6)
                draft.put("actor_train.data_args.domain_interleave_probs", fixed)
            else:
                _drop(draft, "actor_train.data_args.domain_interleave_probs", "no domain of rewards has a share")
            gone = ", ".join(sorted(shares.keys() - known.keys()))
            draft.report.decisions.append(f"domain_interleave_probs: without {gone}, which rewards doesn't have")
    if len(rewards) == 1:
        name = next(iter(rewards))
        if not draft.get(f"rewards.{name}.tag_included"):
            draft.put(f"rewards.{name}.tag_included", "*")
            draft.report.decisions.append(f"rewards.{name}.tag_included: '*', the only domain takes rows of any tag")
    if not rewards and draft.pipeline == "rlvr":
        draft.report.missing.append("rewards: at least one domain, e.g. rewards: {math: {name: math_rule}}")
    if any(str(path).endswith(".name") and value == "judge" for path, value in leaves_of({"r": rewards})):
        if not draft.has("judge.model_args.model_name_or_path") and not draft.has("judge.endpoint"):
            draft.report.missing.append("judge: a model or an endpoint that grades")
    elif draft.has("judge"):
        _drop(draft, "judge", "no domain is graded by a judge")


def _rows(draft: Draft) -> None:
    """Finished rows are in one form."""
    if draft.get("actor_train.data_args.messages"):
        for key in ("prompt", "response"):
            for section in ("actor_train", "validation"):
                _drop(draft, f"{section}.data_args.{key}", "messages says it")
    if draft.pipeline == "sft" and draft.has("teacher") and not draft.has("distill.coef"):
        draft.report.decisions.append("distill: the teacher alone teaches, sft_coef is 0")


def _asynchronous(draft: Draft) -> None:
    """Samples of older weights are corrected for, or that they aren't is said."""
    ratio = draft.get("async_generation_ratio")
    if not ratio or draft.has("train_infer_correction"):
        return
    if draft.get("policy_loss") in ("topr", "tis", "cispo", "decoupled_ppo"):
        return
    draft.put("train_infer_correction", {"level": "token", "importance_upper": 2.0})
    draft.report.decisions.append(
        "train_infer_correction: {level: token, importance_upper: 2}, because async_generation_ratio is above 0 and "
        "nothing else corrects for samples of older weights; allow_uncorrected_async does without, as ROLL does"
    )
    _drop(draft, "is_use_additional_prompts", "generation that runs ahead keeps engines busy")
