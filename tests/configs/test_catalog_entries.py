"""Tables of the catalog: what they name exists, takes these options, and says so where people look for it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from roll.configs.catalog.entries import chosen, implementation
from roll.configs.catalog.estimator_table import ESTIMATORS, estimator_of
from roll.configs.catalog.loss_table import LOSSES, loss_of
from roll.configs.catalog.signatures import signature_of
from roll.configs.schema.policy_config import PolicyOptimisation

FUNCTIONS = [("adv_estimator", ESTIMATORS, name) for name in ESTIMATORS]
FUNCTIONS += [("policy_loss", LOSSES, name) for name in LOSSES]


@pytest.mark.parametrize(("key", "table", "name"), FUNCTIONS)
def test_an_entry_says_what_its_function_takes(key, table, name):
    function = implementation(table, name, key=key)
    first, *parameters = inspect.signature(function).parameters
    assert first == "inputs"
    assert list(table[name].options) == parameters
    hints, defaults = get_type_hints(function), inspect.signature(function).parameters
    for option in parameters:
        assert table[name].options[option].key or table[name].options[option].default == defaults[option].default
        declared, taken = table[name].options[option].hint, hints[option]
        # A function may take None for "as the batch says"; the configuration never gives that.
        assert declared == taken or declared in get_args(taken) or set(get_args(declared)) == set(get_args(taken))


@pytest.mark.parametrize(("key", "table", "name"), FUNCTIONS)
def test_an_options_own_key_is_of_the_configuration_and_agrees_with_its_bounds(key, table, name):
    config = PolicyOptimisation()
    for option in table[name].options.values():
        if option.key:
            assert option.key in PolicyOptimisation.__dataclass_fields__
            value = getattr(config, option.source or option.key)
            low = option.bounds.get("gt", option.bounds.get("ge"))
            assert value is None or low is None or value >= low


def test_tables_load_nothing():
    code = "import sys; from roll.configs.catalog import estimator_table, loss_table; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"policy_loss: unknown name 'kimi'; did you mean 'kimi15'\? known: ppo, gspo"):
        implementation(LOSSES, "kimi", key="policy_loss")


OWN = """
def sevens(inputs, *, beta, level: int = 3, exact: bool = False):
    return beta

class Open:
    def __init__(self, first, *, rows: int = 1, **rest):
        pass
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_ones_own_function_gets_the_arguments_that_it_takes(own):
    assert chosen(LOSSES, f"{own}:sevens", {"beta": 7}, key="policy_loss")(None, beta=7) == 7
    assert (loss_of(f"{own}:sevens").options, estimator_of("x.py:y").needs) == ({}, ("token_rewards",))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"beat": 1}, "policy_loss_args.beat: there is no such option; did you mean 'beta'? it has beta, level, exact"),
        ({}, "policy_loss_args.beta: it has no default and must be given"),
        ({"beta": 1, "level": 2.5}, "policy_loss_args.level: it is annotated as int, which 2.5 isn't"),
        ({"beta": 1, "level": True}, "policy_loss_args.level: it is annotated as int, which True isn't"),
        ({"beta": 1, "exact": "yes"}, "policy_loss_args.exact: it is annotated as bool, which 'yes' isn't"),
    ],
)
def test_other_arguments_are_refused_with_the_nearest(own, args, expected):
    with pytest.raises(ValueError) as error:
        chosen(LOSSES, f"{own}:sevens", args, key="policy_loss")
    assert expected in str(error.value)


def test_a_class_that_takes_anything_is_left_alone(own):
    function = implementation({}, f"{own}:Open", key="x")
    assert not list(signature_of(function, skip=1).problems({"rows": 2, "other": 3}))
    assert list(signature_of(function, skip=1).problems({"rows": "2"}))
