"""What is settled at the end of a job of verl: devices, batches, roles, rewards; and jobs that are commands here."""

from __future__ import annotations

import shlex
from typing import Any

from roll.workbench.migrate.conversions import is_engine
from roll.workbench.migrate.draft import Draft, data_parallel, say_curves
from roll.workbench.migrate.overrides import leaves_of, unexpanded_in
from roll.workbench.migrate.report import KeyUse, MigrationReport
from roll.workbench.migrate.sources import PeerFile
from roll.workbench.migrate.table import DOMAIN, patterns
from roll.workbench.migrate.verl import has_critic, theirs

_ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward_model", "teacher")


def finish_verl(draft: Draft) -> None:
    """Put roles on all devices, count batches in responses, make one domain."""
    _folder(draft)
    _roles(draft)
    _devices(draft)
    backends(draft, at_last=True)
    _types(draft)
    _mini_batches(draft)
    _rewards(draft)
    _lengths(draft)
    say_curves(draft, "verl")
    rule = draft.get("train_infer_correction")
    filters = isinstance(rule, dict) and any(key.endswith(("_low", "_high")) and rule[key] for key in rule)
    if filters and str(draft.get("loss_agg_mode")).startswith("seq-mean"):
        draft.report.decisions.append(
            "loss_agg_mode: responses that train_infer_correction rejects leave the mean over responses here; in verl "
            "they count in it, so that its loss is smaller by their share"
        )
    draft.report.decisions.append(
        "num_train_epochs: prompts that don't fill a step are followed by the next epoch's here, and left out in verl: "
        "of N rows it takes N // batch steps x epochs, here it is N x epochs // batch"
    )


def finish_sft(draft: Draft) -> None:
    """Finish devices, the batch, columns."""
    _folder(draft)
    _devices(draft)
    _types(draft)
    _mini_batches(draft)
    if not draft.has("actor_train.data_args.messages") and "messages_key" not in draft.theirs.get("data", {}):
        for key, default in (("prompt", "question"), ("response", "answer")):
            for role in ("actor_train", "validation"):
                if not draft.has(f"{role}.data_args.{key}") and (role == "actor_train" or draft.has(role)):
                    draft.put(f"{role}.data_args.{key}", default)
                    draft.report.decisions.append(f"{role}.data_args.{key}: {default}, the default of old releases")
    for period, there in (("save_steps", True), ("eval_steps", draft.has("validation"))):
        if there and not draft.get(period):
            draft.put(period, 10**9, draft.made_by.get(period))
            draft.report.decisions.append(f"{period}: 1000000000, so the last step alone, as in verl without a period")
    _needed(draft, "actor_train.data_args.file_name", "the training rows (data.train_files)")
    say_curves(draft, "verl")
    draft.report.decisions += [
        "num_train_epochs: rows that don't fill a step are followed by the next epoch's here, and left out in verl: of "
        "N rows it takes N // batch steps x epochs, here it is N x epochs / batch, the last one smaller",
        "train_on: of a message the end of its turn is learnt, too; verl also learns what the template writes behind "
        "that, such as a line break",
    ]


def _needed(draft: Draft, key_path: str, what: str) -> None:
    if not draft.has(key_path) and not draft.has(f"{key_path.rpartition('.')[0]}.dataset"):
        draft.report.missing.append(f"{key_path}: {what}")


def _folder(draft: Draft) -> None:
    if not draft.has("output_dir"):
        name = draft.get("exp_name", draft.pipeline)
        name = "${exp_name}" if name == "???" else name
        draft.put("output_dir", f"output/{name}")
        draft.report.decisions.append(f"output_dir: output/{name}; checkpoints stay where checkpoint_config says")


def _drop(draft: Draft, keys: tuple[str, ...], why: str) -> None:
    for key in keys:
        if draft.has(key):
            draft.abandon(key, why)


