"""The table of tiers: patterns that name tests, and what a test's name on the command line does."""

from __future__ import annotations

from pathlib import Path

import pytest
from thinned import THINNED
from tiers import CLUSTERS, EVIDENCE, FULL, SMALL_REAL_RUNS, TIERS, is_named, may_hold, starts_early, tier_of

TESTS = Path(__file__).parent


@pytest.mark.parametrize("pattern", [*EVIDENCE, *FULL, *SMALL_REAL_RUNS, *THINNED])
def test_every_pattern_still_names_a_test(pattern: str):
    file, _, name = pattern.partition("::")
    found = list(TESTS.glob(file if file.endswith((".py", "*")) else f"{file}*"))
    assert found, f"tests/tiers.py names {file}, which is gone"
    start = "def " + (name.partition("[")[0].split("*")[0] or "test_")
    assert any(start in path.read_text("utf-8") for path in found if path.suffix == ".py"), f"no test is {pattern}"


def test_small_real_runs_are_fast_although_they_need_ranks():
    for test in SMALL_REAL_RUNS:
        assert tier_of(test, CLUSTERS) == "fast"


def test_what_no_line_claims_is_fast_unless_it_needs_a_process_per_rank():
    assert tier_of("utils/test_x.py::test_y") == "fast"
    assert tier_of("utils/test_x.py::test_y", CLUSTERS) == "full"
    assert tier_of("evidence/test_evidence_kills.py::test_y") == "evidence"
    assert tier_of("pipelines/test_pipelines_async.py::test_y[a-1]") == "full"


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("tests/a/test_x.py", True),
        ("/repo/tests/a/test_x.py::test_y", True),
        ("tests/a/test_x.py::test_y[1]", True),
        ("tests/a/test_x.py::test_y[2]", False),
        ("tests/a/test_x.py::test", False),
        ("tests/a/test_other.py", False),
        ("tests/a", False),
        ("tests", False),
    ],
)
def test_a_test_that_is_named_runs_whatever_its_tier(argument: str, named: bool):
    assert is_named("a/test_x.py::test_y[1]", [argument]) is named


def test_files_with_long_tests_begin_first():
    assert starts_early("pipelines/test_pipelines_async.py", "full")
    assert starts_early("pipelines/test_pipelines_contract.py", "fast")
    assert not starts_early("pipelines/test_pipelines_async.py", "fast")
    assert not starts_early("strategies/test_hf_lora.py", "full")


@pytest.mark.parametrize(
    ("file", "text", "tiers"),
    [
        ("evidence/test_evidence_kills.py", "", {"evidence"}),
        ("benchmarks/test_benchmarks.py", "", {"full", "evidence"}),
        ("utils/test_x.py", "def test_y(): ...", {"fast", "evidence"}),
        ("strategies/test_x.py", "def test_y(ranks): ...", {"fast", "full", "evidence"}),
        ("pipelines/test_pipelines_contract.py", "", {"fast", "full", "evidence"}),
        ("pipelines/test_pipelines_resume.py", "", {"full", "evidence"}),
    ],
)
def test_a_file_is_read_for_the_tiers_that_may_have_tests_in_it(file: str, text: str, tiers: set[str]):
    assert {tier for tier in TIERS if may_hold(file, text, tier)} == tiers
