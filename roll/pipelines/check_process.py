"""What `roll check` asks of tokenizer, model and data, as the run itself will at its start.

One process answers all of it, in a limited time: a check itself loads none of the libraries that they come with. What
wasn't looked at is said.

    StartCheck.violations --configs--> process, look: tokenizer -> chat template -> empty models -> rows -> the run's
    own loading --> violations
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roll.configs.checks.model_families import family_problems, has_untested_family
from roll.configs.checks.model_file_checks import model_file_checks
from roll.configs.errors import Violation, problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.offline_config import OfflineConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import DataArgs
from roll.pipelines.run.model_options import has_model_options, option_problems
from roll.pipelines.run.model_proofs import proof_problems
from roll.pipelines.run.template_check import answers, questions, tokenizer_args
from roll.pipelines.run.warm_start import pending_warm_start

_READING_S = 15.0
"""Seconds that reading rows may take. A run reads all of them, and so does `roll data check`."""
_PROCESS_S = 120.0
_MAX_PROCEDURAL = 20_000
"""Tasks that are made for a check."""
_ALL_ROWS = "`roll data check` reads all of them"


@dataclass
class CheckResult:
    """What the process has found: (key, sentence, fix) of what stops the run, and sentences of the rest."""

    violations: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


class StartCheck:
    """Looks at what a run reads at its start. `warnings` then says what it would lose, `unread` what nobody saw."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.unread: list[str] = []
        self.has_run = False
        """Whether it has looked: it does so when nothing else is wrong."""

    def violations(self, config: RunConfig) -> Iterator[Violation]:
        """Yield what would end the run, or the fine-tuning before it."""
        self.has_run = True
        parts = {"": config}
        try:
            parts |= _warm_start(config)
        except ValueError as error:
            yield problem("warm_start", str(error).removeprefix("warm_start: "))
        in_process: dict[str, RunConfig] = {}
        for prefix, part in parts.items():
            violations = list(model_file_checks(part))
            if self._needs_process(part, violations):
                in_process[prefix] = part
            yield from (replace(one, path=f"{prefix}{one.path}") for one in violations)
        for prefix, answer in zip(in_process, _answers_of_process(list(in_process.values())), strict=True):
            self.warnings += answer.warnings
            self.unread += answer.unread
            yield from (problem(f"{prefix}{key}", *words) for key, *words in answer.violations)

    def _needs_process(self, config: RunConfig, violations: list[Violation]) -> bool:
        """Add what can be seen without the libraries of tokenizers and models; return whether there is more to see."""
        loads = not violations
        has_questions, reads = bool(list(questions(config))), self._reads_rows(config)
        looks_long, made = self._procedural(config)
        violations += made
        args = tokenizer_args(config)
        name = str(args.tokenizer_name_or_path or args.model_name_or_path)
        local = Path(name).expanduser().is_dir()
        if not local and (has_questions or _sections(config)):
            self.unread.append(f"chat template and lengths of rows, because {name} isn't a folder here")
        needs_models = has_model_options(config) or has_untested_family(config)
        return loads and (reads or needs_models or (local and (has_questions or (looks_long and not made))))

    def _reads_rows(self, config: RunConfig) -> bool:
        """Return whether there are rows to read, and note those that can't be."""
        reads = False
        for key, data in _sections(config).items():
            if isinstance(data, DataArgs) and data.dataset is not None:
                self.unread.append(f"{key}: rows of {data.dataset}, your own class; `roll data check` reads them")
            elif (missing := _elsewhere(config, data.file_name)) is not None:
                self.unread += [f"{key}: {missing}"] if missing else []
            else:
                reads = reads or bool(data.file_name)
        return reads

    def _procedural(self, config: RunConfig) -> tuple[bool, list[Violation]]:
        """Return whether prompts of tasks that are made may be too long, and whether there are too few of them."""
        from roll.data.procedural import procedural_tasks, questions_of
        from roll.utils.rows import DataError

        looks_long = False
        violations: list[Violation] = []
        if not isinstance(config, RLVRConfig):
            return looks_long, violations
        known: dict[str, set[str]] = {}
        for key, data in _sections(config).items():
            for i, task in enumerate(data.procedural):
                if task.size > _MAX_PROCEDURAL:
                    self.unread.append(f"{key}.procedural[{i}]: whether there are {task.size:,} different tasks")
                    continue
                split, seed = "val" if key.startswith("validation") else "train", config.seed
                try:
                    made = procedural_tasks(
                        task, seed=seed if task.seed is None else task.seed, split=split,
                        domain=config.domain_of(task.tag) or "", exclude=known.get(task.tag, ()),
                    )  # fmt: skip
                except DataError as error:
                    violations.append(problem(f"{key}.procedural[{i}]", str(error)))
                    continue
                looks_long |= max(len(one.payload["prompt"]) for one in made) > 3 * config.prompt_length
                if split == "train":
                    known.setdefault(task.tag, set()).update(questions_of(made))
        return looks_long, violations


