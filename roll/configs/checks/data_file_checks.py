"""Data files and procedural datasets are there and have what the configuration names."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from roll.configs.catalog.signatures import Signature
from roll.configs.checks.function_checks import named_checks
from roll.configs.errors import Violation, did_you_mean, problem
from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.worker_config import DataArgs, ProceduralTask
from roll.utils.pictures import refuse_pictures
from roll.utils.readers import read_rows, resolve_sources, scan_rows
from roll.utils.reasoning_gym_sets import UselessVerifier, check_dataset, create_dataset, dataset_files
from roll.utils.rows import DataError, Row, Source, has_column


def data_checks(config: RLVRConfig | OfflineConfig) -> Iterator[Violation]:
    """Check that data files exist, unless the run itself makes them, and have the columns; procedural datasets too."""
    sections: dict[str, DataArgs | OfflineDataArgs] = {"actor_train.data_args": config.actor_train.data_args}
    if config.validation is not None:
        sections["validation.data_args"] = config.validation.data_args
    for path, data in sections.items():
        images = _picture_column(config, data)
        if images is not None:
            from roll.configs.checks.picture_checks import row_picture_checks

            yield from row_picture_checks(config, path, images)
        for name in data.file_name:
            if config.prepare is not None and not Path(name).expanduser().exists():
                continue
            try:
                for source in resolve_sources(name):
                    columns: Mapping[str, str | tuple[str, ...]] = data.columns if isinstance(data, DataArgs) else {}
                    if isinstance(config, OfflineConfig) and isinstance(data, OfflineDataArgs):
                        columns = config.columns_of(data)
                    yield from _columns(path, data, columns, source, images)
            except DataError as error:
                yield problem(f"{path}.file_name", str(error), "check the path, or mend the file", name)
            except (RecursionError, OSError) as error:
                reason = "its first row is nested too deeply" if isinstance(error, RecursionError) else error.strerror
                yield problem(f"{path}.file_name", f"{name} can't be read: {reason}", "mend the file", name)
        if isinstance(data, DataArgs) and data.procedural:
            yield from procedural_checks(path, data, config)
        if isinstance(data, DataArgs) and data.dataset is not None:
            args = (f"{path}.dataset_args", data.dataset_args)
            yield from named_checks(f"{path}.dataset", data.dataset, "class", args, skip=0)


def _picture_column(config: RLVRConfig | OfflineConfig, data: DataArgs | OfflineDataArgs) -> str | None:
    if isinstance(config, OfflineConfig) and isinstance(data, OfflineDataArgs):
        return config.data_args_of(data).images
    return data.images


def _columns(
    path: str,
    data: DataArgs | OfflineDataArgs,
    columns: Mapping[str, str | tuple[str, ...]],
    source: Source,
    images: str | None,
) -> Iterator[Violation]:
    """Yield the columns of a text file's first row; other formats, and later rows, are checked when they are read.

    `images`: the column of pictures.
    """
    file = Path(source.location)
    if source.format not in ("jsonl", "csv", "tsv") and not (file.is_file() and file.stat().st_size == 0):
        return
    lenient = isinstance(data, DataArgs) and data.max_bad_rows
    rows = (row for row in scan_rows(source) if isinstance(row, Row)) if lenient else read_rows(source)
    row = next(iter(rows), None)
    if row is None:
        raise DataError(f"{source.location}: no rows")
    try:
        texts = [value for value in row.values.values() if isinstance(value, str)]
        refuse_pictures(row, texts, shown=() if images is None else (images,))
    except DataError as error:
        if images is not None and not has_column(row.values, images):
            expected = f"a column of {source.location}: {', '.join(row.values)}"
            yield Violation(f"{path}.images", expected, f"{path}.images=<the one with the pictures>", images)
        elif not lenient:
            yield problem(f"{path}.file_name", str(error), "", source.location)
    for key, column in columns.items():
        names = (column,) if isinstance(column, str) else column
        if not lenient and not any(has_column(row.values, name) for name in names):
            expected = f"a column of {source.location}: {', '.join(row.values)}"
            if len(names) > 1:
                expected += f"; it has none of {', '.join(names)}"
            value = column if isinstance(column, str) else None
            yield Violation(f"{path}.{key}", expected, f"{path}.{key}=<one of them>", value)
    unnamed = isinstance(data, DataArgs) and data.prompt is None and data.messages is None
    if unnamed and not lenient and not {"prompt", "messages"} & set(row.values):
        expected = f"the column with the prompts, one of {source.location}: {', '.join(row.values)}"
        yield Violation(f"{path}.prompt", expected, f"{path}.prompt=<one of them>", None)


def procedural_checks(path: str, data: DataArgs, config: RLVRConfig | OfflineConfig) -> Iterator[Violation]:
    """Procedural datasets can be made as configured, and their verifiers are worth being learnt from."""
    files = dataset_files()
    if not files:
        fix = "pip install reasoning-gym, or remove the section"
        yield Violation(f"{path}.procedural", "reasoning-gym, which isn't installed", fix)
        return
    for i, task in enumerate(data.procedural):
        if task.dataset not in files:
            fix = did_you_mean(task.dataset, files)
            yield Violation(f"{path}.procedural[{i}].dataset", "a dataset of reasoning-gym", fix, task.dataset)
        else:
            here = f"{path}.procedural[{i}]"
            text = files[task.dataset].read_text(encoding="utf-8")
            wrong = list(_dataset_options(f"{here}.config", task, text))
            yield from wrong or _verifier(here, task, config)


def _verifier(path: str, task: ProceduralTask, config: RLVRConfig | OfflineConfig) -> Iterator[Violation]:
    """Check that the data set can be made, its verifier tells right answers from others, and the reward can find
    them."""
    try:
        entries = check_dataset(create_dataset(task.dataset, task.config, size=8), task.dataset)
    except UselessVerifier as error:
        yield problem(f"{path}.dataset", str(error), "", task.dataset)
        return
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        yield problem(f"{path}.config", f"{task.dataset} refuses it: {error}", "", dict(task.config))
        return
    domain = config.domain_of(task.tag) if isinstance(config, RLVRConfig) else None
    if domain is None or not isinstance(config, RLVRConfig) or "\n" not in str(entries[0]["answer"]).strip():
        return
    reward = config.rewards[domain]
    key = f"rewards.{domain}"
    options = {f"{key}.reward_kwargs": (reward.name, reward.reward_kwargs)}
    options |= {
        f"{key}.parts.{name}.reward_kwargs": (part.name, part.reward_kwargs) for name, part in reward.parts.items()
    }
    for where, (name, kwargs) in options.items():
        if name == "reasoning_gym" and kwargs.get("extract") == "first_line":
            message = f"the answers of {task.dataset} have several lines, of which the first alone is never right"
            yield problem(f"{where}.extract", message, f"{where}.extract=auto", "first_line")


def _dataset_options(path: str, task: ProceduralTask, text: str) -> Iterator[Violation]:
    """Check options against the fields of the dataset's configuration class, which is read and not imported."""
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 2]
    registered = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "register_dataset"]
    named = {node.args[2].id for node in registered if isinstance(node.args[2], ast.Name)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in named]
    if len(classes) != 1:
        return  # laid out in a way that isn't known here; the dataset itself refuses what it doesn't know
    lines = [line for line in classes[0].body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
    fields = {line.target.id: ast.unparse(line.annotation) for line in lines if isinstance(line.target, ast.Name)}
    for name, reason in Signature(frozenset(), fields, takes_any=False).problems(task.config):
        if name not in ("seed", "size"):  # which another rule explains
            yield problem(f"{path}.{name}", f"{task.dataset}: {reason}", "", task.config[name])
