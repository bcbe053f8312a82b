"""The metrics table: what it accepts, and that the page shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from built_parts import with_parts

from roll.tracking import names
from roll.tracking.timing import Timers

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "roll"
PAGE = ROOT / "docs" / "metrics.md"


def test_the_built_page_has_a_whole_row_for_every_metric():
    page = with_parts(PAGE.read_text(encoding="utf-8"))
    for title, group in names.GROUPS.items():
        assert f"\n### {title}\n" in page
        rows = [f"\n| `{m.pattern}` | {m.unit} | {m.meaning} | {m.aggregation} |\n" for m in group]
        assert [row for row in rows if page.count(row) != 1] == []


def test_the_page_names_all_namespaces_and_only_metrics_that_exist():
    page = PAGE.read_text(encoding="utf-8")
    listed = page.split("## Namespaces")[1].split("\n## ")[0]
    patterns = [metric.pattern for group in names.GROUPS.values() for metric in group]
    assert sorted(re.findall(r"`(\w+/)`", listed)) == sorted({pattern.split("/")[0] + "/" for pattern in patterns})
    watched = re.findall(r"`(\w+/[^` ]+)`", page.split("## What to watch")[1].split("\n## ")[0])
    assert watched
    assert names.undocumented(set(watched) - {*patterns, "logs/dropped.jsonl"}) == []


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
        "memory/host_gib",
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
    with pytest.raises(AssertionError, match=r"\['actor/grad_nrm'\].*'actor/grad_norm'.*names.py.*custom/"):
        names.check_names(["actor/loss", "actor/grad_nrm"])


def test_what_the_timers_report_is_documented_and_counts_as_timing():
    timers = Timers()
    with timers.span("step"), timers.span("generate"):
        pass
    result = timers.result()
    names.check_names(result)
    assert all(names.is_timing(name) for name in result)
    assert not names.is_timing("reward/mean")


def emitted_names() -> list[tuple[str, str]]:
    """(where, name) of the metric names that stand in the code, `x` in place of what is filled in at run time."""
    starts = {metric.pattern.split("/")[0] for group in names.GROUPS.values() for metric in group}
    whole_name = re.compile(rf"({'|'.join(starts)})/[\w/]+")
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "tracking":
            continue
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        pieces = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            text = None if node in pieces else literal_text(node)
            if text is not None and whole_name.fullmatch(text):
                found.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", text))
    return found


def literal_text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    return None


def test_every_metric_name_in_the_code_is_in_the_table():
    emitted = emitted_names()
    # "actor/x" is an f-string whose last part is a variable: the trackers judge it when it is logged.
    wrong = [f"{where}: {name}" for where, name in emitted if not name.endswith("/x") and names.undocumented([name])]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "part"),
    [("math", "math"), ("math/easy", "math%2Feasy"), ("50%", "50%"), ("a%2Fb", "a%252Fb"), ("a\nb", "a%0Ab"),
     ("", "%00"), ("\udcff", "%ED%B3%BF"), ("数学", "数学")],
)  # fmt: skip
def test_any_text_is_one_part_of_a_name(text: str, part: str):
    assert names.name_part(text) == part
    names.check_names([f"reward/{part}/mean", f"reward/math/part/{part}", f"val/{part}/pass_at_4"])


def test_a_beginning_of_its_own_stays():
    assert names.name_parts("env/a/b", "env/") == "env/a%2Fb"
    assert names.name_parts("a/b", "env/") == "a%2Fb"
