"""OpenRLHF: conversions of its flags, and what is settled at the end. Checked with the release of openrlhf.json."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

from roll.workbench.migrate.conversions import conversion, first, last, mapped
from roll.workbench.migrate.draft import Draft, Step, data_parallel, say_curves
from roll.workbench.migrate.openrlhf_flags import kinds_of
from roll.workbench.migrate.overrides import Unexpanded, at
from roll.workbench.migrate.table import DOMAIN

_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_ROLES = {"actor_train": "actor", "critic": "critic", "reference": "ref", "reward_model": "reward"}
_TRAINED = ("actor_train", "critic")
_NEVER = 1.0e9
"""A bound that no ratio of probabilities reaches."""
_CORRECTION = "algo.advantage.is_correction_"


def flag(draft: Draft, key: str) -> Any:
    """Return what a flag says, or its default; that, too, for a text where a number belongs."""
    kind, default = kinds_of(draft.job).get(key, ("str", None))
    value = at(draft.theirs, key)
    wrong = isinstance(value, Unexpanded) or (kind in ("int", "float") and not isinstance(value, (int, float)))
    return default if value is None or wrong else value


def _holds(draft: Draft, condition: str) -> bool:
    """Return whether a flag is on (`a.b`), is one of some values (`a.b=c|d`) or another (`a.b!=c`); or the next."""
    for part in condition.split(" or "):
        key, equals, values = part.partition("=")
        value = flag(draft, key.rstrip("!"))
        if (str(value) in values.split("|")) is not key.endswith("!") if equals else value:
            return True
    return False


@conversion
def flag_if(step: Step) -> None:
    """Write the value in our words, for every role that has the key, under the conditions of its row.

    `if`: only where that holds; else nothing, or with `else: ask` it is asked for, with `else: next` it goes to the
    row's second place. `also`: further places, where it is on. `given`: not its default. `trained`: of actor and critic
    alone. What is `ask` in our words is asked for.
    """
    draft, rule, value = step.draft, step.row.rule, mapped(step)
    is_explicit, on = step.use in draft.report.uses, step.value not in (None, False, [], "")
    free = draft.hint(step.key_path) is Any and (value in (None, False) or (not is_explicit and value == step.value))
    acts = "if" not in rule or _holds(draft, rule["if"])
    if rule.get("else") == "next":
        step.key_paths, acts = (step.key_paths[not acts],), True
    if step.role in list(_ROLES)[1:] and not draft.has(step.role):
        step.dead(f"the run has no {step.role}")
    elif (acts and value == "ask") or (not acts and on and "else" in rule):
        step.absent(step.row.note)
    elif not acts:
        step.dead(f"it acts with {rule['if']}")
    elif free or (rule.get("given") and not is_explicit) or (value is None and isinstance(step.value, bool)):
        step.dead("the default here too" if on else "it is off")
    else:
        undivided = not isinstance(value, list) or len(value) != len(step.key_paths) or len(value) == 1
        for key_path, part in zip(step.key_paths, [value] * len(step.key_paths) if undivided else value, strict=True):
            for there in _every(draft, key_path, _TRAINED if rule.get("trained") else tuple(_ROLES)):
                step.put(part, there)
        for key_path, more in rule.get("also", {}).items() if on else ():
            step.put(more, key_path)


def _every(draft: Draft, key_path: str, roles: tuple[str, ...]) -> list[str]:
    """Return the actor's key for every role that there is; schedules and optimizers are of one role."""
    if not key_path.startswith("actor_train.") or ".training_args." in key_path:
        return [key_path]
    named = [key_path.replace("actor_train", role, 1) for role in roles if role == "actor_train" or draft.has(role)]
    return [there for there in named if draft.knows(there)]


@conversion
def flag_settled(step: Step) -> None:
    """Leave a flag to be settled together with others, when roles and ranks are known."""
    step.draft.memo[step.use.key] = step.use
    step.use.ours = step.key_paths if "batch" in step.last or step.use in step.draft.report.uses else ()


