"""Distillation as a whole: a teacher on the student's samples and on rows, against plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from preferences import policy_in
from small import Run, again, row_of, run_small
from tiny_models import build_tiny_model
from toy import metrics_of, run_toy, write_toy
from toy_env import episodes, write_toy_env
from transformers import AutoTokenizer

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.pipelines import run_pipeline

LOSS = ("distill.use_as=loss", "distill.top_k=null")
EPS = 1e-5


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7)


def distil(folder: Path, model: Path, teacher: Path, *overrides: str, **files: Any) -> Run:
    keys = ("pipeline=distill", f"teacher.model_args.model_name_or_path={teacher}", "num_return_sequences_in_group=2")
    return run_small(folder, model, *keys, *overrides, **files)


def distil_config(folder: Path, model: Path, teacher: Path, *overrides: str) -> Any:
    write_toy(folder, model, 8)
    keys = ("pipeline=distill", f"teacher.model_args.model_name_or_path={teacher}", *overrides)
    return load_config(folder, "toy", keys)


def distributions(model: torch.nn.Module, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [T, V] that the tokens of a row were drawn from, and which of them the policy drew."""
    ids = torch.tensor(row.token_ids)
    table = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return torch.cat([torch.zeros_like(table[:1]), table[:-1]]), torch.tensor(row.action_mask)


