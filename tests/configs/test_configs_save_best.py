"""`save_best`: what is refused before a run that could never keep a best checkpoint."""

from __future__ import annotations

import pytest
from refused import check_refused

from roll.configs.catalog.validation_metrics import EITHER, HIGHER, LOWER, NEVER, BestBy, best_by
from roll.configs.parsing.loader import load_config
from roll.configs.rules.save_best import validation_metrics
from roll.tracking.names import GROUPS

EVAL = "eval_steps=2"


def test_every_metric_of_validations_is_said_to_be_better_higher_lower_or_neither():
    patterns = [*HIGHER, *LOWER, *EITHER, *NEVER]
    assert sorted(patterns) == sorted(metric.pattern for metric in GROUPS["Validation"])


@pytest.mark.parametrize(
    ("value", "metric", "better"),
    [
        ("val/accuracy", "val/accuracy", "higher"),
        ("val/loss", "val/loss", "lower"),
        ("val/math/pass_at_4", "val/math/pass_at_4", "higher"),
        ("val/game/role/white/reward", "val/game/role/white/reward", "higher"),
        ("val/math%2Feasy/failed", "val/math%2Feasy/failed", "lower"),
        ("val/math/length_mean", "val/math/length_mean", None),
        ("min:val/math/length_mean", "val/math/length_mean", "lower"),
        ("min:val/accuracy", "val/accuracy", "lower"),
        ("max:val/a:b/reward", "val/a:b/reward", "higher"),
    ],
)
def test_a_name_says_which_way_is_better_or_a_prefix_does(value, metric, better):
    assert best_by(value) == BestBy(metric, better)


@pytest.mark.parametrize(
    "value",
    ["val/accuracy", "val/math/reward", "val/words/accuracy", "min:val/math/length_mean", "val/math/failed",
     "val/math/pass_at_2", "val/math/maj_at_2"],
)  # fmt: skip
def test_what_a_validation_gives_is_accepted(job, value):
    sampling = ("+validation.generating_args={num_return_sequences: 2, temperature: 1.0}",)
    more = ("+validation.pass_at_k=2", "+validation.maj_at_k=2", *sampling)
    assert load_config(job, "job", [EVAL, f"save_best={value}", *more]).save_best == value


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (("save_best=val/accuracy",), ("acts only with eval_steps", "eval_steps=10")),
        (("save_best=val/accuracy", "eval_steps=0"), ("acts only with eval_steps",)),
        (("save_best=val/acc", EVAL), ("expected a metric of this run's validations: val/accuracy", "did you mean")),
        (("save_best=accuracy", EVAL), ("did you mean 'val/accuracy'",)),
        (("save_best=reward/mean", EVAL), ("expected a metric of this run's validations",)),
        (("save_best=val/loss", EVAL), ("expected a metric of this run's validations",)),
        (("save_best=val/mathe/accuracy", EVAL), ("did you mean 'val/math/accuracy'",)),
        (("save_best=val/math/pass_at_4", EVAL), ("expected a metric of this run's validations",)),
        (("save_best=val/responses", EVAL), ("expected a metric of this run's validations",)),
        (("save_best=max:val/acc", EVAL), ("did you mean 'val/accuracy'",)),
        (("save_best=higher:val/accuracy", EVAL), ("did you mean",)),
        (("save_best=val/math/length_mean", EVAL), ("may be better", "save_best=min:val/math/length_mean")),
        (("save_best=val/math/reward", EVAL, "rewards.math.name=none"), ("always the same",)),
    ],
)
def test_what_no_validation_gives_is_refused(job, overrides, fragments):
    check_refused(job, overrides, "save_best", fragments)


def test_without_held_out_rows_there_is_nothing_to_compare(job):
    text = (job / "job.yaml").read_text()
    (job / "job.yaml").write_text(text[: text.index("validation:")])
    check_refused(job, ["save_best=val/accuracy"], "save_best", ("with validation",))


def test_a_checkpoint_that_is_the_best_can_be_resumed_from_by_name_only_where_there_is_one(job):
    from roll.configs.checks.prerequisites import check_prerequisites
    from roll.configs.errors import ConfigError

    config = load_config(job, "job", ["resume_from_checkpoint=best", "output_dir=out"])
    with pytest.raises(ConfigError, match="there is none: save_best chooses one"):
        check_prerequisites(config)
    (job / "out" / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    check_prerequisites(config)


def test_the_plan_says_when_checkpoints_are_written(job):
    config = load_config(job, "job", [EVAL, "save_best=val/accuracy", "output_dir=out"])
    assert "checkpoints: whenever val/accuracy is better than before, in out/checkpoints" in config.explain_results()
    config = load_config(job, "job", [EVAL, "save_best=val/accuracy", "save_steps=3", "output_dir=out"])
    assert "checkpoints: every 3 steps and whenever val/accuracy is better" in config.explain_results()


def test_every_domain_has_its_metrics(job):
    config = load_config(job, "job", ["+validation.pass_at_k=1"])
    names = validation_metrics(config)
    assert names[0] == "val/accuracy"
    assert "val/words/best_at_1" in names and "val/math/worst_at_1" in names