def _in_reward(draft: Draft) -> bool:
    """Return whether a KL penalty is taken off the reward of each token."""
    return flag(draft, "algo.kl.init_coef") > 0 and not flag(draft, "algo.kl.use_loss")


def _has_critic(draft: Draft) -> bool:
    return flag(draft, "algo.advantage.estimator") == "gae"


@first
def flag_zero(step: Step) -> None:
    """Translate DeepSpeed's stage, for the roles that the run has."""
    draft, ppo = step.draft, step.draft.pipeline == "rlvr"
    scorer = None if flag(draft, "reward.remote_url") or flag(draft, "train.agent_func_path") else \
        flag(draft, "reward.model_name_or_path")  # fmt: skip
    there = {"actor_train": True, "critic": _has_critic(draft), "reward_model": scorer,
             "reference": draft.pipeline == "dpo" or (ppo and flag(draft, "algo.kl.init_coef") > 0)}  # fmt: skip
    if scorer:
        draft.put(f"rewards.{DOMAIN}.name", "reward_model", step.use)
        if there["critic"] and not flag(draft, "critic.model_name_or_path"):
            draft.put("critic.model_args.model_name_or_path", str(scorer).split(",")[0], step.use)
    if ppo:
        draft.put("actor_infer", {"strategy_args": {"strategy_name": "vllm"}, "model_args": {"dtype": "bf16"}})
    for role in (role for role in _ROLES if there[role]):
        draft.put(f"{role}.strategy_args.strategy_name", f"deepspeed_{'train' if role in _TRAINED else 'infer'}")
        if role in _TRAINED or step.value == 3:
            step.put(step.value, step.key_path.replace("actor_train", role, 1))


@conversion
def flag_wandb(step: Step) -> None:
    """Translate options of wandb, where it is a tracker."""
    if step.value and flag(step.draft, "logger.wandb.key"):
        step.put(step.value, f"{step.key_path}.wandb.{step.last.replace('org', 'entity')}")
    else:
        step.dead("wandb isn't asked for")


@conversion
def flag_data(step: Step) -> None:
    """Translate data sets, several with commas between them; those of the hub with their split."""
    draft, validates = step.draft, step.role == "validation"
    text = ",".join(map(str, step.value)) if isinstance(step.value, list) else str(step.value or "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    split = flag(draft, "eval.split" if validates else step.use.key.replace("data.prompt_dataset", "data.prompt_split")
                 .replace("data.dataset", "data.dataset_split"))  # fmt: skip
    if not names or (validates and draft.pipeline == "rlvr" and flag(draft, "eval.steps") == -1):
        step.dead("eval.steps is -1, which is never" if names else "none is named")
    elif any("@" in name or name.endswith(".py") for name in names):
        step.absent("data sets are named without @folder, and have no scripts: name the files")
    else:
        of_hub = "" if split in (None, "", "train") else f"#{split}"
        step.put([name if name.endswith(_FILES) else f"{name}{of_hub}" for name in names])


@conversion
def flag_template(step: Step) -> None:
    """Translate how a row becomes text: the tokenizer's template or one of its own, or else a text with {}."""
    text, own = (flag(step.draft, f"data.{key}") for key in ("input_template", "tokenizer_chat_template"))
    chat = bool(flag(step.draft, "data.apply_chat_template"))
    if (step.last == "input_template") is chat:
        step.dead(f"data.apply_chat_template is {'on' if chat else 'off'}")
    elif chat:
        step.put(own or "native")
    else:
        step.put(text.replace("{}", "{prompt}") if text and "{}" in text else "plain")


@conversion
def flag_max_len(step: Step) -> None:
    """Translate the longest sequence: of a prompt and what rollout.max_new_tokens leaves, or of a row."""
    draft, new = step.draft, flag(step.draft, "rollout.max_new_tokens")
    if draft.pipeline != "rlvr":
        step.put(step.value)
        step.put("right", "truncation")
        step.decide("longer rows are cut; there the last token is then the end of the sequence")
    elif {"prompt_max_len", "generate_max_len"} & draft.theirs.keys():
        step.dead("prompt_max_len and generate_max_len say it")
    elif isinstance(new, int) and 0 < new < step.value:
        step.put(step.value - new, "prompt_length")
        step.put("left", "truncation")
        step.note(f"what {new} new tokens leave for the prompt, of which the end is kept")
    else:
        step.key_paths = ("response_length",)
        step.absent(f"a response has there what its prompt leaves of {step.value}: choose it, and prompt_length")


