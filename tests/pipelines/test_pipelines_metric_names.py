"""Domains and parts of any name: a step's metrics have names that trackers take."""

from __future__ import annotations

from dataclasses import replace

from rows import R, make_group

from roll.configs.schema.reward_config import ValidationConfig
from roll.configs.schema.worker_config import DataArgs
from roll.pipelines.rollouts.assemble import assemble
from roll.pipelines.rollouts.rollout_metrics import rollout_metrics
from roll.pipelines.rollouts.validation import validation_metrics
from roll.tracking.names import check_names
from roll.types.trajectory import Group

ODD = ("math/easy", "a b", "50%", "x/part/y", "..")


def _group(domain: str) -> Group:
    group = make_group(domain, [R(1.0), R(0.0)], domain)
    parts = {"length/short": 1.0, "env/a": 2.0, "line\nbreak": 3.0}
    return replace(group, trajectories=tuple(replace(t, reward_parts=parts) for t in group.trajectories))


def test_a_step_names_odd_domains_and_parts_in_a_way_that_trackers_take():
    groups = [_group(domain) for domain in ODD]
    values = rollout_metrics(assemble(groups)).result()
    check_names(values)
    assert values["reward/math%2Feasy/part/length%2Fshort"] == 1.0
    assert values["reward/math%2Feasy/part/env/a"] == 2.0
    assert values["data/50%/share"] == 0.2


def test_so_does_validation():
    values = validation_metrics([_group(domain) for domain in ODD], ValidationConfig(data_args=DataArgs()))
    check_names(values)
    assert values["val/math%2Feasy/accuracy"] == 0.5
