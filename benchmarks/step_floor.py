"""What an optimizer step of the quickstart costs beyond its matrix products, with small and with large pages.

    OMP_NUM_THREADS=1 python benchmarks/step_floor.py

`products` are the matrix products alone that any such step must compute: for each weight and micro-batch one forward
and two backward. Every contender has a process of its own and takes turns with the others. Figures are processor
seconds, which other jobs on the machine change less than time; medians over the rounds. The digest is one of all
weights after the last step: equal digests, equal bits.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CONTENDERS = {"products": "1", "small pages": "0", "large pages": "1"}
"""Name -> THP_MEM_ALLOC_ENABLE."""


def products(model: Any, args: argparse.Namespace) -> Any:
    """Return a step of nothing but products, on random numbers of the same shapes."""
    import torch

    embedding = model.get_input_embeddings().weight
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() == 2 and p is not embedding]
    tokens, scored = args.rows * args.tokens, args.rows * args.scored
    work = [(torch.randn(shape), torch.randn(tokens, shape[1]), torch.randn(tokens, shape[0])) for shape in shapes]
    head = tuple(embedding.shape)
    work.append((torch.randn(head), torch.randn(scored, head[1]), torch.randn(scored, head[0])))

    def step() -> None:
        for _ in range(args.passes):
            for weight, inputs, grad in work:
                inputs @ weight.T
                grad @ weight
                grad.T @ inputs

    return step


def whole_step(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return (the project's own step on FSDP2, its model)."""
    import torch

    from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
    from roll.configs.schema.worker_config import ModelArgs, TrainConfig, TrainingArgs
    from roll.distributed.worker import WorkerInfo
    from roll.strategies import build_train_strategy
    from roll.strategies.base import LossFn, LossTerms, TrainSpec
    from roll.types.batch import TokenBatch

    worker = TrainConfig(
        model_args=ModelArgs(model_name_or_path=args.model, disable_gradient_checkpointing=True, dtype="fp32"),
        training_args=TrainingArgs(learning_rate=1e-5, per_device_train_batch_size=args.rows),
        strategy_args=StrategyArgs(strategy_name="fsdp2_train", strategy_config=Fsdp2Config()),
    )
    spec = TrainSpec(role="actor_train", kind="policy", worker=worker, seed=0, max_grad_norm=1.0)
    strategy = build_train_strategy(spec, WorkerInfo("actor_train", 0, 1, "127.0.0.1", 0, (0,), 0))
    rows, generator = args.rows * args.passes, torch.Generator().manual_seed(1)
    acting = torch.zeros(rows, args.tokens, dtype=torch.bool)
    acting[:, -args.scored :] = True
    names = tuple(str(i) for i in range(rows))
    batch = TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=torch.arange(rows + 1) * args.tokens,
        token_ids=torch.randint(2, strategy._config.vocab_size, (rows * args.tokens,), generator=generator),
        action_mask=acting.flatten(),
        loss_mask=acting.flatten(),
        advantages=torch.randn(rows * args.tokens, generator=generator),
    )

    def compute(outputs: Any, micro: Any, sizes: Any) -> LossTerms:
        return LossTerms(-(outputs.logprobs * micro.advantages * micro.loss_mask).sum() / sizes.tokens)

    loss = LossFn(compute=compute, needs=("logprobs",))
    return lambda: strategy.train_step(batch, loss), strategy


def serve(pipe: Any, args: argparse.Namespace, name: str) -> None:
    """Run a contender's process: build, then take a step whenever it is told to."""
    os.environ["THP_MEM_ALLOC_ENABLE"] = CONTENDERS[name]
    from roll.utils.memory import reuse_freed_memory

    reuse_freed_memory()
    strategy = None
    if name == "products":
        from roll.configs.schema.worker_config import ModelArgs
        from roll.strategies.training.pretrained import DTYPES, load_causal_lm

        step = products(load_causal_lm(ModelArgs(model_name_or_path=args.model), DTYPES["fp32"]), args)
    else:
        step, strategy = whole_step(args)
    step()
    pipe.send("ready")
    while pipe.recv() == "step":
        before = resource.getrusage(resource.RUSAGE_SELF)
        step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        pipe.send((user + system, system, after.ru_minflt - before.ru_minflt, after.ru_maxrss / 1024))
    digest = hashlib.sha256()
    for _, tensor in strategy.named_weights() if strategy is not None else ():
        digest.update(tensor.contiguous().numpy().tobytes())
    pipe.send(digest.hexdigest()[:16] if strategy is not None else "")


def main() -> None:
    from roll.utils.models import smollm2_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(smollm2_path()), help="default: that of the quickstart")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=80, help="of a row")
    parser.add_argument("--scored", type=int, default=5, help="last tokens of a row that are trained on")
    parser.add_argument("--passes", type=int, default=3, help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    running = {}
    for name in CONTENDERS:
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, args, name), daemon=True)
        process.start()
        mine.recv()
        running[name] = (process, mine)
    results: dict[str, list[Any]] = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name, (_, pipe) in running.items():
            pipe.send("step")
            results[name].append(pipe.recv())
    shown = f"{args.passes} x {args.rows} rows of {args.tokens} tokens, {args.scored} scored, {args.rounds} rounds"
    print(f"{shown}\n\n| contender | processor s | of it in the kernel | page faults | peak MiB | weights |")
    print("|---|---|---|---|---|---|")
    for name, (process, pipe) in running.items():
        pipe.send("stop")
        digest = pipe.recv()
        cpu, system, faults, peak = (median(column) for column in zip(*results[name], strict=True))
        print(f"| {name} | {cpu:.3f} | {system:.3f} | {faults:,.0f} | {peak:,.0f} | {digest} |")
        process.join(20)


if __name__ == "__main__":
    main()
