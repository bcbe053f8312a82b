"""What a run would make of the data of its configuration: rows that stop it, rows that it loses, what is odd.

`roll data check` prints all of it; `roll check` refuses what would stop the run, and looks for a limited time.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from roll.configs.checks.data_file_checks import procedural_checks
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.preference_config import PreferenceConfig, PreferenceDataArgs
from roll.configs.schema.reward_config import ANY_TAG, RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.sft_config import SFTConfig, SFTDataArgs
from roll.configs.schema.worker_config import DataArgs
from roll.data.data_check import LISTED, Encode, Findings, LearntOf, Progress, check_conversations, check_prompts
from roll.rewards.base import Reward, RewardRequest, RewardResult, Scorer
from roll.rewards.references import MATH_RULE, answer_in_sentence
from roll.types.trajectory import Task

TRAIN, VAL = "training data", "validation data"
_IN_FLIGHT = 256
_MAX_CHARS = 300
"""Of a row in a list of rows."""

Level: TypeAlias = Literal["stop", "loss", "note"]
"""What becomes of a run: it ends at its start, it goes on without some rows, or it runs."""


@dataclass(frozen=True)
class Remark:
    """Something to be said about the data."""

    level: Level
    text: str
    key: str = ""
    """Of the configuration, where it is about one."""
    fix: str = ""


@dataclass
class _Scores:
    """What rewards made of rows, by domain."""

    unscored: dict[str, list[str]] = field(default_factory=dict)
    unscored_count: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    sentences: dict[str, list[str]] = field(default_factory=dict)


class RunData:
    """Goes through the data and collects what is to be said.

    Args:
        progress: told of every row, and says when to stop.
        tokenizer: measures; None: lengths stay unknown.
    """

    def __init__(self, progress: Progress, tokenizer: Any) -> None:
        self._progress, self._tokenizer = progress, tokenizer
        self.findings: list[Findings] = []
        self.remarks: list[Remark] = []
        self.limit: int | None = None
        self._scorers: Mapping[str, Scorer] = {}
        self._scores = _Scores()

    # --- what to look at --------------------------------------------------------------------

    def files(self, data: DataArgs, held_out: DataArgs | None) -> None:
        """Check files by themselves."""
        native = data.template == "native"
        usual = "native" if getattr(self._tokenizer, "chat_template", None) else "plain"
        encoder = _encoder(self._tokenizer, usual if native else data.template)
        train = self._prompts(TRAIN, data, encoder, None, None, set())
        if held_out is not None:
            self._prompts(VAL, held_out, encoder, None, None, train.prompts)

    def rlvr(self, config: RLVRConfig, scorers: Mapping[str, Scorer]) -> None:
        """Check the data of a configuration; `scorers` are those of domains whose rewards shall read their rows."""
        from roll.pipelines.rl.rlvr import default_tag, prompt_encoder

        self.limit, self._scorers = config.prompt_length, scorers
        known: set[int] = set()
        sections = [(TRAIN, "actor_train.data_args", config.actor_train.data_args)]
        if config.validation is not None:
            sections.append((VAL, "validation.data_args", config.validation.data_args))
        for name, key, data in sections:
            procedural = [Remark("stop", str(one), one.path) for one in procedural_checks(key, data, config)]
            self.remarks += procedural
            if not data.file_name and data.dataset is None:
                if data.procedural:
                    self._note(f"{name}: no files; each procedural data set was tried")
                    self._tags(config, name, key, data, Findings(name))
                continue
            encoder = None if self._tokenizer is None else prompt_encoder(config, data, self._tokenizer)
            findings = self._prompts(
                name, data, encoder, config.prompt_length, default_tag(config, data), known, config, key=key
            )
            known = known or findings.prompts
            kind = "filter" if data.filter_overlong_prompts else config.truncation
            self._too_long(findings, "prompt_length", kind)
            self._tags(config, name, key, data, findings)
        self._rewards()

    def offline(self, config: OfflineConfig) -> None:
        """Check finished rows: of a fine-tuning, or preferences."""
        self.limit = config.max_sequence_length
        known: set[int] = set()
        train = config.actor_train.data_args
        sections: list[tuple[str, str, OfflineDataArgs]] = [(TRAIN, "actor_train.data_args", train)]
        sections += [(VAL, "validation.data_args", config.validation.data_args)] if config.validation else []
        for name, key, data in sections:
            names_pictures = data.images is not None  # by itself, as the run asks
            data = config.data_args_of(data)
            findings = Findings(name)
            self.findings.append(findings)
            encoder = None if self._tokenizer is None else _conversation_encoder(config, data, self._tokenizer)
            if data.images is not None:
                self._add_pictures(findings, encoder)
            check_conversations(
                findings,
                data,
                _learnt_of(config, data),
                None if encoder is None else _encode(config, self._tokenizer, encoder),
                unused_keys=None if encoder is None else encoder.unused_keys,
                sequence_length=self.limit,
                truncates=config.truncation == "right",
                known=known,
                progress=self._progress,
            )
            known = known or findings.prompts
            self._common(findings, 0, key, some_shown=names_pictures)
            self._too_long(findings, "sequence_length", config.truncation)
            if findings.untaught:
                sentence = f"{findings.untaught} rows without a token of the assistant within sequence_length"
                self._say("loss", f"{name}: {sentence}", f"{key}.file_name")

    # --- parts ------------------------------------------------------------------------------

    def _say(self, level: Level, text: str, key: str = "", fix: str = "") -> None:
        self.remarks.append(Remark(level, text, key, fix))

    def _note(self, text: str) -> None:
        self._say("note", text)

    def _prompts(
        self,
        name: str,
        data: DataArgs,
        encoder: Any,
        limit: int | None,
        tag: str | None,
        known: set[int],
        config: RLVRConfig | None = None,
        *,
        key: str = "",
    ) -> Findings:
        findings = Findings(name)
        self.findings.append(findings)
        if data.images is not None:
            self._add_pictures(findings, encoder)
        tasks = check_prompts(
            findings, data, encoder, prompt_length=limit, default_tag=tag, known=known, progress=self._progress
        )
        self._score(tasks, config, findings)
        self._common(findings, data.max_bad_rows, key, prompts=True)
        if findings.repeated_ids:
            text = listing(f"{name}: ids that are used twice", findings.repeated_ids)
            self._say("stop", text, f"{key}.id", "mend the column of ids, or remove it: then rows are numbered")
        if findings.duplicates:
            what = "are left out" if data.deduplicate else "repeat an earlier one; deduplicate=true leaves them out"
            self._note(f"{name}: {findings.duplicates} of {findings.rows} prompts {what}")
        return findings

    def _add_pictures(self, findings: Findings, encoder: Any) -> None:
        from roll.data.picture_check import PictureFindings

        findings.pictures = PictureFindings(getattr(encoder, "picture_tokens", None))

    def _common(
        self, findings: Findings, max_bad_rows: float, key: str, *, prompts: bool = False, some_shown: bool = True
    ) -> None:
        if findings.failure:
            self._say("stop", f"{findings.name}: {findings.failure}", f"{key}.file_name")
        if findings.bad:
            so = "max_bad_rows may let the run go on without them" if max_bad_rows else "the first one stops the run"
            most = max_bad_rows if max_bad_rows >= 1 else max_bad_rows * findings.rows
            # A share is known when all rows were read.
            stops = findings.bad > most and not (findings.unread and 0 < max_bad_rows < 1)
            text = listing(f"{findings.name}: {findings.bad} bad rows; {so}", findings.bad_listed)
            fix = "mend or drop these rows" + (f"; {key}.max_bad_rows=... leaves as many out" if prompts else "")
            self._say("stop" if stops else "loss", text, f"{key}.file_name", fix)
        shown = findings.pictures
        if some_shown and shown is not None and shown.is_empty and findings.rows and not findings.unread:
            text = f"{findings.name}: no row has a picture in the column that images names"
            self._say("stop", text, f"{key}.images", "name the column that holds them, or remove the key")
        for what, count in findings.odd.items():
            if count:
                self._note(f"{findings.name}: {count} rows: the conversation {what}")
        if findings.unused:
            columns = ", ".join(f"{column} ({count:,} rows)" for column, count in findings.unused.most_common())
            what = (
                "columns beside the prompt, which rewards get and nothing else reads" if prompts else "unused columns"
            )
            self._note(f"{findings.name}: {what}: {columns}")
        if findings.overlap:
            sentence = f"{findings.overlap} validation rows are in the training data too"
            self._note(listing(sentence, findings.overlap_listed))

    def _too_long(self, findings: Findings, key: str, truncation: str) -> None:
        if not findings.too_long:
            return
        cuts = truncation not in ("error", "filter")
        every = findings.too_long == len(findings.lengths) and not findings.unread
        rows = f"all {findings.too_long}" if every else f"{findings.too_long}"
        what = "are cut" if cuts else "stop the run" if truncation == "error" or every else "are left out"
        longest = f"the longest is {findings.longest[1]} with {findings.longest[0]}"
        shortest = f", the shortest has {min(findings.lengths)}" if every else ""
        text = f"{findings.name}: {rows} rows of more than {key} = {self.limit} tokens {what}; {longest}{shortest}"
        fix = f"{key}={findings.longest[0]}" + ("" if every and truncation == "filter" else ", or truncation=filter")
        self._say("note" if cuts else "loss" if what == "are left out" else "stop", text, key, fix)

    def _tags(self, config: RLVRConfig, name: str, key: str, data: DataArgs, findings: Findings) -> None:
        lost = {tag: count for tag, count in findings.tags.items() if config.domain_of(tag) is None}
        if lost:
            counts = [f"{tag}: {count} rows" for tag, count in lost.items()]
            fix = f"name them in a tag_included, or the column of tags in {key}.tag; {config_tags(config)}"
            self._say("stop", listing(f"{name}: tags that no domain includes", counts), f"{key}.tag", fix)
        there = {*findings.tags, *(task.tag for task in data.procedural)}
        for domain in config.rewards:
            if not {*there, ANY_TAG} & set(config.tags_of(domain)):
                tags = ", ".join(config.tags_of(domain))
                trained = not data.domain_interleave_probs or domain in data.domain_interleave_probs
                level: Level = "stop" if name == TRAIN and trained else "note"
                text = f"{name}: domain {domain!r} has no rows; its tags: {tags}"
                if findings.unread:
                    level, text = "note", f"{text} (not all rows were read)"
                fix = "name tags that rows have, or leave the domain out of domain_interleave_probs"
                self._say(level, text, f"rewards.{domain}.tag_included", fix)

    def _rewards(self) -> None:
        """Say what rewards can't read, once all rows were tried."""
        for domain, listed in self._scores.sentences.items():
            what = f"{len(listed)} rows whose ground truth is a sentence, which no answer equals in {domain!r}"
            text = listing(f"{what}; give the answer alone, e.g. '50'", listed[:LISTED])
            self._say("loss", text, f"rewards.{domain}")
        for domain, listed in self._scores.unscored.items():
            count, tried = self._scores.unscored_count[domain], self._scores.tried[domain]
            every = "all " if count == tried and not any(findings.unread for findings in self.findings) else ""
            text = listing(f"{every}{count} rows that the reward of {domain!r} can't score", listed)
            fix = "name the column of answers in data_args.ground_truth, mend the rows, or take another reward"
            self._say("stop" if every else "loss", text, f"rewards.{domain}.name", fix)

    def _score(self, tasks: Iterator[Task], config: RLVRConfig | None, findings: Findings) -> None:
        """Let each row's reward read its ground truth; a failure, and no low score, is what counts."""
        waiting: deque[tuple[str, str, Future[RewardResult], str | None]] = deque()
        scores = self._scores

        def settle(left: int) -> None:
            while len(waiting) > left:
                domain, name, future, stated = waiting.popleft()
                result = future.result()
                if stated is not None:
                    if result.reward is not None and not _is_right(result.reward):
                        scores.sentences.setdefault(domain, []).append(f"{name}: {stated!r} gets no full marks")
                    continue
                scores.tried[domain] = scores.tried.get(domain, 0) + 1
                if result.status not in ("ok", "unscored"):
                    scores.unscored_count[domain] = scores.unscored_count.get(domain, 0) + 1
                    listed = scores.unscored.setdefault(domain, [])
                    if len(listed) < LISTED:
                        listed.append(f"{name}: {result.error.strip().splitlines()[-1] if result.error else ''}")

        for number, task in enumerate(tasks):
            domain = None if config is None else config.domain_of(task.tag)
            scorer = self._scorers.get(domain or "")
            if scorer is None or domain is None or config is None:
                continue
            truth = task.payload.get("ground_truth")
            response = f"\\boxed{{{truth}}}\n#### {truth}" if isinstance(truth, (str, int, float)) else ""
            request = RewardRequest(
                id=f"{findings.name}:{number}",
                domain=domain,
                response=response,
                task=replace(task, domain=domain),
                completion_ids=tuple(response.encode()),  # that there are some: no score counts here
                step=0,
            )
            waiting.append((domain, task.id, scorer.submit(request), None))
            stated = answer_in_sentence(truth)
            if stated is not None and MATH_RULE in reward_names(config.rewards[domain]):
                request = replace(request, response=f"\\boxed{{{stated}}}")
                waiting.append((domain, task.id, scorer.submit(request), stated))
            settle(_IN_FLIGHT)
            self._progress.at(number, f"{findings.name}, with rewards")
        settle(0)


