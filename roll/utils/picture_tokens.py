"""How many tokens a picture takes in a row, which ones, and what a model reads in their place.

A prompt has one token where a picture stands (the *place*). A model reads as many as the picture has features, so ids
are *expanded* before they are trained on or sampled from. Counts and pixels come from the image processor of the
model's folder, always in its Pillow version: torchvision's gives other pixels.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from roll.utils.importing import long_imports

if TYPE_CHECKING:
    from torch import Tensor

_CACHE_BYTES = 256 << 20
"""Of pixels that are kept: the rows of a group and the passes of an optimizer step show the same pictures."""

INSTALL = "pip install 'roll-rl[images]'"
"""What brings Pillow."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of a model's folder, those that say how pictures and videos become pixels."""


class SizedPicture(Protocol):
    """What is asked of a picture (`roll.types.picture.Picture`)."""

    @property
    def digest(self) -> str:
        """Return what tells pictures apart."""

    @property
    def width(self) -> int:
        """Return pixels."""

    @property
    def height(self) -> int:
        """Return pixels."""

    def rgb(self) -> Any:
        """Return the decoded picture, mode RGB."""


class PictureTokens:
    """The image processor of one model: tokens and pixels of pictures."""

    def __init__(self, processor: Any, place: int, forbidden: Sequence[int]) -> None:
        self._processor = processor
        self.place = place
        """Id that stands for a picture in a prompt, and for each of its features in an expanded row."""
        self.forbidden = tuple(forbidden)
        """Ids that no answer may hold: the places of pictures and of videos."""
        self._merged = int(processor.merge_size) ** 2
        """Patches of a feature."""
        self._kept: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self._kept_bytes = 0
        self._patches: dict[tuple[int, int], int] = {}
        self._features: dict[tuple[int, int], tuple[int, int]] = {}

    @classmethod
    def load(cls, name: str, *, trust_remote_code: bool = False) -> PictureTokens:
        """Read them from a model's folder or hub id; raises `ValueError` where it has no image processor."""
        with long_imports():
            from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if getattr(config, "image_token_id", None) is None:
            raise ValueError(f"{name} is of type {config.model_type}, which has no token that stands for a picture")
        try:
            processor = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=trust_remote_code)
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(
                f"{name} has no image processor that Pillow can run ({error}); it needs the preprocessor_config.json "
                "that was published with the model, and Pillow: pip install pillow"
            ) from error
        others = (getattr(config, "video_token_id", None),)
        return cls(processor, config.image_token_id, [config.image_token_id, *(i for i in others if i is not None)])

    def patches(self, picture: SizedPicture) -> int:
        """Return the patches that the tower computes; raises `ValueError` for a picture that is too thin."""
        size = picture.height, picture.width
        if size not in self._patches:
            self._patches[size] = int(self._processor.get_number_of_image_patches(*size, {}))
        return self._patches[size]

    def features(self, picture: SizedPicture) -> tuple[int, int]:
        """Return rows and columns of a picture's features."""
        size = picture.height, picture.width
        if size not in self._features:
            side = int(self._processor.merge_size)
            _, rows, columns = self._read(picture)[1][0].tolist()
            self._features[size] = rows // side, columns // side
        return self._features[size]

    def tokens(self, picture: SizedPicture) -> int:
        """Return the tokens of a picture in an expanded row; raises `ValueError` for one that is too thin."""
        return self.patches(picture) // self._merged

    def expand(self, ids: Sequence[int], pictures: Sequence[SizedPicture]) -> list[int]:
        """Return ids with each place repeated for every feature of its picture, in order.

        Raises `ValueError` unless there is one picture for each place.
        """
        places = sum(token == self.place for token in ids)
        if places != len(pictures):
            raise ValueError(f"{places} places for pictures in the tokens, but {len(pictures)} pictures")
        left = iter(pictures)
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (self.tokens(next(left)) if token == self.place else 1)
        return expanded

    def pixels(self, pictures: Sequence[SizedPicture]) -> tuple[Tensor, Tensor]:
        """Return (float32 [patches of all, numbers of a patch], int64 [pictures, 3] frames, rows and columns of
        patches), in the order of the pictures."""
        import torch

        read = [self._read(picture) for picture in pictures]
        return torch.cat([pixels for pixels, _ in read]), torch.cat([grid for _, grid in read])

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return the pixels of the smallest picture there is, all of them 0, as `pixels` does."""
        import torch

        own = self._processor
        side, numbers = own.merge_size, 3 * own.temporal_patch_size * own.patch_size**2
        return torch.zeros(self._merged, numbers), torch.tensor([[1, side, side]])

    def _read(self, picture: SizedPicture) -> tuple[Tensor, Tensor]:
        if picture.digest in self._kept:
            self._kept.move_to_end(picture.digest)
            return self._kept[picture.digest]
        made = self._processor(images=[picture.rgb()], return_tensors="pt")
        read: tuple[Tensor, Tensor] = (made["pixel_values"], made["image_grid_thw"])
        assert len(read[0]) == self.patches(picture), "the image processor counts patches otherwise than it makes them"
        self._kept[picture.digest] = read
        self._kept_bytes += read[0].nbytes
        while self._kept_bytes > _CACHE_BYTES and len(self._kept) > 1:
            _, (pixels, _) = self._kept.popitem(last=False)
            self._kept_bytes -= pixels.nbytes
        return read


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files of a model's processors from its folder, or the hub's cache, as they are."""
    from transformers.utils import cached_file

    for file in PROCESSOR_FILES:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if found is not None and Path(found) != folder / file:
            shutil.copyfile(found, folder / file)
