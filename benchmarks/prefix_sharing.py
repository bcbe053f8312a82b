"""An optimizer step that computes the beginnings of rows once, beside one that computes every row whole.

    python benchmarks/prefix_sharing.py                                          # the shape of the quickstart's step
    python benchmarks/prefix_sharing.py --model FOLDER --few-shot 0 --response 200
    python benchmarks/prefix_sharing.py --strategy megatron_train

Both are `--strategy` on one process and take turns on the same rows: groups of responses to prompts that begin with
the same examples. A figure is the median over the rounds of the CPU seconds of a whole step, AdamW included; `vs whole
rows` is the median of the rounds' own ratios, with the smallest and the largest. Gradients are those of the first step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


OPTIONS: dict[str, dict[str, Any]] = {"fsdp2_train": {}, "megatron_train": {"use_distributed_optimizer": False}}
"""Strategies that can be measured, and their options."""


def make_batch(args: argparse.Namespace, vocabulary: int) -> Any:
    """Return rows of random tokens: examples that all share, a prompt per group, responses of 1 to 2 x `--response` -
    1, or with `--even` of one length."""
    import torch

    from roll.types.batch import TokenBatch

    generator = torch.Generator().manual_seed(1)

    def draw(tokens: int) -> Any:
        return torch.randint(2, vocabulary, (tokens,), generator=generator)

    examples, rows, acting, groups = draw(args.few_shot), [], [], []
    for group in range(args.groups):
        prompt = torch.cat([examples, draw(args.prompt)])
        for member in range(args.each):
            response = draw(args.response if args.even else 1 + (member * 5 + group) % (2 * args.response - 1))
            rows.append(torch.cat([prompt, response]))
            acting.append(torch.arange(len(rows[-1])) >= len(prompt))
            groups.append(str(group))
    mask = torch.cat(acting)
    return TokenBatch(
        row_ids=tuple(str(i) for i in range(len(rows))),
        group_ids=tuple(groups),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        token_ids=torch.cat(rows),
        action_mask=mask,
        loss_mask=mask,
        advantages=torch.randn(len(mask), generator=generator),
    )


class Contender:
    """A strategy, and what it computed."""

    def __init__(self, args: argparse.Namespace, *, shares: bool) -> None:
        from roll.configs.schema.strategy_config import STRATEGIES, StrategyArgs
        from roll.configs.schema.training_args import TrainingArgs
        from roll.configs.schema.worker_config import ModelArgs, TrainConfig
        from roll.distributed.worker import WorkerInfo
        from roll.strategies import build_train_strategy
        from roll.strategies.base import TrainSpec

        worker = TrainConfig(
            model_args=ModelArgs(model_name_or_path=args.model, disable_gradient_checkpointing=not args.recompute),
            training_args=TrainingArgs(learning_rate=1e-5, per_device_train_batch_size=args.rows),
            use_prefix_sharing=shares,
            strategy_args=StrategyArgs(
                strategy_name=args.strategy, strategy_config=STRATEGIES[args.strategy](**OPTIONS[args.strategy])
            ),
        )
        spec = TrainSpec(role="actor_train", kind="policy", worker=worker, seed=0)
        self.strategy: Any = build_train_strategy(spec, WorkerInfo("actor_train", 0, 1, "127.0.0.1", 0, (0,), 0))
        self.gradients: dict[str, Any] = {}
        self.passes: list[int] = []
        self.seconds: list[float] = []
        on_megatron = args.strategy.startswith("megatron")
        model = self.strategy._modules[0] if on_megatron else self.strategy._model
        model.register_forward_pre_hook(lambda _module, inputs: self.passes.append(inputs[0].ids.numel()))
        owner, name = (self.strategy._optimizer, "step") if on_megatron else (self.strategy, "_apply")
        apply = getattr(owner, name)

        def keep(*arguments: Any) -> Any:
            if not self.gradients:
                gradients = ((n, getattr(p, "main_grad", p.grad)) for n, p in model.named_parameters())
                self.gradients = {n: gradient.clone() for n, gradient in gradients if gradient is not None}
            return apply(*arguments)

        setattr(owner, name, keep)

    def step(self, batch: Any) -> None:
        """Take an optimizer step; adds to `passes` and `seconds`."""
        from roll.strategies.base import LossFn, LossTerms

        def compute(outputs: Any, micro: Any, sizes: Any) -> LossTerms:
            return LossTerms(-(outputs.logprobs * micro.advantages * micro.loss_mask).sum() / sizes.tokens)

        self.passes.clear()
        started = time.process_time()
        self.strategy.train_step(batch, LossFn(compute=compute, needs=("logprobs",)))
        self.seconds.append(time.process_time() - started)


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of a gradient over its largest value, of all parameters."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for n, g in theirs.items())


def main() -> None:
    from roll.utils.models import smollm2_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(smollm2_path()), help="folder; default: that of `make quickstart`")
    parser.add_argument("--strategy", choices=OPTIONS, default="fsdp2_train")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--each", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--few-shot", type=int, default=53, help="tokens that all prompts begin with")
    parser.add_argument("--prompt", type=int, default=22, help="tokens of a prompt after these")
    parser.add_argument("--response", type=int, default=4, help="tokens of a response in the middle")
    parser.add_argument("--even", action="store_true", help="all responses are as long")
    parser.add_argument("--rows", type=int, default=4, help="per_device_train_batch_size")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from transformers import AutoConfig

    batch = make_batch(args, AutoConfig.from_pretrained(args.model).vocab_size)
    full, shared = Contender(args, shares=False), Contender(args, shares=True)
    for _ in range(args.rounds + 1):
        for contender in (full, shared):
            contender.step(batch)
    print(f"{len(batch)} rows of {batch.num_tokens} tokens, {args.rows} rows a pass, {args.rounds} rounds\n")
    print("| step | passes | tokens computed | CPU s | vs whole rows |")
    print("|---|---|---|---|---|")
    for name, contender in (("whole rows", full), ("shared beginnings", shared)):
        times = contender.seconds[1:]  # the first step warms up
        ratios = [mine / theirs for mine, theirs in zip(times, full.seconds[1:], strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {len(contender.passes)} | {sum(contender.passes):,} | {median(times):.2f} | {spread} |")
    print(f"\nlargest relative difference of a gradient: {difference(shared.gradients, full.gradients):.1e}")


if __name__ == "__main__":
    main()
