"""The metrics table: what it accepts, and that the page shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.tracking import names
from roll.utils.timing import Timers

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_shows_the_table_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    assert page == names.with_table(page), "docs/metrics.md is out of date: run `make docs`"


def test_every_pattern_is_there_once_and_has_all_cells():
    rows = [metric for group in names.GROUPS.values() for metric in group]
    patterns = [metric.pattern for metric in rows]
    assert len(patterns) == len(set(patterns))
    assert all(metric.unit and metric.meaning and metric.aggregation for metric in rows)
    assert not any("|" in cell for m in rows for cell in (m.pattern, m.unit, m.meaning, m.aggregation))


@pytest.mark.parametrize(
    "name",
    [
        "reward/mean",
        "reward/math/mean",
        "reward/chain_sum/part/format",
        "rollout/failed_env_error",
        "val/math/pass_at_8",
        "val/accuracy",
        "time/update/self",
        "memory/actor_train_gib",
        "custom/my_loss/some/thing",
        "dropped/too_long",
    ],
)
def test_documented_names_pass(name: str):
    names.check_names([name])


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "reward/",
        "reward/median",
        "reward/math/part/a/b",
        "actor/los",
        "val//accuracy",
        "custom/",
        "xreward/mean",
    ],
)
def test_other_names_are_refused(name: str):
    assert names.undocumented(["reward/mean", name]) == [name]


def test_a_refusal_names_the_nearest_and_the_way_out():
    with pytest.raises(AssertionError, match=r"\['actor/grad_nrm'\].*'actor/grad_norm'.*make docs.*custom/"):
        names.check_names(["actor/loss", "actor/grad_nrm"])


def test_what_the_timers_report_is_documented_and_counts_as_timing():
    timers = Timers()
    with timers.span("step"), timers.span("generate"):
        pass
    result = timers.result()
    names.check_names(result)
    assert all(names.is_timing(name) for name in result)
    assert not names.is_timing("reward/mean")


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="needs the markers"):
        names.with_table("# Metrics\n")
