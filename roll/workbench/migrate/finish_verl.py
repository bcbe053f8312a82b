"""What is settled at the end of a job of verl: devices, mini-batches, which roles and rewards there are."""

from __future__ import annotations

from typing import Any

from roll.workbench.migrate.conversions import is_engine
from roll.workbench.migrate.conversions_verl import DOMAIN
from roll.workbench.migrate.draft import Draft
from roll.workbench.migrate.report import Use
from roll.workbench.migrate.sizes import data_parallel, slots_of


def finish_verl(draft: Draft) -> None:
    """Roles on all devices, batches in responses, one domain."""
    _folders(draft)
    _roles(draft)
    _devices(draft)
    _backends(draft)
    _mini_batches(draft)
    _rewards(draft)
    _lengths(draft)


def _written(draft: Draft, place: str, value: Any, note: str) -> None:
    """Write what verl does without a key."""
    use = Use(key=note, value=value, fate="translated", ours=(place,))
    draft.put(place, value, use)
    draft.report.filled.append(use)


def _folders(draft: Draft) -> None:
    if not draft.has("output_dir"):
        name = draft.get("exp_name", "run")
        name = "${exp_name}" if name == "???" else name
        draft.put("output_dir", f"output/{name}")
        draft.report.decisions.append(f"output_dir: output/{name}; checkpoints stay where checkpoint_config says")


def _roles(draft: Draft) -> None:
    """Only roles that the run has."""
    _kl(draft)
    estimator = draft.get("adv_estimator")
    if estimator not in ("gae", "vapo"):
        _drop(draft, ("critic", "critic_warmup", "value_clip"), f"adv_estimator {estimator} has no critic")
    elif not draft.has("critic"):
        draft.put("critic", {})
    if draft.get(f"rewards.{DOMAIN}.name") != "reward_model":
        _drop(draft, ("reward_model",), "reward_model.enable is false")
    if estimator not in ("gae", "reinforce", "reinforce_plus_plus", "vapo"):
        _drop(draft, ("gamma", "lambd"), f"adv_estimator {estimator} doesn't discount")


