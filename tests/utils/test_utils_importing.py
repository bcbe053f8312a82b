"""Large imports without rounds of the garbage collector."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from roll.utils import importing
from roll.utils.importing import keep_imports, long_imports


@pytest.fixture
def frozen(monkeypatch) -> list[bool]:
    """An entry for each time that objects are kept out of later rounds."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(gc.isenabled()))
    monkeypatch.setattr(importing._Imports, "kept", False)
    return calls


def test_the_collector_rests_inside_and_goes_on_whatever_happens():
    def fails():
        with long_imports():
            assert not gc.isenabled()
            with long_imports():
                pass
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fails()
    assert gc.isenabled()


def test_a_collector_that_the_user_has_stopped_stays_so():
    gc.disable()
    try:
        with long_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_a_process_of_our_own_keeps_what_was_imported_and_before_the_next_round(frozen, monkeypatch):
    def imports(name):
        with long_imports():
            monkeypatch.setitem(sys.modules, name, ModuleType(name))

    imports("one")
    assert frozen == []
    keep_imports()
    imports("two")
    assert frozen == [False]
    imports("two")  # nothing new, and models may be there by now
    assert frozen == [False]
