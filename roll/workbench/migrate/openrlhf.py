"""OpenRLHF: conversions of its flags, and what is settled at the end. Checked with the release of openrlhf.json."""

from __future__ import annotations

import difflib
import math
from types import NoneType
from typing import Any

from roll.workbench.migrate.conversions import LAST, conversion, first, mapped
from roll.workbench.migrate.draft import Draft, Step, data_parallel, say_curves
from roll.workbench.migrate.openrlhf_flags import SCRIPTS, kinds_of
from roll.workbench.migrate.overrides import Unexpanded, at
from roll.workbench.migrate.table import systems

_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_TRAINED = ("actor_train", "critic")
_ROLES = (*_TRAINED, "reference", "reward_model")
DOMAIN = "all"
"""The one domain that all rows belong to."""
_NEVER = 1.0e9
"""A bound that no ratio of probabilities reaches."""
_GOES_ON = ("translated", "decided", "dead")
_UNKNOWN = "nothing is known about this key"


def flag(draft: Draft, key: str) -> Any:
    """Return what a flag says, or its default; that, too, for a text where a number belongs."""
    script = next(name for name, pipeline in SCRIPTS.items() if pipeline == draft.pipeline)
    kind, default = kinds_of(script).get(key, ("str", None))
    value = at(draft.theirs, key)
    wrong = isinstance(value, Unexpanded) or (kind in ("int", "float") and not isinstance(value, (int, float)))
    return default if value is None or wrong else value


def _holds(draft: Draft, condition: str) -> bool:
    """Whether a flag is on (`a.b`), has one of some values (`a.b=c|d`), or another one (`a.b!=c`)."""
    key, equals, values = condition.partition("=")
    value = flag(draft, key.rstrip("!"))
    return (str(value) in values.split("|")) is not key.endswith("!") if equals else bool(value)


def _every(draft: Draft, place: str, *, trained: bool) -> list[str]:
    """A place of the actor's at every role that there is; schedules and optimizers are of one role."""
    if not place.startswith("actor_train.") or ".training_args." in place:
        return [place]
    named = [(role, place.replace("actor_train", role, 1)) for role in (_TRAINED if trained else _ROLES)]
    return [there for role, there in named if (role == "actor_train" or draft.has(role)) and draft.knows(there)]


@conversion
def flag_if(step: Step) -> None:
    """The value in our words, for every role that has the key, under the conditions of its row.

    `if`: only where that holds; else nothing, or with `else` it is asked for. `also`: further places, where it is on.
    `given`: not its default. `trained`: of actor and critic alone. What is `ask` in our words is asked for.
    """
    draft, rule, value = step.draft, step.row.rule, mapped(step)
    step.places = tuple(place.replace("<name>", DOMAIN) for place in step.places)
    is_given, on = step.use in draft.report.uses, step.value not in (None, False, [], "")
    free = draft.hint(step.place) is Any and (value in (None, False) or (not is_given and value == step.value))
    if step.role in _ROLES[1:] and not draft.has(step.role):
        step.dead(f"the run has no {step.role}")
    elif "if" in rule and not _holds(draft, rule["if"]):
        step.absent(step.row.note) if on and "else" in rule else step.dead(f"it acts with {rule['if']}")
    elif value == "ask":
        step.absent(step.row.note)
    elif free or (rule.get("given") and not is_given) or (value is None and isinstance(step.value, bool)):
        step.dead("it is off" if not on else "the default here too")
    else:
        for number, place in enumerate(step.places):
            part = value[number] if isinstance(value, list) and len(value) == len(step.places) > 1 else value
            for there in _every(draft, place, trained=rule.get("trained", False)):
                step.put(part, there)
        for place, more in rule.get("also", {}).items() if on else ():
            step.put(more, place)


@conversion
def flag_settled(step: Step) -> None:
    """Settled together with other flags, when roles and ranks are known."""
    step.draft.memo[step.use.key] = step.use
    step.use.ours = step.places if "batch" in step.last or step.use in step.draft.report.uses else ()


def _in_reward(draft: Draft) -> bool:
    """Whether a KL penalty is taken off the reward of each token."""
    return flag(draft, "algo.kl.init_coef") > 0 and not flag(draft, "algo.kl.use_loss")


def _has_critic(draft: Draft) -> bool:
    return draft.pipeline == "rlvr" and flag(draft, "algo.advantage.estimator") == "gae"


