"""The making of a DeepSpeed engine: a package that may not be there, and silence."""

from __future__ import annotations

import importlib.util

import pytest
from test_deepspeed_steps import spec_of
from train_contract import make_info

from roll.strategies import build_train_strategy


def test_a_missing_package_is_named_with_its_install_command(tiny_model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"deepspeed is not installed: pip install -e '\.\[deepspeed\]'"):
        build_train_strategy(spec_of(tiny_model, "stage 1"), make_info())


def printed(info, spec):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        build_train_strategy(spec, info)
    return said.getvalue()


def test_building_prints_nothing(ranks, tiny_model):
    # ZeRO 1 in bf16 is the optimizer that reports memory whatever the settings.
    assert ranks.run(printed, 2, spec_of(tiny_model, "stage 1", model={"dtype": "bf16"})) == ["", ""]
