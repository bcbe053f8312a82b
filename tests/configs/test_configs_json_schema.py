"""The JSON Schema for editors: as committed, fits every shipped file, and marks what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_schema import json_schema, text
from jsonschema import Draft202012Validator
from test_configs_files import EXAMPLES, REPOSITORY, answers

from roll.configs.parsing.loader import compose_file


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_committed_schema_is_the_one_that_the_classes_give():
    committed = (REPOSITORY / "configs" / "schema.json").read_text("utf-8")
    assert committed == text(), "run `make docs`"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.stem)
def test_every_shipped_file_fits_once_composed_and_an_unknown_key_never(file: Path, validator):
    plain, _ = compose_file(file, answers(file))
    assert not list(validator.iter_errors(json.loads(json.dumps(plain))))
    assert list(validator.iter_errors({**plain, "sead": 1}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": "forty"}, "'forty' is not valid"),
        ({"seed": -1}, "-1 is not valid"),
        ({"actor_train": {"learning_rate": 1}}, "is not valid"),
        ({"truncation": "midle"}, "'midle' is not valid"),
        ({"pipeline": "rlhf"}, "'rlhf' is not valid"),
        ({"train_env_manager": {}}, "'train_env_manager' was unexpected"),
    ],
)
def test_a_wrong_value_is_marked(validator, change, words):
    job = {"pipeline": "rlvr", "rewards": {"math": {"name": "math_rule"}}}
    assert validator.is_valid(job)
    assert validator.is_valid({**job, "seed": "${other}", "defaults": ["base"], "track_with": "stdout"})
    assert validator.is_valid({"pipeline": "my.py:pairs", "beta": 0.1})
    assert any(words in error.message for error in validator.iter_errors({**job, **change}))
