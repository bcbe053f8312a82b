"""Fine-tuning under thirteen chat templates: do responses end by themselves, and are thoughts taught where they belong?

    python benchmarks/chat_templates.py                       all of them; some minutes on one core
    python benchmarks/chat_templates.py --only gemma qwen3 --steps 100

Templates of other projects are read from the wheel of trl 1.16.0, which pip downloads into a temporary folder; those of
Mistral, ChatML and one without a system role are written here as their kind. For each template a tiny random model
learns ten answers in `--steps` steps of `pipeline: sft`. Then the exported folder is sampled at temperature 1 in two
ways: by the engine `hf_infer`, and by transformers' own `generate`, which knows nothing but the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TRL = "trl==1.16.0"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SAMPLES = 10
"""Responses to each of ten questions."""
MAX_NEW_TOKENS = 96

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OWN = {
    "chatml": CHATML,
    "default system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    + CHATML,
    "mistral, old": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral, new": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "no system role": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}


@dataclass(frozen=True)
class Kind:
    """A template, and the model around it."""

    template: str
    """A key of `OWN`, or a file in `trl/chat_templates`."""
    eos: str
    """The tokenizer's and the generation settings' end: that of a base model, where the template has another."""
    tokens: tuple[str, ...] = ()
    """That the template needs beyond those in angle brackets."""
    thinks: bool = False
    """Whether rows have thoughts."""


KINDS = {
    "chatml": Kind("chatml", "<|endoftext|>"),
    "gemma": Kind("gemma.jinja", "<eos>", ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "llama3": Kind("llama3.jinja", "<|end_of_text|>"),
    "mistral, old": Kind("mistral, old", "</s>"),
    "mistral, new": Kind("mistral, new", "</s>", ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")),
    "glm": Kind("glm4moe.jinja", "<|endoftext|>", ("[gMASK]", "<sop>", "<think>", "</think>"), thinks=True),
    "gpt-oss": Kind("gptoss.jinja", "<|endoftext|>", thinks=True),
    "deepseek-r1": Kind("deepseek_r1_distill.jinja", "<|end_of_text|>", ("<think>", "</think>"), thinks=True),
    "qwen3": Kind("qwen3.jinja", "<|endoftext|>", ("<think>", "</think>"), thinks=True),
    "qwen3, opened": Kind("qwen3_5_think.jinja", "<|endoftext|>", ("<think>", "</think>"), thinks=True),
    "smollm2": Kind("default system", "<|endoftext|>"),
    "phi": Kind("phi3.jinja", "<|endoftext|>"),
    "no system role": Kind("no system role", "<eos>"),
}


@dataclass(frozen=True)
class Measured:
    """What came out under one template."""

    taught_end: str
    """The token that the last answer is taught to end with."""
    ended: float
    """Share of responses that ended by themselves, in `hf_infer`."""
    ended_alone: float
    """The same by transformers' `generate`, with the exported folder alone."""
    right: float
    """Share whose text is the taught one: thought and answer, letter for letter."""
    accuracy: float
    """Share of the held-out rows' tokens that the model gives the highest probability."""


def templates(wheel: Path | None) -> dict[str, str]:
    """Return all templates by the names that kinds have for them."""
    if wheel is not None:
        return {**OWN, **_in_wheel(wheel)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, TRL]
        subprocess.run(command, check=True)
        return {**OWN, **_in_wheel(next(Path(folder).glob("*.whl")))}


def _in_wheel(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if name.startswith("trl/chat_templates/") and name.endswith(".jinja")]
        return {name.rpartition("/")[2]: file.read(name).decode("utf-8") for name in names}


