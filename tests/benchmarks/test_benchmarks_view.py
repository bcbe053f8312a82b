"""The benchmarks of `roll view`, at their smallest size."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn", reason="the page of runs needs the extra view")


def test_a_page_with_many_rows(bench):
    printed = bench("view_rows", "--rows", 2000, "--tokens", 5)
    assert "an episode's tokens" in printed, printed


def test_what_recording_costs(bench, tiny_model):
    printed = bench("view_cost", "--model", tiny_model)
    assert "step" in printed, printed
