"""The training batch and what a model says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roll.types.ragged import Ragged, row_column, token_column

if TYPE_CHECKING:
    from roll.types.picture import Picture


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenBatch(Ragged):
    """Trajectories as ragged token columns.

    Every token column is aligned with `token_ids`: entry t of a log-prob column is log p(token_t | tokens < t), and
    entry t of a value column is V before token t is chosen. Entry 0 of a row has no context and holds 0.
    """

    group_ids: tuple[str, ...]
    unit_ids: tuple[str, ...] = ()
    """Rows that share one are dealt out together, to a mini-batch, a rank and a micro-batch: a preference pair, a
    listwise group, the rows of an episode. Left out: every row is a unit by itself."""
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """Of each row, what its tokens show, in the order of their places; the tokens are expanded, one for each feature
    (`roll.utils.picture_tokens`). Left out: no row has any."""
    token_ids: Tensor
    """int64 [N]"""
    action_mask: Tensor
    """bool [N], True where the policy chose the token."""
    routed_experts: Tensor | None = token_column()
    """int16 [N, L, K], the K experts to which each of the model's L layers sent a token when the engine read it; -1
    where it isn't told, as of a response's last token, which no engine reads. At layers without experts anything."""
    loss_mask: Tensor | None = token_column()
    """bool [N], the action tokens that count in the loss after filters; numerator *and* denominator."""
    sampling_logprobs: Tensor | None = token_column()
    """float32 [N], from the inference engine, at sampling time."""
    versions: Tensor | None = token_column()
    """int64 [N], weight version that produced the token; -1 where the policy didn't choose."""
    old_logprobs: Tensor | None = token_column()
    """float32 [N], the trainer's log-probs before this step's updates (the proximal policy)."""
    ref_logprobs: Tensor | None = token_column()
    logit_gradients: Tensor | None = token_column()
    """float32 [N], as in `TokenOutputs`, under the trainer's weights before this step's updates."""
    teacher_ids: Tensor | None = token_column()
    """int64 [N, K], tokens whose log-probs a loss compares with another model's, each at most once per position."""
    teacher_logprobs: Tensor | None = token_column()
    """float32 [N, K], the other model's log-probs of these."""
    reference_kl: Tensor | None = token_column()
    """float32 [N], the KL of the policy before this step's updates towards the reference, where it is no estimate."""
    values: Tensor | None = token_column()
    token_rewards: Tensor | None = token_column()
    advantages: Tensor | None = token_column()
    returns: Tensor | None = token_column()
    importance_weights: Tensor | None = token_column()
    """float32 [N], train/infer correction weights, constant in the loss."""
    selected: Tensor | None = token_column()
    """bool [N], tokens of a mini-batch that the loss treats apart (`clip_cov`, `kl_cov`)."""
    loss_weight: Tensor | None = row_column()
    """float32 [B]; a row of weight 0 leaves the denominators, too."""
    preferred: Tensor | None = row_column()
    """bool [B], in data of preferences: the chosen row of a pair, or a row that is desirable by itself."""
    targets: Tensor | None = row_column()
    """float32 [B], what a row's score is compared with: a reward model's target, the margin of a pair, KTO's KL."""

    @classmethod
    def _levels(cls) -> dict[str, str]:
        return {"token_ids": "token", "action_mask": "token", **super()._levels()}

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.group_ids) != len(self.row_ids):
            raise ValueError(f"{len(self.row_ids)} rows but {len(self.group_ids)} group ids")
        if not self.unit_ids:
            object.__setattr__(self, "unit_ids", self.row_ids)
        if len(self.unit_ids) != len(self.row_ids):
            raise ValueError(f"{len(self.row_ids)} rows but {len(self.unit_ids)} unit ids")
        if not self.pictures:
            object.__setattr__(self, "pictures", ((),) * len(self.row_ids))
        if len(self.pictures) != len(self.row_ids):
            raise ValueError(f"{len(self.row_ids)} rows but pictures of {len(self.pictures)}")

    @property
    def has_pictures(self) -> bool:
        """Return whether any row has one."""
        return any(self.pictures)

    def _row_values(self, rows: Sequence[int]) -> dict[str, tuple[Any, ...]]:
        names = {"group_ids": self.group_ids, "unit_ids": self.unit_ids, "pictures": self.pictures}
        return {**super()._row_values(rows), **{name: tuple(values[i] for i in rows) for name, values in names.items()}}

    def units(self) -> list[list[int]]:
        """Return the rows of each unit, ascending, in the order of the units' first rows."""
        rows: dict[str, list[int]] = {}
        for row, unit in enumerate(self.unit_ids):
            rows.setdefault(unit, []).append(row)
        return list(rows.values())

    def with_row_units(self) -> TokenBatch:
        """Return the same rows, each a unit by itself: for passes and losses that take rows one by one."""
        return replace(self, unit_ids=self.row_ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenOutputs(Ragged):
    """What a model says about the tokens of a batch, aligned like the columns of `TokenBatch`."""

    logprobs: Tensor | None = token_column()
    """float32 [N], under the training temperature."""
    student_logprobs: Tensor | None = token_column()
    """float32 [N, K], likewise, of the batch's `teacher_ids`."""
    top_logprobs: Tensor | None = token_column()
    """float32 [N, K], of the likeliest tokens, falling."""
    top_ids: Tensor | None = token_column()
    """int64 [N, K], these tokens; of equally likely ones the lower ids come, and come first."""
    entropy: Tensor | None = token_column()
    """float32 [N], entropy of the distribution token t was drawn from."""
    correct: Tensor | None = token_column()
    """float32 [N], 1 where no token is likelier than token t, else 0."""
    logit_gradients: Tensor | None = token_column()
    """float32 [N], squared length of the gradient of log p(token t) in the logits: 1 - 2 p + the sum of all p^2."""
    values: Tensor | None = token_column()


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sizes of the whole mini-batch over all ranks: they make the loss the same for every layout."""

    tokens: float
    """Tokens with `loss_mask` in rows of non-zero weight."""
    sequences: float
    """Rows of non-zero weight with at least one such token."""
    units: float
    """Units with at least one such row."""
    computed_tokens: float | None = None
    """Of `tokens`, those in rows that are computed; None: all. For means in metrics only."""
