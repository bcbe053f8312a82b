"""A file of TRL's and what `roll migrate` makes of it train the same, or the report says what differs.

Both sides run: TRL's own trainers of the pinned wheel, and our pipelines on the migrated file. `ROLL_PEERS=folder`
names a folder that has TRL already; otherwise it is installed without its dependencies into a temporary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import get_scheduler
from trl_first_steps import (
    Case,
    arguments,
    in_reach,
    leaves,
    lines_of,
    migrated,
    our_config,
    our_step,
    their_step,
    their_trainer,
    write_case,
)

from roll.pipelines.offline.offline_pipeline import planned_steps
from roll.strategies.training.optim import schedule_from

RATE = 1e-3


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [_user(f"{i}?")]} for i in range(count)]


def _completions(count: int) -> list[dict[str, Any]]:
    return [{**row, "completion": [_assistant("abcdefgh"[: 1 + i % 5])]} for i, row in enumerate(_prompts(count))]


def _labelled(count: int) -> list[dict[str, Any]]:
    return [{**row, "label": i % 3 > 0} for i, row in enumerate(_completions(count))]


def _pairs(count: int) -> list[dict[str, Any]]:
    return [
        {**row, "chosen": [_assistant("abcdefgh"[: 1 + i % 5])], "rejected": [_assistant("XYZWV"[: 1 + i % 4])]}
        for i, row in enumerate(_prompts(count))
    ]


def _conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "system", "content": "s"}] * (i % 2)
         + [_user(f"{i}?"), _assistant("abcdefgh"[: 1 + i % 5]), _user("and?"), _assistant("xyz"[: 1 + i % 3])]}
        for i in range(count)
    ]  # fmt: skip


@dataclass(frozen=True)
class File:
    """A file as people write it, its rows, and what its author answers where the new file asks."""

    job: str
    rows: list[dict[str, Any]]
    keys: dict[str, Any]
    answers: tuple[str, ...] = ()
    loss_differs: str = ""
    """Words of the report that say why losses of equal gradients differ."""


PLAYED = {"learning_rate": RATE, "num_generations": 4, "max_completion_length": 8, "gradient_accumulation_steps": 2,
          "reward_funcs": ["lower_case.share"]}  # fmt: skip
PLAIN = {"learning_rate": RATE}
FILES = {
    "GRPO": File("grpo", _prompts(4), {**PLAYED, "beta": 0.04}),
    "RLOO": File("rloo", _prompts(4), {**PLAYED, "normalize_advantages": False}),
    "DPO": File("dpo", _pairs(8), {**PLAIN, "beta": 0.2, "loss_type": "sigmoid"}),
    "KTO": File("kto", _labelled(8), {**PLAIN, "desirable_weight": 1.0, "undesirable_weight": 1.33}),
    "SFT on messages": File("sft", _conversations(16), {**PLAIN, "gradient_accumulation_steps": 2,
                                                         "assistant_only_loss": True}),
    "SFT on completions": File("sft", _completions(16), {**PLAIN, "gradient_accumulation_steps": 2,
                                                          "completion_only_loss": True}),
    "reward model": File("reward", _pairs(8), {**PLAIN, "center_rewards_coefficient": 0.01}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Tiny models, where TRL can be imported."""
    with in_reach(tmp_path_factory.mktemp("trl")) as built:
        yield built


@dataclass
class Moved:
    """A file that was moved."""

    case: Case
    report: Any
    ours: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    def tells(self, *words: str) -> bool:
        """Whether a line of the report has all of these words."""
        return any(all(word in line for word in words) for line in self.lines)


def _move(folder: Path, model: Path, file: File, **more: Any) -> Moved:
    case = write_case(folder, file.job, model, file.rows, **{**file.keys, **more})
    report, ours = migrated(case)
    return Moved(case, report, ours, lines_of(report))


def _answered(moved: Moved, file: File) -> list[str]:
    """The answers, each to a question that the new file or the report asks."""
    asked = [place for place, value in leaves(moved.ours) if value == "???"]
    for answer in file.answers:
        place = answer.partition("=")[0].lstrip("+")
        assert place in asked or any(line.startswith(f"{place}:") for line in moved.report.missing), (place, asked)
    assert set(asked) <= {answer.partition("=")[0].lstrip("+") for answer in file.answers}, asked
    return list(file.answers)


