"""A run whose rows have pictures has a model that reads them, and what decodes their files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.model_file_checks import model_tree, picture_families
from roll.configs.errors import Violation, problem
from roll.configs.schema.run_config import RunConfig
from roll.utils.picture_tokens import INSTALL, PROCESSOR_FILES


def row_picture_checks(config: RunConfig, path: str, column: str) -> Iterator[Violation]:
    """Check what `path`, a section of data_args whose `images` is `column`, needs."""
    key = f"{path}.images"
    if importlib.util.find_spec("PIL") is None:
        yield problem(key, "pictures are read by Pillow, which isn't installed", INSTALL, column)
    name = config.model_path("actor_train")
    model_type = model_tree(name).get("model_type")
    if model_type is None:
        return  # isn't at hand; the image processor says so at the start
    if family_of(model_type).pictures is None:
        sentence = f"models of type {model_type}, as {name}, aren't given pictures"
        yield problem(key, sentence, f"a model of one of these types: {', '.join(picture_families())}", column)
    elif Path(name).is_dir() and not any((Path(name) / file).is_file() for file in PROCESSOR_FILES):
        sentence = f"{name} doesn't say how pictures become pixels: it has no {' or '.join(PROCESSOR_FILES[:2])}"
        yield problem(key, sentence, "copy the file that was published with the model", column)
