"""`roll data check`: what a run would make of data files, or of those of a configuration."""

from __future__ import annotations

import argparse
import functools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from roll.cli.exits import Exit, say
from roll.cli.key_values import key_values
from roll.configs.checks.data_files import procedural_checks
from roll.configs.errors import ConfigError
from roll.configs.parsing.build_config import build
from roll.configs.parsing.find import find_config
from roll.configs.parsing.loader import load_config
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.preference_config import PreferenceConfig, PreferenceDataArgs
from roll.configs.schema.reward_config import ANY_TAG, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs
from roll.configs.schema.worker_config import DataArgs
from roll.data.data_check import LISTED, Encode, Findings, LearntOf, Progress, check_conversations, check_prompts
from roll.rewards.base import Reward, RewardRequest, RewardResult
from roll.rewards.references import MATH_RULE, answer_in_sentence
from roll.rewards.reward_pool import RewardPool
from roll.types.episode import Task
from roll.utils.console import Console
from roll.utils.readers import resolve_sources

_WIDTH = 100
_SERVICE = "http"
"""The reward that asks a server, which a check doesn't; models it doesn't ask either."""
_IN_FLIGHT = 256
_TRAIN, _VAL = "training data", "validation data"


def check_data(options: argparse.Namespace) -> int:
    """Tables of what was found; status 1 if a run would stop or lose rows."""
    console = Console(highlight=False, width=min(Console().width, _WIDTH))
    check = _DataCheck(options)
    file = Path(options.file).expanduser()
    config_like = file.suffix in (".yaml", ".yml") or (
        not file.exists() and file.with_name(f"{file.name}.yaml").is_file()
    )
    if config_like:
        path = find_config(options.file)
        config = load_config(path.parent, path.stem, options.overrides)
        if isinstance(config, RLVRConfig):
            check.rlvr(config)
        elif isinstance(config, OfflineConfig):
            check.offline(config)
        else:
            raise ValueError(f"{path} is of pipeline {config.pipeline}, whose tasks are environments: roll envs test")
    else:
        for given in filter(None, (options.file, options.validation)):
            resolve_sources(given)  # raises for a file that isn't there
        check.files(options.file, options.overrides)
    for found in check.found:
        _print(console, found, check.limit)
    for level, text in check.said:
        style = "bold red" if level == "PROBLEM" else "cyan"
        console.print(Text.assemble((f"{level}: ", style), text))
    problems = sum(level == "PROBLEM" for level, _ in check.said)
    console.print(f"{problems} problem(s): a run would stop or lose rows" if problems else "no problems")
    return Exit.FAILED if problems else Exit.DONE


