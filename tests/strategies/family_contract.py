"""What users run on a model of a family, against a plain loop of transformers over single rows.

A family is *right* if `roll check` accepts the way and every number of it is the loop's, *refused* if check says why it
can't be used so, *wrong* if check accepts it and a start fails or a number differs: of these there must be none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_job import model_job

from roll.configs.checks.machine_checks import Machine
from roll.configs.checks.model_families import family_checks, family_problems
from roll.configs.errors import problem
from roll.configs.schema.worker_config import ModelArgs, TrainConfig
from roll.pipelines.run.model_proofs import proof_problems
from roll.strategies.base import EngineSettings, Request, SamplingParams, TrainSpec
from roll.strategies.engines.hf import hf_infer
from roll.strategies.hf.hf_build import build_module
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out, lay_out_tree
from roll.strategies.training.pretrained import named_tensors
from roll.types.batch import TokenBatch

WAYS = ("padded", "packed", "shared", "sampled")
"""Rows padded at the right, laid end to end, as a tree of what they have in common; sampled by `hf_infer`."""
_OPTIONS = {
    "padded": ["actor_train.use_prefix_sharing=false"],
    "packed": ["actor_train.use_sequence_packing=true", "actor_train.use_prefix_sharing=false"],
    "shared": ["actor_train.use_prefix_sharing=true"],
}
ROWS = (
    (3, 10, 17, 24, 31, 38, 45, 52, 59, 66, 73),
    (7, 9, 11, 40, 50),
    (3, 10, 17, 24, 31, 90, 91, 92, 93),
    (8, 5, 60),
)
"""Of 11, 5, 9 and 3 tokens; the first and the third begin alike."""
_NO_CHECKPOINTING = "disable_gradient_checkpointing=true"
_LENGTH = 16
_LONGEST = 2 * _LENGTH
_RESPONSE = 9
_TOLERANCE = 1e-4
"""Of log-probs, which differ by 1e-6 to 1e-5 where a way is right, and of gradients beside the largest of them."""


@dataclass
class FamilyReport:
    """What became of each of `WAYS`: "right", "refused: ..." or "wrong: ..."."""

    ways: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """A key without which check refuses to train it."""

    @property
    def verdict(self) -> str:
        """Return what a user gets who trains padded rows and samples with `hf_infer`, the least that a run does."""
        if any(words.startswith("wrong") for words in self.ways.values()):
            return "wrong"
        needed = (self.ways["padded"], self.ways["sampled"])
        return "right" if all(words == "right" for words in needed) else "refused"


def report_on(folder: Path) -> FamilyReport:
    """Try all ways of a model folder."""
    report = FamilyReport()
    alone = _Alone(folder)
    for way in WAYS:
        changes = [*_OPTIONS.get(way, [])]
        refused = checked(folder, way, changes)
        if _NO_CHECKPOINTING in refused:  # the fix that check names
            report.needs = _NO_CHECKPOINTING
            changes.append(f"actor_train.model_args.{_NO_CHECKPOINTING}")
            refused = checked(folder, way, changes)
        if refused:
            report.ways[way] = f"refused: {refused}"
            continue
        run: Callable[[], Iterator[str]] = (
            partial(_sampled, folder, alone) if way == "sampled" else partial(_trained, folder, changes, alone)
        )
        try:
            wrong = list(run())
        except Exception as error:  # noqa: BLE001 - whatever a start raises is what its user meets
            wrong = [f"{type(error).__name__}: {error}"]
        report.ways[way] = f"wrong: {'; '.join(wrong)}" if wrong else "right"
    return report


def checked(folder: Path, way: str, changes: list[str]) -> str:
    """Return what `roll check` says against a way of running a folder's model; empty if it accepts it."""
    config = model_job(folder, changes, length=_LENGTH)
    families = list(family_problems(config))
    refused = {key.split(".")[0] for key, *_ in families}
    problems = [*families, *proof_problems(config, refused)]
    violations = [*family_checks(config, Machine()), *(problem(*each) for each in problems)]
    role = "actor_infer" if way == "sampled" else "actor_train"
    return " ".join(str(violation) for violation in violations if violation.path.split(".")[0] in (role, "pretrain"))


