"""What no single key decides: devices, batches, lengths, which roles there are. Each choice is put into the report."""

from __future__ import annotations

from typing import Any

from roll.configs.catalog.loss_table import LOSSES
from roll.configs.errors import NO_VALUE, ConfigError, Violation
from roll.configs.parsing.loader import read_tree
from roll.workbench.migrate.alibaba_roll import finish_roll
from roll.workbench.migrate.conversions import is_engine
from roll.workbench.migrate.draft import Draft, data_parallel, slots_of
from roll.workbench.migrate.openrlhf import finish_openrlhf
from roll.workbench.migrate.report import masked
from roll.workbench.migrate.trl import finish_trl
from roll.workbench.migrate.verl_finish import finish_sft, finish_verl

_MAX_RANK_RESPONSES = 100_000
"""Responses of a rank up to which batches are fitted."""
ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward_model", "teacher", "judge")


def finish(draft: Draft, system: str) -> None:
    """Settle all that is left."""
    finishers = {"roll": finish_roll, "verl": finish_verl, "verl_sft": finish_sft, "trl": finish_trl,
                 "openrlhf": finish_openrlhf}  # fmt: skip
    if system in finishers:
        finishers[system](draft)
    _validation(draft)
    _engines(draft)
    _machines(draft)
    _end(draft)
    _batches(draft)
    _budgets(draft)


def _validation(draft: Draft) -> None:
    """Turn validation off if nothing is held out to validate on."""
    offline = draft.pipeline in ("sft", "dpo", "reward_model")
    section = "val_env_manager" if draft.pipeline == "agentic" else "validation"
    if section == "validation" and draft.has(section) and not draft.has("validation.data_args.file_name") \
            and not draft.has("validation.data_args.dataset"):  # fmt: skip
        draft.abandon(section, "no validation data is named")
    if draft.has(section) or (offline and draft.get("validation_share")):
        if not draft.get("eval_steps") and not draft.get("val_before_train") and not draft.get("val_only"):
            draft.abandon("val_before_train", "validation is off")
        if not draft.get("eval_steps") and draft.has("save_best"):
            draft.abandon("save_best", "eval_steps is off")
        return
    for key in ("eval_steps", "save_best", "val_before_train", "val_only", "val_batch_size", "log_val_generations",
                "render_save_dir"):  # fmt: skip
        if draft.has(key):
            draft.abandon(key, f"there is no {section}")