class _DataCheck:
    """Goes through the data and collects what is to be said."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._progress = Progress(say)
        self.found: list[Findings] = []
        self.said: list[tuple[str, str]] = []
        self.limit: int | None = None
        self._pools: dict[str, RewardPool] = {}
        self._unscored: dict[str, list[str]] = {}
        self._unscored_count: dict[str, int] = {}
        self._sentences: dict[str, list[str]] = {}

    # --- what to look at --------------------------------------------------------------------

    def files(self, name: str, settings: Sequence[str]) -> None:
        """Check files by themselves; `settings` are keys of `data_args`."""
        tokenizer, template = self._tokenizer(None), "native"
        data = _data_args(name, settings)
        if tokenizer is not None and data.template == "native" and not getattr(tokenizer, "chat_template", None):
            template = "plain"
        encoder = _encoder(tokenizer, template if data.template == "native" else data.template, None)
        train = self._prompts(_TRAIN, data, encoder, None, None, set())
        if self._options.validation:
            held_out = replace(data, file_name=(self._options.validation,))
            self._prompts(_VAL, held_out, encoder, None, None, train.prompts)

    def rlvr(self, config: RLVRConfig) -> None:
        """Check the data of a configuration with its rewards."""
        from roll.pipelines.rlvr import default_tag, prompt_encoder

        tokenizer = self._tokenizer(config)
        self.limit = config.prompt_length
        self._start_rewards(config)
        try:
            known: set[int] = set()
            sections = [(_TRAIN, config.actor_train.data_args)]
            sections += [(_VAL, config.validation.data_args)] if config.validation is not None else []
            for name, data in sections:
                key = "actor_train.data_args" if name == _TRAIN else "validation.data_args"
                self.said += [("PROBLEM", str(violation)) for violation in procedural_checks(key, data, config)]
                if not data.file_name and data.dataset is None:
                    self.said.append(("note", f"{name}: no files; each procedural data set was tried"))
                    self._tags(config, name, data, Findings(name))
                    continue
                encoder = None if tokenizer is None else prompt_encoder(config, data, tokenizer)
                found = self._prompts(
                    name, data, encoder, config.prompt_length, default_tag(config, data), known, config
                )
                known = known or found.prompts
                cuts = not data.filter_overlong_prompts and config.truncation not in ("error", "filter")
                self._too_long(found, "prompt_length", cuts)
                self._tags(config, name, data, found)
        finally:
            for pool in self._pools.values():
                pool.shutdown()
        for domain, listed in self._sentences.items():
            what = f"{len(listed)} rows whose ground truth is a sentence, which no answer equals in {domain!r}"
            self.said.append(("PROBLEM", _listing(f"{what}; give the answer alone, e.g. '50'", listed[:LISTED])))
        for domain, listed in self._unscored.items():
            count = self._unscored_count[domain]
            self.said.append(("PROBLEM", _listing(f"{count} rows that the reward of {domain!r} can't score", listed)))

    def offline(self, config: OfflineConfig) -> None:
        """Check finished rows: of a fine-tuning, or preferences."""
        tokenizer = self._tokenizer(config)
        self.limit = config.max_sequence_length
        known: set[int] = set()
        train = config.actor_train.data_args
        sections = [(_TRAIN, train), *([(_VAL, config.validation.data_args)] if config.validation else [])]
        for name, data in sections:
            template = data.template or train.template or "native"
            found = Findings(name)
            self.found.append(found)
            encoder = None if tokenizer is None else _conversation_encoder(config, tokenizer, template)
            check_conversations(
                found,
                data,
                _learnt_of(config, data),
                None if encoder is None else _encode(config, tokenizer, encoder),
                unused_keys=None if encoder is None else encoder.unused_keys,
                sequence_length=self.limit,
                known=known,
                progress=self._progress,
            )
            known = known or found.prompts
            self._common(found, lenient=False)
            self._too_long(found, "sequence_length", config.truncation == "right")
            if found.untaught:
                said = f"{found.untaught} rows without a token of the assistant within sequence_length"
                self.said.append(("PROBLEM", f"{name}: {said}"))

    # --- parts ------------------------------------------------------------------------------

    def _prompts(
        self,
        name: str,
        data: DataArgs,
        encoder: Any,
        limit: int | None,
        tag: str | None,
        known: set[int],
        config: RLVRConfig | None = None,
    ) -> Findings:
        found = Findings(name)
        self.found.append(found)
        tasks = check_prompts(
            found, data, encoder, prompt_length=limit, default_tag=tag, known=known, progress=self._progress
        )
        self._score(tasks, config, found)
        self._common(found, lenient=data.max_bad_rows > 0, prompts=True)
        if found.repeated_ids:
            self.said.append(("PROBLEM", _listing(f"{name}: ids that are used twice", found.repeated_ids)))
        if found.duplicates:
            what = "are left out" if data.deduplicate else "repeat an earlier one; deduplicate=true leaves them out"
            self.said.append(("note", f"{name}: {found.duplicates} of {found.rows} prompts {what}"))
        return found

    def _common(self, found: Findings, *, lenient: bool, prompts: bool = False) -> None:
        if found.failure:
            self.said.append(("PROBLEM", f"{found.name}: {found.failure}"))
        if found.bad:
            so = "max_bad_rows may let the run go on without them" if lenient else "the first one stops the run"
            self.said.append(("PROBLEM", _listing(f"{found.name}: {found.bad} bad rows; {so}", found.bad_listed)))
        for what, count in found.odd.items():
            if count:
                self.said.append(("note", f"{found.name}: {count} rows: the conversation {what}"))
        if found.unused:
            columns = ", ".join(f"{column} ({count:,} rows)" for column, count in found.unused.most_common())
            what = (
                "columns beside the prompt, which rewards get and nothing else reads" if prompts else "unused columns"
            )
            self.said.append(("note", f"{found.name}: {what}: {columns}"))
        if found.overlap:
            said = f"{found.overlap} validation rows are in the training data too"
            self.said.append(("note", _listing(said, found.overlap_listed)))

    def _too_long(self, found: Findings, key: str, cuts: bool) -> None:
        if found.too_long:
            what = "are cut" if cuts else "stop the run or are left out, as truncation says"
            longest = f"the longest is {found.longest[1]} with {found.longest[0]}"
            said = f"{found.name}: {found.too_long} rows of more than {key} = {self.limit} tokens {what}; {longest}"
            self.said.append(("note" if cuts else "PROBLEM", said))

    def _tags(self, config: RLVRConfig, name: str, data: DataArgs, found: Findings) -> None:
        lost = {tag: count for tag, count in found.tags.items() if config.domain_of(tag) is None}
        if lost:
            counts = [f"{tag}: {count} rows" for tag, count in lost.items()]
            self.said.append(("PROBLEM", _listing(f"{name}: tags that no domain includes", counts)))
        there = {*found.tags, *(task.tag for task in data.procedural)}
        for domain in config.rewards:
            if not {*there, ANY_TAG} & set(config.tags_of(domain)):
                tags = ", ".join(config.tags_of(domain))
                trained = not data.domain_interleave_probs or domain in data.domain_interleave_probs
                level = "PROBLEM" if name == _TRAIN and trained else "note"
                self.said.append((level, f"{name}: domain {domain!r} has no rows; its tags: {tags}"))

    def _start_rewards(self, config: RLVRConfig) -> None:
        from roll.pipelines.reward_router import in_run, reward_spec

        for domain, reward in config.rewards.items():
            if self._options.no_rewards or reward.models or _SERVICE in _functions(reward):
                self.said.append(("note", f"the reward of {domain!r} ({reward.name}) wasn't tried"))
                continue
            spec = in_run(reward_spec(config, domain), config.max_steps)
            self._pools[domain] = RewardPool({domain: spec}, num_processes=1, timeout_s=reward.timeout_s, retries=0)
        for pool in self._pools.values():
            pool.wait_ready()

    def _score(self, tasks: Iterator[Task], config: RLVRConfig | None, found: Findings) -> None:
        """Let each row's reward read its ground truth; a failure, and no low score, is what counts."""
        waiting: deque[tuple[str, str, Future[RewardResult], str | None]] = deque()

        def settle(left: int) -> None:
            while len(waiting) > left:
                domain, name, future, stated = waiting.popleft()
                result = future.result()
                if stated is not None:
                    if result.reward is not None and not _is_right(result.reward):
                        self._sentences.setdefault(domain, []).append(f"{name}: {stated!r} gets no full marks")
                elif result.status not in ("ok", "unscored"):
                    self._unscored_count[domain] = self._unscored_count.get(domain, 0) + 1
                    listed = self._unscored.setdefault(domain, [])
                    if len(listed) < LISTED:
                        listed.append(f"{name}: {result.error.strip().splitlines()[-1] if result.error else ''}")

        for number, task in enumerate(tasks):
            domain = None if config is None else config.domain_of(task.tag)
            pool = self._pools.get(domain or "")
            if pool is None or domain is None or config is None:
                continue
            truth = task.payload.get("ground_truth")
            response = f"\\boxed{{{truth}}}\n#### {truth}" if isinstance(truth, (str, int, float)) else ""
            request = RewardRequest(
                id=f"{found.name}:{number}",
                domain=domain,
                response=response,
                task=replace(task, domain=domain),
                completion_ids=tuple(response.encode()),  # that there are some: no score counts here
                step=0,
            )
            waiting.append((domain, task.id, pool.submit(request), None))
            stated = answer_in_sentence(truth)
            if config is not None and stated is not None and MATH_RULE in _functions(config.rewards[domain]):
                request = replace(request, response=f"\\boxed{{{stated}}}")
                waiting.append((domain, task.id, pool.submit(request), stated))
            settle(_IN_FLIGHT)
            self._progress.at(number, f"{found.name}, with rewards")
        settle(0)

    def _tokenizer(self, config: RLVRConfig | OfflineConfig | None) -> Any:
        from roll.configs.schema.worker_config import ModelArgs
        from roll.strategies.hf.hf_model import load_tokenizer
        from roll.workers.train import resolved_model_args

        if self._options.model:
            return load_tokenizer(ModelArgs(model_name_or_path=self._options.model))
        if config is None:
            self.said.append(("note", "lengths aren't measured; --model says with which tokenizer"))
            return None
        args = resolved_model_args(config, "actor_train")
        if not os.path.isdir(Path(str(args.model_name_or_path)).expanduser()):
            said = f"lengths aren't measured: {args.model_name_or_path} isn't a folder here; --model names a tokenizer"
            self.said.append(("note", said))
            return None
        return load_tokenizer(args)


