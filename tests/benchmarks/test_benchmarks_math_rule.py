"""The benchmarks of `math_rule` run, at their smallest size."""

from __future__ import annotations

from pathlib import Path

from printed import rows

CHECKOUT = Path(__file__).parents[2]


def test_pairs_of_answers_by_math_rule(bench):
    printed = bench("math_rule_pairs", "--kinds", "decimals", "money", "--each", 2)
    assert rows(printed) == ["kind", "decimals", "money", "all"]
    # 0.75 and 0.750, 0.75 and 3/4; $5 and 5, $5 and 5 dollars: all equal, so nothing unequal can be paid.
    assert "| decimals | 2 | 100 % (0) |" in printed
    assert "| all | 4 | 100 % (0) |" in printed


def test_the_time_of_an_answer_beside_another_checkout(bench):
    printed = bench("math_rule_speed", "--rows", 4, "--rounds", 1, "--against", CHECKOUT)
    assert rows(printed) == ["round", "1", "1"]
    assert printed.count("| 0 | 0 | 0 |") == 2  # nothing refused, all own answers paid, none of the next row's
    assert "this / against:" in printed
