"""The builder: types, null, bounds, nesting, unknown keys."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import pytest

from roll.configs.errors import did_you_mean
from roll.configs.parsing.build_config import build
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.rlvr_config import RLVRConfig


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: int = number(1, ge=1, lt=10)
    rate: float | None = number(0.5, gt=0)


@dataclass(frozen=True, kw_only=True)
class Root:
    name: str
    on: bool = False
    either: bool | str = False
    mode: Literal["a", "b", 1] = "a"
    leaf: Leaf = field(default_factory=Leaf)
    maybe: Leaf | None = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    rows: tuple[Leaf, ...] = ()
    words: tuple[str, ...] = one_or_many()
    anything: dict[str, Any] = field(default_factory=dict)


def accepted(tree: dict) -> Root:
    root, violations = build(Root, {"name": "x", **tree})
    assert root is not None, violations
    assert not violations
    return root


def refused(tree: dict) -> list[tuple[str, str]]:
    _, violations = build(Root, {"name": "x", **tree})
    assert violations
    return [(violation.path, str(violation)) for violation in violations]


ACCEPTED = [
    ({"on": True}, "on", True),
    ({"either": "auto"}, "either", "auto"),
    ({"either": True}, "either", True),
    ({"mode": 1}, "mode", 1),
    ({"leaf": {"rate": 2}}, "leaf", Leaf(rate=2.0)),
    ({"leaf": {"rate": None}}, "leaf", Leaf(rate=None)),
    ({"leaf": {}}, "leaf", Leaf()),
    ({"maybe": None}, "maybe", None),
    ({"maybe": {"size": 9}}, "maybe", Leaf(size=9)),
    ({"leaves": {"one": {"size": 2}}}, "leaves", {"one": Leaf(size=2)}),
    ({"rows": [{"size": 2}, {}]}, "rows", (Leaf(size=2), Leaf())),
    ({"words": "one"}, "words", ("one",)),
    ({"words": ["one", "two"]}, "words", ("one", "two")),
    ({"anything": {"a": [1, None]}}, "anything", {"a": [1, None]}),
]


@pytest.mark.parametrize(("tree", "name", "expected"), ACCEPTED)
def test_values_of_the_declared_type_are_taken(tree, name, expected):
    value = getattr(accepted(tree), name)
    assert value == expected
    assert type(value) is type(expected)


REFUSED = [
    ({"name": 3}, "name", "quote it"),
    ({"name": None}, "name", "can't be null"),
    ({"on": 1}, "on", "true or false"),
    ({"on": "true"}, "on", "without quotes"),
    ({"on": None}, "on", "null"),
    ({"either": 3}, "either", "true or false or text"),
    ({"mode": True}, "mode", "one of a, b, 1"),
    ({"mode": "aa"}, "mode", "one of a, b, 1"),
    ({"leaf": None}, "leaf", "no value in the file"),
    ({"leaf": [1]}, "leaf", "a section with keys"),
    ({"leaf": {"size": 0}}, "leaf.size", ">= 1 and < 10"),
    ({"leaf": {"size": 10}}, "leaf.size", ">= 1 and < 10"),
    ({"leaf": {"size": True}}, "leaf.size", "a whole number"),
    ({"leaf": {"size": 2.0}}, "leaf.size", "write 2"),
    ({"leaf": {"size": 2.5}}, "leaf.size", "a whole number"),
    ({"leaf": {"rate": 0}}, "leaf.rate", "> 0"),
    ({"leaf": {"rate": "1e-3"}}, "leaf.rate", "without quotes"),
    ({"leaf": {"rate": float("inf")}}, "leaf.rate", "finite"),
    ({"leaf": {"rate": True}}, "leaf.rate", "a number"),
    ({"leaf": {"sise": 1}}, "leaf.sise", "did you mean 'size'"),
    ({"leaves": {"one": {"size": 0}}}, "leaves.one.size", ">= 1"),
    ({"leaves": {1: {}}}, "leaves", "text as a key"),
    ({"leaves": []}, "leaves", "a section with keys"),
    ({"rows": {"size": 1}}, "rows", "a list"),
    ({"rows": [{}, {"size": 0}]}, "rows[1].size", ">= 1"),
    ({"rows": [None]}, "rows[0]", "a section with keys"),
    ({"words": ["one", 2]}, "words[1]", "quote it: '2'"),
    ({"words": None}, "words", "can't be null"),
    ({"size": 2}, "size", "belongs at leaf.size"),
]


@pytest.mark.parametrize(("tree", "path", "fragment"), REFUSED)
def test_other_values_are_refused_with_path_and_way_out(tree, path, fragment):
    assert [where for where, _ in refused(tree)] == [path]
    assert fragment in refused(tree)[0][1]


def test_every_violation_is_collected():
    assert [path for path, _ in refused({"on": 1, "leaf": {"size": 0, "rate": 0}, "rows": [3], "x": 1})] == [
        "x",
        "on",
        "leaf.size",
        "leaf.rate",
        "rows[0]",
    ]


def test_unknown_keys_alone_still_give_the_section():
    root, violations = build(Root, {"name": "x", "nam": "y"})
    assert root == Root(name="x")
    assert len(violations) == 1


def test_a_missing_required_key_says_what_to_add():
    root, violations = build(Root, {})
    assert root is None
    assert "name: expected text; this key is required" in str(violations[0])


def test_did_you_mean_names_the_nearest_or_all_of_a_few():
    assert did_you_mean("sedd", ["seed", "speed", "other"]).startswith("did you mean 'seed'")
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b"
    assert did_you_mean("zzz", [f"key_{i}" for i in range(20)]) == ""


def test_the_options_of_a_strategy_are_typed_by_its_name():
    tree = {"pipeline": "rlvr", "rewards": {}}
    tree["actor_train"] = {
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"reshard_after_forward": 1}}
    }
    config, violations = build(RLVRConfig, tree)
    assert config is None
    assert [v.path for v in violations] == ["actor_train.strategy_args.strategy_config.reshard_after_forward"]


def test_the_tree_is_frozen_all_the_way_down():
    config, _ = build(RLVRConfig, {"pipeline": "rlvr", "rewards": {}, "reference": {}, "critic": {}})
    assert config is not None
    pending: list[Any] = [config]
    while pending:
        section = pending.pop()
        name = fields(section)[0].name if fields(section) else "anything"
        with pytest.raises(AttributeError):
            setattr(section, name, 1)
        pending += [value for f in fields(section) if is_dataclass(value := getattr(section, f.name))]
