"""A picture as it goes through a run: read once, by one rule, and never changed again."""

from __future__ import annotations

import base64
import hashlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Picture:
    """An RGB picture in a file format. Two are equal if their bytes are.

    Whoever reads pictures has turned them into RGB before: nothing later decides about alpha, palettes or rotation.
    Rows and turns that show the same picture share the object, which pickle then writes once.
    """

    data: bytes = field(repr=False, compare=False)
    """A PNG or JPEG file, mode RGB."""
    digest: str
    """sha256 of `data`, in hexadecimal."""
    width: int = field(compare=False)
    """Pixels."""
    height: int = field(compare=False)
    """Pixels."""

    @classmethod
    def of(cls, image: Image.Image) -> Picture:
        """Return an RGB image as a PNG."""
        assert image.mode == "RGB", f"a picture is RGB, not {image.mode}"
        file = io.BytesIO()
        image.save(file, format="PNG")
        data = file.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest(), *image.size)

    def data_url(self) -> str:
        """Return the file as a data URL."""
        kind = "png" if self.data.startswith(b"\x89PNG") else "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(self.data).decode('ascii')}"

    def rgb(self) -> Image.Image:
        """Return the decoded image, mode RGB."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as image:
            image.load()
            assert image.mode == "RGB", f"picture {self.digest[:12]} is {image.mode}: its reader must make it RGB"
            return image