def _learnt_of(config: OfflineConfig, data: OfflineDataArgs) -> LearntOf:
    from roll.data.preference import preference_of
    from roll.data.sft import conversation_of

    if isinstance(config, PreferenceConfig) and isinstance(data, PreferenceDataArgs):
        return lambda source, row: preference_of(source, row, data, pairs=config.pairs)
    if isinstance(config, SFTConfig) and isinstance(data, SFTDataArgs):
        return lambda source, row: conversation_of(source, row, data)
    raise ValueError(f"pipeline {config.pipeline}: its rows can't be checked by themselves")


def _conversation_encoder(config: OfflineConfig, tokenizer: Any, template: str) -> Any:
    from roll.data.chat_masks import ConversationEncoder
    from roll.pipelines.teaching import smallest_embedding

    train_on = config.train_on if isinstance(config, SFTConfig) else "last"
    embedding = smallest_embedding(config)
    return ConversationEncoder(
        tokenizer, template=template, train_on=train_on, variables=config.chat_template_kwargs, embedding=embedding
    )


def _encode(config: OfflineConfig, tokenizer: Any, encoder: Any) -> Encode:
    """Return what makes tokens of a row as the run does."""
    from roll.data.preference import preference_encoding
    from roll.data.sft import encode_conversation
    from roll.pipelines.preference import scored_ends

    if isinstance(config, SFTConfig):
        return lambda conversation: max(encode_conversation(encoder, conversation), key=lambda row: row.length)
    ends = scored_ends(tokenizer, encoder) if config.pipeline == "reward_model" else set()
    return functools.partial(preference_encoding(ends), encoder)


