"""One optimizer step per backend against a bare transformers + AdamW loop on the same packed tokens.

    python benchmarks/train_step.py                                     # CPU: a small model, one process each
    python benchmarks/train_step.py --world 2 --backends fsdp2 zero3 megatron-tp
    python benchmarks/train_step.py --shape qwen2.5-0.5b --dtype bf16   # on an accelerator also prints MFU

Every contender has its own process (or processes) for the whole run and takes turns with the others, so that the load
of the machine affects all alike. A figure is the median over the rounds; `vs bare` is the median of the
rounds' own ratios. Memory is the peak of a process above what it held before the model was loaded.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 2048},
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151936},
    "qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16, from the vendor's data sheets."""


@dataclass(frozen=True)
class Contender:
    """A backend with its options; `strategy` None is the bare loop."""

    strategy: str | None
    options: dict[str, Any]
    packed: bool = True


CONTENDERS = {
    "bare": Contender(None, {}),
    "bare-padded": Contender(None, {}, packed=False),
    "fsdp2": Contender("fsdp2_train", {}),
    "fsdp2-padded": Contender("fsdp2_train", {}, packed=False),
    "zero1": Contender("deepspeed_train", {"zero_optimization": {"stage": 1}}),
    "zero2": Contender("deepspeed_train", {"zero_optimization": {"stage": 2}}),
    "zero3": Contender("deepspeed_train", {"zero_optimization": {"stage": 3}}),
    "megatron": Contender("megatron_train", {}),
    "megatron-padded": Contender("megatron_train", {}, packed=False),
    "megatron-tp": Contender("megatron_train", {"tensor_model_parallel_size": 2}),
    "megatron-pp": Contender("megatron_train", {"pipeline_model_parallel_size": 2}),
}


@dataclass(frozen=True)
class Job:
    """The work of every contender."""

    model: str
    dtype: str
    lengths: tuple[int, ...]
    rows: int
    """Rows per micro-batch; all contenders cut alike."""
    threads: int


def make_model(shape: str, folder: Path) -> None:
    """Make a random Qwen2 of that shape; the tokenizer is only there because training backends load one."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    options = {"tie_word_embeddings": True, "max_position_embeddings": 32768, **SHAPES[shape]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **options), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>").save_pretrained(folder)


def make_batch(job: Job, vocabulary: int) -> Any:
    """Return rows of random tokens, all but the first of each scored."""
    import torch

    from roll.types.batch import TokenBatch

    generator = torch.Generator().manual_seed(1)
    total, offsets = sum(job.lengths), torch.tensor([0, *job.lengths]).cumsum(0)
    acting = torch.ones(total, dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(str(i) for i in range(len(job.lengths)))
    return TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=offsets,
        token_ids=torch.randint(2, vocabulary, (total,), generator=generator),
        action_mask=acting,
        loss_mask=acting,
        advantages=torch.randn(total, generator=generator),
    )


def bare_step(job: Job, contender: Contender) -> Any:
    """Build the plain loop: transformers' own packing by position ids, log-softmax over all logits."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = make_batch(job, model.config.vocab_size)
    order = sorted(range(len(batch)), key=lambda i: -job.lengths[i])
    parts = [batch.select(order[i : i + job.rows]) for i in range(0, len(order), job.rows)]
    scored = float(batch.loss_mask.sum())

    def laid_out(part: Any) -> tuple[dict[str, Any], Any, Any]:
        if contender.packed:
            starts = torch.repeat_interleave(part.offsets[:-1], part.lengths)
            positions = torch.arange(part.num_tokens) - starts
            inputs = {"input_ids": part.token_ids[None], "position_ids": positions[None]}
            return inputs, part.loss_mask[None], part.advantages[None]
        inputs = {"input_ids": part.pad("token_ids"), "attention_mask": part.valid().long()}
        return inputs, part.pad("loss_mask", False), part.pad("advantages")

    def step() -> None:
        optimizer.zero_grad()
        for part in parts:
            inputs, mask, advantages = laid_out(part)
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            with torch.autocast(device, torch.bfloat16, enabled=job.dtype == "bf16"):
                logits = model(**inputs, use_cache=False).logits[:, :-1]
            table = logits.float().log_softmax(-1)
            logprobs = table.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
            loss = -(logprobs * advantages[:, 1:].to(device) * mask[:, 1:].to(device)).sum() / scored
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def built_step(job: Job, contender: Contender, rank: int, world: int, port: int) -> tuple[Any, Any]:
    """Build the same step with a backend; returns (the strategy, its step)."""
    from transformers import AutoConfig

    from roll.configs.schema.strategy_config import STRATEGIES, StrategyArgs
    from roll.configs.schema.training_args import TrainingArgs
    from roll.configs.schema.worker_config import ModelArgs, TrainConfig
    from roll.distributed.worker import WorkerInfo
    from roll.strategies import build_train_strategy
    from roll.strategies.base import LossFn, LossTerms, TrainSpec

    assert contender.strategy is not None
    worker = TrainConfig(
        model_args=ModelArgs(model_name_or_path=job.model, dtype=job.dtype, disable_gradient_checkpointing=True),
        training_args=TrainingArgs(learning_rate=1e-5, per_device_train_batch_size=job.rows),
        use_sequence_packing=contender.packed,
        strategy_args=StrategyArgs(
            strategy_name=contender.strategy, strategy_config=STRATEGIES[contender.strategy](**contender.options)
        ),
    )
    spec = TrainSpec(role="actor_train", kind="policy", worker=worker, seed=0, max_grad_norm=1.0)
    info = WorkerInfo("actor_train", rank, world, "127.0.0.1", port, (rank,), 0)
    strategy = build_train_strategy(spec, info)
    batch = make_batch(job, AutoConfig.from_pretrained(job.model).vocab_size)
    layout = strategy.layout
    mine = batch.select(list(range(layout.dp_rank, len(batch), layout.dp_size)))

    def compute(outputs: Any, micro: Any, sizes: Any) -> LossTerms:
        weighted = outputs.logprobs * micro.advantages * micro.loss_mask.to(outputs.logprobs.device)
        return LossTerms(-weighted.sum() / sizes.tokens)

    loss = LossFn(compute=compute, needs=("logprobs",))
    return strategy, lambda: strategy.train_step(mine, loss)


