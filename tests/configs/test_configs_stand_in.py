"""What stands for a value that a configuration doesn't have."""

from __future__ import annotations

import pytest

from roll.configs.stand_in import STAND_IN, StandInUsed


def test_whatever_a_rule_does_with_it_ends_the_rule():
    for use in (lambda: STAND_IN.model, lambda: STAND_IN > 3, lambda: str(STAND_IN), lambda: isinstance(STAND_IN, int)):
        with pytest.raises(StandInUsed):
            use()


def test_a_walk_over_all_objects_of_all_modules_goes_on():
    # As vLLM does in its worker processes, and they may have imported this package.
    assert not hasattr(STAND_IN, "__dict__")
