"""Rows of texts and pictures for models with a tower, scored by transformers alone, row by row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layout_contract import Run, by_hand, play
from torch import nn

from roll.types.batch import TokenBatch
from roll.types.picture import Picture
from roll.utils.picture_tokens import PictureTokens

Rows = Sequence[tuple[Sequence[int | None], Sequence[Picture]]]
"""Of each row its ids, None where a picture stands, and its pictures."""


@functools.cache
def noise(width: int, height: int, seed: int = 0) -> Picture:
    """A picture in which no pixel is like another."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Picture.of(Image.fromarray(pixels))


def picture_batch(tokens: PictureTokens, rows: Rows, answer: int = 4) -> TokenBatch:
    """A batch of rows whose last `answer` tokens are trained."""
    expanded = [tokens.expand([tokens.place if i is None else i for i in ids], shown) for ids, shown in rows]
    lengths = torch.tensor([len(ids) for ids in expanded])
    acting = torch.cat([torch.arange(n) >= n - answer for n in lengths.tolist()])
    names = tuple(f"row{i}" for i in range(len(rows)))
    return TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        token_ids=torch.tensor([i for ids in expanded for i in ids]),
        action_mask=acting,
        loss_mask=acting,
        advantages=torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(0)),
        pictures=tuple(tuple(shown) for _, shown in rows),
    )


WIDE, SMALL, TALL = noise(84, 56), noise(56, 56, 1), noise(40, 120, 2)
SIX: Rows = (
    ([20, 21, None, 22, 23, None, 24, 25, 26, 27, 28], [WIDE, SMALL]),
    ([30, 31, 32, 33, 34, 35, 36], []),
    ([40, None, 41, 42, 43, 44, 45, 46], [WIDE]),
    ([50, 51, 52, None, 49, None, 53, 54, 55, 56], [TALL, SMALL]),
    ([60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70], []),
    ([71, 72, 73, 74, 75, 76], []),
)
"""Pictures of several sizes, two in a row, one in two rows, and rows of text; the last alone on a second rank."""


@functools.cache
def tokens_of(folder: Path) -> PictureTokens:
    return PictureTokens.load(str(folder))


def six(folder: Path) -> TokenBatch:
    """`SIX` for the model of a folder."""
    return picture_batch(tokens_of(folder), SIX)


class Reading(nn.Module):
    """transformers' model, which is told of each row of a batch, known by its ids, what it shows; no place is said."""

    def __init__(self, folder: Path, batch: TokenBatch) -> None:
        from transformers import AutoModelForImageTextToText

        super().__init__()
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens = tokens_of(folder)
        self.shown = {tuple(batch.row("token_ids", i).tolist()): batch.pictures[i] for i in range(len(batch))}

    def forward(self, ids: torch.Tensor) -> Any:
        """Logits of one row."""
        shown: dict[str, Any] = {}
        if pictures := self.shown[tuple(ids[0].tolist())]:
            pixels, grid = self.tokens.pixels(pictures)
            kinds = (ids == self.tokens.place).int()
            shown = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
        outputs = self.model(input_ids=ids, **shown)
        outputs.logits[..., list(self.tokens.forbidden)] = -1e9  # times 0 it is 0, where they stand among what is read
        return outputs

    def logprobs(self, batch: TokenBatch) -> torch.Tensor:
        """Log-probs of a batch's trained tokens, 0 elsewhere, [N]."""
        parts = []
        for i in range(len(batch)):
            ids = batch.row("token_ids", i)
            table = self(ids[None]).logits[0].log_softmax(-1)[:-1]
            parts += [torch.zeros(1), table.gather(-1, ids[1:, None])[:, 0]]
        return torch.cat(parts) * batch.action_mask


@functools.cache
def picture_reference(folder: Path) -> Run:
    """Optimizer steps by hand on the model in a folder."""
    batch = six(folder)
    run = by_hand(Reading(folder, batch), make=lambda: batch)
    run.weights = {name.removeprefix("model."): tensor for name, tensor in run.weights.items()}
    return run


def picture_play(info: Any, spec: Any, look: Any = None) -> dict:
    """`layout_contract.play` on `SIX`."""
    return play(info, spec, look, make=lambda: six(Path(spec.worker.model_args.model_name_or_path)))
