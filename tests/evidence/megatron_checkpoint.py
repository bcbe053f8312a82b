"""A checkpoint of Megatron-core's installed release: `megatron_checkpoint.py write|resume FOLDER`, see its test."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from layout_contract import PP2, TP2
from ranks import RankPool
from test_megatron_checkpoint import a_spec, check_resumed, resume, write
from tiny_models import build_tiny_model


def main(task: str, folder: Path) -> None:
    pool, model = RankPool(), folder / "model"
    if task == "write":
        build_tiny_model(model, "llama", layers=4)
        torch.save(pool.run(write, 2, a_spec(model, TP2), folder / "saved")[0], folder / "written.pt")
    else:
        after = pool.run(resume, 2, a_spec(model, PP2), folder / "saved")[0]
        check_resumed(torch.load(folder / "written.pt", weights_only=False), after)
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