@first
def flag_zero(step: Step) -> None:
    """DeepSpeed's stage, for the roles that the run has."""
    draft, stage, ppo = step.draft, step.value, step.draft.pipeline == "rlvr"
    roles = {"actor_train": "train", **({"critic": "train"} if _has_critic(draft) else {})}
    if draft.pipeline == "dpo" or (ppo and flag(draft, "algo.kl.init_coef") > 0):
        roles["reference"] = "infer"
    scored = ppo and flag(draft, "reward.model_name_or_path")
    if scored and not flag(draft, "reward.remote_url") and not flag(draft, "train.agent_func_path"):
        roles["reward_model"] = "infer"
        draft.put(f"rewards.{DOMAIN}.name", "reward_model", step.use)
        if _has_critic(draft) and not flag(draft, "critic.model_name_or_path"):
            draft.put("critic.model_args.model_name_or_path", str(scored).split(",")[0], step.use)
    if ppo:
        draft.put("actor_infer", {"strategy_args": {"strategy_name": "vllm"}, "model_args": {"dtype": "bf16"}})
    for role, way in roles.items():
        draft.put(f"{role}.strategy_args.strategy_name", f"deepspeed_{way}")
        if way == "train" or stage == 3:
            step.put(stage, step.place.replace("actor_train", role, 1))


@conversion
def flag_max_norm(step: Step) -> None:
    """The bound of the gradient's norm, one for all roles; 0 is none."""
    norms = [flag(step.draft, f"{role}.max_norm") for role in ("actor", "critic")]
    if step.use.key.startswith("critic.") and not _has_critic(step.draft):
        step.dead("the run has no critic")
    elif _has_critic(step.draft) and norms[0] != norms[1]:
        step.absent(f"it is one bound for actor and critic, which have {norms[0]} and {norms[1]}")
    else:
        step.put(step.value or None)


@conversion
def flag_epochs(step: Step) -> None:
    """Passes over the rows, or over the responses of a step."""
    step.put(step.value, step.places[step.draft.pipeline == "rlvr"])


@conversion
def flag_freezing(step: Step) -> None:
    """First steps in which the critic alone trains."""
    if step.value < 0:
        step.dead("below 0 is none")
    elif _has_critic(step.draft):
        step.put(step.value + 1)
    else:
        step.absent("without a critic nothing is trained in these steps")


@conversion
def flag_data(step: Step) -> None:
    """Data sets, several with commas between them; those of the hub with their split."""
    given = ",".join(map(str, step.value)) if isinstance(step.value, list) else str(step.value or "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    split = flag(step.draft, {"prompt_dataset": "data.prompt_split", "dataset": "data.dataset_split"}[step.last]
                 if step.place.startswith("actor_train") else "eval.split")  # fmt: skip
    never = step.draft.pipeline == "rlvr" and flag(step.draft, "eval.steps") == -1
    if not names or (never and step.place.startswith("validation")):
        step.dead("eval.steps is -1, which is never" if names else "none is named")
    elif any("@" in name or name.endswith(".py") for name in names):
        step.absent("data sets are named without @folder, and have no scripts: name the files")
    else:
        of_hub = "" if split in (None, "", "train") else f"#{split}"
        step.put([name if name.endswith(_FILES) else f"{name}{of_hub}" for name in names])


@conversion
def flag_input(step: Step) -> None:
    """The column with the prompt, or in fine-tuning without another one with conversations."""
    draft = step.draft
    whole = draft.pipeline == "sft" and flag(draft, "data.apply_chat_template") and not flag(draft, "data.output_key")
    step.put(step.value, "actor_train.data_args.messages" if whole else step.place)


@conversion
def flag_template(step: Step) -> None:
    """How a row becomes text: the tokenizer's template or one of its own, or else a text with {}."""
    text, own = (flag(step.draft, f"data.{key}") for key in ("input_template", "tokenizer_chat_template"))
    chat = flag(step.draft, "data.apply_chat_template")
    if (step.last == "input_template") is bool(chat):
        step.dead(f"data.apply_chat_template is {'on' if chat else 'off'}")
    elif chat:
        step.put(own or "native")
    else:
        step.put(text.replace("{}", "{prompt}") if text and "{}" in text else "plain")