@conversion
def flag_uncorrected(step: Step) -> None:
    """Leave sampling that the trainer's log-probs don't know as it is: the correction's bound never acts."""
    draft, is_async = step.draft, step.last == "async_enable"
    if not is_async:
        step.put(step.value)
        if flag(draft, "eval.dataset"):
            step.put(step.value, "validation.generating_args.top_p")
    elif step.value:
        step.put(flag(draft, "train.async_queue_size"))
    if flag(draft, f"{_CORRECTION}level") == "off" and (step.value is True if is_async else step.value < 1):
        step.put(None, "train_infer_correction.importance_upper")
        step.put(_NEVER, "train_infer_correction.ratio_high")
        step.decide("without a correction, as there: the bound of train_infer_correction never acts")


@conversion
def flag_estimator(step: Step) -> None:
    """Translate an estimator; where a KL is in the reward, with its baseline taken off the score before it."""
    n, in_reward = flag(step.draft, "rollout.n_samples_per_prompt"), _in_reward(step.draft)
    group = {"adv_estimator": "reinforce", "reward_norm": "group"}
    centred, white = {**group, "reward_shift": True}, {"whiten_advantages": True}
    routes: dict[str, dict[str, Any]] = {
        "gae": {"adv_estimator": "gae", **white},
        "reinforce": {"adv_estimator": "reinforce", **white},
        "reinforce_baseline": {**centred, **white},
        "flash_reinforce": {**centred, "reward_norm": "batch"},
        "dr_grpo": centred if in_reward else {"adv_estimator": "dr_grpo"},
        "group_norm": group if in_reward else {"adv_estimator": "grpo", "adv_estimator_args": {"eps": 1e-9}},
        # The difference to the mean of the others is n / (n - 1) times that to the mean of all.
        "rloo": {**centred, f"rewards.{DOMAIN}.weight": n / (n - 1) if n > 1 else 1.0} if in_reward
        else {"adv_estimator": "rloo"},
    }  # fmt: skip
    if step.value not in routes:
        step.absent(f"OpenRLHF has {', '.join(routes)}")
        return
    for key_path, value in routes[step.value].items():
        step.put(value, key_path)
    says = {"whiten_advantages": "divides by the unbiased deviation: n - 1 for n tokens, there n",
            "reward_norm": "takes the baseline off the score"}  # fmt: skip
    if notes := [f"{key} {text}" for key, text in says.items() if key in routes[step.value]]:
        step.decide("; ".join(notes))


@last
def flag_clip(step: Step) -> None:
    """Translate bounds of the reward, there after the baseline is taken off."""
    if not isinstance(step.value, list) or len(step.value) != 2 or step.value[0] != -step.value[1]:
        step.absent("the bounds are + and - the same number")
    else:
        named = step.draft.get("adv_estimator") in ("grpo", "dr_grpo", "rloo")
        step.put(float(step.value[1]), "advantage_clip" if named else "reward_clip")


@conversion
def flag_policy(step: Step) -> None:
    """Translate the loss and its mean: KL, entropy and the critic's loss are always a mean over tokens there."""
    draft, gspo = step.draft, flag(step.draft, "actor.policy_loss_type") == "gspo"
    in_loss = flag(draft, "algo.kl.init_coef") > 0 and flag(draft, "algo.kl.use_loss")
    is_loss = step.last == "policy_loss_type"
    step.put("seq-mean-token-mean" if gspo and not is_loss else step.value)
    uneven = _in_reward(draft) or _has_critic(draft) or flag(draft, "algo.advantage.gamma") != 1
    if is_loss and gspo and (uneven or flag(draft, f"{_CORRECTION}level") != "off"):
        step.absent("gspo here has one advantage per response, and its ratio is to the trainer's old log-probs")
    others = in_loss or _has_critic(draft) or (flag(draft, "actor.entropy_coef") or 0) > 0
    if not is_loss and (gspo or step.value == "seq-mean-token-mean") and others:
        step.absent("the KL, the entropy or the critic's loss is a mean over tokens there, here all are averaged alike")


