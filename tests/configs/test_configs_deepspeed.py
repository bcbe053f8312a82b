"""DeepSpeed's JSON: what agrees with the role passes, each contradiction is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.schema.deepspeed_config import REFUSED_ZERO_KEYS, ZERO_KEYS

CONFIG = "actor_train.strategy_args.strategy_config"
ZERO = f"{CONFIG}.zero_optimization"
ARGS = "actor_train.training_args"
PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("deepspeed_*.yaml"))


def use(job: Path, options: dict, overrides: tuple[str, ...] = (), role: str = "actor_train", kind: str = "train"):
    tree = yaml.safe_load((job / "job.yaml").read_text())
    strategy = {"strategy_name": f"deepspeed_{kind}", "strategy_config": options}
    tree.setdefault(role, {})["strategy_args"] = strategy
    (job / "job.yaml").write_text(yaml.safe_dump(tree))
    return load_config(job, "job", list(overrides))


def complaint(job, options, overrides=(), **role):
    with pytest.raises(ConfigError) as caught:
        use(job, options, overrides, **role)
    (violation,) = caught.value.violations
    return violation.path, str(violation)


ACCEPTED = {
    "nothing": {},
    "auto": {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
     "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
     "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    "the same numbers": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
     "gradient_clipping": 1.0, "bf16": {"enabled": False}, "fp16": {"enabled": False},
     "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}}},
    "every stage that a key acts in": {"zero_optimization": {"stage": 1, "reduce_scatter": False,
                                                             "allgather_partitions": True},
     "gradient_predivide_factor": 2.0, "bf16": {"enabled": False, "immediate_grad_update": True}},
    "offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_agrees_with_the_role_passes(job, name):
    use(job, ACCEPTED[name])


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_every_preset_loads_and_is_named_like_its_file(job, file):
    (name, options), *more = yaml.safe_load(file.read_text()).items()
    assert (name, more) == (file.stem, [])
    config = use(job, options)
    assert config.actor_train.strategy_args.strategy_config.stage == int(name[14:15] or 1)


def test_there_are_five_presets():
    assert len(PRESETS) == 5


REFUSED = [
    ({"zero_optimisation": {}}, f"{CONFIG}.zero_optimisation", "did you mean 'zero_optimization'"),
    ({"zero_optimization": {"stge": 2}}, f"{ZERO}.stge", "did you mean 'stage'"),
    ({"zero_optimization": {"stage": 4}}, f"{ZERO}.stage", "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, f"{ZERO}.stage", "0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, f"{ZERO}.cpu_offload",
     "offload_optimizer: {device: cpu}"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}}, f"{ZERO}.offload_optimizer.devise",
     "did you mean 'device'"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, f"{ZERO}.offload_param.device",
     "offload to files isn't supported"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, f"{ZERO}.stage", "stage 3 or more"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, f"{ZERO}.stage", "stage 1 or more"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
     f"{ZERO}.offload_optimizer.ratio", "1 below stage 3"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": True}}, f"{ZERO}.offload_optimizer",
     "a section with keys"),
    ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 9}}, f"{ZERO}.stage3_max_live_parameters",
     "no effect with stage 2: it acts in stage 3"),
    ({"zero_optimization": {"stage": 3, "allgather_bucket_size": 9}}, f"{ZERO}.allgather_bucket_size",
     "no effect with stage 3: it acts in stage 1 or 2"),
    ({"zero_optimization": {"overlap_comm": True}}, f"{ZERO}.overlap_comm",
     "no effect with stage 0: it acts in stage 1 or 2 or 3"),
    ({"zero_optimization": {"stage": 2, "allgather_partitions": False}}, f"{ZERO}.allgather_partitions", "true: "),
    ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, f"{ZERO}.round_robin_gradients",
     "the order of the model"),
    ({"prescale_gradients": True, "zero_optimization": {"stage": 2}}, f"{CONFIG}.prescale_gradients",
     "zero_optimization.reduce_scatter=false"),
    ({"gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 1}}, f"{CONFIG}.gradient_predivide_factor",
     "no effect with reduce_scatter"),
    ({"gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 3, "reduce_scatter": False}},
     f"{CONFIG}.gradient_predivide_factor", "no effect with stage 3"),
    ({"gradient_predivide_factor": 2.0, "prescale_gradients": True}, f"{CONFIG}.gradient_predivide_factor",
     "keep one of the two"),
    ({"gradient_predivide_factor": 0.0}, f"{CONFIG}.gradient_predivide_factor", "a number > 0"),
    ({"bf16": {"enabled": False, "immediate_grad_update": True}, "zero_optimization": {"stage": 2}},
     f"{CONFIG}.bf16.immediate_grad_update", "known: enabled"),
    ({"train_batch_size": 16}, f"{CONFIG}.train_batch_size", "8 (actor_train's per_device_train_batch_size 4 x"),
    ({"train_micro_batch_size_per_gpu": 1}, f"{CONFIG}.train_micro_batch_size_per_gpu", "expected 4"),
    ({"gradient_accumulation_steps": 1}, f"{CONFIG}.gradient_accumulation_steps", "expected 2"),
    ({"gradient_clipping": 0.5}, f"{CONFIG}.gradient_clipping", "expected 1 (the pipeline's max_grad_norm), or auto"),
    ({"bf16": {"enabled": True}}, f"{CONFIG}.bf16.enabled", "model_args.dtype is fp32"),
    ({"bf16": {"enabled": False, "check_grad_overflow": False}}, f"{CONFIG}.bf16.check_grad_overflow",
     "known: enabled"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, f"{CONFIG}.data_types.grad_accum_dtype",
     "bf16 with model_args.dtype"),
    ({"optimizer": {"type": "Lamb"}}, f"{CONFIG}.optimizer.type", "AdamW"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, f"{CONFIG}.optimizer.params.lr", "training_args says"),
    ({"optimizer": {"type": "AdamW", "params": {"beta": 1.0}}}, f"{CONFIG}.optimizer.params.beta", "'betas'"),
    ({"scheduler": {"type": "WarmupLR"}}, f"{CONFIG}.scheduler", "lr_scheduler_type"),
    ({"activation_checkpointing": {}}, f"{CONFIG}.activation_checkpointing", "disable_gradient_checkpointing"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "path", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_contradiction_is_one_error_that_names_its_key(job, options, path, text):
    where, said = complaint(job, options)
    assert where == path
    assert text in said


def test_sizes_follow_the_role(job):
    assert use(
        job,
        {"gradient_clipping": 0.5, "bf16": {"enabled": True}},
        ("max_grad_norm=0.5", "actor_train.model_args.dtype=bf16"),
    )
    where, said = complaint(job, {"gradient_clipping": 0.5}, ("max_grad_norm=null",))
    assert (where, "no clipping" in said) == (f"{CONFIG}.gradient_clipping", True)


@pytest.mark.parametrize(
    "options",
    [{"train_batch_size": 8}, {"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "fp32"}},
     {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}],
)  # fmt: skip
def test_a_role_that_does_not_train_has_no_batch_and_no_gradients(job, options):
    where, said = complaint(job, options, role="reference", kind="infer")
    assert where == f"reference.strategy_args.strategy_config.{next(iter(options))}"
    assert "not for reference: it doesn't train" in said


def test_gradients_of_micro_batches_are_summed_in_bf16_with_zero_only(job):
    sums, bf16 = {"data_types": {"grad_accum_dtype": "bf16"}}, ("actor_train.model_args.dtype=bf16",)
    use(job, {**sums, "zero_optimization": {"stage": 1}}, bf16)
    where, said = complaint(job, sums, bf16)
    assert (where, "and ZeRO" in said) == (f"{CONFIG}.data_types.grad_accum_dtype", True)


def test_every_key_of_zero_is_known_with_the_stages_it_acts_in_or_refused_with_a_reason():
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    there = {field.alias or name for name, field in config.model_fields.items()}
    assert ZERO_KEYS.keys() | REFUSED_ZERO_KEYS.keys() == there
    assert not ZERO_KEYS.keys() & REFUSED_ZERO_KEYS.keys()
