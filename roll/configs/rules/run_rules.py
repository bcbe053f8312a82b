"""Rules between keys of the run: lengths, sampling, schedule, names. Each yields what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.errors import Violation, nearest, no_effect, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.checkpoint_config import STATE_CONTENTS
from roll.configs.schema.replay_source import parse_replay_from
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import GeneratingArgs


def length_rules(config: RLConfig) -> Iterator[Violation]:
    """Token limits."""
    total = config.prompt_length + config.response_length
    if config.sequence_length is not None and config.sequence_length < total:
        sums = f"{config.prompt_length} + {config.response_length} = {total}"
        expected = f"at least prompt_length + response_length = {sums}"
        yield Violation("sequence_length", expected, "raise it, or remove it", config.sequence_length)
    threshold = config.error_max_len_threshold
    one_response = not isinstance(config, AgenticConfig)  # an episode of several may be longer than each of them
    if one_response and config.error_max_len_clip and threshold is not None and threshold > config.response_length:
        expected = f"at most response_length ({config.response_length}), which no response exceeds"
        yield Violation("error_max_len_threshold", expected, "", threshold)


def token_budget_rules(config: RunConfig) -> Iterator[Violation]:
    """Budgets of dynamic batching hold at least one sequence."""
    for role, worker in config.sections.items():
        for way in ("train", "infer"):
            switch = f"use_dynamic_batching_in_{way}"
            if not getattr(worker, switch, False):
                continue
            key = f"max_tokens_per_microbatch_in_{way}"
            budget = getattr(worker, key)
            if budget is None:
                yield Violation(f"{role}.{key}", f"a number of tokens, because {switch} is on", "", None)
            elif budget < config.max_sequence_length:
                expected = f"at least the longest sequence, {config.max_sequence_length} tokens"
                yield Violation(f"{role}.{key}", expected, "raise it, or lower the lengths", budget)


def sampling_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that sampling in training is what the trainer's log-probs describe; validation is free."""
    path, args = "actor_infer.generating_args", config.actor_infer.generating_args
    yield from _generating_rules(config, path, args)
    if not config.val_only:
        if args.temperature <= 0 or not args.do_sample:
            key, value = ("do_sample", False) if not args.do_sample else ("temperature", args.temperature)
            expected = "sampling at a temperature above 0: greedy responses of one prompt are all the same"
            yield Violation(f"{path}.{key}", expected, f"{path}.temperature=1", value)
        yield from _untracked_truncation(config, path, args)
    n = config.group_size
    if args.num_return_sequences not in (None, n):
        expected = f"{config.group_size_key} ({n}), which rules in training"
        yield Violation(f"{path}.num_return_sequences", expected, "remove it", args.num_return_sequences)
    yield from _fire_rules(config, path, args)
    if config.validation_sampling is not None:
        yield from _generating_rules(config, *config.validation_sampling)


def _generating_rules(config: RLConfig, path: str, args: GeneratingArgs) -> Iterator[Violation]:
    if args.max_new_tokens is not None and args.max_new_tokens > config.response_length:
        expected = f"at most response_length ({config.response_length})"
        yield Violation(f"{path}.max_new_tokens", expected, "raise response_length", args.max_new_tokens)
    if "" in args.stop_strings:
        key, expected = f"{path}.stop_strings", "texts that aren't empty"
        yield Violation(key, expected, "remove the empty one", list(args.stop_strings))


def _fire_rules(config: RLConfig, path: str, args: GeneratingArgs) -> Iterator[Violation]:
    """Check that a first token of its own leaves others to train on, and is no part of a stop string."""
    if args.fire_temperature is None:
        return
    if args.stop_strings:
        message = "a stop string that begins in the first token isn't found: that token is sampled by itself"
        yield problem(f"{path}.fire_temperature", message, f"remove it, or {path}.stop_strings")
    if (args.max_new_tokens or config.response_length) < 2:
        message = "responses of one token have none that the policy chose"
        yield problem(f"{path}.fire_temperature", message, "response_length=2 or more, or remove it")