def make_model(kind: Kind, template: str, folder: Path) -> None:
    """Save a tiny random model with a token per character and the family's special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    letters = {letter: number for number, letter in enumerate(string.printable)}
    core = Tokenizer(models.WordLevel({**letters, "<unk>": len(letters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    marked = re.findall(r"<[|｜][^<>{}'\s]*[|｜]>", template.replace("m.role", ""))
    roles = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"] if kind.template == "no system role" else []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token=kind.eos,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(dict.fromkeys([*marked, *roles, *kind.tokens])),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversation(digit: int, *, thinks: bool) -> list[dict[str, str]]:
    """Return the row of a digit: what comes after it, in a word, with the thought before the word."""
    after = WORDS[(digit + 1) % 10]
    answer = f"<think>\nafter {digit} is {(digit + 1) % 10}\n</think>\n\n{after}" if thinks else after
    return [{"role": "user", "content": f"{digit}?"}, {"role": "assistant", "content": answer}]


def measure(name: str, template: str, folder: Path, *, steps: int) -> Measured:
    """Train under a template, and sample."""
    from roll.configs.parsing.build_config import build
    from roll.configs.schema.sft_config import SFTConfig
    from roll.data.chat_masks import ConversationEncoder
    from roll.pipelines.offline.sft import run_sft
    from roll.strategies.training.pretrained import load_tokenizer

    kind = KINDS[name]
    make_model(kind, template, folder / "base")
    rows = folder / "rows.jsonl"
    lines = [json.dumps({"messages": conversation(digit, thinks=kind.thinks)}) for digit in range(10)]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = {"file_name": str(rows), "messages": "messages"}
    config, violations = build(SFTConfig, _settings(folder, data, steps))
    assert isinstance(config, SFTConfig), violations
    run_sft(config)
    logged = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    args = config.actor_train.model_args
    tokenizer = load_tokenizer(type(args)(model_name_or_path=str(folder / "model")))
    marked = [ConversationEncoder(tokenizer).encode(conversation(d, thinks=kind.thinks)) for d in range(10)]
    taught = [[i for i, t in zip(m.token_ids, m.trained, strict=True) if t] for m in marked]
    prompts = [list(m.token_ids[: m.trained.index(True)]) for m in marked]
    engine = _by_engine(folder / "model", prompts)
    alone = _alone(folder / "model", prompts)
    return Measured(
        taught_end=tokenizer.decode(taught[0][-1:]),
        ended=sum(ended for ended, _ in engine) / len(engine),
        ended_alone=sum(alone) / len(alone),
        right=sum(ids == taught[k // SAMPLES] for k, (_, ids) in enumerate(engine)) / len(engine),
        accuracy=logged[-1]["val/token_accuracy"],
    )


def _settings(folder: Path, data: Mapping[str, str], steps: int) -> dict[str, Any]:
    return {
        "pipeline": "sft", "exp_name": "templates", "executor": "inline", "output_dir": str(folder),
        "track_with": "jsonl", "print_summary": False, "logging_dir": str(folder / "logs"),
        "export_dir": str(folder / "model"),
        "pretrain": str(folder / "base"), "max_steps": steps, "sequence_length": 1500, "eval_steps": steps,
        "validation": {"data_args": data},
        "actor_train": {
            "model_args": {"disable_gradient_checkpointing": True},
            "training_args": {"learning_rate": 5e-3, "per_device_train_batch_size": 10},
            "data_args": data,
        },
    }  # fmt: skip


def _by_engine(folder: Path, prompts: list[list[int]]) -> list[tuple[bool, list[int]]]:
    from roll.configs.schema.worker_config import ModelArgs
    from roll.strategies.base import Request, SamplingParams
    from roll.strategies.engines.hf.hf_infer import HfInfer
    from roll.strategies.training.pretrained import context_length, eos_token_ids, load_causal_lm, load_tokenizer

    args = ModelArgs(model_name_or_path=str(folder))
    model: Any = load_causal_lm(args, torch.float32)
    ends = eos_token_ids(model, load_tokenizer(args))
    engine = HfInfer(model, eos_token_ids=ends, pad_token_id=0, max_context=context_length(model))
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    numbers = range(len(prompts) * SAMPLES)
    engine.submit(
        [
            Request(id=f"{k}", prompt_ids=tuple(prompts[k // SAMPLES]), params=params, seed=k, order=(k,))
            for k in numbers
        ]
    )
    done: dict[int, tuple[bool, list[int]]] = {}
    while len(done) < len(numbers):
        for completion in engine.poll(16):
            done[int(completion.id)] = (completion.finish_reason == "stop", list(completion.token_ids))
    return [done[k] for k in numbers]


def _alone(folder: Path, prompts: list[list[int]]) -> list[bool]:
    """Return whether each response of transformers' own `generate` ended before the limit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ended = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for prompt in prompts:
            ids = torch.tensor([prompt] * SAMPLES)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS
            )[:, len(prompt) :]
            stops = torch.tensor(model.generation_config.eos_token_id).reshape(-1)
            ended += torch.isin(out, stops).any(1).tolist()
    return ended


def main() -> int:
    """Measure, print the table, and return 1 where a template falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--wheel", type=Path, help="of trl 1.16.0; default: pip downloads it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = OWN if {KINDS[name].template for name in options.only} <= OWN.keys() else templates(options.wheel)
    print("| template | ends with | ended | ended, generate alone | thought and answer right | token accuracy |")
    print("|---|---|---|---|---|---|")
    worst = 1.0
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(name, texts[KINDS[name].template], Path(folder), steps=options.steps)
        worst = min(worst, result.ended, result.ended_alone)
        shares = (result.ended, result.ended_alone, result.right, result.accuracy)
        print(
            f"| {name} | `{result.taught_end}` | " + " | ".join(f"{share:.1%}" for share in shares) + " |", flush=True
        )
    return int(worst < 0.95)


if __name__ == "__main__":
    sys.exit(main())
