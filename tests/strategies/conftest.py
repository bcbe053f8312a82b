"""One pool of rank processes for all tests of the backends."""

from __future__ import annotations

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def ranks():
    """Processes for tests on several ranks, see `RankPool`."""
    pool = RankPool()
    yield pool
    pool.close()