def config_tags(config: RLVRConfig) -> str:
    """Return the domains with their tags, for messages."""
    listed = [f"{domain}: {', '.join(config.tags_of(domain))}" for domain in config.rewards]
    return f"domains and their tags: {'; '.join(listed)}"


def _learnt_of(config: OfflineConfig, data: OfflineDataArgs) -> LearntOf:
    from roll.data.preference_rows import preference_of
    from roll.data.sft_rows import conversation_of, picture_folder_of

    folder = picture_folder_of(data)
    if isinstance(config, PreferenceConfig) and isinstance(data, PreferenceDataArgs):
        return lambda source, row: preference_of(source, row, data, folder, pairs=config.pairs)
    if isinstance(config, SFTConfig) and isinstance(data, SFTDataArgs):
        return lambda source, row: conversation_of(source, row, data, folder)
    raise ValueError(f"pipeline {config.pipeline}: its rows can't be checked by themselves")


def _conversation_encoder(config: OfflineConfig, data: OfflineDataArgs, tokenizer: Any) -> Any:
    from roll.pipelines.offline.encoders import conversation_encoder

    train_on = config.train_on if isinstance(config, SFTConfig) else "last"
    return conversation_encoder(config, data, tokenizer, train_on=train_on)


def _encode(config: OfflineConfig, tokenizer: Any, encoder: Any) -> Encode:
    """Return what makes tokens of a row as the run does."""
    from roll.data.preference_rows import preference_encoding
    from roll.data.sft_rows import encode_conversation
    from roll.pipelines.offline.preference_pipeline import scored_ends

    if isinstance(config, SFTConfig):
        return lambda conversation: max(encode_conversation(encoder, conversation), key=lambda row: row.length)
    ends = scored_ends(tokenizer, encoder) if config.pipeline == "reward_model" else set()
    return functools.partial(preference_encoding(ends), encoder)


def _encoder(tokenizer: Any, template: str) -> Any:
    from roll.data.templates import PromptEncoder

    return None if tokenizer is None else PromptEncoder(tokenizer, template=template)


def listing(title: str, items: Sequence[str]) -> str:
    """Return a title with examples below it, each on a line."""
    return "\n".join([title, *(f"    {clipped(item, _MAX_CHARS)}" for item in items)])


def clipped(text: str, width: int) -> str:
    """Return a text of at most `width` characters."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _is_right(reward: Reward) -> bool:
    """Return whether a reward, or the part of a sum that compares answers, gives full marks."""
    return 1.0 in (reward.value, *(value for name, value in reward.parts.items() if name.endswith("correct")))


def reward_names(reward: RewardConfig) -> set[str]:
    """Return the reward function of a domain, and those of its parts."""
    return {reward.name, *(part.name for part in reward.parts.values())}