def _untracked_truncation(config: RLConfig, path: str, args: GeneratingArgs) -> Iterator[Violation]:
    if config.train_infer_correction is not None:
        return
    changed = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "repetition_penalty": args.repetition_penalty != 1}
    for key in (key for key, truncates in changed.items() if truncates):
        expected = "no truncation in training: the trainer's log-probs are those of the full distribution"
        fix = f"remove {key}, or set train_infer_correction"
        yield Violation(f"{path}.{key}", expected, fix, getattr(args, key))


def end_rules(config: RunConfig) -> Iterator[Violation]:
    """Check that the run ends."""
    if not config.max_steps and not config.num_train_epochs and not config.only_validates:
        has_epochs = "num_train_epochs" in type(config).__dataclass_fields__
        expected = "a number of steps" + (", because num_train_epochs is off too" if has_epochs else "")
        fix = "max_steps=100" + (", or num_train_epochs=1" if has_epochs else "")
        yield Violation("max_steps", expected, fix, config.max_steps)


def schedule_rules(config: RunConfig) -> Iterator[Violation]:
    """Check where the run resumes."""
    wanted = config.resume_from_checkpoint
    if isinstance(wanted, str) and wanted.lower() in ("true", "false", ""):
        fix = "write true or false without quotes"
        yield Violation("resume_from_checkpoint", "true, false, auto, best, or a folder", fix, wanted)


_LOST = {
    "optimizer": "without optimizer its moments are lost (AdamW's: 8 bytes for every weight that trains)",
    "extra": "without extra the step, the position in the schedule and in the data, and running statistics are lost",
    "model": "without model the weights are lost",
}


def checkpoint_rules(config: RunConfig) -> Iterator[Violation]:
    """Check that what checkpoints hold can be used, and that what a resumed run takes out of one is in there."""
    contents, wanted = config.checkpoint_config, config.checkpoint_config.load_contents
    saved = contents.saved
    path = "checkpoint_config.save_contents"
    if not saved:
        expected = f"one or several of {', '.join(STATE_CONTENTS)}, hf_model"
        yield Violation(path, expected, "save_steps=0 saves nothing", list(contents.save_contents))
    elif "model" not in saved and {"optimizer", "extra"} & set(saved):
        rest = " and ".join(content for content in saved if content in ("optimizer", "extra"))
        yield Violation(path, f"model too: {rest} can't be used without the weights", "add model", list(saved))
    for key in ("save_contents", "load_contents"):
        listed = getattr(contents, key)
        for content in sorted({content for content in listed if listed.count(content) > 1}):
            yield Violation(f"checkpoint_config.{key}", "each content once", "remove one", content)
    yield from _load_rules(config, wanted)
    lacking = [content for content in wanted if content not in saved and content in _LOST]
    saves = config.save_steps or config.save_best
    if config.resume_from_checkpoint in (True, "auto", "best") and saves and lacking:
        losses = "; ".join(_LOST[content] for content in lacking)
        yield problem(
            path,
            f"the checkpoints of this run couldn't be resumed from bit for bit, which resume_from_checkpoint asks for: "
            f"{losses}",
            f"add {', '.join(lacking)}, or take {', '.join(lacking)} out of checkpoint_config.load_contents",
            list(saved),
        )


def _load_rules(config: RunConfig, wanted: tuple[str, ...]) -> Iterator[Violation]:
    path = "checkpoint_config.load_contents"
    if "hf_model" in wanted:
        fix = "to start from its weights: pretrain=<checkpoint>/hf_model, which any backend reads"
        yield Violation(path, f"{', '.join(STATE_CONTENTS)}: hf_model is a copy for others", fix, list(wanted))
    elif "model" not in wanted:
        yield Violation(path, "model among them: the rest can't be used without the weights", "add model", list(wanted))
    elif "extra" not in wanted and config.resume_from_checkpoint in (True, "auto", "best"):
        yield problem(
            path,
            "without extra a run starts at step 1, so that each start would throw away the steps of the one before",
            "name the checkpoint's folder in resume_from_checkpoint, or add extra",
            list(wanted),
        )


