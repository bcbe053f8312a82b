"""Shared fixtures: tiny real models, and where the data beside the project is."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from thinned import THINNED
from tiers import TIERS, is_named, may_hold, starts_early, tier_of
from tiny_models import build_tiny_model

from roll.pipelines import choose_products

# Before torch starts its threads. Tests compare bits, so the number is fixed; processes that share the tests get one.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
choose_products()  # as the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray gives its workers the lowest priority but four, so that beside other tests theirs would wait for ever.
os.environ.setdefault("RAY_worker_niceness", "0")

# What a shell starts in the background (`make test &`) ignores Ctrl-C, and so would every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing of the code where others share the cores.
settings.register_profile("roll", deadline=None)
settings.load_profile("roll")

SETTINGS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps those of a test; it has no public way to change them later."""

TESTS = Path(__file__).parent
SHARED = TESTS.parents[1] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="run one tier of tests/tiers.py (default: fast and full); files and tests that are named run anyway",
    )
    parser.addoption(
        "--strict-tier", action="store_true", help="leave out other tiers' tests in files that are named, too"
    )
    parser.addoption("--examples", type=int, help="of every property: so many, and other ones each time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files without a test of the tier: importing all of them takes each worker half a minute."""
    tier, path = config.getoption("--tier"), collection_path
    if tier is None or not path.match("test_*.py") or any(str(path).endswith(name) for name in _named_files(config)):
        return None
    return None if may_hold(path.relative_to(TESTS).as_posix(), path.read_text("utf-8"), tier) else True


def _named_files(config: pytest.Config) -> list[str]:
    return [argument.partition("::")[0] for argument in config.args if ".py" in argument]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers, and begin with the files that have long tests."""
    examples = config.getoption("--examples")
    if examples:
        for item in items:
            if settings_of_test := getattr(getattr(item, "obj", None), SETTINGS, None):
                changed = settings(settings_of_test, max_examples=examples, derandomize=False)
                setattr(item.obj, SETTINGS, changed)
    wanted = config.getoption("--tier")
    named = [] if config.getoption("--strict-tier") else config.args
    kept, left_out = [], []
    for item in items:
        test_id = f"{item.path.relative_to(TESTS).as_posix()}::{item.nodeid.partition('::')[2]}"
        if test_id in THINNED:
            item.extra_keyword_matches.add("cells")  # make evidence EVIDENCE=cells
        tier = tier_of(test_id, getattr(item, "fixturenames", ()))
        chosen = tier == wanted if wanted else tier != "evidence"
        (kept if chosen or is_named(test_id, named) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=lambda item: not starts_early(item.path.relative_to(TESTS).as_posix(), wanted))


@pytest.fixture(scope="session", autouse=True)
def hydras_own_settings_are_left_out():
    """Leave out of each composition what Hydra adds for its own launcher, help and log, which nobody reads here.

    That takes three fifths of its time; processes that tests start, such as those of the command, compose it all.
    """
    from hydra._internal.config_repository import ConfigRepository

    read = ConfigRepository.load_config

    def load_config(self, config_path):
        loaded = read(self, config_path)
        if config_path == "hydra/config":
            loaded.defaults_list = [entry for entry in loaded.defaults_list if str(entry) == "_self_"]
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load_config)
        yield


@pytest.fixture
def checks_start_no_process(monkeypatch):
    """Have a check look at tokenizer, model and rows in this process, which has their libraries already."""
    import json
    import pickle

    from roll.pipelines import check_process

    def answers(configs):
        found = [vars(check_process.look(config)) for config in pickle.loads(pickle.dumps(configs))]
        return [check_process.CheckResult(**each) for each in json.loads(json.dumps(found))]

    monkeypatch.setattr(check_process, "_answers_of_process", answers)


@pytest.fixture(autouse=True)
def root_logger_is_left_as_it_was() -> Iterator[None]:
    """Take back what a run in this process does to the root logger: its log file goes with the test's folder."""
    root = logging.getLogger()
    level, before = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared/data, which isn't here")
    return SHARED / "data"


@pytest.fixture(scope="session")
def stories260k(shared_data: Path) -> Path:
    """A real 0.26M-parameter Llama with its tokenizer."""
    return shared_data / "models" / "stories260k"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random tiny Llama."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def tiny_family(request, tmp_path_factory) -> Path:
    """A random tiny model of each family."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, request.param)