def _drop(draft: Draft, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if draft.has(key):
            draft.abandon(key, why)


def _kl(draft: Draft) -> None:
    """A reference and constants for the KL terms that are on."""
    in_loss, in_reward = draft.get("use_kl_loss"), draft.get("add_token_level_kl")
    if not in_loss and not in_reward:
        keys = ("reference", "init_kl_coef", "kl_loss_coef", "kl_loss_type", "kl_penalty", "target_kl")
        _drop(draft, keys, "no KL term is on")
        return
    if not draft.has("reference"):
        draft.put("reference", {})
    if in_loss and in_reward:
        draft.put("allow_both_kl", True)
        draft.report.decisions.append("allow_both_kl: true, as KL is in the reward and in the loss")
    elif in_loss:
        _drop(draft, ("init_kl_coef", "kl_penalty"), "use_kl_in_reward is off")


def backends(draft: Draft, *, at_last: bool = False) -> None:
    """Backends of roles that the job has and names none for: that of the actor.

    `at_last`: only those of roles that stayed.
    """
    family = str(draft.get("actor_train.strategy_args.strategy_name", "fsdp2_train")).rpartition("_")[0]
    defaults = {
        "reference": ("actor_rollout_ref.ref", f"{family}_infer"),
        "critic": ("critic", f"{family}_train"),
        "reward_model": ("reward_model.enable", "fsdp2_infer"),
    }
    for role, (section, name) in defaults.items():
        there = draft.has(role) or (not at_last and draft.their(section, False) is not False)
        if there and not draft.has(f"{role}.strategy_args.strategy_name"):
            _written(draft, f"{role}.strategy_args.strategy_name", name, f"{section.removesuffix('.enable')}.strategy")


def _backends(draft: Draft) -> None:
    """Backends and types that verl has by default."""
    backends(draft, at_last=True)
    for role in ("actor_train", "critic", "reference", "reward_model"):
        if not draft.has(role):
            continue
        if not draft.has(f"{role}.model_args.dtype"):
            _written(draft, f"{role}.model_args.dtype", "bf16", "verl computes in bfloat16")
        if role == "critic" and not draft.has("critic.model_args.model_name_or_path") and not draft.has("pretrain"):
            draft.report.missing.append("critic.model_args.model_name_or_path: the critic's model")
    for role, name in draft.strategies.items():
        if name.startswith("fsdp2") and draft.has(f"{role}.strategy_args.strategy_config"):
            _fsdp(draft, role)
        if name.startswith("megatron") and draft.get(f"{role}.model_args.ulysses_size", 1) != 1:
            draft.abandon(f"{role}.model_args.ulysses_size", "megatron_* splits sequences by context_parallel_size")
        if name.startswith("megatron") or is_engine(name):
            for key in ("use_liger", "use_fused_kernels", "activation_offload", "torch_compile", "lora_rank"):
                if draft.has(f"{role}.model_args.{key}") and not draft.get(f"{role}.model_args.{key}"):
                    draft.abandon(f"{role}.model_args.{key}", f"{name} has no such choice")


def _fsdp(draft: Draft, role: str) -> None:
    if draft.get(f"{role}.strategy_args.strategy_config.offload_policy") and len(slots_of(draft, role)) < 2:
        draft.abandon(f"{role}.strategy_args.strategy_config.offload_policy", "one rank isn't sharded")


def _devices(draft: Draft) -> None:
    """All roles share all devices."""
    nodes, each = draft.get("num_nodes", 1), draft.get("num_gpus_per_node", 1)
    if not isinstance(nodes, int) or not isinstance(each, int) or not 0 < nodes * each <= 8192:
        return
    count = nodes * each
    slots = f"0-{count - 1}" if count > 1 else [0]
    for role in ("actor_train", "actor_infer", "reference", "critic", "reward_model"):
        if role in ("actor_train", "actor_infer") or draft.has(role):
            draft.put(f"{role}.device_mapping", slots)
    draft.report.decisions.append(
        f"device_mapping: all roles share the {count} devices (nnodes x n_gpus_per_node), as in verl's hybrid engine"
    )
    for place in ("actor_train", "critic", "reference", "reward_model"):
        for key in ("per_device_train_batch_size", "infer_batch_size"):
            target = f"{place}.training_args.{key}" if key.startswith("per") else f"{place}.{key}"
            found = draft.memo.get(f"micro:{target}")
            if found and isinstance(found[0], int) and not draft.has(target):
                value, use = found
                draft.put(target, max(1, value // count), use)
                use.note = f"of all devices: {value} / {count} = {max(1, value // count)}"
            elif found:
                found[1].fate, found[1].ours = "dead", ()
                found[1].note = "the number per device says it"


def _mini_batches(draft: Draft) -> None:
    """A mini-batch in prompts there, in passes of responses here."""
    n = draft.get("num_return_sequences_in_group", 1)
    actor_size = draft.memo.get("mini:actor_train", (256, None))[0]
    prompts = draft.get("rollout_batch_size", 1024)
    for role in ("actor_train", "critic"):
        if not draft.has(role):
            continue
        size, use = draft.memo.get(f"mini:{role}", (actor_size, None))
        size = actor_size if size is None else size
        if not isinstance(size, int) or not isinstance(n, int) or not isinstance(prompts, int):
            continue
        ranks = data_parallel(draft, role)
        args = f"{role}.training_args"
        per_device = draft.get(f"{args}.per_device_train_batch_size", 1)
        per_device = per_device if isinstance(per_device, int) else 1
        responses = min(size, prompts) * n
        wide = min(per_device, max(1, responses // ranks))
        while wide > 1 and responses % (wide * ranks):
            wide -= 1
        deep = max(1, responses // (wide * ranks))
        draft.put(f"{args}.per_device_train_batch_size", wide, draft.made_by.get(f"{args}.per_device_train_batch_size"))
        draft.put(f"{args}.gradient_accumulation_steps", deep, use)
        said = f"{min(size, prompts)} prompts x {n} = {responses} responses: {wide} per device x {deep} accumulation x "
        said += f"{ranks} data-parallel = {wide * deep * ranks}"
        if use is not None:
            use.note = said
            if wide * deep * ranks != responses or wide != per_device:
                use.fate = "decided"
        else:
            draft.report.decisions.append(f"{args}: a mini-batch of {said}")
        used = draft.made_by.get(f"{args}.per_device_train_batch_size")
        if wide != per_device and used is not None:
            used.fate, used.note = "decided", f"{wide}, so that passes fill the mini-batch"


def _rewards(draft: Draft) -> None:
    """One domain takes rows of every data source."""
    place = f"rewards.{DOMAIN}.name"
    if not draft.has(place):
        files = str(draft.get("actor_train.data_args.file_name", "")).lower()
        name = "gsm8k" if "gsm8k" in files else "math_rule"
        draft.put(place, name)
        draft.report.decisions.append(
            f"{place}: {name}; verl chooses by the column data_source, here a domain has its tags: see docs/rewards.md"
        )
    draft.put(f"rewards.{DOMAIN}.tag_included", "*")
    if draft.get(place) == "reward_model" and not draft.has("reward_model.model_args.model_name_or_path"):
        draft.report.missing.append("reward_model.model_args.model_name_or_path: the model that scores")
    if not draft.has("actor_train.data_args.file_name") and not draft.has("actor_train.data_args.dataset"):
        draft.report.missing.append("actor_train.data_args.file_name: the training prompts (data.train_files)")


def _lengths(draft: Draft) -> None:
    """Engines hold what the run needs."""
    config = "actor_infer.strategy_args.strategy_config"
    prompt, response = draft.get("prompt_length", 512), draft.get("response_length", 512)
    if not isinstance(prompt, int) or not isinstance(response, int):
        return
    if isinstance(value := draft.get(f"{config}.max_model_len"), int) and value < prompt + response:
        draft.put(f"{config}.max_model_len", prompt + response)
        draft.report.decisions.append(f"{config}.max_model_len: {prompt + response}; {value} was given")
    budget, requests = draft.get(f"{config}.max_num_batched_tokens"), draft.get("max_running_requests", 128)
    if isinstance(budget, int) and isinstance(requests, int) and budget < requests:
        draft.put(f"{config}.max_num_batched_tokens", requests)
    chunked = draft.get(f"{config}.enable_chunked_prefill")
    if chunked is False and isinstance(budget, int) and budget < prompt + response:
        draft.put(f"{config}.max_num_batched_tokens", prompt + response)
        draft.report.decisions.append(f"{config}.max_num_batched_tokens: {prompt + response}, the longest sequence")
    buffer = draft.get("overlong_shaping.buffer")
    if isinstance(buffer, int) and buffer > response:
        draft.put("overlong_shaping.buffer", response)
    if draft.has("overlong_shaping") and not draft.has("overlong_shaping.buffer"):
        draft.put("overlong_shaping.buffer", min(4096, response))
    number = draft.get("validation.generating_args.num_return_sequences", 1)
    greedy = draft.get("validation.generating_args.do_sample") is False
    if isinstance(number, int) and number > 1 and (greedy or draft.get("validation.generating_args.temperature") == 0):
        draft.put("validation.generating_args.num_return_sequences", 1)
        draft.report.decisions.append(
            f"validation.generating_args.num_return_sequences: 1; {number} greedy responses would all be the same"
        )