def _encoder(tokenizer: Any, template: str, config: RLVRConfig | None) -> Any:
    from roll.data.templates import PromptEncoder
    from roll.pipelines.teaching import smallest_embedding

    if tokenizer is None:
        return None
    by_tag = {} if config is None else config.tag_to_template
    embedding = None if config is None else smallest_embedding(config)
    return PromptEncoder(tokenizer, template=template, tag_to_template=by_tag, embedding=embedding)


def _data_args(name: str, settings: Sequence[str]) -> DataArgs:
    values = {"file_name": name, **key_values(settings, "with a key of data_args, e.g. prompt=question")}
    data, violations = build(DataArgs, values, "data_args")
    if data is None or violations:
        raise ConfigError(violations, "the arguments")
    return data


def _listing(title: str, items: Sequence[str]) -> str:
    return "\n".join([f"{title}", *(f"    {_clipped(item, 3 * _WIDTH)}" for item in items)])


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _print(console: Console, found: Findings, limit: int | None) -> None:
    table = Table("column", "types", "rows", "empty", "example", title=f"{found.name}: {found.rows:,} rows")
    table.title_justify = "left"
    for name, column in found.columns.items():
        types = ", ".join(column.types)
        example = Text(_clipped(column.example, 40))
        table.add_row(Text(name), types, f"{column.rows:,}", f"{column.empty:,}" if column.empty else "", example)
    if found.columns:
        console.print(table)
    if found.tags:
        console.print(Text("tags: " + ", ".join(f"{tag} {count:,}" for tag, count in found.tags.most_common(20))))
    bins = found.histogram()
    if bins:
        half, most, nearly = (found.quantile(share) for share in (0.5, 0.9, 0.99))
        against = "" if limit is None else f", the limit is {limit}"
        console.print(
            f"tokens: half of the rows up to {half}, 90 % {most}, 99 % {nearly}, all {found.longest[0]}{against}"
        )
        highest = max(count for _, _, count in bins)
        for low, high, count in bins:
            console.print(f"  {low:>7,} to {high:>7,} {count:>9,} {'#' * round(50 * count / highest)}")


def _is_right(reward: Reward) -> bool:
    """Whether a reward, or the part of a sum that compares answers, gives full marks."""
    return 1.0 in (reward.value, *(value for name, value in reward.parts.items() if name.endswith("correct")))


def _functions(reward: RewardConfig) -> set[str]:
    return {reward.name, *(part.name for part in reward.parts.values())}
