"""Pictures of data sets, whatever they are stored as, read by one rule.

A picture becomes RGB with 8 bits a channel: it is turned as its EXIF data say, and what is transparent lies on white.
Size and shape are looked at before anything is decoded; then the whole picture is decoded once, so that a damaged one
is found here and not in the middle of a run. What is kept is a file: the one that was read, where it is RGB already.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from roll.types.picture import Picture
from roll.utils.picture_tokens import INSTALL

MAX_BYTES = 64 << 20
"""Of a picture's file."""
MAX_PIXELS = 64 << 20
"""Of a picture: 8192 x 8192. Decoded it takes three bytes a pixel."""
MAX_RATIO = 200
"""Of the longer side to the shorter one: beyond it, image processors refuse."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""That are tried: others of Pillow's run programs (EPS), or hardly anybody has them."""
_KEPT_FORMATS = ("PNG", "JPEG", "MPO")  # MPO: a JPEG file of a phone, with a depth map or the like behind the picture
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
"""Of 8 bits a channel or less."""
_ORIENTATION = 0x0112
_UPRIGHT = (None, 0, 1)
_SHOWN = 60
"""Characters of a path or link in a message."""


class PictureError(ValueError):
    """Something that isn't a picture which can be used; the message says why and what to do."""


class PictureReader:
    """Reads pictures as rows hold them. Rows that show the same picture share it."""

    def __init__(self, folder: str | os.PathLike[str] = ".", *, shares: bool = True) -> None:
        """Start with none read; `folder` is where relative paths begin. `shares`: all pictures stay in memory, each
        once; else none does."""
        self._folder, self._shares = Path(folder), shares
        self._by_digest: dict[str, Picture] = {}
        self._by_file: dict[tuple[str, int, int], Picture] = {}

    def read(self, value: Any) -> Picture:
        """Return the picture that a value of a row is, or names; raises `PictureError`.

        A value is {"bytes": ...}, {"path": ...}, {"image": ...} or {"url": ...}; a path, or a data URL; the bytes of a
        file; a PIL image; a numpy array, uint8 [height, width] or [height, width, 1, 3 or 4].
        """
        return self._shared(self._read(value))

    def _read(self, value: Any, *, inside: bool = False) -> Picture:
        if isinstance(value, Mapping) and not inside:
            return self._of_mapping(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return picture_of_file(bytes(value))
        if isinstance(value, (str, Path)):
            return self._of_text(str(value))
        library = type(value).__module__.partition(".")[0]
        if library == "numpy":
            return picture_of_array(value)
        if library == "PIL" or hasattr(value, "getexif"):
            return picture_of_image(value)
        raise PictureError(
            f"a {type(value).__name__} is no picture; expected a path, a data URL, {{'bytes': ...}}, {{'path': ...}}, "
            "a PIL image or a uint8 array"
        )

    def _of_mapping(self, value: Mapping[str, Any]) -> Picture:
        # datasets' form has bytes and path, where either may be null; verl's has image, and OpenAI's url.
        for key in ("bytes", "image", "path", "url"):
            if value.get(key) is not None:
                if key == "bytes" and isinstance(value[key], str):
                    raise PictureError("its bytes are a text; write base64 as 'data:image/png;base64,...'")
                return self._read(value[key], inside=True)
        raise PictureError(f"the keys {sorted(map(str, value))} hold no picture; expected bytes, path, image or url")

    def _of_text(self, text: str) -> Picture:
        if text[:5].lower() == "data:":
            return picture_of_file(_data_url(text))
        scheme = text[:8].partition("://")
        if scheme[1] and scheme[0].lower() != "file":
            raise PictureError(f"{text:.{_SHOWN}} is on a network, and no picture is fetched; save it as a file beside")
        path = Path(unquote(urlsplit(text).path) if scheme[1] else text)
        try:
            path = self._folder / path.expanduser()
            state = path.stat()
        except (OSError, ValueError, RuntimeError) as error:
            raise PictureError(_no_file(text, path, error)) from None
        if not stat.S_ISREG(state.st_mode):
            raise PictureError(f"{str(path)!r:.{_SHOWN}} isn't a file")
        _check_bytes(state.st_size)
        key = (str(path), state.st_size, state.st_mtime_ns)
        if key in self._by_file:
            return self._by_file[key]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise PictureError(_no_file(text, path, error)) from None
        picture = self._shared(picture_of_file(data))
        if self._shares:
            self._by_file[key] = picture
        return picture

    def _shared(self, picture: Picture) -> Picture:
        return self._by_digest.setdefault(picture.digest, picture) if self._shares else picture


def picture_of_file(data: bytes) -> Picture:
    """Return the picture of a file's content; raises `PictureError`."""
    _check_bytes(len(data))
    opened = _opener()
    return _attributed(lambda: _of_open_image(opened(io.BytesIO(data), formats=_FORMATS), data))


def picture_of_image(image: Any) -> Picture:
    """Return a PIL image; raises `PictureError`."""
    _opener()
    return _attributed(lambda: _of_open_image(image, None))


def picture_of_array(array: Any) -> Picture:
    """Return an array, uint8 [height, width] or [height, width, channels]: grey, RGB, or RGB and alpha.

    Raises `PictureError`.
    """
    shape = tuple(getattr(array, "shape", ()))
    if str(getattr(array, "dtype", "")) != "uint8":
        kind = getattr(array, "dtype", type(array).__name__)
        fix = "(array * 255).round().astype('uint8') if it goes from 0 to 1" if "float" in str(kind) else "uint8"
        raise PictureError(f"an array of {kind} is no picture, since nothing says which number is white; give {fix}")
    if len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
        raise PictureError(f"an array of shape {shape} has its channels first; give array.transpose(1, 2, 0)")
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        raise PictureError(
            f"an array of shape {shape} is no picture; expected [height, width] or [height, width, 1, 3 or 4]"
        )
    _check_size(shape[1], shape[0])
    _opener()
    from PIL import Image

    return _attributed(
        lambda: Picture.of(_rgb(Image.fromarray(array[:, :, 0] if len(shape) == 3 and shape[2] == 1 else array)))
    )


def _of_open_image(image: Any, data: bytes | None) -> Picture:
    """Return an image that Pillow has opened, and may not have decoded; `data` is its file."""
    _check_size(*image.size)
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise PictureError(f"it has {getattr(image, 'n_frames', 'several')} frames; save the one that is meant")
    deep = any(";16" in str(tile) for tile in getattr(image, "tile", ()))
    if deep or image.mode not in _MODES:
        what = "16 bits a channel" if deep or image.mode.startswith("I;16") else f"the mode {image.mode}"
        raise PictureError(f"it has {what}, expected 8 bits a channel: grey, RGB, or either with alpha; convert it")
    if data is not None and image.format == "JPEG" and not image.info.get("progressive"):
        _check_filled(len(data), *image.size)
    image.load()
    orientation = image.getexif().get(_ORIENTATION)
    if data is not None and image.format in _KEPT_FORMATS and _is_plain(image) and orientation in _UPRIGHT:
        return Picture(data, hashlib.sha256(data).hexdigest(), *image.size)
    if orientation not in _UPRIGHT:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    return Picture.of(_rgb(image))


def _is_plain(image: Any) -> bool:
    return image.mode == "RGB" and "transparency" not in image.info


def _rgb(image: Any) -> Any:
    """Return an image as RGB, what is transparent on white."""
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    from PIL import Image

    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def _check_bytes(count: int) -> None:
    if not count:
        raise PictureError("it is empty: a file of 0 bytes")
    if count > MAX_BYTES:
        raise PictureError(f"it has {count >> 20} MiB, and at most {MAX_BYTES >> 20} are read; save it smaller")


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise PictureError(f"it has {width} x {height} pixels, and so nothing to show")
    if width * height > MAX_PIXELS:
        raise PictureError(
            f"it has {width} x {height} pixels by its header, and at most {MAX_PIXELS >> 20} x 2^20 are decoded; scale "
            "it down"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise PictureError(
            f"it has {width} x {height} pixels: one side is more than {MAX_RATIO} times the other, which image "
            "processors refuse; cut it, or pad it"
        )


def _check_filled(count: int, width: int, height: int) -> None:
    """Refuse a baseline JPEG that is too short for its size: its decoder fills in grey, without a word. Each block of
    8 x 8 pixels takes two codes, and each of those a bit."""
    if count < width * height // 256:
        raise PictureError(
            f"its header claims {width} x {height} pixels, more than its {count} bytes can hold; save it again"
        )


def _data_url(text: str) -> bytes:
    head, comma, body = text.partition(",")
    kind, *options = head[5:].lower().split(";")
    if not comma or "base64" not in options:
        raise PictureError(f"{text:.{_SHOWN}} is no data URL of base64; expected 'data:image/png;base64,...'")
    if kind and not kind.startswith("image/"):
        raise PictureError(f"a data URL of {kind:.{_SHOWN}} is no picture; expected image/png, image/jpeg, ...")
    _check_bytes(len(body) * 3 // 4)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"a data URL whose base64 is broken: {error}") from None


def _no_file(text: str, path: Path, error: Exception) -> str:
    if len(text) > 1000:
        return f"{text:.{_SHOWN}}... is no path; write base64 as 'data:image/png;base64,...'"
    reason = getattr(error, "strerror", None) or str(error)
    return f"{text!r:.{4 * _SHOWN}} can't be read: {reason} (looked for {os.path.abspath(path)!r:.{8 * _SHOWN}})"


def _opener() -> Callable[..., Any]:
    """Return what opens image files; raises `PictureError` without Pillow."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PictureError(f"pictures are read by Pillow, which isn't installed: {INSTALL}") from error
    return Image.open


def _attributed(make: Callable[[], Picture]) -> Picture:
    """Return what `make` gives; whatever Pillow raises about a file becomes a `PictureError`."""
    try:
        return make()
    except PictureError:
        raise
    except MemoryError:
        raise PictureError("it doesn't fit the memory when it is decoded; scale it down") from None
    except Exception as error:  # noqa: BLE001 - decoders raise every kind
        from PIL import UnidentifiedImageError

        if isinstance(error, UnidentifiedImageError):
            known = ", ".join(_FORMATS)
            raise PictureError(f"it isn't a picture in any of the formats {known}, or its header is damaged") from None
        if type(error).__name__.startswith("DecompressionBomb"):  # Pillow's own limits, from the header
            raise PictureError(
                f"its header claims more than the {MAX_PIXELS >> 20} x 2^20 pixels that are decoded; scale it down"
            ) from None
        raise PictureError(
            f"it is damaged or cut short ({type(error).__name__}: {error!s:.100}); save it again"
        ) from None
