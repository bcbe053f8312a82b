"""`policy_loss` and `adv_estimator` with options: both spellings, types, bounds, and what is said of wrong ones."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_args

import pytest

from roll.configs.catalog.loss_table import LOSSES
from roll.configs.checks.prerequisites import algorithm_checks
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config, to_yaml
from roll.configs.rules.acts_if_rules import acts_if_rules
from roll.utils.importing import load_object


@pytest.mark.parametrize(
    "written",
    [
        ["policy_loss={name: kimi15, tau: 1}"],
        ["policy_loss=kimi15", "policy_loss_args={tau: 1}"],
        ["policy_loss=kimi15", "policy_loss_args.tau=1"],
        ["policy_loss=kimi15", "kimi15_tau=1"],
    ],
)
def test_options_of_a_loss_may_be_written_in_several_ways(job, written):
    config = load_config(job, "job", [*written, "adv_estimator={name: grpo, eps: 0.5}"])
    assert config.policy_loss == "kimi15"
    assert config.loss_options == {"tau": 1.0, "level": "sequence"}
    assert isinstance(config.loss_options["tau"], float)
    assert config.estimator_options == {"eps": 0.5}


@pytest.mark.parametrize("override", ["policy_loss={name: sapo}", "policy_loss.name=sapo"])
def test_an_override_with_another_name_replaces_the_options_of_the_file(job, override):
    (job / "more.yaml").write_text("defaults: [job, _self_]\npolicy_loss: {name: kimi15, tau: 0.2}\n")
    assert load_config(job, "more", [override]).policy_loss_args == {}
    assert load_config(job, "more", [override, "policy_loss.tau_pos=2"]).policy_loss_args == {"tau_pos": 2.0}
    kept = load_config(job, "more", ["policy_loss={name: kimi15, level: token}"])
    assert kept.policy_loss_args == {"tau": 0.2, "level": "token"}
    assert load_config(job, "more", ["policy_loss.tau=0.3"]).policy_loss_args == {"tau": 0.3}


@pytest.mark.parametrize(
    ("overrides", "name", "options"),
    [
        (["policy_loss.name=sapo", "policy_loss=ppo"], "ppo", {}),
        (["policy_loss={name: sapo}", "policy_loss=ppo"], "ppo", {}),
        (["policy_loss.name=sapo", "~policy_loss.tau"], "sapo", {}),
        (["policy_loss.name=sapo", "~policy_loss"], "ppo", {}),
        (["policy_loss=ppo", "policy_loss.name=sapo"], "sapo", {}),
    ],
)
def test_the_last_override_of_a_named_section_counts(job, overrides, name, options):
    (job / "more.yaml").write_text("defaults: [job, _self_]\npolicy_loss: {name: kimi15, tau: 0.2}\n")
    config = load_config(job, "more", overrides)
    assert (config.policy_loss, config.policy_loss_args) == (name, options)


def test_a_key_below_a_list_is_refused_by_its_name(job):
    (job / "more.yaml").write_text("defaults: [job, _self_]\ntrack_with: [stdout, jsonl]\n")
    with pytest.raises(ConfigError, match=r"track_with.name: got 'jsonl', .*track_with is a list"):
        load_config(job, "more", ["track_with.name=jsonl"])


def test_a_name_may_be_a_variable_that_only_the_command_line_gives(job):
    (job / "late.yaml").write_text('defaults: [job, _self_]\npolicy_loss: {name: "${loss}", level: token}\n')
    assert load_config(job, "late", ["loss=kimi15"]).policy_loss_args == {"level": "token"}
    assert load_config(job, "late", ["policy_loss.name=kimi15"]).policy_loss_args == {}


@pytest.mark.parametrize("trackers", ["[jsonl, tensorboard]", "{name: stdout, rows: 3}", "jsonl"])
def test_one_tracker_with_options_may_override_any_others(job, trackers):
    (job / "more.yaml").write_text(f"defaults: [job, _self_]\ntrack_with: {trackers}\n")
    config = load_config(job, "more", ["track_with={name: stdout, rows: 5}"])
    assert (config.track_with, config.tracker_kwargs) == (("stdout",), {"stdout": {"rows": 5}})


def test_a_printed_configuration_is_read_again(job):
    config = load_config(job, "job", ["policy_loss={name: ppo, clip_low: 0.1, dual_clip: null}"])
    (job / "again.yaml").write_text(to_yaml(config))
    again = load_config(job, "again")
    assert again == config
    assert again.loss_options == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None, "ratio_type": "token"}


def test_options_that_arent_written_come_from_their_keys(job):
    config = load_config(
        job, "job", ["adv_estimator={name: reinforce}", "gamma=0.5", "pg_clip=0.1", "pg_clip_high=0.3"]
    )
    assert config.estimator_options == {"gamma": 0.5}
    assert (config.loss_options["clip_low"], config.loss_options["clip_high"]) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("policy_loss={name: kimi15, tua: 1}",
         "policy_loss_args.tua: got 1, expected an option of kimi15, which has tau"),
        ("policy_loss={name: kimi15, tua: 1}", "did you mean 'tau'?"),
        ("policy_loss={name: kimi15, tau: fast}", "policy_loss_args.tau: got 'fast', expected a number"),
        ("policy_loss={name: kimi15, tau: -1}", "policy_loss_args.tau: got -1.0, expected a number >= 0"),
        ("policy_loss={name: topr, level: row}", "policy_loss_args.level: got 'row', expected one of sequence, token"),
        ("policy_loss={name: reinforce, tau: 1}", "expected an option of reinforce, which has none"),
        ("policy_loss={tau: 1}", "expected a name, or a section with a name and options"),
        ("policy_loss={name: kimmi15}", "did you mean 'kimi15'"),
        ("adv_estimator={name: grpo, gamma: 1}",
         "adv_estimator_args.gamma: got 1, expected an option of grpo, which has eps"),
        ("adv_estimator={name: gigpo}", "credits the turns of an environment"),
        ("policy_loss_args={tau: 1}", "expected an option of ppo, which has clip_low"),
        ("policy_loss={name: tis, lower: 2}", "policy_loss_args.lower: got 2.0, expected less than upper (1.0)"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_with_what_there_is(job, override, expected):
    with pytest.raises(ConfigError) as error:
        load_config(job, "job", [override])
    assert expected in str(error.value)


def test_an_option_is_given_once(job):
    with pytest.raises(ConfigError, match=r"policy_loss_args.tau: .* because kimi15_tau says the same"):
        load_config(job, "job", ["policy_loss={name: kimi15, tau: 1}", "kimi15_tau=0.5"])
    with pytest.raises(ConfigError, match="options in one place; policy_loss has some too"):
        load_config(job, "job", ["policy_loss={name: kimi15, tau: 1}", "policy_loss_args={level: token}"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("beta: 0.2", ""),
        ("beta: 0.2, power: 3", ""),
        ("beat: 0.2", "beat: got 0.2, expected an argument of OWN: there is no such option; did you mean 'beta'"),
        ("power: 3", "beta: expected an argument of OWN: it has no default and must be given"),
        ("beta: 1, power: high", "power: got 'high', expected an argument of OWN: it is annotated as int"),
    ],
)
def test_options_of_ones_own_loss_are_compared_with_its_signature_without_importing_it(job, options, expected):
    (job / "own.py").write_text("raise SystemExit\ndef bent(inputs, *, beta: float, power: int = 2):\n    pass\n")
    own = f"{job}/own.py:bent"
    config = load_config(job, "job", [f"policy_loss={{name: '{own}', {options}}}"])
    found = [str(violation).replace(own, "OWN") for violation in algorithm_checks(config)]
    assert bool(found) == bool(expected)
    assert not found or found[0].startswith(f"policy_loss_args.{expected}")


def test_keys_of_losses_act_with_the_losses_that_read_them_and_are_refused_with_others(job):
    config = load_config(job, "job", [])
    fields = {spec.name: spec for spec in dataclasses.fields(config)}
    keys = {option.key: option for loss in LOSSES.values() for option in loss.options.values() if option.key}
    for name, loss in LOSSES.items():
        config = dataclasses.replace(config, policy_loss=name, dual_clip_loss="dual_clip" in loss.options)
        for key, option in {"pg_clip": LOSSES["ppo"].options["clip_low"], **keys}.items():
            default = fields[key].default
            value = next(v for v in (*get_args(option.hint), 0.5, 4.0) if v != default and _within(v, fields[key]))
            changed = dataclasses.replace(config, **{key: value})
            idle = [violation.problem for violation in acts_if_rules(changed) if violation.path == key]
            assert bool(idle) is (changed.loss_options == config.loss_options), (key, name)
            assert not idle or "acts only" in idle[0]
        assert loss.options.keys() <= inspect.signature(load_object(loss.path, key="policy_loss")).parameters.keys()


def _within(value, spec) -> bool:
    bounds = spec.metadata.get("bounds", {})
    if isinstance(value, type) or value is type(None) or isinstance(value, str) is bool(bounds):
        return False
    return not bounds or (value < bounds.get("lt", 9) and value > bounds.get("gt", -1))


def test_a_clip_range_that_no_bound_takes_is_refused(job):
    bounds = ["pg_clip=0.3", "pg_clip_low=0.2", "pg_clip_high=0.28"]
    assert load_config(job, "job", bounds[:2]).loss_options["clip_high"] == 0.3
    with pytest.raises(ConfigError, match="pg_clip: .*both say another range"):
        load_config(job, "job", bounds)
    with pytest.raises(ConfigError, match="decoupled_ppo_cap.*this key acts only with policy_loss decoupled_ppo"):
        load_config(job, "job", ["decoupled_ppo_cap=2"])