@conversion
def flag_max_len(step: Step) -> None:
    """The longest sequence: of a prompt and what rollout.max_new_tokens leaves, or of a row."""
    draft, new = step.draft, flag(step.draft, "rollout.max_new_tokens")
    if draft.pipeline != "rlvr":
        step.put(step.value)
        step.put("right", "truncation")
        step.decide("longer rows are cut; there the last token is then the end of the sequence")
    elif at(draft.theirs, "prompt_max_len") is not None or at(draft.theirs, "generate_max_len") is not None:
        step.dead("prompt_max_len and generate_max_len say it")
    elif isinstance(new, int) and 0 < new < step.value:
        step.put(step.value - new, "prompt_length")
        step.put("left", "truncation")
        step.note(f"what {new} new tokens leave for the prompt, of which the end is kept")
    else:
        step.places = ("response_length",)
        step.absent(f"a response has there what its prompt leaves of {step.value}: choose it, and prompt_length")


@conversion
def flag_uncorrected(step: Step) -> None:
    """Sampling that the trainer's log-probs don't know, left as it is: the bound of the correction never acts."""
    draft, is_async = step.draft, step.last == "async_enable"
    if not is_async:
        step.put(step.value)
        if flag(draft, "eval.dataset"):
            step.put(step.value, "validation.generating_args.top_p")
    elif step.value:
        step.put(flag(draft, "train.async_queue_size"))
    off = flag(draft, "algo.advantage.is_correction_level") == "off"
    if off and (step.value is True if is_async else step.value < 1):
        step.put(None, "train_infer_correction.importance_upper")
        step.put(_NEVER, "train_infer_correction.ratio_high")
        step.decide("without a correction, as there: the bound of train_infer_correction never acts")


@conversion
def flag_remote(step: Step) -> None:
    """A reward function, a server, an agent: each has its own protocol there."""
    step.places = tuple(place.replace("<name>", DOMAIN) for place in step.places)
    if not step.value:
        step.dead("none is named")
    elif step.last == "agent_func_path":
        step.absent(
            "an AgentExecutor becomes a class of your own, or an environment of pipeline: agentic: docs/rewards.md"
        )
    elif flag(step.draft, "train.agent_func_path"):
        step.dead("train.agent_func_path scores")
    elif str(step.value).endswith(".py"):
        step.absent(f"reward_func(queries, prompts, labels) of {step.value} becomes a function (response, task): "
                    "docs/rewards.md")  # fmt: skip
    else:
        step.absent("the reward http asks a server, with another protocol: docs/rewards.md")