@pytest.mark.parametrize("name", FILES)
def test_the_first_step_has_the_loss_and_the_gradient_of_trls_trainer(
    name: str, models: dict[str, Path], tmp_path: Path, evidence_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FILES[name]
    moved = _move(tmp_path / "run", models["classifier" if file.job == "reward" else "policy"], file)
    monkeypatch.syspath_prepend(moved.case.folder)  # TRL looks for reward functions where it is started
    monkeypatch.setenv("PYTHONPATH", str(moved.case.folder), prepend=":")
    answers = _answered(moved, file)
    if "reference" in moved.ours:  # the policy isn't its own reference, so that no term is nothing
        answers.append(f"reference.model_args.model_name_or_path={models['other']}")
    theirs = their_step(moved.case, reference=models["other"] if "reference" in moved.ours else None)
    ours = our_step(moved.case, *answers)
    loss, gradient = theirs.differs(ours)
    line = f"| {name} | {theirs.loss:.6f} | {ours.loss:.6f} | {loss:.1e} | {gradient:.1e} |"
    (evidence_folder / f"migrate-trl-{file.job}.md").open("a").write(f"{line}\n")
    assert gradient <= 1e-6
    if name == "RLOO":
        # Theirs is the mean of -A over responses, 0 where A has that mean; ours of -A times the tokens of a response.
        assert moved.ours["loss_agg_mode"] == "seq-mean-token-sum"
    else:
        assert loss <= 1e-6 * max(1.0, abs(theirs.loss))
    assert ours.rate == pytest.approx(theirs.rate)


@pytest.mark.parametrize("name", FILES)
def test_batches_epochs_steps_and_the_optimizer_are_those_of_trls_arguments(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    file = FILES[name]
    rows = (file.rows * 12)[:48]
    moved = _move(
        tmp_path / "run", models["classifier" if file.job == "reward" else "policy"], replace(file, rows=rows)
    )
    config, trainer = our_config(moved.case, *_answered(moved, file)), their_trainer(moved.case)
    args, trained = trainer.args, config.actor_train.training_args
    total = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if config.pipeline == "rlvr":
        assert config.rollout_batch_size * config.num_return_sequences_in_group == args.generation_batch_size
        assert config.batch.of("actor_train").optimizer_steps == args.generation_batch_size // per_step == 1
        # 48 prompts, 4 of them (16 completions of 4) a step.
        assert 3 * 48 // config.rollout_batch_size == total == 36
    else:
        assert config.rows_per_step == per_step
        assert planned_steps(config, [None] * 48) == total  # type: ignore[list-item]
    assert config.num_train_epochs == args.num_train_epochs == 3
    assert trained.learning_rate == args.learning_rate
    assert config.max_grad_norm == args.max_grad_norm
    assert trained.weight_decay == args.weight_decay
    adam = (trained.adam_beta1, trained.adam_beta2, trained.adam_epsilon)
    assert adam == (args.adam_beta1, args.adam_beta2, args.adam_epsilon)
    given = yaml.safe_load((moved.case.folder / "ours.yaml").read_text("utf-8"))
    plain = arguments(moved.case, plainly=True)[1]
    assert given["save_steps"] == plain.save_steps == 500
    assert given["checkpoint_config"]["max_to_keep"] is plain.save_total_limit is None
    assert given["logging_steps"] == plain.logging_steps == 10
    assert (config.eval_steps == 0) is (plain.eval_strategy == "no")
    # The precision, which these tests overwrite.
    assert (given["actor_train"]["model_args"]["dtype"] == "bf16") is bool(plain.bf16)


def test_an_epoch_that_is_no_whole_number_of_batches_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    for name, count, theirs_and_ours in (("SFT on completions", 40, (9, 8)), ("GRPO", 10, (6, 7))):
        # TRL: 16 + 16 + 8 rows in each of three epochs, here 120 rows in 16s; 2 x 4 prompts of 10, here 30 in 4s.
        file = replace(FILES[name], rows=(FILES[name].rows * 4)[:count])
        moved = _move(tmp_path / name, models["policy"], file)
        trainer, config = their_trainer(moved.case), our_config(moved.case, *_answered(moved, file))
        total = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
        if config.pipeline == "rlvr":
            assert (total, 3 * count // config.rollout_batch_size) == theirs_and_ours
        else:
            assert (total, planned_steps(config, [None] * count)) == theirs_and_ours  # type: ignore[list-item]
        assert moved.tells("epoch", "a smaller batch" if config.pipeline == "sft" else "left out in TRL"), moved.lines


SCHEDULES = {"linear": {}, "constant": {}, "constant_with_warmup": {}, "cosine": {}, "inverse_sqrt": {},
             "polynomial": {"power": 2.0, "lr_end": 0.0}, "cosine_with_restarts": {"num_cycles": 2},
             "cosine_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 10},
             "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1}, "reduce_lr_on_plateau": {}}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 5, 0.1])
def test_the_learning_rate_of_every_step_is_theirs_or_the_report_says_what_differs(
    schedule: str, warmup: float, models: dict[str, Path], tmp_path: Path
) -> None:
    keys = {"lr_scheduler_type": schedule, "warmup_steps": warmup}
    if SCHEDULES[schedule]:
        keys["lr_scheduler_kwargs"] = SCHEDULES[schedule]
    moved = _move(tmp_path / "run", models["policy"], FILES["SFT on completions"], **keys)
    if "???" in dict(leaves(moved.ours)).values():
        assert moved.tells("lr_scheduler"), moved.lines
        return
    steps, args = 40, arguments(moved.case)[1]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    trained = our_config(moved.case).actor_train.training_args
    share = schedule_from(trained, steps)
    ours = [trained.learning_rate * share(step) for step in range(steps)]
    risen = args.get_warmup_steps(steps)
    assert ours[risen:] == pytest.approx(theirs[risen:], abs=1e-6 * RATE)
    if ours[:risen] != pytest.approx(theirs[:risen], abs=1e-6 * RATE):
        # The first is 1 / (w + 1) of the peak here and 0 in transformers.
        assert theirs[0] == 0.0
        assert moved.tells("warmup_steps", "first step"), moved.lines


def test_sampling_is_as_trl_samples(models: dict[str, Path], tmp_path: Path) -> None:
    for number, more in enumerate(({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1})):
        moved = _move(tmp_path / str(number), models["policy"], FILES["GRPO"], **more)
        theirs = their_trainer(moved.case).generation_config
        config = our_config(moved.case)
        ours = config.actor_infer.generating_args
        assert ours.temperature == theirs.temperature
        for key, value in (("top_p", ours.top_p), ("top_k", max(ours.top_k, 0)),
                           ("repetition_penalty", ours.repetition_penalty)):  # fmt: skip
            assert value == (getattr(theirs, key) or value) or moved.tells(f"{key} = {more[key]}", "off in training")
        assert (ours.max_new_tokens or config.response_length) == theirs.max_new_tokens
        assert theirs.do_sample
        assert not theirs.min_p


@pytest.mark.parametrize("family", ["policy", "qwen2"])
def test_adapters_are_those_of_peft_for_trls_arguments(
    family: str, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = models[family].rename(models[family].with_name({"policy": "tiny-llama-3", "qwen2": "qwen2.5-tiny"}[family]))
    try:
        file = replace(FILES["SFT on completions"], keys={**FILES["SFT on completions"].keys, "use_peft": True})
        moved = _move(tmp_path / "whole", named, file)
        theirs, ours = their_trainer(moved.case).model.peft_config["default"], our_config(moved.case)
        model = ours.actor_train.model_args
        assert (model.lora_rank, model.lora_alpha, model.lora_dropout) == (
            theirs.r,
            theirs.lora_alpha,
            theirs.lora_dropout,
        )
        # Adapters begin with the same A on both sides, and without dropout, which draws.
        monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", _wave)
        moved = _move(tmp_path / "still", named, file, lora_dropout=0.0, lora_r=4)
        first, second = their_step(moved.case), our_step(moved.case)
        assert len(first.gradient) == 2 * 2 * 2  # A and B of q_proj and v_proj in two layers
        loss, gradient = first.differs(second)
        assert max(loss, gradient) <= 1e-6
    finally:
        named.rename(models[family])


def _wave(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_(torch.sin(torch.arange(tensor.numel(), dtype=torch.float32)).view_as(tensor) / 10)


def test_what_the_data_decide_in_trl_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    # Prompts that are texts are taken without a chat template; what it writes behind the end of a turn is learnt.
    for name in FILES:
        moved = _move(tmp_path / name, models["policy"], FILES[name])
        assert moved.tells("template", "text"), moved.lines
        if FILES[name].job in ("sft", "dpo", "kto"):
            assert moved.tells("behind the token that ends"), moved.lines


PREFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid, smoothed": ("DPO", {"label_smoothing": 0.1}),
    "sigmoid_norm": ("DPO", {"loss_type": "sigmoid_norm"}),
    "robust": ("DPO", {"loss_type": "robust", "label_smoothing": 0.1}),
    "hinge": ("DPO", {"loss_type": "hinge"}),
    "ipo": ("DPO", {"loss_type": "ipo"}),
    "exo_pair": ("DPO", {"loss_type": "exo_pair", "label_smoothing": 0.1}),
    "apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "dft": ("SFT on completions", {"loss_type": "dft"}),
    "all tokens": ("SFT on messages", {"assistant_only_loss": False}),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_another_loss_has_the_same_gradient_or_the_new_file_asks(
    name: str, models: dict[str, Path], tmp_path: Path, evidence_folder: Path
) -> None:
    of, keys = PREFERENCES[name]
    moved = _move(tmp_path / "run", models["policy"], FILES[of], **keys)
    asked = [place for place, value in leaves(moved.ours) if value == "???"]
    differs = (float("nan"), float("nan"))
    if not asked:
        theirs = their_step(moved.case, reference=models["other"])
        differs = theirs.differs(our_step(moved.case, f"reference.model_args.model_name_or_path={models['other']}"))
    with (evidence_folder / "migrate-trl-preferences.md").open("a") as table:
        table.write(f"| {of}, {name} | {asked or differs} |\n")
    assert bool(asked) is (name in ("exo_pair", "apo_zero_unpaired", "dft", "all tokens")), moved.lines
    assert asked or max(differs) <= 1e-6
