"""Are the tokens that are trained those that were sampled, whatever an agent does to its conversation?

    python benchmarks/agent_token_identity.py --engines hf_infer vllm
    .venv-sglang/bin/python benchmarks/agent_token_identity.py --engines sglang

Fuzzed agents (`tests/rollout/agent_fuzz.py`) edit and summarise histories, drop what was thought, ask again, ask
several things at once or for several answers and disconnect, under chat templates of five shapes, two of which rewrite
history as a rule, with responses carried and rendered. A tiny random model answers, in float32. Every trained token
must have been sampled in that context, every sampled one be trained once, and the trainer's log-probs (FSDP2, float32)
are compared with those of sampling.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "rollout")]

ENGINES = ("hf_infer", "vllm", "sglang")
WINDOW = 1024
"""Tokens of a context."""
BOUND = 1e-5
"""Of the difference of log-probs, which are of order 10."""


def build_model(folder: Path, hidden: int) -> Path:
    """Return a random model over the fuzz's tokens, with its tokenizer."""
    import torch
    from agent_fuzz import fuzz_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = fuzz_tokenizer("chatml")
    tokenizer.pad_token = tokenizer.eos_token
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2 * WINDOW,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_engine(name: str, model: Path, running: int) -> Any:
    from roll.configs.schema.engine_config import SglangConfig, VllmConfig
    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.base import EngineSettings

    args = ModelArgs(model_name_or_path=str(model))
    settings = EngineSettings(max_running_requests=running, max_sequence_length=WINDOW, seed=0)
    if name == "vllm":
        from roll.strategies.engines.vllm import vllm_engine

        options = VllmConfig(block_size=32, engine_args={"kv_cache_memory_bytes": 256 << 20})
        return vllm_engine.build(args, options, settings)
    if name == "sglang":
        from roll.strategies.engines.sglang import sglang_engine

        return sglang_engine.build(args, SglangConfig(), settings)
    import torch

    from roll.strategies.engines.hf.hf_infer import HfInfer
    from roll.strategies.training.pretrained import load_causal_lm, load_tokenizer

    eos = load_tokenizer(args).eos_token_id
    loaded = load_causal_lm(args, torch.float32).eval()
    return HfInfer(loaded, eos_token_ids=(eos,), pad_token_id=eos, max_running_requests=running, max_context=WINDOW)


def build_trainer(model: Path) -> Any:
    from roll.configs.schema.strategy_config import StrategyArgs
    from roll.configs.schema.training_args import TrainingArgs
    from roll.configs.schema.worker_config import ModelArgs, TrainConfig
    from roll.distributed.worker import WorkerInfo
    from roll.strategies import build_train_strategy
    from roll.strategies.base import TrainSpec

    worker = TrainConfig(
        model_args=ModelArgs(model_name_or_path=str(model)),
        training_args=TrainingArgs(per_device_train_batch_size=8),
        infer_batch_size=8,
        strategy_args=StrategyArgs(strategy_name="fsdp2_train"),
    )
    spec = TrainSpec(role="actor_train", kind="policy", worker=worker, seed=0)
    return build_train_strategy(spec, WorkerInfo("actor_train", 0, 1, "127.0.0.1", 0, (0,), 0))


def fuzz(
    engine: Any, template: str, history: str, turns: int, episodes: int, seed: int
) -> tuple[Any, int, Counter[str]]:
    """Play about so many turns; returns the rows, how many tokens are trained, and what happened."""
    from agent_fuzz import EngineRank, FuzzedAgent, FuzzLog, Logged, check_identity, fuzz_tokenizer, play_fuzz

    from roll.rollout.chat_format import ChatTemplate
    from roll.rollout.continuous_driver import ContinuousDriver
    from roll.rollout.lockstep_driver import LockstepDriver
    from roll.strategies.base import SamplingParams

    tokenizer, tally, logged = fuzz_tokenizer(template), FuzzLog(), Logged(EngineRank(engine))
    calls = max(1, turns // episodes)
    agent = FuzzedAgent(ChatTemplate(tokenizer), tokenizer, history, calls, tally, seed=seed, imagines=0.4)
    if engine.lockstep:
        driver: Any = LockstepDriver(logged)
    else:
        driver = ContinuousDriver(logged, max_running_requests=64)
    params = SamplingParams(max_new_tokens=16)
    try:
        rollouts = play_fuzz(driver, tokenizer, agent, episodes=episodes, limit=WINDOW, params=params)
    finally:
        driver.close()
    tokens = check_identity(rollouts, logged, tally)
    tally.counts["turns"] = len(tally.delivered)
    tally.counts["rows"] = len(rollouts.batch)
    return rollouts, tokens, tally.counts


def largest_difference(trainer: Any, rollouts: Any) -> float:
    """Return how far the trainer's log-probs of trained tokens are from those of sampling."""
    batch = rollouts.batch
    joined = batch.join(trainer.forward(batch, ["logprobs"]), old_logprobs="logprobs")
    mask = batch.action_mask
    return float((joined.old_logprobs - batch.sampling_logprobs)[mask].abs().max())


def main() -> None:
    from agent_fuzz import TEMPLATES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["hf_infer"])
    parser.add_argument("--turns", type=int, default=10_000, help="per engine")
    parser.add_argument("--templates", nargs="+", choices=list(TEMPLATES), default=list(TEMPLATES))
    parser.add_argument("--episodes", type=int, default=16, help="at once")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    parts = [(template, history) for template in args.templates for history in ("carried", "rendered")]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", args.hidden)
        trainer = build_trainer(model)
        print("| engine | template | history | turns | rows | trained tokens | mismatches | largest difference | s |")
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for name in args.engines:
            engine = build_engine(name, model, running=64)
            try:
                for number, (template, history) in enumerate(parts):
                    begun, turns = time.monotonic(), max(1, args.turns // len(parts))
                    size = {"turns": turns, "episodes": min(args.episodes, turns), "seed": args.seed + number}
                    rollouts, tokens, counts = fuzz(engine, template, history, **size)
                    difference = largest_difference(trainer, rollouts)
                    worst = max(worst, difference)
                    mismatches = sum(count for what, count in counts.items() if what.startswith("mismatch_"))
                    seconds = time.monotonic() - begun
                    print(
                        f"| {name} | {template} | {history} | {counts['turns']} | {counts['rows']} | {tokens} | "
                        f"{mismatches} | {difference:.1e} | {seconds:.0f} |",
                        flush=True,
                    )
            finally:
                engine.close()
        trainer.close()
    print(
        f"\nevery trained token was sampled there, every sampled one is trained once; largest difference: {worst:.1e}"
    )
    if worst > BOUND:
        sys.exit(f"log-probs differ by {worst:.1e}, more than {BOUND:.0e}")


if __name__ == "__main__":
    main()
