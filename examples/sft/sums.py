"""What sft_smollm2_cpu.yaml reads: sums worked out in words, and the quickstart's model. Both are made once."""

from __future__ import annotations

import json
import random
from pathlib import Path

from roll.configs.schema.sft_config import SFTConfig
from roll.utils.models import prepare_smollm2, smollm2_path

ROWS = 400


def make(config: SFTConfig) -> None:
    """Write the rows and convert the model, unless they are there."""
    if config.pretrain == str(smollm2_path()):
        prepare_smollm2()
    for name in config.actor_train.data_args.file_name:
        file = Path(name)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows(ROWS)), encoding="utf-8")


def rows(count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return conversations of one question and its answer, the same ones every time."""
    draw = random.Random("sums")
    made = []
    for _ in range(count):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        answer = f"{tens} from the tens, {ones} from the ones: {tens} + {ones} = {a + b}"
        made.append(
            {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": answer}]}
        )
    return made