def _roles(draft: Draft) -> None:
    """Keep only roles that the run has: a reference and constants for the KL terms that are on."""
    in_loss, in_reward = draft.get("use_kl_loss"), draft.get("add_token_level_kl")
    if not in_loss:
        _drop(draft, ("kl_loss_coef", "kl_loss_type"), "use_kl_loss is off")
    if not in_reward:
        _drop(draft, ("init_kl_coef", "kl_penalty", "target_kl"), "use_kl_in_reward is off")
    if not in_loss and not in_reward:
        _drop(draft, ("reference",), "no KL term is on")
    elif not draft.has("reference"):
        draft.put("reference", {})
    if in_loss and in_reward:
        draft.put("allow_both_kl", True)
        draft.report.decisions.append("allow_both_kl: true, as KL is in the reward and in the loss")
    estimator = draft.get("adv_estimator")
    if not has_critic(draft):
        _drop(draft, ("critic", "critic_warmup", "value_clip"), f"adv_estimator {estimator} has no critic")
    elif not draft.has("critic"):
        draft.put("critic", {})
    if draft.get(f"rewards.{DOMAIN}.name") != "reward_model":
        _drop(draft, ("reward_model",), "no reward model scores by itself")
    if not theirs(draft, "distillation.enabled"):
        _drop(draft, ("teacher", "distill"), "distillation is off")
    if estimator not in ("gae", "reinforce_plus_plus", "optimal_token_baseline"):
        _drop(draft, ("gamma", "lambd"), f"adv_estimator {estimator} doesn't discount")


def backends(draft: Draft, *, at_last: bool = False) -> None:
    """Give roles that the job has and names no backend for that of the actor.

    `at_last`: only those of roles that stayed.
    """
    family = str(draft.get("actor_train.strategy_args.strategy_name", "fsdp2_train")).rpartition("_")[0]
    for role, section, name in (("reference", "actor_rollout_ref.ref", f"{family}_infer"),
                                ("critic", "critic", f"{family}_train"),
                                ("reward_model", "reward_model.enable", "fsdp2_infer")):  # fmt: skip
        key_path = f"{role}.strategy_args.strategy_name"
        if (draft.has(role) or (not at_last and draft.their(section, False) is not False)) and not draft.has(key_path):
            _fill(draft, f"{section.removesuffix('.enable')}.strategy", name, key_path)


def _fill(draft: Draft, key: str, value: str, key_path: str) -> None:
    use = KeyUse(key=key, value=value, fate="translated", ours=(key_path,))
    draft.put(key_path, value, use)
    draft.report.filled.append(use)


def _types(draft: Draft) -> None:
    """Write types that verl has by default, and drop keys that a backend has no use for."""
    for role in _ROLES:
        if role != "actor_infer" and draft.has(role) and not draft.has(f"{role}.model_args.dtype"):
            _fill(draft, "verl computes in bfloat16", "bf16", f"{role}.model_args.dtype")
    for role, name in draft.strategies.items():
        size = f"{role}.model_args.ulysses_size"
        if name.startswith("megatron") and draft.get(size, 1) != 1:
            draft.abandon(size, "megatron_* splits sequences by context_parallel_size")
        if name.startswith("megatron") or is_engine(name):
            for key in ("use_liger", "use_fused_kernels", "activation_offload", "torch_compile", "lora_rank"):
                if draft.has(f"{role}.model_args.{key}") and not draft.get(f"{role}.model_args.{key}"):
                    draft.abandon(f"{role}.model_args.{key}", f"{name} has no such choice")
        if name.startswith("fsdp2") and _devices_of(draft) < 2:
            _drop(draft, (f"{role}.strategy_args.strategy_config.offload_policy",), "one rank isn't sharded")


def _devices_of(draft: Draft) -> int:
    nodes, each = draft.get("num_nodes", 1), draft.get("num_gpus_per_node", 1)
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) and 0 < nodes * each <= 8192 else 0


