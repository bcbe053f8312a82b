"""One pool of rank processes for all tests of the backends."""

from __future__ import annotations

import pickle

import pytest
from ranks import RankPool
from tiny_models import build_tiny_model


@pytest.fixture(scope="session")
def ranks():
    """Processes for tests on several ranks, see `RankPool`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def written(ranks, tmp_path_factory):
    """`written(write, world, spec)`: a folder, and what `write(info, spec, folder)` gave rank 0; each written once.

    Who changes anything in the folder takes a copy.
    """
    made = {}

    def get(write, world, spec):
        key = pickle.dumps((write, world, spec))
        if key not in made:
            folder = tmp_path_factory.mktemp("written") / "checkpoint"
            made[key] = folder, ranks.run(write, world, spec, folder)[0]
        return made[key]

    return get


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """`model_of(family="llama", **options)`: a tiny model, built once."""
    made = {}

    def get(family="llama", **options):
        key = (family, repr(sorted(options.items())))
        if key not in made:
            made[key] = build_tiny_model(tmp_path_factory.mktemp("layouts") / family, family, **options)
        return made[key]

    return get