def test_advantages_are_the_teachers_log_probs_less_the_students(tiny_model, teacher, tmp_path):
    run = distil(tmp_path, tiny_model, teacher, "distill.coef=0.5", dump=True)
    student, theirs = policy_in(tiny_model), policy_in(teacher)
    apart, tokens = 0.0, 0
    for row in run.rollouts():
        ids = torch.tensor(row.token_ids)[:, None]
        with torch.no_grad():
            (ours, mask), (other, _) = distributions(student, row), distributions(theirs, row)
        expected = ((other - ours).gather(1, ids)[:, 0] * mask) * 0.5
        torch.testing.assert_close(torch.tensor(row.advantages).float(), expected, rtol=EPS, atol=EPS)
        apart, tokens = apart - 2 * float(expected.sum()), tokens + int(mask.sum())
    assert run.last["distill/reverse_kl"] == pytest.approx(apart / tokens, rel=1e-4)
    assert run.last["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("reverse_kl", ()),
        ("forward_kl", ()),
        ("jensen_shannon", ("distill.divergence={name: jensen_shannon, beta: 0.3}",)),
        ("skewed_reverse_kl", ()),
    ],
)
def test_a_step_of_the_loss_is_that_of_plain_transformers(tiny_model, teacher, tmp_path, name, keys):
    keys = keys or (f"distill.divergence={name}",)
    run = distil(tmp_path, tiny_model, teacher, *LOSS, *keys, dump=True)
    student, theirs = policy_in(tiny_model), policy_in(teacher)
    total, tokens = torch.zeros(()), 0
    for row in run.rollouts():
        table, mask = distributions(student, row)
        with torch.no_grad():
            p = distributions(theirs, row)[0][mask].double().exp()
        q = table[mask].double().exp()
        if name == "reverse_kl":
            found = q * (q / p).log()
        elif name == "forward_kl":
            found = p * (p / q).log()
        elif name == "skewed_reverse_kl":
            found = q * (q / (0.1 * q + 0.9 * p)).log()
        else:
            m = 0.3 * p + 0.7 * q
            found = 0.3 * p * (p / m).log() + 0.7 * q * (q / m).log()
        total, tokens = total + found.sum(), tokens + int(mask.sum())
    (total / tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    assert run.last["distill/divergence"] == pytest.approx(float(total) / tokens, rel=1e-4)
    assert run.last["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_some_tokens_are_less_than_all_and_the_whole_vocabulary_is_all(tiny_model, teacher, tmp_path):
    found = {}
    for top_k in (4, 1000, None):
        keys = ("distill.use_as=loss", f"distill.top_k={json.dumps(top_k)}")
        found[top_k] = distil(tmp_path / str(top_k), tiny_model, teacher, *keys).last["distill/divergence"]
    assert found[4] < found[None] == found[1000]


def test_tokens_beyond_a_models_rows_are_left_out(tiny_model, teacher, tmp_path):
    """The tokenizers have one more than the models have rows."""
    folders = []
    for name, model in {"student": tiny_model, "teacher": teacher}.items():
        folder = tmp_path / name
        shutil.copytree(model, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer.add_tokens([f"<more{i}>" for i in range(rows + 1 - len(tokenizer))])
        tokenizer.save_pretrained(folder)
        assert len(tokenizer) > rows
        folders.append(folder)
    run = distil(tmp_path / "run", *folders, *LOSS)
    same = distil(tmp_path / "same", tiny_model, teacher, *LOSS)
    assert run.last["distill/divergence"] == pytest.approx(same.last["distill/divergence"], rel=0.2)


def test_validation_alone_starts_no_teacher(tiny_model, teacher, tmp_path):
    held_out = "+validation.data_args={file_name: '${actor_train.data_args.file_name}', prompt: prompt}"
    config = distil_config(tmp_path, tiny_model, teacher, "val_only=true", held_out)
    assert set(config.roles) == {"actor_train", "actor_infer"}


def test_every_tag_is_taught_by_its_teacher(tiny_model, teacher, tmp_path):
    """A teacher that is the student has nothing to say: advantage 0."""
    rows = [row_of(i, tag="case" if i % 2 else "own") for i in range(8)]
    several = f"teachers={{own: {{model_args: {{model_name_or_path: '{tiny_model}'}}}}}}"
    keys = (several, "rewards.case.tag_included=[case,own]", "rollout_batch_size=4")
    keys = (*keys, "actor_train.training_args.per_device_train_batch_size=8")
    run = distil(tmp_path, tiny_model, teacher, *keys, data=rows, dump=True)
    found = {tag: [row for row in run.rollouts() if row.tag == tag] for tag in ("case", "own")}
    assert all(found.values())
    for row in found["own"]:
        assert max(map(abs, row.advantages)) < EPS
    for row in found["case"]:
        assert max(map(abs, row.advantages)) > 0.01


def test_episodes_of_environments_are_taught(tiny_model, teacher, tmp_path):
    write_toy_env(tmp_path, tiny_model)
    key = f"+teacher.model_args.model_name_or_path={teacher}"
    row = run_toy(tmp_path, key, "max_steps=1")[-1]
    assert row["distill/reverse_kl"] != 0
    for episode in episodes(tmp_path)[:4]:
        said = torch.tensor(episode.action_mask)
        ids = torch.tensor(episode.token_ids)[:, None]
        with torch.no_grad():
            ours, other = (
                model(input_ids=ids.T).logits[0, :-1].log_softmax(-1).gather(1, ids[1:])[:, 0] * said[1:]
                for model in (policy_in(tiny_model), policy_in(teacher))
            )
        torch.testing.assert_close(torch.tensor(episode.advantages)[1:].float(), other - ours, rtol=1e-4, atol=1e-4)


def test_rewards_count_as_much_as_they_are_told_to(tiny_model, teacher, tmp_path):
    """reinforce: the reward itself at every token."""
    alone = distil(tmp_path / "alone", tiny_model, teacher, dump=True).rollouts()
    mixed = distil(tmp_path / "mixed", tiny_model, teacher, "distill.reward_coef=2", dump=True).rollouts()
    assert any(row.reward for row in mixed)
    for row, other in zip(alone, mixed, strict=True):
        mask = torch.tensor(row.action_mask)
        expected = torch.tensor(row.advantages)[mask] + 2 * other.reward
        torch.testing.assert_close(torch.tensor(other.advantages)[mask], expected)


def test_rows_of_any_tag_are_played_where_no_rewards_are_named(tiny_model, teacher, tmp_path):
    write_toy(tmp_path, tiny_model, 8)
    rows = [row_of(i, tag=f"tag{i % 3}") for i in range(8)]
    (tmp_path / "case.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = next(tmp_path.glob("*.yaml"))
    text, skip = [], False
    for line in file.read_text().splitlines():
        skip = line.startswith(("rewards:", "custom_reward_function:")) or (skip and line.startswith(" "))
        text += [] if skip else [line]
    file.write_text("\n".join(text))
    run = again(tmp_path, "pipeline=distill", f"teacher.model_args.model_name_or_path={teacher}")
    assert run.last["reward/mean"] == 0.0
    assert run.last["actor/grad_norm"] > 0


def test_a_teacher_with_other_tokens_is_refused(tiny_model, teacher, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    file = other / "tokenizer.json"
    read = json.loads(file.read_text())
    first, second = list(read["model"]["vocab"])[40:42]
    vocab = read["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(read))
    with pytest.raises(ConfigError, match="a model with the student's tokenizer: .* is .* in one and .* in the other"):
        distil(tmp_path / "run", tiny_model, other)


@pytest.mark.parametrize(
    ("keys", "path", "said"),
    [
        (("teacher=null",), "teacher", "the model that teaches"),
        (("distill.divergence=reverse",), "distill.divergence", "did you mean"),
        (("distill.top_k=8",), "distill.top_k", "use_as=loss"),
        (("distill.coef=0",), "distill.coef", "above 0|> 0"),
        (("teacher.tags=[a]",), "teacher.tags", "teaches all"),
        (
            ("teachers={a: {tags: x, model_args: {model_name_or_path: m}}, x: {model_args: {model_name_or_path: m}}}",),
            "teachers.x.tags",
            "each tag at one teacher",
        ),
        (("teacher.strategy_args.strategy_name=vllm",), "teacher.strategy_args", "can do the work of teacher"),
        (("pipeline=rlvr", "teacher=null", "distill.coef=2"), "distill", "teacher"),
    ],
)
def test_what_cannot_run_is_refused_by_its_key(tiny_model, teacher, tmp_path, keys, path, said):
    with pytest.raises(ConfigError, match=said) as caught:
        distil(tmp_path, tiny_model, teacher, *keys)
    assert any(violation.path.startswith(path) for violation in caught.value.violations)


SFT = """
pipeline: sft
exp_name: taught
seed: 3
executor: inline
output_dir: {folder}/output
track_with: jsonl
pretrain: {model}
sequence_length: 40
max_steps: 2
teacher: {{model_args: {{model_name_or_path: {teacher}}}}}
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-2, per_device_train_batch_size: 4}}
  data_args: {{file_name: {folder}/rows.jsonl, prompt: prompt, response: response}}
"""


def test_a_teacher_teaches_on_rows(tiny_model, teacher, tmp_path):
    rows = [{"prompt": f"{i}?", "response": "abc"[: 1 + i % 3]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(SFT.format(folder=tmp_path, model=tiny_model, teacher=teacher))
    found = {}
    for name, keys in {"all": ("distill.top_k=null",), "both": ("distill.top_k=null", "distill.sft_coef=0.5")}.items():
        config = load_config(tmp_path, "job", [*keys, f"output_dir={tmp_path}/{name}"])
        check_prerequisites(config)
        run_pipeline(config)
        found[name] = metrics_of(config.logging_path)
    from roll.data.sft_rows import batch_of
    from roll.pipelines.offline.sft import sft_data
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.training.pretrained import load_tokenizer

    data = sft_data(config, load_tokenizer(resolved_model_args(config, "actor_train"))).training.rows
    batch = batch_of([(row.id, row) for row in data])
    student, theirs = policy_in(tiny_model), policy_in(teacher)
    total = nll = torch.zeros(())
    tokens = int(batch.action_mask.sum())
    for row in range(len(batch)):
        ids, mask = batch.row("token_ids", row), batch.row("action_mask", row)[1:]
        ours, other = (model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[mask] for model in (student, theirs))
        total = total + (other.exp() * (other - ours)).sum()
        nll = nll - ours.gather(1, ids[1:][mask][:, None]).sum()
    (total.detach() / tokens, (total / tokens + 0.5 * nll / tokens).backward())
    assert found["all"][0]["distill/divergence"] == pytest.approx(float(total) / tokens, rel=1e-4)
    assert found["both"][0]["sft/loss"] == pytest.approx(float(nll) / tokens, rel=1e-4)
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    assert found["both"][0]["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert found["all"][1]["distill/divergence"] < found["all"][0]["distill/divergence"]
