"""Prompts that show pictures, in `hf_infer`.

Two prompts of the same ids may show other pictures, so what an engine tells apart by tokens, and what it shares of
beginnings, would mix them up. Here the places of a prompt become *marks*: negative numbers, one for each feature of
each different picture. Marks are equal where the pictures are, and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roll.strategies.base import Request
from roll.strategies.hf.cache import RowCache, cache_argument
from roll.strategies.hf.picture_model import read_pictures
from roll.strategies.hf.picture_rows import mrope_positions, picture_inputs
from roll.strategies.training.micro import PictureInputs
from roll.types.picture import Picture
from roll.utils.picture_tokens import PictureTokens


class PicturePrompts:
    """Marks prompts, and runs them through a model with a tower."""

    def __init__(self, tokens: PictureTokens, device: torch.device) -> None:
        self._tokens = tokens
        self._device = device
        self._starts: list[int] = []
        """Marks are -1 - n; of the features of all pictures so far, the first n of each picture."""
        self._marked: list[Picture] = []
        self._start_of: dict[str, int] = {}
        self._used = 0

    def marked(self, request: Request) -> tuple[tuple[int, ...], int]:
        """Return (a request's prompt with marks, by how much its pictures move the positions behind them).

        Raises `ValueError` where its tokens don't fit its pictures.
        """
        ids = request.prompt_ids
        if not request.pictures and self._tokens.place not in ids:
            return ids, 0
        try:
            positions = self._positions(ids, request.pictures)
        except ValueError as error:
            raise ValueError(f"request {request.id!r}: its prompt doesn't fit its pictures: {error}") from None
        marks = iter([-1 - n for picture in request.pictures for n in self._numbers(picture)])
        prompt = tuple(next(marks) if token == self._tokens.place else token for token in ids)
        return prompt, int(positions.max()) + 1 - len(ids)

    def _numbers(self, picture: Picture) -> range:
        count = self._tokens.tokens(picture)
        if picture.digest not in self._start_of:
            self._start_of[picture.digest] = self._used
            self._starts.append(self._used)
            self._marked.append(picture)
            self._used += count
        start = self._start_of[picture.digest]
        return range(start, start + count)

    def _positions(self, ids: Sequence[int], pictures: Sequence[Picture]) -> Tensor:
        return mrope_positions(
            torch.tensor(ids), self._tokens.place, [self._tokens.features(each) for each in pictures]
        )

    def forward(self, model: Any, contexts: Sequence[tuple[int, ...]], width: int, cache: RowCache) -> Tensor:
        """Run the last `width` tokens of marked contexts whose other tokens the cache has: logits [B, V] after them."""
        ids = torch.zeros(len(contexts), width, dtype=torch.int64)
        positions = torch.zeros(3, len(contexts), width, dtype=torch.int64)
        places: list[tuple[Picture, int]] = []  # picture and feature, row by row
        for row, context in enumerate(contexts):
            count, shown = min(width, len(context)), [self._feature(mark) for mark in context if mark < 0]
            whole = [self._tokens.place if token < 0 else token for token in context]
            pictures = [picture for picture, feature in shown if feature == 0]
            ids[row, -count:] = torch.tensor(whole[-count:])
            positions[:, row, -count:] = self._positions(whole, pictures)[:, -count:]
            computed = sum(mark < 0 for mark in context[-count:])
            places += shown[len(shown) - computed :]
        mask = cache.mask(extra=width)
        ids = ids.to(self._device)
        inputs: dict[str, Any] = {"input_ids": ids} if not places else read_pictures(model, ids, self._inputs(places))
        decoder = model.get_decoder()
        inputs[cache_argument(decoder.__class__)] = cache.cache
        hidden = decoder(
            **inputs, attention_mask=mask, position_ids=positions.to(self._device), use_cache=True
        ).last_hidden_state
        logits: Tensor = model.get_output_embeddings()(hidden[:, -1])
        return logits

    def _feature(self, mark: int) -> tuple[Picture, int]:
        number = -1 - mark
        index = bisect_right(self._starts, number) - 1
        return self._marked[index], number - self._starts[index]

    def _inputs(self, places: Sequence[tuple[Picture, int]]) -> PictureInputs:
        """Return what the tower reads for these features; where beginnings are shared, a row may lack the first ones of
        a picture."""
        distinct = list({picture.digest: picture for picture, _ in places}.values())
        inputs = picture_inputs(self._tokens, distinct, self._device)
        start_of, start = {}, 0
        for picture in distinct:
            start_of[picture.digest] = start
            start += self._tokens.tokens(picture)
        wanted = torch.tensor([start_of[picture.digest] + feature for picture, feature in places])
        return PictureInputs(inputs.pixels, inputs.grid, wanted.to(self._device))

    def forget(self) -> None:
        """Let go of all pictures; no marks are in use."""
        self._starts, self._marked, self._start_of, self._used = [], [], {}, 0
