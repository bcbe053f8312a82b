"""Losses and gradients of `pipeline: dpo` against TRL's trainers, in float64 on a tiny model.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/requirements-trl.txt
    python benchmarks/preference_vs_trl.py --trl-python /tmp/trl/bin/python

TRL's trainers make a batch of the same texts, compute its loss and the gradient of every weight. Our side takes the
tokens and masks of that batch and does the same: log-probs of the model, `dpo_loss`, backward. TRL's ORPO has three
things of its own: the odds ratio in float32, a cross-entropy over the prompt too, and that as a mean over all tokens of
the batch instead of each response; so of ORPO the term of the odds ratio is compared. Differences are divided by the
size of what is compared where that is above 1; TRL's fused head rounds log-probs to float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid_norm": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.2},
    "kto": {"desirable_weight": 1.5, "undesirable_weight": 0.75},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.1},
    "orpo": {"beta": 0.3},
}
"""Options as this project spells them; TRL has the same names."""
BETA = 0.1
WORDS = 40
PROMPTS = 6


def write_files(folder: Path) -> None:
    """Write `policy/` and `reference/`, two random Llamas in float64 with one tokenizer of words, and `pairs.json`."""
    import random

    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=WORDS, initializer_range=0.3, pad_token_id=0, **shape)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(3)

    def text(longest: int) -> str:
        return "".join(f" w{rng.randrange(3, WORDS)}" for _ in range(rng.randrange(1, longest)))

    pairs = [{"prompt": text(6), "chosen": text(9), "rejected": text(9)} for _ in range(PROMPTS)]
    (folder / "pairs.json").write_text(json.dumps(pairs))


def theirs(folder: Path, case: str) -> None:
    """Write what TRL computes to `<case>.pt`: sequences, loss, gradients. Runs in TRL's environment."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64) for name in ("policy", "reference")
    )
    pairs = json.loads((folder / "pairs.json").read_text())
    options = {"beta": BETA, **CASES[case]}
    more: dict[str, Any] = {}
    rows = pairs
    if case == "kto":
        trainer_of, config_of = KTOTrainer, KTOConfig
        sides = [(pair, side) for i, pair in enumerate(pairs) for side in ("chosen", "rejected")[: 1 + (i % 3 == 0)]]
        rows = [{"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"} for pair, side in sides]
        more["ref_model"] = reference
    elif case == "simpo":
        trainer_of, config_of = CPOTrainer, CPOConfig
        options |= {"loss_type": "simpo", "cpo_alpha": 0.0}
    elif case == "orpo":
        trainer_of, config_of = ORPOTrainer, ORPOConfig
    else:
        trainer_of, config_of = DPOTrainer, DPOConfig
        options["loss_type"] = case
        more["ref_model"] = reference
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "max_length": 64,
                "per_device_train_batch_size": len(rows), "output_dir": str(folder / "trl")}  # fmt: skip
    trainer = trainer_of(
        model=policy,
        args=config_of(**settings, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        **more,
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    if case == "orpo":
        chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, inputs)
        loss = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    else:
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    torch.save({"inputs": dict(inputs), "loss": loss.detach(), "gradients": gradients}, folder / f"{case}.pt")


def sequences_of(inputs: dict[str, Any], case: str) -> list[tuple[list[int], list[bool]]]:
    """Return tokens, and which are the response's, of each sequence of TRL's batch: chosen ones, then rejected."""
    if case in ("simpo", "orpo"):
        sides = [(inputs[f"{side}_input_ids"], inputs[f"{side}_labels"] != -100, inputs[f"{side}_attention_mask"])
                 for side in ("chosen", "rejected")]  # fmt: skip
    else:
        sides = [(inputs["input_ids"], inputs["completion_mask"], inputs["attention_mask"])]
    sequences = []
    for ids, response, attended in sides:
        for row in range(len(ids)):
            there = attended[row].bool()
            sequences.append((ids[row][there].tolist(), response[row][there].bool().tolist()))
    return sequences


def ours(folder: Path, case: str) -> dict[str, float]:
    """Return the largest differences from what TRL wrote: of the loss, and of any entry of a gradient."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from roll.configs.schema.preference_config import DPOConfig, DPOTrainConfig
    from roll.data.preference_rows import PreferenceRow, batch_of, mismatched
    from roll.data.sft_rows import TaughtRow
    from roll.pipelines.workers.preference_losses import dpo_loss, pairs_of, sequence_scores
    from roll.types.batch import TokenBatch, TokenOutputs

    trl = torch.load(folder / f"{case}.pt", weights_only=False)
    sequences = [TaughtRow(str(i), np.array(ids, np.int32), np.array(mask, np.bool_))
                 for i, (ids, mask) in enumerate(sequences_of(trl["inputs"], case))]  # fmt: skip
    if case == "kto":
        labels = trl["inputs"]["label"]
        rows = [PreferenceRow(row.id, (row,), desirable=bool(labels[i])) for i, row in enumerate(sequences)]
    else:
        half = len(sequences) // 2
        rows = [PreferenceRow(str(i), (sequences[i], sequences[half + i])) for i in range(half)]
    batch = batch_of([(row.id, row) for row in rows])
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64) for name in ("policy", "reference")
    )

    def logprobs(model: Any, of: TokenBatch) -> torch.Tensor:
        parts = []
        for row in range(len(of)):
            ids = of.row("token_ids", row)
            every = model(ids[None, :]).logits[0, :-1].log_softmax(-1)
            parts.append(torch.cat([every.new_zeros(1), every.gather(1, ids[1:, None])[:, 0]]))
        return torch.cat(parts)

    config = DPOConfig(pipeline="dpo", pretrain="policy", actor_train=DPOTrainConfig(), loss_type=case,
                       **{"beta": BETA, **CASES[case]})  # fmt: skip
    with torch.no_grad():
        batch = batch.with_columns(ref_logprobs=logprobs(reference, batch))
        if case == "kto":
            other = mismatched(batch, 64)
            ratios = (logprobs(policy, other) - logprobs(reference, other))[other.action_mask]
            baseline = max(0.0, float(ratios.sum()) / len(batch))
            batch = batch.with_columns(targets=torch.full((len(batch),), baseline, dtype=torch.float64))
    outputs = TokenOutputs(row_ids=batch.row_ids, offsets=batch.offsets, logprobs=logprobs(policy, batch))
    losses, _ = dpo_loss(config)(outputs, batch)
    loss = losses.mean()
    if case == "orpo":  # less the cross-entropy
        loss = loss + sequence_scores(outputs, batch, per_token=True)[pairs_of(batch)[0]].mean()
    loss.backward()
    weights = policy.named_parameters()
    far = max(float((weight.grad - trl["gradients"][name]).abs().max()) for name, weight in weights)
    size, expected = max(float(grad.abs().max()) for grad in trl["gradients"].values()), float(trl["loss"])
    return {"loss": expected, "difference": abs(float(loss.detach()) - expected) / max(1.0, abs(expected)),
            "gradient": size, "gradient_difference": far / max(1.0, size)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl-python", default="python", help="interpreter of the environment that has TRL")
    parser.add_argument("--theirs", nargs=2, metavar=("FOLDER", "CASE"), help="TRL's side; the benchmark starts it")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    if options.theirs:
        theirs(Path(options.theirs[0]), options.theirs[1])
        return
    print("| loss_type | loss | difference | largest gradient | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for case in options.cases:
            command = [options.trl_python, __file__, "--theirs", folder, case]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
            if done.returncode:
                sys.exit(f"{case}: TRL's side ended with {done.returncode}:\n{done.stderr[-3000:]}")
            result = ours(Path(folder), case)
            print(f"| {case} | {result['loss']:.9f} | {result['difference']:.1e} "
                  f"| {result['gradient']:.9f} | {result['gradient_difference']:.1e} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