@conversion
def flag_estimator(step: Step) -> None:
    """An advantage estimator; where a KL is in the reward, with its baseline taken off the score before it."""
    group = {"adv_estimator": "reinforce", "reward_norm": "group"}
    centred = {**group, "reward_shift": True}
    n, in_reward = flag(step.draft, "rollout.n_samples_per_prompt"), _in_reward(step.draft)
    routes: dict[str, dict[str, Any]] = {
        "gae": {"adv_estimator": "gae", "whiten_advantages": True},
        "reinforce": {"adv_estimator": "reinforce", "whiten_advantages": True},
        "reinforce_baseline": {**centred, "whiten_advantages": True},
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
    for place, value in routes[step.value].items():
        step.put(value, place)
    notes = ["whiten_advantages divides by the unbiased deviation"] if "whiten_advantages" in routes[step.value] else []
    notes += ["reward_norm takes the baseline off the score"] if "reward_norm" in routes[step.value] else []
    if notes:
        step.decide("; ".join(notes))


@conversion
def flag_clip(step: Step) -> None:
    """Bounds of the reward, there after the baseline is taken off."""
    named = step.draft.get("adv_estimator") in ("grpo", "dr_grpo", "rloo")
    if not isinstance(step.value, list) or len(step.value) != 2 or step.value[0] != -step.value[1]:
        step.absent("the bounds are + and - the same number")
    else:
        step.put(float(step.value[1]), "advantage_clip" if named else "reward_clip")


LAST.add("flag_clip")


@conversion
def flag_policy(step: Step) -> None:
    """The loss, and how it is averaged: KL, entropy and the critic's loss are always a mean over tokens there."""
    draft, gspo = step.draft, flag(step.draft, "actor.policy_loss_type") == "gspo"
    others = (flag(draft, "algo.kl.init_coef") > 0 and flag(draft, "algo.kl.use_loss")) or _has_critic(draft) or (
        flag(draft, "actor.entropy_coef") or 0) > 0  # fmt: skip
    if step.last == "policy_loss_type":
        step.put(step.value)
        uneven = _in_reward(draft) or _has_critic(draft) or flag(draft, "algo.advantage.gamma") != 1
        if gspo and (uneven or flag(draft, "algo.advantage.is_correction_level") != "off"):
            step.absent("gspo here has one advantage per response, and its ratio is to the trainer's old log-probs")
    elif gspo or step.value == "seq-mean-token-mean":
        step.put("seq-mean-token-mean")
        if others:
            step.absent(
                "the KL, the entropy or the critic's loss stays a mean over tokens there, here all are averaged alike"
            )
    else:
        step.put(step.value)


@conversion
def flag_kl(step: Step) -> None:
    """A key of the KL term, which is in the reward or in the loss."""
    draft, in_loss = step.draft, flag(step.draft, "algo.kl.use_loss")
    unbiased, word = flag(draft, "algo.kl.unbiased_gradient"), step.last
    if not flag(draft, "algo.kl.init_coef") > 0:
        step.dead("algo.kl.init_coef is 0: there is no KL term")
    elif word in ("target", "horizon") and (step.value is None or not flag(draft, "algo.kl.target")):
        step.dead("algo.kl.target is null")
    elif word in ("target", "horizon") and in_loss:
        step.absent("the coefficient of a KL in the loss stays as it is")
    elif word == "unbiased_gradient" and not in_loss:
        step.dead("a KL in the reward has no gradient")
    elif word == "estimator" and in_loss and step.value == "k1" and not unbiased:
        step.places = step.places[1:]
        step.absent("its gradient there is that of the log-prob, whose mean is 0; k2 has that of the KL")
    else:
        # Of two places the first is the reward's, but for use_loss.
        second = len(step.places) > 1 and word != "unbiased_gradient" and bool(in_loss) is (word != "use_loss")
        step.put(word == "use_loss" or step.value, step.places[second])
        if word == "unbiased_gradient" and step.value:
            step.put(10.0, "decoupled_ppo_cap")


@conversion
def flag_correction(step: Step) -> None:
    """Importance weights and rejection between sampler and trainer, from four flags together."""
    draft, fix = step.draft, "train_infer_correction"
    words = ("level", "mode", "gating", "threshold")
    level, mode, gating, bounds = (flag(draft, f"algo.advantage.is_correction_{word}") for word in words)
    if level == "off" or flag(draft, "actor.policy_loss_type") == "gspo":
        step.dead("is_correction_level is off" if level == "off" else "actor.policy_loss_type: gspo asks for it")
        return
    if step.last != "is_correction_level":
        step.use.ours = step.places
        return
    low, high = [0.0, *bounds][-2:] if isinstance(bounds, list) else (0.0, bounds)
    weigh: dict[str, Any] = {"level": "token", "importance_upper": high}
    band = {"ratio_low": low or None, "ratio_high": high}
    if (level, gating, mode) == ("token", "ratio", "clip"):
        weigh["importance_lower"] = low
    elif (level, gating, mode) == ("token", "ratio", "mask"):
        weigh |= {"rejection": "icepop", **band}
    elif (level, gating, mode) == ("token", "tv", "mask"):
        weigh |= {"importance_upper": _NEVER, "rejection": "icepop", "difference_low": -high, "difference_high": high}
    else:
        step.absent("weights of tokens go with filters of tokens, by the ratio or the difference of probabilities")
        return
    for word, value in weigh.items():
        step.put(value, f"{fix}.{word}")


@conversion
def flag_eval(step: Step) -> None:
    """Steps between validations."""
    if isinstance(step.value, int) and step.value > 0:
        step.put(step.value)
    elif step.draft.pipeline != "rlvr" and flag(step.draft, "eval.dataset"):
        step.quiet("once per epoch there: write the steps of an epoch")
    else:
        step.dead("-1 is never" if step.draft.pipeline == "rlvr" else "eval.dataset isn't given")


@first
def flag_trackers(step: Step) -> None:
    """Trackers, and what wandb is told."""
    named = {"wandb": "logger.wandb.key", "tensorboard": "logger.tensorboard_dir"}
    if not step.value or (step.place == "tracker_kwargs" and not flag(step.draft, named["wandb"])):
        step.dead("none is asked for")
        return
    if step.place == "tracker_kwargs":
        step.put(step.value, f"tracker_kwargs.wandb.{step.last.replace('org', 'entity')}")
        return
    step.put(["stdout", *(name for name, key in named.items() if flag(step.draft, key))])
    if step.last == "tensorboard_dir":
        step.put(step.value, "logging_dir")


# --- at the end ------------------------------------------------------------------------------------------------------


def finish_openrlhf(draft: Draft) -> None:
    """Devices, batches, what is validated and scored, flags that nothing is known about."""
    if draft.pipeline == "rlvr":
        _placed(draft)
        draft.put(f"rewards.{DOMAIN}.tag_included", "*")
        if draft.has("reward_model"):
            draft.put("reward_model.template", draft.get("actor_train.data_args.template"))
    else:
        _offline(draft)
    for role in _TRAINED:
        if draft.has(role):
            _batch(draft, role)
    for key, value in dict(draft.get("actor_train.data_args", {})).items():
        if draft.has("validation") and key not in ("file_name", "shuffle"):
            draft.put(f"validation.data_args.{key}", value)
    needed = {"pretrain": "the model", "actor_train.data_args.file_name": "the training rows"}
    needed |= {f"rewards.{DOMAIN}.name": "what scores a response"} if draft.pipeline == "rlvr" else {}
    for place, what in needed.items():
        if not draft.has(place):
            draft.put(place, "???")
            draft.report.missing.append(f"{place}: {what}, which the script doesn't say")
    if (weight := draft.get(f"rewards.{DOMAIN}.weight")) and draft.has("overlong_shaping"):  # it isn't weighted
        draft.put("overlong_shaping.penalty", weight * flag(draft, "reward.overlong_penalty_factor"))
    _names(draft)
    _refused(draft)
    say_curves(draft, "OpenRLHF")
    if draft.pipeline == "rlvr":
        draft.report.decisions.append(
            "num_train_epochs: prompts that don't fill a step are followed by the next episode's here; in OpenRLHF "
            "they are a smaller step at the end of each episode"
        )
    if draft.get("whiten_advantages"):
        draft.report.decisions.append(
            "whiten_advantages: the deviation of n tokens is taken with n - 1 here, with n in OpenRLHF, whose "
            "advantages are larger by 1 / 2n"
        )


def _refused(draft: Draft) -> None:
    """What their parser refuses: flags that nothing is known about, with what may be meant; texts as numbers."""
    kinds = kinds_of(next(name for name, pipeline in SCRIPTS.items() if pipeline == draft.pipeline))
    names = [*kinds, *(row.key for row in systems()["openrlhf"].rows if row.now)]
    for use in draft.report.uses:
        if use.note.startswith(_UNKNOWN) and (near := difflib.get_close_matches(use.key, names, 1)):
            use.note += f"; did you mean {near[0]}?"
        kind = kinds.get(use.key, ("",))[0]
        if kind in ("int", "float") and not isinstance(use.value, (int, float, NoneType)) and use.fate in _GOES_ON:
            use.fate, use.note = "absent", f"{kind} was expected"
            draft.ask(use, use.ours[0] if use.ours else "")


def _names(draft: Draft) -> None:
    """A name without slashes, and a folder for the model that holds no checkpoints."""
    if isinstance(name := draft.get("exp_name"), str):
        draft.put("exp_name", name.strip().replace("/", "_"), draft.made_by.get("exp_name"))
    model, states = (str(draft.get(key, "")).rstrip("/") for key in ("export_dir", "checkpoint_config.output_dir"))
    if model not in ("", "???") and f"{states}/".startswith(f"{model}/"):
        draft.put("export_dir", f"{model}/hf_model", draft.made_by.get("export_dir"))
        draft.report.decisions.append(f"export_dir: {model}/hf_model, apart from the checkpoints")


def _placed(draft: Draft) -> None:
    """Slots of the roles, in groups of their own or shared."""
    sizes = {"actor_train": "actor", "reference": "ref", "critic": "critic", "reward_model": "reward"}
    together, asynchronous = flag(draft, "train.colocate_all"), flag(draft, "train.async_enable")
    with_actor, with_critic = flag(draft, "train.colocate_actor_ref"), flag(draft, "train.colocate_critic_reward")
    begin, after = {"actor_train": 0}, 0
    for role, name in sizes.items():
        if not draft.has(role):
            continue
        count = flag(draft, f"{name}.num_nodes") * flag(draft, f"{name}.num_gpus_per_node")
        shared = {"reference": "actor_train" if with_actor else "", "reward_model": "critic" if with_critic else ""}
        begin[role] = 0 if together else begin.get(shared.get(role, ""), after)
        draft.put(f"{role}.device_mapping", _range(begin[role], count))
        after = max(after, begin[role] + count)
    count = (flag(draft, "vllm.num_engines") or 0) * flag(draft, "vllm.tensor_parallel_size")
    start = 0 if (together and not asynchronous) or not count else after
    count = count or flag(draft, "actor.num_nodes") * flag(draft, "actor.num_gpus_per_node")
    draft.put("actor_infer.device_mapping", _range(start, count))
    total, spread = max(after, start + count), [role for role in begin if flag(draft, f"{sizes[role]}.num_nodes") > 1]
    machine = max(flag(draft, f"{sizes[role]}.num_gpus_per_node") for role in spread or begin)
    draft.put("num_gpus_per_node", machine if spread else max(machine, min(8, total)))
    draft.report.decisions.append(f"num_gpus_per_node: {draft.get('num_gpus_per_node')}; change it for other machines. "
                                  f"Roles have {total} slots together, colocated ones the same")  # fmt: skip


def _range(start: int, count: int) -> Any:
    return f"{start}-{start + count - 1}" if 1 < count <= 8192 else [start]


def _offline(draft: Draft) -> None:
    """Devices, and what differs by the script."""
    sizes = [size for key in ("num_nodes", "num_gpus_per_node") if isinstance(size := draft.get(key, 1), int)]
    count = math.prod(sizes)
    draft.put("actor_train.device_mapping", _range(0, count))
    said = f"actor_train.device_mapping: {count} device{'s' * (count != 1)}; the batch is the same on any number: with "
    draft.report.decisions.append(f"{said}more, lower gradient_accumulation_steps accordingly")
    if draft.has("reference"):
        draft.put("reference.device_mapping", _range(0, count))
    if draft.pipeline == "reward_model":
        draft.report.decisions.append("the classifier's head starts at 0, there at random")
    if not flag(draft, "data.apply_chat_template"):
        draft.report.decisions.append(
            "a row is its prompt, its response and the end-of-sequence token, tokenised apart; there it is one text "
            "with a blank before that token"
        )


def _batch(draft: Draft, role: str) -> None:
    """Rows of an optimizer step: per device x accumulation x ranks, of pairs both."""
    micro, size, ranks = (
        flag(draft, "train.micro_batch_size"),
        flag(draft, "train.batch_size"),
        data_parallel(draft, role),
    )
    if min(micro, size) < 1:
        draft.put(f"{role}.training_args.gradient_accumulation_steps", "???")
        draft.put(f"{role}.training_args.per_device_train_batch_size", micro if micro >= 1 else "???")
        draft.report.missing.append(
            f"{role}.training_args.gradient_accumulation_steps: batch sizes from 1 were expected"
        )
        return
    wide, rows = min(micro, max(1, size // ranks)), 2 if draft.pipeline in ("dpo", "reward_model") else 1
    while size % (wide * ranks) and wide > 1:
        wide -= 1
    deep = max(1, size // (wide * ranks))
    said = f"{wide} per device x {deep} accumulation x {ranks} data-parallel = {wide * deep * ranks}"
    said += ", each a pair of two sequences" if rows > 1 else ""
    for key, word, value in (("micro_batch_size", "per_device_train_batch_size", wide * rows),
                             ("batch_size", "gradient_accumulation_steps", deep)):  # fmt: skip
        use = draft.memo.get(f"train.{key}")
        draft.put(f"{role}.training_args.{word}", value, use)
        if use is not None:
            use.note = said
    use = draft.memo.get("train.batch_size")
    responses = flag(draft, "rollout.batch_size") * flag(draft, "rollout.n_samples_per_prompt") if rows == 1 and \
        draft.pipeline == "rlvr" else size  # fmt: skip
    if use is not None and (wide * deep * ranks != size or responses % size):
        use.fate, use.note = "absent", f"{said}, of {size}; a step has {responses}"
        draft.ask(use, f"{role}.training_args.gradient_accumulation_steps")