def held_bytes() -> int:
    """Return the peak memory of this process: of the accelerator if there is one."""
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(pipe: Any, job: Job, contender: Contender, rank: int, world: int, port: int) -> None:
    """Run a contender's process: build, then take a step whenever it is told to."""
    os.environ.update(OMP_NUM_THREADS=str(job.threads), OMP_WAIT_POLICY="PASSIVE")
    if "CUDA_VISIBLE_DEVICES" not in os.environ and world > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(job.threads)
    before = held_bytes()
    if contender.strategy is None:
        step = bare_step(job, contender)
    else:
        _, step = built_step(job, contender, rank, world, port)
    step()
    pipe.send("ready")
    while pipe.recv() == "step":
        started = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - started, held_bytes() - before))


class Processes:
    """The processes of one contender."""

    def __init__(self, job: Job, contender: Contender, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self._ranks = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job, contender, rank, world, port), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine))
        for _, pipe in self._ranks:
            pipe.recv()

    def step(self) -> tuple[float, int]:
        """Take a step; return (seconds of the slowest rank, bytes of the largest)."""
        for _, pipe in self._ranks:
            pipe.send("step")
        answers = [pipe.recv() for _, pipe in self._ranks]
        return max(seconds for seconds, _ in answers), max(held for _, held in answers)

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.send("stop")
            process.join(20)
            process.kill()


def flops_of_step(shape: str, job: Job) -> float:
    """Return 6 per parameter and token, and causal attention: 6 x layers x hidden x sum of squared lengths."""
    s = SHAPES[shape]
    head = s["hidden_size"] // s["num_attention_heads"]
    kv = head * s["num_key_value_heads"]
    layer = 2 * s["hidden_size"] ** 2 + 2 * s["hidden_size"] * kv + 3 * s["hidden_size"] * s["intermediate_size"]
    matrices = s["num_hidden_layers"] * layer + s["hidden_size"] * s["vocab_size"]
    attention = 6 * s["num_hidden_layers"] * s["hidden_size"] * sum(n * n for n in job.lengths)
    return 6.0 * matrices * sum(job.lengths) + attention


def spread_lengths(rows: int, longest: int, spread: float) -> tuple[int, ...]:
    """Return row lengths from `longest` down to `longest / spread`, evenly, in a mixed order."""
    steps = [longest - (longest - longest / spread) * i / max(1, rows - 1) for i in range(rows)]
    return tuple(round(steps[(i * 5) % rows]) for i in range(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--backends", nargs="+", choices=CONTENDERS, default=["fsdp2", "zero1", "megatron"])
    parser.add_argument("--world", type=int, default=1, help="processes of each backend; the bare loop has one")
    parser.add_argument("--rows", type=int, default=16, help="rows of the batch; not a multiple of 5")
    parser.add_argument("--per-pass", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--spread", type=float, default=4.0, help="longest row / shortest row")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, Path(folder))
        threads = max(1, (os.cpu_count() or 1) // args.world)
        lengths = spread_lengths(args.rows, args.longest, args.spread)
        job = Job(model=folder, dtype=args.dtype, lengths=lengths, rows=args.per_pass, threads=threads)
        names = ["bare", *args.backends]
        running = {}
        for name in names:
            if CONTENDERS[name].strategy is None:
                running[name] = Processes(replace(job, threads=os.cpu_count() or 1), CONTENDERS[name], 1)
            else:
                running[name] = Processes(job, CONTENDERS[name], args.world)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        held = dict.fromkeys(names, 0)
        for _ in range(args.rounds):
            for name in names:
                taken, held[name] = running[name].step()
                seconds[name].append(taken)
        for processes in running.values():
            processes.close()
    report(args, job, seconds, held)


def report(args: argparse.Namespace, job: Job, seconds: dict[str, list[float]], held: dict[str, int]) -> None:
    import torch

    peak = 0.0
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), 0.0)
    tokens = sum(job.lengths)
    mfu_head = " MFU |" if peak else ""
    print(
        f"{args.shape}, {args.dtype}, {tokens} tokens in {len(job.lengths)} rows of {min(job.lengths)} to "
        f"{max(job.lengths)}, {job.rows} rows a pass, {args.world} process(es) a backend, {args.rounds} rounds\n"
    )
    print(f"| contender | s per step | tokens/s | vs bare | peak memory |{mfu_head}")
    print("|---|---|---|---|---|" + ("---|" if peak else ""))
    for name, times in seconds.items():
        ratio = median(bare / mine for bare, mine in zip(seconds["bare"], times, strict=True))
        middle = median(times)
        cells = [name, f"{middle:.3f}", f"{tokens / middle:,.0f}", f"{ratio:.2f}", f"{held[name] / 2**20:,.0f} MiB"]
        if peak:
            cells.append(f"{flops_of_step(args.shape, job) / middle / peak / args.world:.1%}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
