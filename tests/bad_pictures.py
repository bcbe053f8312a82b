"""Pictures that can't be used, made on the spot and harmless: cut short, with damaged headers, claiming enormous sizes,
in odd modes, and values that are no pictures.

    python tests/bad_pictures.py COUNT

reads so many and prints what became of them, the seconds of the slowest and the memory of the process, as JSON.
"""

from __future__ import annotations

import base64
import io
import json
import random
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def picture_file(kind: str, *, size: tuple[int, int] = (40, 30), seed: int = 0, **options: Any) -> bytes:
    """Return a picture of noise as a file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header is whole and says that it has this size."""
    data = bytearray(picture_file("PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def _claims(draw: random.Random) -> bytes:
    width = height = draw.choice([8_000, 9_000, 16_000, 60_000, 2**31 - 1])
    kind = draw.choice(FORMATS[:5])
    if kind == "GIF":  # whose screen may be larger than its pictures, within the limit
        width, height = max(width, 9_000), max(height, 9_000)
    if kind == "PNG":
        return png_claiming(width, height)
    data = bytearray(picture_file(kind, seed=draw.randrange(100), **({"lossless": True} if kind == "WEBP" else {})))
    if kind == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", min(height, 65_500), min(width, 65_500))
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", min(width, 65_535), min(height, 65_535))
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    else:  # the two fields of 14 bits of WebP's lossless form
        bits = struct.unpack("<I", data[21:25])[0]
        data[21:25] = struct.pack("<I", (bits & ~0xFFFFFFF) | 16_382 | (16_382 << 14))
    return bytes(data)


def _text_bomb(draw: random.Random) -> bytes:
    """Return a PNG with a text that unpacks to many megabytes."""
    body = b"Comment\0\0" + zlib.compress(b"\0" * (8 << 20) * draw.choice([1, 4]), 9)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    data = picture_file("PNG")
    return data[:33] + chunk + data[33:]


def _deep(draw: random.Random) -> Any:
    mode, kind = draw.choice([("I;16", "PNG"), ("I;16", "TIFF"), ("F", "TIFF"), ("I", "TIFF")])
    file = io.BytesIO()
    Image.new(mode, (draw.randrange(1, 20), 9)).save(file, kind)
    return file.getvalue()


def _frames(draw: random.Random) -> bytes:
    kind, frames = (
        draw.choice(["GIF", "WEBP", "PNG", "TIFF"]),
        [Image.new("RGB", (8, 8), (k * 60, 0, 9)) for k in range(4)],
    )
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def _cut(draw: random.Random) -> bytes:
    kind = draw.choice(FORMATS)
    data = picture_file(kind, seed=draw.randrange(100))
    return data[: draw.randrange(0, len(data) * 2 // 3)]


def _array(draw: random.Random) -> Any:
    shapes = [(8, 8), (8, 8, 3), (3, 8, 8), (8, 8, 2), (8,), (2, 8, 8, 3), (0, 8, 3), (8, 0, 3)]
    kind = draw.choice(["float32", "float64", "int64", "bool", "uint16"])
    shape = draw.choice(shapes)
    return np.zeros(shape, "uint8" if shape in shapes[2:] and draw.random() < 0.5 else kind)


def _name(draw: random.Random) -> Any:
    body = base64.b64encode(b"not a picture" * draw.randrange(1, 50)).decode()
    return draw.choice([
        "https://host/x.png", "s3://bucket/x.png", "nothing.png", "../nothing/x.jpg", "/dev/zero", "/proc/self/mem",
        "", "a\0b", "x" * 5000, body, f"data:image/png;base64,{body}", "data:image/png;base64,@@", "data:",
        "data:video/mp4;base64,AA", "data:image/png,abc", "file:///nothing", "~nobody/x.png", "\udcff.png", {},
        {"bytes": None, "path": None}, {"bytes": "text"}, {"image": {"image": "x"}}, {"url": "http://host"}, 3, 1.5,
        None, True, [], object(),
    ])  # fmt: skip


def _thin(draw: random.Random) -> bytes:
    sides = (draw.randrange(500, 2000), draw.choice([1, 2]))
    return picture_file(draw.choice(["PNG", "BMP"]), size=sides if draw.random() < 0.5 else sides[::-1])


BAD: dict[str, Callable[[random.Random], Any]] = {
    "cut short": _cut, "an enormous claim": _claims, "too deep": _deep, "several frames": _frames, "thin": _thin,
    "a text bomb": _text_bomb, "an array": _array, "a name": _name,
    "noise": lambda draw: draw.randbytes(draw.randrange(2000)),
    "another kind": lambda draw: draw.choice([b"%PDF-1.7", b"PK\3\4", b"<svg/>", b"%!PS-Adobe-3.0 EPSF"]) * 50,
}  # fmt: skip
"""Name -> a value that has to be refused."""


def damaged(draw: random.Random) -> bytes:
    """Return a picture with some changed bytes, most of them in its header: it may be readable."""
    data = bytearray(picture_file(draw.choice(FORMATS), seed=draw.randrange(100)))
    for _ in range(draw.randrange(1, 12)):
        data[draw.randrange(min(len(data), 200) if draw.random() < 0.8 else len(data))] = draw.randrange(256)
    return bytes(data)


def bad_pictures(count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and values: two thirds have to be refused, a third may be."""
    draw = random.Random(seed)
    names = list(BAD)
    for number in range(count):
        if number % 3 == 2:
            yield "damaged", damaged(draw)
        else:
            name = names[(number - number // 3) % len(names)]
            yield name, BAD[name](draw)


def _main(count: int) -> None:
    from roll.data.picture_reader import PictureError, PictureReader

    reader, outcomes, slowest = PictureReader("/nothing"), dict[str, int](), 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, value in bad_pictures(count):
        start, sentence = time.process_time(), ""
        try:
            picture = reader.read(value)
        except PictureError as error:
            sentence = str(error)
        else:
            assert picture.rgb().size == (picture.width, picture.height)
        assert not sentence or len(sentence) > 20, sentence
        outcome = f"{name}: {'refused' if sentence else 'read'}"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        slowest = max(slowest, time.process_time() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    found = {"outcomes": outcomes, "slowest_s": round(slowest, 3), "grown_mib": grown >> 10}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    _main(int(sys.argv[1]))