def name_rules(config: RunConfig) -> Iterator[Violation]:
    """Names of the run, trackers and environment variables."""
    if not config.exp_name or "/" in config.exp_name or config.exp_name != config.exp_name.strip():
        expected = "a name without slashes or spaces at its ends"
        yield Violation("exp_name", expected, "folders go to output_dir", config.exp_name)
    for tracker in sorted(set(config.track_with)):
        if config.track_with.count(tracker) > 1:
            yield Violation("track_with", "each tracker once", "remove one", tracker)
        if tracker not in TRACKERS and not OWN_PATH.match(tracker):
            expected = f"{', '.join(TRACKERS)}, or your own as package.module:Name or file.py:Name"
            yield Violation("track_with", expected, nearest(tracker, TRACKERS), tracker)
    for tracker in config.tracker_kwargs:
        if tracker not in config.track_with:
            why = f", because track_with is {', '.join(config.track_with) or 'empty'}"
            yield no_effect(f"tracker_kwargs.{tracker}", why, f"add {tracker} to track_with")


def profiler_rules(config: RunConfig) -> Iterator[Violation]:
    """Check for steps that the run has, roles and ranks that it starts, and not too many files."""
    steps, options, roles = config.profile_steps, config.profiler, config.roles
    last = config.max_steps if config.max_steps and not config.only_validates else None
    for step in steps:
        if step < 0 or (config.only_validates and step > 0) or (last is not None and step > last):
            what = "0, for nothing is trained" if config.only_validates else f"0 to {last}" if last else "0 or more"
            yield Violation("profile_steps", f"steps of the run: {what}", "", step)
    for role in options.roles:
        if role not in roles:
            yield Violation("profiler.roles", f"roles that are started: {', '.join(roles)}", nearest(role, roles), role)
    sizes = {role: len(slots) for role, slots in config.placement.roles.items()}
    chosen = [role for role in (options.roles or roles) if role in sizes]
    largest = max((sizes[role] for role in chosen), default=1)
    for rank in options.ranks:
        if not 0 <= rank < largest:
            yield Violation("profiler.ranks", f"ranks of these roles: 0 to {largest - 1}", "", rank)
    per_step = sum(sum(not options.ranks or rank in options.ranks for rank in range(sizes[role])) for role in chosen)
    total = per_step * len(set(steps))
    if "torch" in options.tools and total > options.max_traces:
        expected = f"at least the {total} traces that {len(set(steps))} steps of {per_step} ranks make"
        fix = "fewer steps, roles or ranks, or raise it"
        yield Violation("profiler.max_traces", expected, fix, options.max_traces)
    endpoint = config.tracing.endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Violation("tracing.endpoint", "an address such as http://localhost:4318", "", endpoint)


def replay_rules(config: RLConfig) -> Iterator[Violation]:
    """Check that a run and its steps are named, and that something is trained."""
    if config.replay_from is None:
        return
    try:
        parse_replay_from(config.replay_from)
    except ValueError as error:
        expected = f"a run's folder, with steps as RUN:5 or RUN:5-8; {error}"
        yield Violation("replay_from", expected, "replay_from=<output_dir of a run>", config.replay_from)
    if config.val_only:
        why = "a replay has no engine that could play the validation, so nothing would be left to do"
        yield problem("val_only", why, "remove it, or replay_from", True)


def replay_warnings(config: RLConfig) -> Iterator[str]:
    """Say what a replay leaves out of what the file asks for."""
    if config.replays and config.validates and (config.eval_steps or config.val_before_train):
        yield "replay_from: nothing is validated, because a replay has no engine"