@conversion
def flag_kl(step: Step) -> None:
    """Translate a key of the KL term, which is in the reward or in the loss."""
    draft, in_loss, word = step.draft, bool(flag(step.draft, "algo.kl.use_loss")), step.last
    adapts, unbiased = word in ("target", "horizon"), flag(step.draft, "algo.kl.unbiased_gradient")
    if not flag(draft, "algo.kl.init_coef") > 0:
        step.dead("algo.kl.init_coef is 0: there is no KL term")
    elif adapts and not flag(draft, "algo.kl.target"):
        step.dead("algo.kl.target is null")
    elif adapts and in_loss:
        step.absent("the coefficient of a KL in the loss stays as it is")
    elif word == "unbiased_gradient" and not in_loss:
        step.dead("a KL in the reward has no gradient")
    elif word == "estimator" and in_loss and step.value == "k1" and not unbiased:
        step.key_paths = step.key_paths[1:]
        step.absent("its gradient there is that of the log-prob, whose mean is 0; k2 has that of the KL")
    else:
        # Of two places the first is the reward's, but for use_loss.
        second = len(step.key_paths) > 1 and word != "unbiased_gradient" and in_loss is (word != "use_loss")
        step.put(word == "use_loss" or step.value, step.key_paths[second])
        if word == "unbiased_gradient" and step.value:
            step.put(10.0, "decoupled_ppo_cap")


@conversion
def flag_correction(step: Step) -> None:
    """Translate importance weights and rejection between sampler and trainer, from four flags together."""
    level, *way, bounds = (flag(step.draft, _CORRECTION + word) for word in ("level", "gating", "mode", "threshold"))
    low, high = [0.0, *bounds][-2:] if isinstance(bounds, list) else (0.0, bounds)
    if level == "off" or flag(step.draft, "actor.policy_loss_type") == "gspo":
        step.dead("is_correction_level is off" if level == "off" else "actor.policy_loss_type: gspo asks for it")
    elif step.last != "is_correction_level":
        step.use.ours = step.key_paths
    elif level != "token" or way == ["tv", "clip"]:
        step.absent("weights of tokens go with filters of tokens, by the ratio or the difference of probabilities")
    else:
        ways = {"clip": {"importance_upper": high, "importance_lower": low},
                "ratio": {"importance_upper": high, "rejection": "icepop", "ratio_low": low or None,
                          "ratio_high": high},
                "tv": {"importance_upper": _NEVER, "rejection": "icepop", "difference_low": -high,
                       "difference_high": high}}  # fmt: skip
        for word, value in {"level": "token", **ways["clip" if way[1] == "clip" else way[0]]}.items():
            step.put(value, f"train_infer_correction.{word}")


# --- at the end ------------------------------------------------------------------------------------------------------


def finish_openrlhf(draft: Draft) -> None:
    """Finish devices, batches, validation and scoring; note flags that the parser refuses, and differences."""
    data = dict(draft.get("actor_train.data_args", {}))
    (_placed if draft.pipeline == "rlvr" else _offline)(draft)
    if draft.has("reward_model"):
        draft.put("reward_model.template", data.get("template"))
    for role in filter(draft.has, _TRAINED):
        _batch(draft, role)
    for key, value in data.items() if draft.has("validation") else ():
        if key != "file_name":
            draft.put(f"validation.data_args.{key}", value)
    if trackers := [name for name, key in (("wandb", "wandb.key"), ("tensorboard", "tensorboard_dir"))
                    if flag(draft, f"logger.{key}")]:  # fmt: skip
        draft.put("track_with", ["stdout", *trackers])
    if (weight := draft.get(f"rewards.{DOMAIN}.weight")) and draft.has("overlong_shaping"):  # it isn't weighted
        draft.put("overlong_shaping.penalty", weight * flag(draft, "reward.overlong_penalty_factor"))
    _names(draft)
    _refused(draft)
    _ask_for_needed(draft)
    _say(draft)