def _engines(draft: Draft) -> None:
    """Give each engine the devices of its parallel sizes."""
    for role in ("actor_infer", "judge"):
        name = draft.strategies.get(role, "")
        if not is_engine(name):
            if draft.has(f"{role}.num_gpus_per_worker"):
                draft.abandon(f"{role}.num_gpus_per_worker", f"{name or 'hf_infer'} uses one device per rank")
            continue
        options = draft.get(f"{role}.strategy_args.strategy_config", {})
        options = options if isinstance(options, dict) else {}
        stages = options.get("pp_size" if name == "sglang" else "pipeline_parallel_size", 1)
        tensor, key_path = options.get("tensor_parallel_size", 1), f"{role}.num_gpus_per_worker"
        if not isinstance(stages, int) or not isinstance(tensor, int):
            continue
        needed, explicit = tensor * stages, draft.get(key_path, 1)
        if explicit != needed:
            if name == "sglang" and tensor == 1 and stages == 1 and isinstance(explicit, int):
                draft.put(f"{role}.strategy_args.strategy_config.tensor_parallel_size", explicit)
                decision = (
                    f"{role}.strategy_args.strategy_config.tensor_parallel_size: {explicit}, the devices of one worker"
                )
            else:
                draft.put(key_path, needed)
                decision = f"{key_path}: {needed}, the devices of one engine"
            draft.report.decisions.append(decision)
        slots = slots_of(draft, role)
        per_rank = draft.get(key_path, 1)
        if slots and isinstance(per_rank, int) and per_rank > 0 and len(slots) % per_rank:
            usable = slots[: len(slots) // per_rank * per_rank]
            if usable:
                draft.put(f"{role}.device_mapping", list(usable))
                draft.report.decisions.append(
                    f"{role}.device_mapping: {len(usable)} of {len(slots)} slots, whole engines of {per_rank} devices"
                )


def _machines(draft: Draft) -> None:
    """Set as many machines as the slots need."""
    top = max((max(slots) for role in ROLES if (slots := slots_of(draft, role))), default=-1)
    per_node = draft.get("num_gpus_per_node", 1)
    nodes = draft.get("num_nodes", 1)
    if not isinstance(per_node, int) or not isinstance(nodes, int) or per_node < 1 or top < 0:
        return
    if draft.theirs.get("num_gpus_per_node") is None and top + 1 < per_node and "num_gpus_per_node" in draft.theirs:
        return
    needed = -(-(top + 1) // per_node)
    if needed > nodes:
        draft.put("num_nodes", needed)
        draft.report.decisions.append(
            f"num_nodes: {needed}; the file names slots up to {top}, and a machine has {per_node} (num_gpus_per_node)"
        )


def _end(draft: Draft) -> None:
    """Make sure that a run ends."""
    if draft.has("num_train_epochs") and not draft.has("max_steps"):
        draft.put("max_steps", None)
        draft.report.decisions.append("max_steps: null, so num_train_epochs decides")


def _rows(draft: Draft) -> int:
    """Return responses of a step."""
    size = draft.get("rollout_batch_size", 64)
    if draft.pipeline == "agentic":
        group = draft.get("train_env_manager.group_size", 8)
        return size // group * group if isinstance(size, int) and isinstance(group, int) and group else 0
    number = draft.get("num_return_sequences_in_group", 1 if draft.pipeline == "distill" else 8)
    return size * number if isinstance(size, int) and isinstance(number, int) else 0


def _batches(draft: Draft) -> None:
    """Let mini-batches fill the responses of a step exactly."""
    if draft.pipeline in ("sft", "dpo", "reward_model") or draft.get("val_only"):
        return
    rows = _rows(draft)
    for role in ("actor_train", "critic"):
        args = f"{role}.training_args"
        if not draft.has(role) or rows <= 0:
            continue
        per_device = draft.get(f"{args}.per_device_train_batch_size", 1)
        passes = draft.get(f"{args}.gradient_accumulation_steps", 1)
        ranks = data_parallel(draft, role)
        if not isinstance(per_device, int) or not isinstance(passes, int) or min(per_device, passes) < 1:
            continue
        share = rows // ranks
        if rows % (per_device * passes * ranks) == 0 or rows % ranks or share > _MAX_RANK_RESPONSES:
            continue
        fitting = [(wide, next(deep for deep in range(min(passes, share // wide), 0, -1) if share // wide % deep == 0))
                   for wide in range(min(per_device, share), 0, -1) if share % wide == 0]  # fmt: skip
        wide, deep = max(fitting, key=lambda sizes: (sizes[0] * sizes[1], sizes[0]))
        for key, value in (("per_device_train_batch_size", wide), ("gradient_accumulation_steps", deep)):
            if value != draft.get(f"{args}.{key}", 1):
                draft.put(f"{args}.{key}", value)
        draft.report.decisions.append(
            f"{args}: {wide} per device x {deep} accumulation x {ranks} data-parallel = {wide * deep * ranks}, which "
            f"divides the {rows} responses of a step; {per_device} x {passes} x {ranks} doesn't"
        )


def _budgets(draft: Draft) -> None:
    """Raise token budgets to the longest sequence."""
    prompt, response = (draft.get(f"{part}_length", 1024) for part in ("prompt", "response"))
    both = prompt + response if isinstance(prompt, int) and isinstance(response, int) else 0
    longest = draft.get("sequence_length") or both
    for role in ROLES:
        for way in ("train", "infer"):
            key, switch = f"{role}.max_tokens_per_microbatch_in_{way}", f"{role}.use_dynamic_batching_in_{way}"
            budget: Any = draft.get(key)
            budget = budget if isinstance(budget, int) else 0
            if draft.get(switch) and isinstance(longest, int) and budget < longest:
                draft.put(key, longest)
                decision = f"{key}: {longest}, the longest sequence; {budget or 'nothing'} was given"
                draft.report.decisions.append(decision)
            elif draft.has(key) and not draft.get(switch):
                draft.abandon(key, f"{switch.rpartition('.')[2]} is off")


_ROUNDS = 20
_IDLE = ("this key acts only", "this key has no effect")
"""How the rules begin what they say of a key that would do nothing."""
_OF_LOSSES = {option.key for loss in LOSSES.values() for option in loss.options.values()} | {"pg_clip"}


def settle(draft: Draft, *, look: bool) -> None:
    """Take out keys that would do nothing here, and put what is left to do into the report.

    `look`: also look for the files, models and packages that it names, on this machine.
    """
    missing = draft.report.missing
    for _ in range(_ROUNDS):
        try:
            reading = read_tree(draft.ours, "")
        except ConfigError as error:
            missing += [_line(violation) for violation in error.violations]
            return
        idle = [violation for violation in reading.violations if violation.problem.startswith(_IDLE)]
        if not sum(_take_out(draft, violation) for violation in idle):
            break
    missing += [_line(wrong) for wrong in reading.violations
                if not any(line.startswith(wrong.path.partition("[")[0]) for line in missing)]  # fmt: skip
    if look and reading.config is not None and reading.sound and not reading.violations:
        from roll.configs.checks.prerequisites import prerequisite_violations

        # Roles that share a model say the same of it.
        draft.report.elsewhere += dict.fromkeys(_line(each) for each in prerequisite_violations(reading.config))


def _take_out(draft: Draft, violation: Violation) -> bool:
    """Take out the key; whether there was one."""
    if not draft.has(violation.path):
        return False
    why = violation.problem.removeprefix("this key ").partition(";")[0]
    uses = draft.uses_below(violation.path)
    for use in uses:
        use.note = why
    draft.abandon(violation.path, why)
    if violation.path in _OF_LOSSES:  # what it does in their loss isn't known here
        for use in uses:
            use.fate = "decided"
    return True


def _line(violation: Violation) -> str:
    value = "" if violation.value is NO_VALUE else f" (it is {str(masked(violation.path, violation.value))[:60]})"
    problem = violation.problem or f"{violation.expected}{value}"
    return f"{violation.path}: {problem}{f'; {violation.fix}' if violation.fix else ''}"