def _devices(draft: Draft) -> None:
    """Let all roles share all devices; passes of all devices are divided by them."""
    count = _devices_of(draft)
    if not count and draft.pipeline != "sft":
        return
    count = max(1, count)
    for role in _ROLES:
        if role == "actor_train" or (role == "actor_infer" and draft.pipeline != "sft") or draft.has(role):
            draft.put(f"{role}.device_mapping", f"0-{count - 1}" if count > 1 else [0])
    draft.report.decisions.append(
        f"device_mapping: all roles share the {count} devices (nnodes x n_gpus_per_node), as in verl's hybrid engine"
    )
    for key_path, (value, use) in draft.memo.get("micro", {}).items():
        if not draft.has(key_path.partition(".")[0]):
            use.fate, use.ours, use.note = "dead", (), "the run has no such role"
        elif isinstance(value, int) and (not draft.has(key_path) or draft.made_by.get(key_path) in draft.report.filled):
            draft.put(key_path, max(1, value // count), use)
            use.note = f"of all devices: {value} / {count} = {max(1, value // count)}"
        else:
            use.fate, use.ours, use.note = "dead", (), "the number per device says it"


def _mini_batches(draft: Draft) -> None:
    """Turn a mini-batch in prompts into one in passes of responses; and convert what is counted in steps."""
    offline = draft.pipeline == "sft"
    n, epochs = (1, 1) if offline else (draft.get(key, 1) for key in ("num_return_sequences_in_group", "ppo_epochs"))
    actor_size, actor_use = draft.memo.get("mini:actor_train", (None, None))
    prompts = actor_size if offline else draft.get("rollout_batch_size", 1024)
    for role in ("actor_train", "critic"):
        args = f"{role}.training_args"
        per_device_path, accumulation_path = (
            f"{args}.per_device_train_batch_size",
            f"{args}.gradient_accumulation_steps",
        )
        if not draft.has(role) or draft.get(accumulation_path) == "???":
            continue
        size, use = draft.memo.get(f"mini:{role}", (actor_size, actor_use))
        size, per_device, ranks = size or actor_size, draft.get(per_device_path, 1), data_parallel(draft, role)
        if not all(isinstance(number, int) and number > 0 for number in (size, n, prompts, per_device, epochs)):
            draft.put(accumulation_path, "???", use)
            if use is not None:
                use.fate, use.note = "absent", "whole numbers above 0 were expected of it, of n, passes and prompts"
            continue
        responses = min(size, prompts) * n
        wide = min(per_device, max(1, responses // ranks))
        while wide > 1 and responses % (wide * ranks):
            wide -= 1
        deep = max(1, responses // (wide * ranks))
        used = draft.made_by.get(per_device_path)
        draft.put(per_device_path, wide, used)
        draft.put(accumulation_path, deep, use)
        rows = f"{responses} rows" if offline else f"{min(size, prompts)} prompts x {n} = {responses} responses"
        if use is not None:
            product = wide * deep * ranks
            use.note = f"{rows}: {wide} per device x {deep} accumulation x {ranks} data-parallel = {product}"
            use.fate = "translated" if product == responses and wide == per_device else "decided"
        if wide != per_device and used is not None:
            used.fate, used.note = "decided", f"{wide}, so that passes fill the mini-batch"
        if not offline:
            _in_optimizer_steps(draft, args, -(-prompts // min(size, prompts)) * epochs)


def _in_optimizer_steps(draft: Draft, args: str, number: int) -> None:
    """Convert schedules, which count optimizer steps here and the steps of the run in verl."""
    if number < 2:
        return
    for key in ("warmup_steps", "lr_decay_steps", "num_decay_steps"):
        if isinstance(value := draft.get(f"{args}.{key}"), int):
            use = draft.made_by.get(f"{args}.{key}")
            draft.put(f"{args}.{key}", value * number, use)
            if use is not None:
                use.note = f"{value} steps of {number} mini-batches: optimizer steps are counted here"
    shape = draft.get(f"{args}.lr_scheduler_type", "constant")
    draft.report.decisions.append(
        f"{args}: {number} optimizer steps of a step have mini-batches drawn by the run's seed, in verl they follow "
        "the data" + ("" if shape == "constant" else f"; {shape} moves with each of them, in verl with each step")
    )


def _rewards(draft: Draft) -> None:
    """Let one domain take rows of every data source."""
    key_path = f"rewards.{DOMAIN}.name"
    if not draft.has(key_path):
        name = "gsm8k" if "gsm8k" in str(draft.get("actor_train.data_args.file_name", "")).lower() else "math_rule"
        draft.put(key_path, name)
        draft.report.decisions.append(
            f"{key_path}: {name}; verl chooses by the column data_source, here a domain has its tags: "
            "see docs/rewards.md"
        )
    draft.put(f"rewards.{DOMAIN}.tag_included", "*")
    if draft.get(key_path) == "reward_model":
        _needed(draft, "reward_model.model_args.model_name_or_path", "the model that scores")
    if draft.has("teacher"):
        _needed(draft, "teacher.model_args.model_name_or_path", "the model that teaches")
    if draft.has("critic") and not draft.has("pretrain"):
        _needed(draft, "critic.model_args.model_name_or_path", "the critic's model")
    _needed(draft, "actor_train.data_args.file_name", "the training prompts (data.train_files)")


def _lengths(draft: Draft) -> None:
    """Let engines hold what the run needs."""
    config = "actor_infer.strategy_args.strategy_config"
    prompt, response = draft.get("prompt_length", 512), draft.get("response_length", 512)
    if not isinstance(prompt, int) or not isinstance(response, int):
        return
    requests = draft.get("max_running_requests", 128)
    unchunked = draft.get(f"{config}.enable_chunked_prefill") is False
    for key, least in (("max_model_len", prompt + response),
                       ("max_num_batched_tokens", prompt + response if unchunked else requests)):  # fmt: skip
        if isinstance(value := draft.get(f"{config}.{key}"), int) and isinstance(least, int) and value < least:
            draft.put(f"{config}.{key}", least)
            draft.report.decisions.append(f"{config}.{key}: {least}; {value} was given")
    if draft.has("overlong_shaping"):
        buffer: Any = draft.get("overlong_shaping.buffer", min(4096, response))
        draft.put("overlong_shaping.buffer", min(buffer, response) if isinstance(buffer, int) else buffer)
    section = "validation.generating_args"
    number = draft.get(f"{section}.num_return_sequences", 1)
    if isinstance(number, int) and number > 1 and draft.get(f"{section}.temperature") == 0:
        draft.put(f"{section}.num_return_sequences", 1)
        draft.report.decisions.append(f"{section}.num_return_sequences: 1; {number} greedy responses would be the same")


_COMMANDS = {"verl_generation": "generate", "verl_evaluation": "score"}


def command_of(system: str, source: PeerFile, report: MigrationReport) -> None:
    """Put the command that does the job into the report, and what became of every key."""
    table = patterns(system)
    positional, options, overrides, reward = [], [], [], {}
    for path, value in leaves_of(source.tree):
        row = table.find(path.split("."))
        use = KeyUse(
            key=path, value=value, fate="dead" if row is None else row.fate, note="" if row is None else row.note
        )
        report.uses.append(use)
        if stopped := unexpanded_in(value):
            use.fate, use.note, use.value = "unexpanded", ", ".join(stopped.parts), str(stopped)
        elif row is None or row.fate in ("dead", "absent") or value in (None, {}):
            use.fate = "dead" if value in (None, {}) else use.fate
            use.note = use.note or "it asks for nothing"
        elif row.how == "prompt_column":
            known = value in ("prompt", "messages")
            use.fate = "dead" if known else "decided"
            use.note = "the column is found by itself" if known else f"rename the column {value} to prompt"
        else:
            to, value = row.to[0], row.values.get(value, value)
            use.ours = (to,)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if to == "--reward":
                reward[path.rpartition(".")[2]] = text
            elif to.isupper():
                positional.append(text)
            else:
                options += [to, text] if to.startswith("-") else []
                overrides += [] if to.startswith("-") else [f"{to}={text}"]
    if system == "verl_generation" and "--temperature" not in options:
        options += ["--temperature", "1.0"]  # theirs; one response is greedy here
    if reward.get("path"):
        options += ["--reward", f"{reward['path']}:{reward.get('name', 'compute_score')}"]
    words = ["roll", "eval", _COMMANDS[system], *(positional or ["FILE"]), *options, *overrides]
    report.command = " ".join(shlex.quote(word) for word in words)
    if system == "verl_generation" and "--model" not in options:
        report.missing.append("--model: the model that answers")
    if not positional:
        report.missing.append("FILE: the data file")
