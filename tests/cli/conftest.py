"""What commands start anew each time, kept for the tests of a module."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def one_pool_for_a_reward():
    """Start the processes of a reward that comes with the package once; one's own functions have new ones."""
    from roll.cli import reward
    from roll.configs.catalog.reward_table import REWARDS
    from roll.rewards import reward_pool

    new, kept = reward_pool.RewardPool, {}

    class KeptPool(new):
        def shutdown(self) -> None:
            """Wait for the end of the module."""

    def pool(specs, **options):
        if not all(name in REWARDS for spec in specs.values() for name in spec.functions):
            return new(specs, **options)
        key = repr((specs, options))
        if key not in kept:
            kept[key] = KeptPool(specs, **options)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_pool, "RewardPool", pool)
        patch.setattr(reward, "RewardPool", pool)
        yield
    for each in kept.values():
        new.shutdown(each)
