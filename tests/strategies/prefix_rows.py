"""Batches whose rows begin alike."""

from __future__ import annotations

import torch

from roll.types.batch import TokenBatch

GROUPS = (
    # A prompt of 9 tokens with answers that share nothing, their first token, or all of it.
    (range(10, 19), ([50, 51, 52], [60, 61], [50, 53, 54, 55], [50, 51, 52])),
    # A longer prompt, of which the first 4 tokens are the other's.
    ((10, 11, 12, 13, *range(30, 38)), ([70], [71, 72, 73], [74, 75], [76, 77, 78, 79])),
)


def batch_of(rows: list[list[int]], masks: list[list[bool]], groups: list[str] | None = None) -> TokenBatch:
    generator = torch.Generator().manual_seed(3)
    acting = torch.tensor([mask for row in masks for mask in row])
    return TokenBatch(
        row_ids=tuple(f"row{i}" for i in range(len(rows))),
        group_ids=tuple(groups or (f"group{i}" for i in range(len(rows)))),
        offsets=torch.tensor([0, *map(len, rows)]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=acting,
        loss_mask=acting,
        advantages=torch.randn(len(acting), generator=generator),
    )


def answers() -> TokenBatch:
    """Two groups of answers, and a row of its own."""
    rows, masks, groups = [], [], []
    for name, (prompt, responses) in zip("ab", GROUPS, strict=True):
        for response in responses:
            rows.append([*prompt, *response])
            masks.append([False] * len(prompt) + [True] * len(response))
            groups.append(name)
    rows.append([80, 81, 82])
    masks.append([False, True, True])
    return batch_of(rows, masks, [*groups, "c"])


def turns() -> TokenBatch:
    """Rows of an agent's episode: each goes on from the one before, and one branches off; tokens of earlier turns are
    scored in every row that has them."""
    first = [10, 11, 12, 13, 14, 15, 40, 41, 42, 20, 21, 22]
    acted = [False] * 6 + [True] * 3 + [False] * 3
    second, branch = [43, 44, 23, 24], [43, 45, 46]
    rows = [first[:9], [*first, *second], [*first, *branch], [*first, *second, 47, 48]]
    masks = [
        acted[:9],
        [*acted, True, True, False, False],
        [*acted, True, True, True],
        [*acted, True, True, False, False, True, True],
    ]
    return batch_of(rows, masks)


def pairs() -> TokenBatch:
    """Two answers to each of two prompts, scored at their last token, as preference data is."""
    rows = [
        [10, 11, 12, 13, 14, 15, 50, 51],
        [10, 11, 12, 13, 14, 15, 60],
        [*range(20, 28), 61],
        [*range(20, 28), 62, 63],
    ]
    return batch_of(rows, [[False] * (len(row) - 1) + [True] for row in rows], ["a", "a", "b", "b"])