def _ask_for_needed(draft: Draft) -> None:
    """Ask for what the script doesn't say, and for a bound of which it has two."""
    data, pairs = "actor_train.data_args", draft.pipeline in ("dpo", "reward_model")
    needed = {"pretrain": "the model", f"{data}.file_name": "the training rows"}
    if draft.pipeline == "rlvr":
        draft.put(f"rewards.{DOMAIN}.tag_included", "*")
        needed[f"rewards.{DOMAIN}.name"] = "what scores a response"
    if pairs and not flag(draft, "data.apply_chat_template"):
        needed[f"{data}.prompt"] = "the column with the prompt (there it is part of the texts)"
    unresolved = [key_path for _, key_path in draft.unresolved]
    needed = {key_path: f"{what}, which the script doesn't say" for key_path, what in needed.items()
              if key_path not in unresolved and not draft.has(key_path)}  # fmt: skip
    if _has_critic(draft) and flag(draft, "actor.max_norm") != flag(draft, "critic.max_norm"):
        needed["max_grad_norm"] = "one bound for actor and critic, which have two: actor.max_norm, critic.max_norm"
    if min(flag(draft, "train.micro_batch_size"), flag(draft, "train.batch_size")) < 1:
        needed["actor_train.training_args.gradient_accumulation_steps"] = "batch sizes from 1 were expected"
    for key_path, why in needed.items():
        draft.put(key_path, "???")
        draft.report.missing.append(f"{key_path}: {why}")


def _say(draft: Draft) -> None:
    """Say in what the training differs, which no key changes."""
    online, decisions = draft.pipeline == "rlvr", draft.report.decisions
    plain, validates = not flag(draft, "data.apply_chat_template"), draft.has("validation")
    differs = {
        "num_train_epochs: prompts that don't fill a step are followed by the next episode's here; there they are "
        "a smaller step at the end of each episode": online,
        "eval_steps: once per epoch there: write the steps of an epoch": validates and not draft.get("eval_steps"),
        "the classifier's head starts at 0, there at random": draft.pipeline == "reward_model",
        "a row is its prompt, its response and the end-of-sequence token, tokenised apart; there it is one text with a "
        "blank before that token": plain and not online,
    }  # fmt: skip
    decisions += [text for text, holds in differs.items() if holds]
    say_curves(draft, "OpenRLHF")
    if (model := draft.get("critic.model_args.model_name_or_path")) not in (None, draft.get("pretrain")):
        decisions[-1] = f"critic: the head for values starts at 0, in OpenRLHF as {model} has it, where it has one"


def _refused(draft: Draft) -> None:
    """Refuse texts where their parser wants numbers, and several reward models."""
    for use in draft.report.uses:
        kind = kinds_of(draft.job).get(use.key, ("",))[0]
        text = kind in ("int", "float") and not isinstance(use.value, (int, float, NoneType))
        several = use.key == "reward.model_name_or_path" and "," in str(use.value) and bool(use.ours)
        if (text or several) and use.fate in ("translated", "decided", "dead"):
            use.fate, use.note = "absent", "one model scores" if several else f"{kind} was expected"
            draft.ask(use, use.ours[0] if use.ours else "")


def _names(draft: Draft) -> None:
    """Write a name without slashes, and a folder for the model that holds no checkpoints."""
    if isinstance(name := draft.get("exp_name"), str):
        draft.put("exp_name", name.strip().replace("/", "_"), draft.made_by.get("exp_name"))
    model, states = (str(draft.get(key, "")).rstrip("/") for key in ("export_dir", "checkpoint_config.output_dir"))
    if model not in ("", "???") and f"{states}/".startswith(f"{model}/"):
        draft.put("export_dir", f"{model}/hf_model", draft.made_by.get("export_dir"))
        draft.report.decisions.append(f"export_dir: {model}/hf_model, apart from the checkpoints")


