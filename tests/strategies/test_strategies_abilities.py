"""Which backend can do what: the table of docs/backends.md, and what workers do with one that can't."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.configs.schema.checkpoint_config import STATE_CONTENTS
from roll.pipelines.workers.engine_probe import LoadedCheck
from roll.pipelines.workers.infer_worker import InferWorker
from roll.pipelines.workers.train_worker import TrainWorker
from roll.strategies import abilities
from roll.strategies.abilities import (
    CastsWeights,
    CountsUpdates,
    GathersOnHost,
    LoadedWeights,
    SavesContents,
    SavesToFiles,
    SendsFromEveryRank,
    Sleeps,
    TakesAdapters,
)
from roll.strategies.base import EngineCounters
from roll.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from roll.strategies.engines.async_engine import AsyncEngine
from roll.strategies.engines.endpoint_engine import EndpointTeacher
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.engines.vllm.vllm_adapters import AdapterEngine
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.strategies.megatron.megatron_strategy import MegatronStrategy

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
CLASSES = {
    "fsdp2": Fsdp2Strategy,
    "deepspeed": DeepSpeedStrategy,
    "megatron": MegatronStrategy,
    "endpoint": EndpointTeacher,
    "hf_infer": HfInfer,
    "vllm": AdapterEngine,
    "sglang": AsyncEngine,
}
ABILITIES = {
    name: each
    for name, each in vars(abilities).items()
    if inspect.isclass(each) and each.__module__ == abilities.__name__ and not name.startswith("_")
}


def table():
    """Ability -> the backends that have it, by the page."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    head = next(line for line in lines if line.startswith("| ability |"))
    backends = [cell.strip(" `") for cell in head.strip("|").split("|")][2:]
    assert backends == list(CLASSES)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        row[0].strip("`"): {backend for backend, cell in zip(backends, row[2:], strict=True) if cell}
        for row in rows
        if row[0].strip("`") in ABILITIES and len(row) == 2 + len(backends)
    }


def test_the_page_says_of_every_ability_which_backends_have_it():
    assert table() == {
        name: {backend for backend, cls in CLASSES.items() if issubclass(cls, ability)}
        for name, ability in ABILITIES.items()
    }


class Plain:
    """A backend of one's own, with what every one must have."""

    def named_weights(self, part="merged"):
        yield from ()

    def save(self, path):
        self.saved = path

    def load(self, path):
        self.loaded = path

    def export(self, path):
        self.exported = path


class Full(Plain):
    def named_weights(self, part="merged", dtype=None):
        yield from ()

    def save(self, path, contents=STATE_CONTENTS, files=None):
        files.text(path, ",".join(contents))

    def load(self, path, contents=STATE_CONTENTS):
        self.loaded = path, contents

    def export(self, path, files=None):
        files.text(path, "model")


class Around:
    """Passes on what it doesn't do itself."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_an_ability_is_having_its_methods_with_its_parameters_also_by_passing_calls_on():
    for ability in (CastsWeights, SavesContents, SavesToFiles):
        assert not isinstance(Plain(), ability)
        assert not isinstance(Around(Plain()), ability)
        assert isinstance(Full(), ability)
        assert isinstance(Around(Full()), ability)
    assert not isinstance(Full(), Sleeps)


def test_a_member_that_is_false_or_none_is_an_ability_that_is_not_there():
    for value, expected in ((True, True), (False, False), (None, False)):
        backend = SimpleNamespace(sends_from_every_rank=value, gathers_on_host=value, take_counters=value)
        assert isinstance(backend, SendsFromEveryRank) is expected
        assert isinstance(backend, GathersOnHost) is expected
    assert not isinstance(backend, CountsUpdates)


def worker_around(backend, kind=TrainWorker):
    worker = object.__new__(kind)
    worker.strategy = worker.engine = backend
    worker.info = SimpleNamespace(role="actor_train", rank=0)
    return worker


def test_a_trainer_without_abilities_stays_resident_and_refuses_the_keys_that_need_one(tmp_path):
    worker = worker_around(Plain())
    assert worker.sleep(("parameters",)) == 0
    worker.wake(("parameters",))
    assert not worker.sends_from_every_rank()
    assert not worker.gathers_on_host()
    folder = str(tmp_path / "a")
    assert (worker.save(folder), worker.export(folder), worker.export_recorded(folder)) == ({}, {}, {})
    worker.load(folder)
    assert worker.strategy.saved == worker.strategy.loaded == worker.strategy.exported == tmp_path / "a"
    advice = "save and load of Plain take no 'contents'; add it, or remove the key"
    with pytest.raises(ValueError, match=f"checkpoint_config.save_contents: {advice}"):
        worker.save(folder, ("model",))
    with pytest.raises(ValueError, match=f"checkpoint_config.load_contents: {advice}"):
        worker.load(folder, ("model",))
    with pytest.raises(ValueError, match="checkpoint_config.async_save: save and load of Plain take no 'files'"):
        worker.begin_save(folder, ("model",), exports=False)


def test_a_trainer_with_them_is_told_what_to_write_and_where(tmp_path):
    worker = worker_around(Full())
    assert list(worker.save(str(tmp_path / "a"), ("model", "extra"))) == ["a"]
    assert (tmp_path / "a").read_text() == "model,extra"
    worker.load(str(tmp_path / "a"), ("model",))
    assert worker.strategy.loaded == (tmp_path / "a", ("model",))
    assert list(worker.export_recorded(str(tmp_path / "b"))) == ["b"]


def test_an_engine_without_abilities_counts_nothing_keeps_its_memory_and_refuses_adapters():
    engine = SimpleNamespace(update_weights=lambda version, weights: None)
    for ability in (CountsUpdates, LoadedWeights, Sleeps, TakesAdapters):
        assert not isinstance(engine, ability)
    worker = worker_around(engine, InferWorker)
    assert worker.take_counters() == EngineCounters()
    assert worker.sleep(("weights",)) == 0
    worker.wake(("weights",))
    LoadedCheck(engine).verify(0, 1)
    transfer = SimpleNamespace(part="adapters", checksum=False)
    with pytest.raises(NotImplementedError, match="SimpleNamespace takes merged weights only"):
        worker.update_weights(SimpleNamespace(transfer=transfer), [])