class _Alone:
    """A model as transformers loads it, asked for one row at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        # The cap of Gemma 2, which transformers' sdpa leaves out, is the model's.
        capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        options = {"attn_implementation": "eager"} if capped else {}
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    def logprobs(self, row: tuple[int, ...]) -> torch.Tensor:
        """Return those of all tokens but the first."""
        ids = torch.tensor([row])
        table = self.model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        return table.gather(1, ids[0, 1:, None])[:, 0]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return those of a weighted sum of the log-probs of all rows, by name."""
        self.model.zero_grad()
        for row, weights in zip(ROWS, _weights(), strict=True):
            (self.logprobs(row) * weights).sum().backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def _weights() -> list[torch.Tensor]:
    return [torch.linspace(-1.0, 1.5, len(row) - 1) for row in ROWS]


def _batch() -> TokenBatch:
    offsets = torch.tensor([0, *map(len, ROWS)]).cumsum(0)
    acting = torch.ones(int(offsets[-1]), dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(map(str, range(len(ROWS))))
    ids = torch.tensor([token for row in ROWS for token in row])
    return TokenBatch(row_ids=names, group_ids=names, offsets=offsets, token_ids=ids, action_mask=acting)


def _trained(folder: Path, changes: list[str], alone: _Alone) -> Iterator[str]:
    """Yield what a trainer's module computes otherwise than the loop."""
    config = model_job(folder, changes, length=_LENGTH)
    worker: TrainConfig = config.actor_train
    spec = TrainSpec(
        role="actor_train", kind="policy", seed=0, trains=True, max_sequence_length=_LONGEST,
        worker=replace(worker, model_args=replace(worker.model_args, model_name_or_path=str(folder))),
    )  # fmt: skip
    device = torch.device("cpu")
    module, shares = build_module(spec, torch.float32, torch.float32, device)
    batch = _batch()
    layout = lay_out_tree(batch, device) if shares else lay_out(batch, device, packed=worker.use_sequence_packing)
    scored = module(layout, HeadRequest()).logprobs
    logprobs = (scored if layout.copies is None else scored[layout.copies])[layout.flat.argsort()]
    expected = torch.cat([alone.logprobs(row) for row in ROWS])
    if not torch.allclose(logprobs, expected, rtol=0, atol=_TOLERANCE):
        yield f"log-probs off by {float((logprobs - expected).detach().abs().max()):.2g}"
    (logprobs * torch.cat(_weights())).sum().backward()
    theirs = alone.gradients()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, parameter in module.lm.named_parameters():
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        difference = float((mine - theirs.get(name, torch.zeros_like(parameter))).abs().max())
        if not difference <= _TOLERANCE * max(1.0, largest):
            yield f"gradient of {name} off by {difference:.2g}"
            return


def _sampled(folder: Path, alone: _Alone) -> Iterator[str]:
    """Yield what `hf_infer` samples with other log-probs than the loop gives, before and after a weight update."""
    settings = EngineSettings(max_running_requests=3, max_sequence_length=_LONGEST, seed=0)
    engine = hf_infer.build(ModelArgs(model_name_or_path=str(folder)), None, settings)  # type: ignore[arg-type]
    for when in ("", " after an update"):
        if when:
            with torch.no_grad():
                for parameter in alone.model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(0.9)
            engine.update_weights(1, list(named_tensors(alone.model)))
        lengths = [_RESPONSE, 3, _RESPONSE, 5]  # rows leave, and the fourth comes in when the second has left
        requests = [
            Request(id=f"{when}{i}", prompt_ids=row, seed=i, order=(i,),
                    params=SamplingParams(max_new_tokens=length, ignore_eos=True))
            for i, (row, length) in enumerate(zip(ROWS, lengths, strict=True))
        ]  # fmt: skip
        engine.submit(requests)
        done: dict[str, Any] = {}
        while len(done) < len(requests):
            done |= {one.id: one for one in engine.poll(50)}
        worst = 0.0
        for request in requests:
            completion = done[request.id]
            with torch.no_grad():
                own = alone.logprobs((*request.prompt_ids, *completion.token_ids))[len(request.prompt_ids) - 1 :]
            worst = max(worst, float((own - torch.tensor(completion.logprobs)).abs().max()))
        if not worst <= _TOLERANCE:
            yield f"samples{when} are off by {worst:.2g}"
