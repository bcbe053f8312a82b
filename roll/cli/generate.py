"""`roll eval generate`: a model's answers to a data file, as a job that goes on where it was ended.

<output>.job/            beside the output, until that is whole
    job.json             what was asked; something else is refused
    attempt-<n>/         a mere validation of `pipeline: rlvr` over the rows that were left, with its log and episodes
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from roll.api.launch import load, run_logged
from roll.checkpoint.files import write_json
from roll.cli.evaluate import check_output, read_all, write_rows
from roll.cli.exits import Exit
from roll.configs.errors import ConfigError, of_no_file
from roll.configs.schema.model_shape import read_shape
from roll.utils.locking import FolderInUse, folder_lock
from roll.utils.readers import Row
from roll.utils.rows import column_value
from roll.utils.terminal import say

QUESTIONS = ("messages", "prompt", "question")
"""Columns in which the question is looked for."""
ADDED = ("row", "sample", "finish_reason", "error")
"""Columns of the output besides the response."""
LEFT_OUT = "not asked: the prompt is longer than prompt_length"
_TAG = "rows"

_USUAL_LENGTH = 1024

Answers = dict[int, list[dict[str, Any]]]
"""The episodes of a row, by its number from 1, in the order of the samples."""


def generate(options: argparse.Namespace) -> int:
    """Write the rows of a file with a model's responses."""
    if options.prompt_length is None:
        options.prompt_length = _usual_length(options)
    for name in ("samples", "max_new_tokens", "prompt_length", "engines"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: got {getattr(options, name)}, expected at least 1")
    check_output(options.output, "-o")
    rows = read_all(options.data)
    asked = [{"id": number, "prompt": _question(row, options.prompt_key)} for number, row in enumerate(rows, 1)]
    _refuse_taken(rows, options)
    job = Job(options.output.with_name(f"{options.output.name}.job"), options.samples)
    begun = time.monotonic()
    with job.locked(_about(options, asked)):
        there = job.answers()
        if there:
            say(f"{len(there)} of {len(rows)} rows were answered before; going on with the others")
        left = [row for row in asked if row["id"] not in there]
        if left and not job.is_through():
            _attempt(options, job, left)
        answers = job.answers()
        write_rows(_output(rows, answers, options), options.output)
        job.remove()
    _say_what_was_done(rows, answers, options, time.monotonic() - begun)
    return Exit.DONE


@dataclass(frozen=True)
class Job:
    """The folder of a job on its way."""

    folder: Path
    samples: int

    @contextlib.contextmanager
    def locked(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Be the only process that works on this job; raise `ValueError` if one does, or if it is another job."""
        busy = FolderInUse(f"another roll eval generate is writing to {self.folder}; give each its own -o")
        with folder_lock(self.folder, busy=busy):
            file = self.folder / "job.json"
            if not file.is_file():
                write_json(file, about)
            earlier = json.loads(file.read_text("utf-8"))
            if other := sorted(name for name in {*earlier, *about} if earlier.get(name) != about.get(name)):
                new = ", ".join(f"{name} was {earlier.get(name)!r}, is {about.get(name)!r}" for name in other)
                raise ValueError(
                    f"{self.folder} is a job that was begun otherwise ({new:.500}); repeat its command to go on with "
                    "it, remove the folder to start over, or write to another file with -o"
                )
            yield

    def attempt(self) -> Path:
        """Return a new folder for a run."""
        number = 1 + sum(1 for _ in self.folder.glob("attempt-*"))
        folder = self.folder / f"attempt-{number:03d}"
        folder.mkdir()
        return folder

    def answers(self) -> Answers:
        """Return the rows of which every sample is there; the last line of a killed run may be torn."""
        from roll.pipelines.rollouts.eval_table import EPISODES, UNFINISHED

        by_row: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        for folder in sorted(self.folder.glob("attempt-*")):
            file = next((folder / name for name in (EPISODES, UNFINISHED) if (folder / name).is_file()), None)
            # Only a line feed ends a line: a response may hold other separators, and a kill may cut a character.
            for line in [] if file is None else file.read_bytes().split(b"\n"):
                try:
                    episode = json.loads(line)
                except ValueError:
                    break
                by_row[int(episode["task"].rpartition(":")[2])][episode["member"]] = episode
        return {
            row: [by_member[member] for member in sorted(by_member)]
            for row, by_member in by_row.items()
            if len(by_member) == self.samples
        }

    def is_through(self) -> bool:
        """Return whether an attempt came to its end: rows without an answer were too long to ask."""
        from roll.pipelines.rollouts.eval_table import EPISODES

        return any((folder / EPISODES).is_file() for folder in self.folder.glob("attempt-*"))

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _attempt(options: argparse.Namespace, job: Job, left: Sequence[Mapping[str, Any]]) -> None:
    folder = job.attempt()
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in left), encoding="utf-8")
    file = folder / "generate.yaml"
    file.write_text(yaml.safe_dump(_configuration(options, folder), sort_keys=False), encoding="utf-8")
    try:
        try:
            config = load(file, options.overrides)
        except ConfigError as error:
            raise of_no_file(error, str(file), "what roll eval generate would run") from None
        run_logged(config)
    except BaseException:
        if done := len(job.answers()):
            say(f"{done} rows are answered; the same command goes on with the others ({job.folder})")
        else:
            job.remove()
        raise


def _usual_length(options: argparse.Namespace) -> int:
    """Return 1024, or what the positions of a smaller model leave beside the response."""
    shape = read_shape(options.model, {})
    room = 0 if shape is None or shape.positions is None else shape.positions - options.max_new_tokens
    return min(_USUAL_LENGTH, room) if room > 0 else _USUAL_LENGTH


def _about(options: argparse.Namespace, asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what makes one job another; on which engines it runs doesn't."""
    names = ("model", "samples", "temperature", "max_new_tokens", "prompt_length", "template", "overrides")
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
    files = _files_of(options.model)
    return {**{name: getattr(options, name) for name in names}, "model_files": files, "prompts": digest}


def _files_of(model: str) -> str | None:
    """Return a digest of which files a model's folder has and when they were written; None: it is no folder."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    files = [path for path in folder.iterdir() if path.is_file()]
    versions = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return hashlib.sha256(json.dumps(versions).encode()).hexdigest()


def _question(row: Row, column: str | None) -> Any:
    for name in (column,) if column else QUESTIONS:
        value = column_value(row.values, name)
        if value is not None:
            return value
    wanted = f"column {column!r}" if column else "prompt, question or messages"
    hint = "" if column else "; name the column with --prompt_key"
    raise ValueError(f"{row.where}: no {wanted}; columns: {', '.join(row.values)}{hint}")


def _refuse_taken(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Raise `ValueError` where a column of the output would take the place of one of the data."""
    there = {name for row in rows for name in row.values}
    if options.response_key in there:
        raise ValueError(
            f"{options.data}: there is a column {options.response_key!r} already; name that of the responses with "
            "--response_key"
        )
    added = ("finish_reason", "error") if options.grouped else ADDED
    if taken := [name for name in added if name in there]:
        raise ValueError(
            f"{options.data}: columns {', '.join(taken)} are there already, and the output has some of these names; "
            "rename them, or give the file that has the questions alone"
        )


def _configuration(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the configuration of a validation that keeps what is said, and scores nothing."""
    temperature = options.temperature if options.temperature is not None else (1.0 if options.samples > 1 else 0.0)
    data = {"file_name": str(folder / "rows.jsonl"), "template": options.template, "prompt": "prompt", "id": "id"}
    inline = options.engine == "hf_infer" and options.engines == 1
    return {
        "pipeline": "rlvr",
        "exp_name": "generate",
        "executor": "inline" if inline else "ray",
        "output_dir": str(folder),
        "track_with": ["jsonl"],
        "print_summary": False,
        "pretrain": options.model,
        "val_only": True,
        "num_gpus_per_node": options.engines,
        "prompt_length": options.prompt_length,
        "response_length": options.max_new_tokens,
        "rewards": {_TAG: {"name": "none"}},
        "validation": {
            "data_args": data,
            "generating_args": {"temperature": temperature, "num_return_sequences": options.samples},
        },
        "actor_train": {"data_args": data, "training_args": {}},
        "actor_infer": {"world_size": options.engines, "strategy_args": {"strategy_name": options.engine}},
    }


def _output(rows: Sequence[Row], answers: Answers, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each response, or one for each question with lists."""
    rows_out = []
    for number, row in enumerate(rows, 1):
        answered = [_answer(episode) for episode in answers.get(number, ())]
        answered = answered or [{"response": None, "finish_reason": None, "error": LEFT_OUT}] * options.samples
        columns = [{options.response_key: one.pop("response"), **one} for one in map(dict, answered)]
        if options.grouped:
            rows_out.append({**row.values, **{name: [one[name] for one in columns] for name in columns[0]}})
        else:
            rows_out += [{**row.values, "row": number, "sample": i, **one} for i, one in enumerate(columns)]
    return rows_out


def _answer(episode: Mapping[str, Any]) -> dict[str, Any]:
    turn = episode["turns"][-1] if episode["turns"] else {}
    return {"response": turn.get("text"), "finish_reason": turn.get("finish_reason"), "error": episode["error"]}


def _say_what_was_done(rows: Sequence[Row], answers: Answers, options: argparse.Namespace, seconds: float) -> None:
    every = [episode for episodes in answers.values() for episode in episodes]
    failed = [episode for episode in every if episode["error"]]
    if failed:
        say(f"{len(failed)} responses failed, e.g. {failed[0]['task']}: {failed[0]['error']:.400}")
    if len(answers) < len(rows):
        say(f"{len(rows) - len(answers)} rows have no response: {LEFT_OUT}")
    counted = f"{len(every)} responses to {len(rows)} rows in {options.output}"
    say(f"{counted}, in {seconds:.0f} s; roll eval score scores them")
