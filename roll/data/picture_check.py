"""What can be said about the pictures of data before a run: how many, how large, what they cost in tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from roll.types.picture import Picture
from roll.utils.picture_tokens import PictureTokens

_LISTED = 3
_FAR = 4
"""Times the median number of tokens from which a picture is an outlier."""


class PictureFindings:
    """Takes in the pictures of rows; each counts as often as it is shown.

    Args:
        tokens: counts them; None: tokens stay unknown.
    """

    def __init__(self, tokens: PictureTokens | None) -> None:
        """Start with none."""
        self._tokens = tokens
        self._rows = self._bytes = 0
        self._digests: set[str] = set()
        self._sides, self._counts = array("Q"), array("Q")
        self._largest: list[tuple[int, str]] = []

    def add(self, pictures: Sequence[Picture], where: str) -> None:
        """Take in the pictures of a row."""
        self._rows += bool(pictures)
        for number, picture in enumerate(pictures):
            size = picture.width, picture.height
            self._sides.extend(size)
            if picture.digest not in self._digests:
                self._digests.add(picture.digest)
                self._bytes += len(picture.data)
            count = self._tokens.tokens(picture) if self._tokens is not None else 0
            self._counts.append(count)
            entry = (count or size[0] * size[1], f"{where}, picture {number + 1}: {size[0]} x {size[1]}")
            self._largest = sorted({*self._largest, entry}, key=lambda one: (-one[0], one[1]))[:_LISTED]

    @property
    def is_empty(self) -> bool:
        """Return whether no row has any."""
        return not self._rows

    def lines(self) -> Iterator[str]:
        """Yield sentences about them."""
        if self.is_empty:
            yield "pictures: none"
            return
        sides = np.frombuffer(self._sides, dtype=np.uint64).reshape(-1, 2)
        low, half, high = np.quantile(sides.astype(np.float64), (0, 0.5, 1), axis=0).round().astype(int).tolist()
        yield (
            f"pictures: {len(sides):,} in {self._rows:,} rows, {len(self._digests):,} different ones of "
            f"{self._bytes / 2**20:,.1f} MiB; width {low[0]} to {high[0]} (half up to {half[0]}), height {low[1]} to "
            f"{high[1]} (half up to {half[1]})"
        )
        if self._tokens is None:
            return
        counts = np.frombuffer(self._counts, dtype=np.uint64).astype(np.int64)
        half_count, nearly, most = np.quantile(counts, (0.5, 0.99, 1), method="inverted_cdf").tolist()
        yield f"tokens of a picture: half up to {half_count}, 99 % {nearly}, all {most}"
        far = int((counts > _FAR * half_count).sum())
        if far:
            listed = "; ".join(f"{where} pixels, {count} tokens" for count, where in self._largest)
            yield f"outliers: {far:,} pictures take more than {_FAR} times as many tokens as half of them: {listed}"
