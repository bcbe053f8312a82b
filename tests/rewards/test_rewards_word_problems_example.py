"""The rows of examples/word_problems: what is held out stays out, and its reward wants the number."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny_models import build_tiny_model

from roll.cli.__main__ import main
from roll.configs.parsing.loader import load_config
from roll.rewards.gsm8k import gsm8k
from roll.types.trajectory import Task

FOLDER = Path(__file__).parents[2] / "examples" / "word_problems"
NAMES = ("Ann", "Ben", "Cem", "Dora", "Emil")
THINGS = ("apples", "books", "cards", "dogs", "eggs", "figs", "goats", "hats")
FORMS = (
    ("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?", "+"),
    ("There are {a} {thing} and {name} takes {b} of them. How many {thing} are left?", "-"),
    ("Today {name} fills {a} boxes with {b} {thing} each. How many {thing} are that?", "*"),
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("word_problems", FOLDER / "word_problems.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def mawps(tmp_path: Path) -> Path:
    """Five problems of each of 24 outlines, and some of them again in other letters."""
    rows = []
    for number, thing in enumerate(THINGS):
        for form, sign in FORMS:
            for a, name in enumerate(NAMES, 11 + number):
                b = 7
                target = {"+": a + b, "-": a - b, "*": a * b}[sign]
                rows.append({"input": form.format(name=name, a=a, b=b, thing=thing), "target": float(target)})
    again = [{**row, "input": row["input"].replace(".", " .").upper()} for row in rows[::7]]
    file = tmp_path / "mawps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows + again))
    return file


def test_no_held_out_problem_is_taught_nor_a_near_copy_of_it(example, mawps):
    problems = example.read(mawps)
    assert len(problems) == 120, "a text in other letters is the same problem"
    names = example.names_in([problem.text for problem in problems])
    assert names == {name.lower() for name in NAMES}
    parts = example.split(problems, seed=1, held_out=40, solved=20)
    taught = parts.solved + parts.tasks
    assert (len(parts.solved), len(parts.tasks), len(parts.held_out)) == (20, 60, 40)
    assert not {p.text for p in taught} & {p.text for p in parts.held_out}
    assert not {p.text for p in parts.solved} & {p.text for p in parts.tasks}
    outlines = [{example.outline(p.text, names) for p in side} for side in (taught, parts.held_out)]
    assert not outlines[0] & outlines[1]
    other = example.split(problems, seed=2, held_out=40, solved=20)
    assert other.held_out == parts.held_out, "the same for all seeds"
    assert other.solved != parts.solved


def test_a_problem_with_two_answers_or_with_a_fraction_that_was_cut_is_left_out(example, tmp_path):
    rows = [("How many are 2 and 3?", 5.0), ("How many are 2 and 3 ?", 6.0), ("How many are 2 and 4?", 6.0)]
    rows += [("How many are 0.3333333333333333 and 1?", 1.3333), ("What is 1 of 3 parts?", 0.3333333333333333)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"input": text, "target": target}) + "\n" for text, target in rows))
    assert [problem.text for problem in example.read(file)] == ["How many are 2 and 4?"]


@pytest.mark.parametrize(
    ("text", "target", "solution"),
    [
        ("Ann had 1,070 shells and gave 27 away.", "1043", "1070 - 27 = 1043"),
        ("19 cats and 45 dogs, 56 were sold.", "8", "19 + 45 = 64, 64 - 56 = 8"),
        ("16 blue and 25 green ones, and 21 blue ones: how many blue ones?", "37", "16 + 21 = 37"),
        ("$ 3.75 for 3 people", "1.25", "3.75 / 3 = 1.25"),
        ("5 boxes, then 5 more, of 3 each", "30", "5 + 5 = 10, 10 * 3 = 30"),
        ("8 carrots, 7 turnips, 6 carrots", "14", None),  # 8 + 6, or (8 - 6) * 7
        ("2 and 2", "4", None),  # 2 + 2, or 2 * 2
        ("half of 30 for 4", "15", None),
        ("$ 12.5 and $ 12.31", "24.81", "12.5 + 12.31 = 24.81"),
        ("1 and 3", "0.333333", None),
    ],
)
def test_a_calculation_is_found_where_only_one_gives_the_answer(example, text, target, solution):
    assert example.solution(example.Problem(text, target)) == solution


def test_the_reward_wants_the_number_and_not_the_calculation_alone():
    config = load_config(FOLDER, "rlvr_word_problems", [])
    reward = config.rewards["word_problems"]
    assert reward.name == "gsm8k"
    row = {"prompt": "?", "ground_truth": "63"}
    task = Task(id="1", source="rows", payload=row, seed=0, tag="word_problems", domain="word_problems")
    for text, value in {
        "60 + 3 = 63": 1,
        "63": 1,
        "60 + 3": 0,
        "60 + 3 = 62": 0,
        "60 + 3 = 63, 63 - 3": 0,
        "": 0,
    }.items():
        assert gsm8k(f" {text}", task, **reward.reward_kwargs).value == value


def test_both_files_pass_their_check(example, mawps, tmp_path, capsys):
    model = build_tiny_model(tmp_path / "model", max_position_embeddings=512)
    example.write_split(example.split(example.read(mawps), seed=1, held_out=40, solved=20), tmp_path)
    for name, more in {
        "sft_word_problems": [f"actor_train.data_args.file_name={tmp_path}/solved.jsonl"],
        "rlvr_word_problems": [
            f"actor_train.data_args.file_name={tmp_path}/tasks.jsonl",
            f"validation.data_args.file_name={tmp_path}/held_out.jsonl",
        ],
    }.items():
        assert main(["check", str(FOLDER / name), f"pretrain={model}", f"output_dir={tmp_path}/out", *more]) == 0
        assert "error" not in capsys.readouterr().out
