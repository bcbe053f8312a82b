"""Pictures of a micro-batch's rows, laid out for a model that reads them: pixels, places and positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from roll.configs.catalog.family_table import family_of
from roll.strategies.training.micro import MicroLayout, PictureInputs
from roll.types.batch import TokenBatch
from roll.types.picture import Picture
from roll.utils.picture_tokens import PictureTokens


def mrope_positions(ids: Tensor, place: int, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Return the positions of a row in time, height and width, int64 [3, T].

    A token of text has the same number three times. Those of a picture stand at one time, in rows and columns from
    there on; the text behind it goes on after the larger side.

    Args:
        ids: int64 [T], expanded.
        place: the id that stands for a feature of a picture.
        sizes: rows and columns of features of each picture, in order.

    Raises:
        ValueError: the row has more or fewer places than its pictures have features, or breaks one off.
    """
    places = (ids == place).nonzero()[:, 0].tolist()
    features = sum(rows * columns for rows, columns in sizes)
    if len(places) != features:
        raise ValueError(
            f"{len(places)} of its tokens stand for pictures, but its {len(sizes)} have {features} features"
        )
    positions = torch.arange(len(ids)).repeat(3, 1)
    ahead = seen = 0  # of the text: what pictures so far have moved it back; places so far
    for rows, columns in sizes:
        count = rows * columns
        start, stop = places[seen], places[seen] + count
        if places[seen + count - 1] != stop - 1:
            raise ValueError(f"the {count} tokens of a picture, from token {start} on, have others between them")
        first = start - ahead
        positions[0, start:stop] = first
        positions[1, start:stop] = first + torch.arange(rows).repeat_interleave(columns)
        positions[2, start:stop] = first + torch.arange(columns).repeat(rows)
        ahead = stop - first - max(rows, columns)
        positions[:, stop:] = torch.arange(stop, len(ids)) - ahead
        seen += count
    return positions


def picture_inputs(tokens: PictureTokens, shown: Sequence[Picture], device: torch.device) -> PictureInputs:
    """Return what the tower reads, each different picture once, and the features of all that are shown, in order."""
    distinct = list({picture.digest: picture for picture in shown}.values())
    starts = accumulate(map(tokens.tokens, distinct), initial=0)
    start_of = dict(zip((picture.digest for picture in distinct), starts, strict=False))
    runs = [start_of[picture.digest] + torch.arange(tokens.tokens(picture)) for picture in shown]
    pixels, grid = tokens.pixels(distinct) if distinct else tokens.empty()
    features = torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64)
    return PictureInputs(pixels.to(device), grid.to(device), features.to(device))


class PictureRows:
    """What a model with a tower reads beside tokens (`ReadsBeside`).

    `runs_always`: where a micro-batch has no picture the tower reads an empty one, because other ranks or micro-batches
    run it: its collectives and gradients are then the same everywhere.
    """

    def __init__(self, tokens: PictureTokens, model: Any, *, runs_always: bool, role: str) -> None:
        self._tokens = tokens
        self._runs_always = runs_always
        self._role = role
        names = family_of(model.config.model_type).pictures
        assert names is not None
        sizes = [(name.startswith(names.tower), parameter.numel()) for name, parameter in model.named_parameters()]
        tower, whole = (sum(size for inside, size in sizes if inside >= least) for least in (True, False))
        self._tokens_per_patch = tower / (whole - tower)
        """What a patch costs in the tower, by the weights that it meets."""

    def costs(self, batch: TokenBatch) -> list[int]:
        """Return tokens, and what the tower computes for each row's pictures, in tokens."""
        patches = [sum(map(self._tokens.patches, pictures)) for pictures in batch.pictures]
        lengths = batch.lengths.tolist()
        return [n + math.ceil(self._tokens_per_patch * more) for n, more in zip(lengths, patches, strict=True)]

    def lay_out(self, layout: MicroLayout, micro: TokenBatch) -> MicroLayout:
        """Return the layout with its pictures, each different one once, and four positions of every token.

        Raises `ValueError` for a row whose tokens don't fit its pictures, or with a place among what it is taught.
        """
        device = layout.ids.device
        moved = self._moved(micro, layout)
        positions = layout.positions.expand(4, -1, -1)
        if moved is not None:
            positions = positions + moved.to(device)
        shown = [picture for pictures in micro.pictures for picture in pictures]
        if not shown and not self._runs_always:
            return replace(layout, positions=positions)
        return replace(layout, positions=positions, pictures=picture_inputs(self._tokens, shown, device))

    def _moved(self, micro: TokenBatch, layout: MicroLayout) -> Tensor | None:
        """Return how far pictures move the tokens' positions, int64 [4, *ids] on the host; None without pictures."""
        is_place = micro.token_ids == self._tokens.place
        if bool((is_place & micro.action_mask).any()):
            row = int(torch.searchsorted(micro.offsets, (is_place & micro.action_mask).nonzero()[0, 0], right=True)) - 1
            raise ValueError(
                f"{self._role}: what row {micro.row_ids[row]!r} is to say holds the token {self._tokens.place}, which "
                "stands for a picture and can't be said"
            )
        if not micro.has_pictures and not bool(is_place.any()):
            return None
        moved = torch.zeros(4, *layout.ids.shape, dtype=torch.int64)
        starts = list(accumulate(layout.lengths, initial=0))
        for row, pictures in enumerate(micro.pictures):
            ids = micro.row("token_ids", row)
            try:
                sizes = [self._tokens.features(picture) for picture in pictures]
                positions = mrope_positions(ids, self._tokens.place, sizes)
            except ValueError as error:
                raise ValueError(
                    f"{self._role}: row {micro.row_ids[row]!r} doesn't fit its pictures: {error}"
                ) from None
            line, start = (0, starts[row]) if layout.packed else (row, 0)
            moved[1:, line, start : start + len(ids)] = positions - torch.arange(len(ids))
        return moved