def _warm_start(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration of a warm start that is still to be done, by the words that its keys begin with."""
    if not isinstance(config, AgenticConfig) or config.replays or config.warm_start is None:
        return {}
    if not Path(config.warm_start).is_file():
        return {}  # another check says so
    first = pending_warm_start(config)
    return {} if first is None else {f"warm_start ({config.warm_start}): ": first}


def _sections(config: RunConfig) -> dict[str, Any]:
    """Return the sections of data that the run will read, by key."""
    if isinstance(config, RLVRConfig):
        if config.replays:
            return {}
        validates = config.eval_steps or config.val_before_train or config.val_only
    elif isinstance(config, OfflineConfig):
        validates = True
    else:
        return {}
    sections: dict[str, Any] = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None and validates and not getattr(config, "validation_share", 0.0):
        sections["validation.data_args"] = config.validation.data_args
    return sections


def _elsewhere(config: RunConfig, names: tuple[str, ...]) -> str | None:
    """Say which rows aren't here: those that the run makes, or fetches; empty: another check refuses them. None: all
    are here."""
    from roll.utils.readers import resolve_sources
    from roll.utils.rows import DataError

    for name in names:
        if config.prepare is not None and not Path(name).expanduser().exists():
            return f"rows of {name}, which `prepare` makes when the run starts"
        try:
            if any(source.format == "hub" for source in resolve_sources(name)):
                return f"rows of {name}, a data set of the hub; {_ALL_ROWS}"
        except DataError:
            return ""
    return None


def _answers_of_process(configs: list[RunConfig]) -> list[CheckResult]:
    if not configs:
        return []
    command = [sys.executable, "-m", "roll.pipelines.check_process"]
    try:
        payload = pickle.dumps(configs)
        done = subprocess.run(command, input=payload, capture_output=True, timeout=_PROCESS_S)
        return [CheckResult(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    except subprocess.TimeoutExpired:
        why = f"reading them took more than {_PROCESS_S:.0f} seconds"
    except (IndexError, ValueError, TypeError):
        last = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()][-1:]
        why = f"the process that reads them ended: {last[0] if last else f'exit {done.returncode}'}"
    except (OSError, pickle.PicklingError, AttributeError) as error:
        why = str(error)
    unread = [f"tokenizer, chat template, rows and the model's options: {why}"]
    return [CheckResult(unread=unread), *(CheckResult() for _ in configs[1:])]


# --- in the process -------------------------------------------------------------------------------------------------


def look(config: RunConfig) -> CheckResult:
    """Return what is to be said; loads the tokenizer and reads rows."""
    from roll.data.data_check import Progress
    from roll.pipelines.run_data import RunData

    answer = CheckResult()
    tokenizer = _tokenizer(config, answer)
    if answer.violations:
        return answer
    if tokenizer is not None:
        answer.violations += [(*each, "") for each in answers(tokenizer, list(questions(config)))]
    answer.violations += option_problems(config)
    families = list(family_problems(config))
    refused = {key.partition(".strategy_args")[0].partition(".model_args")[0] for key, *_ in families}
    answer.violations += [*families, *proof_problems(config, refused)]
    sections = _sections(config)
    if not sections or any(_elsewhere(config, data.file_name) is not None for data in sections.values()):
        return answer
    progress = Progress(None, _READING_S)
    rows = RunData(progress, tokenizer)
    try:
        if isinstance(config, RLVRConfig):
            if not any(data.dataset for data in sections.values()):
                rows.rlvr(config, _scorers(config, answer))
        elif isinstance(config, OfflineConfig):
            rows.offline(config)
    except ValueError as error:  # of the template: no row can be made
        answer.violations.append(("actor_train.data_args", str(error), ""))
    answer.violations += [(one.key, one.text, one.fix) for one in rows.remarks if one.level == "stop"]
    answer.warnings += [one.text for one in rows.remarks if one.level == "loss"]
    for findings in rows.findings:
        if findings.unread:
            answer.unread.append(f"{findings.name}: rows after the first {findings.rows:,}; {_ALL_ROWS}")
    if tokenizer is not None and not answer.violations and not progress.over:
        answer.violations += _as_the_run(config, tokenizer)
    return answer


def _tokenizer(config: RunConfig, answer: CheckResult) -> Any:
    """Return the policy's tokenizer; None where it isn't here."""
    from roll.strategies.training.pretrained import load_tokenizer

    args = tokenizer_args(config)
    own = args.tokenizer_name_or_path
    if not Path(str(own or args.model_name_or_path)).expanduser().is_dir():
        return None
    try:
        return load_tokenizer(args)
    except Exception as error:  # noqa: BLE001 - of transformers, or of code in the folder
        key = "actor_train.model_args.tokenizer_name_or_path" if own else "pretrain"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        fix = "save it again with transformers, or name another tokenizer_name_or_path"
        answer.violations.append((key, f"its tokenizer can't be loaded: {lines[0]}", fix))
        return None


class _InProcess:
    """Scores at once; see `Scorer`."""

    def __init__(self, reward: Any) -> None:
        self._reward = reward

    def submit(self, request: Any) -> Future[Any]:
        from roll.rewards.base import Reward, RewardResult

        (outcome,) = self._reward.score_all([request])
        failed = isinstance(outcome, Exception)
        reward = outcome if isinstance(outcome, Reward) else None
        status = "reward_error" if failed else "unscored" if outcome is None else "ok"
        future: Future[Any] = Future()
        future.set_result(
            RewardResult(id=request.id, status=status, reward=reward, error=str(outcome) if failed else "")  # type: ignore[arg-type]
        )
        return future


def _scorers(config: RLVRConfig, answer: CheckResult) -> dict[str, Any]:
    """Return the rewards of this package by domain; functions of one's own and services aren't called by a check."""
    from roll.configs.catalog.reward_table import REWARDS
    from roll.pipelines.rollouts.reward_router import in_run, reward_spec
    from roll.pipelines.run_data import reward_names
    from roll.rewards.reward_registry import load_reward

    scorers: dict[str, Any] = {}
    for domain, reward in config.rewards.items():
        names = reward_names(reward)
        if reward.is_function and not names - set(REWARDS) and not names & {"http", "code"}:
            with contextlib.suppress(ValueError):  # options that another check refuses
                scorers[domain] = _InProcess(load_reward(in_run(reward_spec(config, domain), config.max_steps)))
        elif names - {"none", "judge"} and reward.is_function:
            answer.unread.append(
                f"rewards.{domain}: whether {reward.name} can score each row; `roll data check` tries it"
            )
    return scorers


def _as_the_run(config: RunConfig, tokenizer: Any) -> Iterator[tuple[str, str, str]]:
    """Load the data as the run does, which says what the rows together aren't fit for: epochs, shares, domains."""
    from roll.pipelines import start
    from roll.pipelines.offline.dpo import dpo_data
    from roll.pipelines.offline.reward_model import reward_data
    from roll.pipelines.offline.sft import sft_data

    loaders = {"sft": sft_data, "dpo": dpo_data, "reward_model": reward_data}
    key = "actor_train.data_args"
    with tempfile.TemporaryDirectory(prefix="roll-check-") as folder, contextlib.redirect_stdout(sys.stderr):
        elsewhere = replace(config, output_dir=folder, logging_dir=None)
        try:
            if isinstance(elsewhere, RLVRConfig):
                data, training = elsewhere.actor_train.data_args, None
                if data.has_rows:
                    training = start.training_data(elsewhere, tokenizer)
                    start.planned_steps(elsewhere, training[0])
                if "validation.data_args" in _sections(config):
                    key = "validation.data_args"
                    start.validation_data(elsewhere, tokenizer, None if training is None else training[1])
            elif config.pipeline in loaders:
                loaders[config.pipeline](elsewhere, tokenizer)  # type: ignore[operator]
        except ValueError as error:
            yield key, str(error), ""


if __name__ == "__main__":
    results = [vars(look(config)) for config in pickle.loads(sys.stdin.buffer.read())]
    sys.stdout.write(json.dumps(results) + "\n")