def _placed(draft: Draft) -> None:
    """Place the roles on slots, in groups of their own or shared."""
    per_node = {role: flag(draft, f"{name}.num_gpus_per_node") for role, name in _ROLES.items() if draft.has(role)}
    nodes = {role: flag(draft, f"{_ROLES[role]}.num_nodes") for role in per_node}
    together, asynchronous = flag(draft, "train.colocate_all"), flag(draft, "train.async_enable")
    shared = {"reference": "actor_train" if flag(draft, "train.colocate_actor_ref") else "",
              "reward_model": "critic" if flag(draft, "train.colocate_critic_reward") else ""}  # fmt: skip
    begin, after = {"actor_train": 0}, 0
    for role in ("actor_train", "reference", "critic", "reward_model"):
        if role in nodes:
            begin[role] = 0 if together else begin.get(shared.get(role, ""), after)
            draft.put(f"{role}.device_mapping", _range(begin[role], count := nodes[role] * per_node[role]))
            after = max(after, begin[role] + count)
    count = (flag(draft, "vllm.num_engines") or 0) * flag(draft, "vllm.tensor_parallel_size")
    start = 0 if (together and not asynchronous) or not count else after
    count = count or nodes["actor_train"] * per_node["actor_train"]
    draft.put("actor_infer.device_mapping", _range(start, count))
    total = max(after, start + count)
    spread = [per_node[role] for role in nodes if nodes[role] > 1]
    size = max(spread) if spread else max(*per_node.values(), min(8, total))
    draft.put("num_gpus_per_node", size)
    draft.report.decisions.append(f"num_gpus_per_node: {size}; change it for other machines. Roles have {total} slots "
                                  "together, colocated ones the same")  # fmt: skip


def _range(start: int, count: int) -> Any:
    return f"{start}-{start + count - 1}" if 1 < count <= 8192 else [start]


def _offline(draft: Draft) -> None:
    """Set the devices of one model, or of two that share them."""
    sizes = [size for key in ("num_nodes", "num_gpus_per_node") if isinstance(size := draft.get(key, 1), int)]
    for role in filter(draft.has, ("actor_train", "reference")):
        draft.put(f"{role}.device_mapping", _range(0, math.prod(sizes)))
    draft.report.decisions.append(f"actor_train.device_mapping: {_range(0, math.prod(sizes))}; the batch is the same "
                                  "on more, if you lower gradient_accumulation_steps accordingly")  # fmt: skip


def _batch(draft: Draft, role: str) -> None:
    """Set the rows of an optimizer step: per device x accumulation x ranks, of pairs both."""
    micro, size = (flag(draft, f"train.{key}") for key in ("micro_batch_size", "batch_size"))
    deep_key, ranks = f"{role}.training_args.gradient_accumulation_steps", data_parallel(draft, role)
    if min(micro, size) < 1:
        draft.put(deep_key, "???")
        draft.put(f"{role}.training_args.per_device_train_batch_size", micro if micro >= 1 else "???")
        draft.report.missing.append(f"{deep_key}: batch sizes from 1 were expected")
        return
    wide, rows = max(1, min(micro, size // ranks)), 2 if draft.pipeline in ("dpo", "reward_model") else 1
    while size % (wide * ranks) and wide > 1:
        wide -= 1
    deep = max(1, size // (wide * ranks))
    uses = [draft.memo.get(f"train.{key}") for key in ("micro_batch_size", "batch_size")]
    draft.put(f"{role}.training_args.per_device_train_batch_size", wide * rows, uses[0])
    draft.put(deep_key, deep, uses[1])
    product = f"{wide} per device x {deep} accumulation x {ranks} data-parallel = {wide * deep * ranks}"
    product += ", each a pair of two sequences" if rows > 1 else ""
    for use in filter(None, uses):
        use.note = product
    step = size if draft.pipeline != "rlvr" else \
        flag(draft, "rollout.batch_size") * flag(draft, "rollout.n_samples_per_prompt")  # fmt: skip
    if (use := uses[1]) is not None and (wide * deep * ranks != size or step % size):
        short = wide * deep * ranks != size
        use.fate, use.note = "absent", f"{product}, not {size}" if short else f"a step has {step} responses"
        draft.ask(use, deep_key)
