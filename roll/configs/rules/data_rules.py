"""Rules between keys of the data: sources, tags, templates, shares. Each yields what is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from roll.configs.catalog.entries import OWN_PATH
from roll.configs.catalog.reward_table import REWARDS
from roll.configs.errors import NO_VALUE, Violation, did_you_mean, nearest, no_effect, problem
from roll.configs.schema.reward_config import ANY_TAG, WEIGHTED, RewardConfig, RewardModelConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import TEMPLATES, DataArgs, ProceduralTask
from roll.utils.importing import suggested_path


def data_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check where prompts come from, and which domain they belong to."""
    sections = {"actor_train": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation"] = config.validation.data_args
    for role, data in sections.items():
        path, trains = f"{role}.data_args", role == "actor_train"
        held_out = config.validation_share > 0 and not trains
        if not data.has_rows and not held_out and not (trains and config.val_only):
            fix = f"{path}.file_name={'data' if trains else 'test'}.jsonl"
            yield Violation(f"{path}.file_name", "a file, or procedural tasks, or a dataset class", fix, NO_VALUE)
        yield from _source_rules(config, path, data)
        if trains:
            yield from _shares(config, f"{path}.domain_interleave_probs", data)
        elif data.domain_interleave_probs:
            why = ": validation plays every row once"
            yield no_effect(f"{path}.domain_interleave_probs", why, "remove it", data.domain_interleave_probs)
    yield from _held_out_rules(config)
    yield from template_rules(_templates(config))
    yield from _supply_rules(config)
    tags = {tag for domain in config.rewards for tag in config.tags_of(domain)}
    for tag in config.tag_to_template:
        if tag not in tags and ANY_TAG not in tags:
            expected = f"a tag of some domain: {', '.join(sorted(tags))}"
            yield Violation(f"tag_to_template.{tag}", expected, did_you_mean(tag, tags))


def _held_out_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check that a share is held out only where there are training prompts, and no others for validation."""
    key, share, data = "validation_share", config.validation_share, config.actor_train.data_args
    if not share:
        return
    if config.validation is not None and config.validation.data_args.has_rows:
        expected = "0 beside validation.data_args, whose prompts are held out"
        yield Violation(key, expected, "remove one of them", share)
    if data.streaming:
        sentence = "rows that are streamed can't be split: which are held out is drawn from all of them"
        yield problem(key, sentence, "actor_train.data_args.streaming=false, or files in validation.data_args", share)
    if not data.has_rows:
        yield problem(
            key, "there are no training prompts to hold some out of", "name them in actor_train.data_args", share
        )


def validation_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Several greedy responses are all the same; pass@k needs k of them."""
    if config.validation is None:
        return
    path, args = "validation.generating_args", config.validation.generating_args
    count = args.num_return_sequences or 1
    if count > 1 and (args.temperature == 0 or not args.do_sample):
        expected = "1 with greedy decoding: all responses of a prompt would be the same"
        yield Violation(f"{path}.num_return_sequences", expected, f"{path}.temperature=1, do_sample=true", count)
    for key in ("pass_at_k", "maj_at_k"):
        for k in getattr(config.validation, key):
            if not 1 <= k <= count:
                expected = f"whole numbers from 1 to num_return_sequences ({count})"
                yield Violation(f"validation.{key}", expected, f"{path}.num_return_sequences={max(k, 1)}", k)
    if config.validation.maj_at_k and config.rewards and not any(map(_states_answers, config.rewards.values())):
        names = ", ".join(sorted({reward.name for reward in config.rewards.values()}))
        message = f"no reward says which answer a response states, so nothing can be voted on ({names})"
        yield problem("validation.maj_at_k", message, "remove it; best_at and pass@k (validation.pass_at_k) need none")


def _states_answers(reward: RewardConfig) -> bool:
    """Return whether a domain's reward says which answer a response states; of one's own nobody knows."""
    names = [part.name for part in reward.parts.values()] if reward.name == WEIGHTED else [reward.name]
    return reward.is_function and any(name not in REWARDS or REWARDS[name].answers for name in names)


def _source_rules(config: RLVRConfig, path: str, data: DataArgs) -> Iterator[Violation]:
    if data.prompt is not None and data.messages is not None:
        expected = f"only one of prompt and messages ({data.messages!r})"
        yield Violation(f"{path}.prompt", expected, f"{path}.prompt=null, or {path}.messages=null", data.prompt)
    yield from _row_rules(path, data)
    twice = {name for name in data.file_name if data.file_name.count(name) > 1}
    for name in sorted(twice):
        yield Violation(f"{path}.file_name", "each file once", "remove one", name)
    tags: set[str] = set()
    known = {tag for domain in config.rewards for tag in config.tags_of(domain)}
    for i, task in enumerate(data.procedural):
        here = f"{path}.procedural[{i}]"
        if task.tag in tags:
            fix = "tags of one domain may differ"
            yield Violation(f"{here}.tag", "a tag of its own for every entry", fix, task.tag)
        tags.add(task.tag)
        if task.tag not in known and ANY_TAG not in known:
            expected = f"a tag of some domain: {', '.join(sorted(known))}"
            yield Violation(f"{here}.tag", expected, "add it to rewards.<domain>.tag_included", task.tag)
        yield from _procedural_rules(here, task)
    if data.default_tag is not None and data.default_tag not in known and ANY_TAG not in known:
        expected = f"a tag of some domain: {', '.join(sorted(known))}"
        yield Violation(f"{path}.default_tag", expected, did_you_mean(data.default_tag, known), data.default_tag)


def _row_rules(path: str, data: DataArgs) -> Iterator[Violation]:
    if data.dataset is not None and not OWN_PATH.match(data.dataset):
        expected = "a class by its path: path/to/file.py:MyData, or package.module:MyData"
        yield Violation(f"{path}.dataset", expected, suggested_path(data.dataset), data.dataset)
    if data.max_bad_rows > 1 and data.max_bad_rows != int(data.max_bad_rows):
        expected = "a whole number of rows, or a share below 1"
        yield Violation(f"{path}.max_bad_rows", expected, f"{path}.max_bad_rows={data.max_bad_rows:.0f}", NO_VALUE)
    if data.streaming and not data.file_name and data.dataset is None:
        yield no_effect(f"{path}.streaming", ": procedural tasks are made in memory", "remove it", True)
    order = data.curriculum
    if order.by == "column" and order.column is None:
        yield Violation(f"{path}.curriculum.column", "the column with the difficulty", "", NO_VALUE)
    if order.by is not None and not data.shuffle:
        expected = "true with a curriculum, which is an order of its own"
        yield Violation(f"{path}.shuffle", expected, f"{path}.curriculum.by=null", False)


def _procedural_rules(path: str, task: ProceduralTask) -> Iterator[Violation]:
    if task.few_shot and "{answer}" not in task.example_template:
        yield Violation(f"{path}.example_template", "a text with {answer}", "", task.example_template)
    if "{answer}" in task.question_template:
        expected = "a text without {answer}, which it would give away"
        yield Violation(f"{path}.question_template", expected, "", task.question_template)
    elif not re.search(r"\{\w+\}", task.question_template):
        expected = "a text with {question}, or with a field of the task's metadata"
        yield Violation(f"{path}.question_template", expected, "", task.question_template)
    for key in ("seed", "size"):
        if key in task.config:
            expected = f"no {key}: that is a key of the entry itself"
            yield Violation(f"{path}.config.{key}", expected, f"{path}.{key}={task.config[key]}", task.config[key])


def _templates(config: RLVRConfig) -> dict[str, str | None]:
    templates = {
        "global_template": config.global_template,
        "actor_train.data_args.template": config.actor_train.data_args.template,
        **{f"tag_to_template.{tag}": text for tag, text in config.tag_to_template.items()},
    }
    for role, worker in config.sections.items():
        if isinstance(worker, RewardModelConfig):
            templates[f"{role}.template"] = worker.template
    if config.validation is not None:
        templates["validation.data_args.template"] = config.validation.data_args.template
    return templates


def template_rules(templates: Mapping[str, str | None]) -> Iterator[Violation]:
    """Check that each text, by its key, is a name, a text with one slot, or Jinja."""
    for path, text in templates.items():
        if text is None or text in TEMPLATES or "{%" in text or "{{" in text or text.count("{prompt}") == 1:
            continue
        expected = f"one of {', '.join(TEMPLATES)}, a text with one {{prompt}}, or Jinja"
        yield Violation(path, expected, nearest(text, TEMPLATES), text)


def _supply_rules(config: RLVRConfig) -> Iterator[Violation]:
    """Check that every domain has rows, as far as can be told without reading files."""
    data = config.actor_train.data_args
    generated = {task.tag for task in data.procedural}
    for domain, reward in config.rewards.items():
        tags = config.tags_of(domain)
        if ANY_TAG in tags:
            continue
        if generated.intersection(tags) or config.val_only:
            continue
        if data.procedural and not data.file_name and data.dataset is None:
            expected = f"rows: no procedural task has one of its tags ({', '.join(tags)})"
            yield Violation(f"rewards.{domain}", expected, "add a task, or remove the domain")
        elif reward.name == "reasoning_gym":
            expected = "a reward for rows of files: reasoning_gym scores procedural tasks only"
            fix = "math_rule, or a procedural task with its tag"
            yield Violation(f"rewards.{domain}.name", expected, fix, reward.name)


def _shares(config: RLVRConfig, path: str, data: DataArgs) -> Iterator[Violation]:
    shares = data.domain_interleave_probs
    if not shares:
        return
    for domain in [domain for domain in config.rewards if domain not in shares and config.validation is None]:
        yield Violation(f"{path}.{domain}", "a share for every domain of rewards", f"add {domain}: ...", NO_VALUE)
    for domain, share in shares.items():
        if domain not in config.rewards:
            expected = f"a domain of rewards: {', '.join(config.rewards)}"
            yield Violation(f"{path}.{domain}", expected, did_you_mean(domain, config.rewards))
        if share <= 0:
            yield Violation(f"{path}.{domain}", "a share above 0", "or remove the domain from rewards", share)
    total = sum(shares.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        sums = " + ".join(f"{share:g}" for share in shares.values())
        yield Violation(path, f"shares that sum to 1; {sums} = {total:g}", "", shares)
