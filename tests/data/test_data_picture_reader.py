"""Pictures of all forms become RGB files by one rule; what can't be used gets a sentence, whatever it is."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
from bad_pictures import BAD, FORMATS, picture_file, png_claiming
from PIL import Image

from roll.data.picture_reader import PictureError, PictureReader, picture_of_file
from roll.types.picture import Picture

PIXELS = np.random.default_rng(3).integers(0, 256, (6, 4, 3), dtype=np.uint8)
GIF = picture_file("GIF", save_all=True, append_images=[Image.new("RGB", (40, 30))])


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(picture: Picture) -> Any:
    return np.asarray(picture.rgb())


def test_every_form_of_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    data = saved(Image.fromarray(PIXELS))
    (tmp_path / "a b.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    reader = PictureReader(tmp_path)
    forms = [data, bytearray(data), {"bytes": data, "path": None}, {"bytes": None, "path": "a b.png"}, "a b.png", url,
             {"image": "a b.png"}, {"url": url}, str(tmp_path / "a b.png"), f"file://{tmp_path}/a%20b.png",
             tmp_path / "a b.png", {"image": data}]  # fmt: skip
    for form in forms:
        picture = reader.read(form)
        assert picture is reader.read(data)  # rows that show it share it
        assert (picture.data, picture.digest) == (data, hashlib.sha256(data).hexdigest())
        assert (picture.width, picture.height) == (4, 6)
    for form in (Image.fromarray(PIXELS), PIXELS, {"image": Image.fromarray(PIXELS)}):
        assert (pixels(reader.read(form)) == PIXELS).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_read_and_only_png_and_jpeg_kept_as_they_are(kind: str) -> None:
    data = picture_file(kind)
    picture = picture_of_file(data)
    assert (picture.data == data) == (kind in ("PNG", "JPEG"))
    assert (pixels(picture) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all()


def test_what_is_transparent_lies_on_white() -> None:
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[:, 0], rgba[:, 1], rgba[:, 2] = (10, 20, 30, 255), (10, 20, 30, 128), (10, 20, 30, 0)
    # 128 of 255 of the colour on white: 10 * 0.502 + 255 * 0.498 = 132, and so on.
    for form in (
        rgba,
        Image.fromarray(rgba),
        saved(Image.fromarray(rgba)),
        saved(Image.fromarray(rgba), "WEBP", lossless=True, exact=True),
    ):
        assert pixels(PictureReader().read(form))[1].tolist() == [[10, 20, 30], [132, 137, 142], [255, 255, 255]]
    palette = Image.new("P", (2, 2))
    palette.putpalette([9, 9, 9] * 256)
    colour = Image.new("RGB", (2, 2), (1, 2, 3))
    grey = Image.new("LA", (2, 2), (7, 0))
    for data in (saved(palette, transparency=0), saved(colour, transparency=(1, 2, 3)), saved(grey)):
        assert pixels(picture_of_file(data))[0, 0].tolist() == [255, 255, 255]
    assert pixels(picture_of_file(saved(palette)))[0, 0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_as_exif_says(orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(np.repeat(np.repeat(PIXELS, 8, 0), 8, 1))
    exif = image.getexif()
    exif[0x0112] = orientation
    data = saved(image, "JPEG", exif=exif.tobytes())
    picture = picture_of_file(data)
    assert (picture.width, picture.height) == ((48, 32) if orientation > 4 else (32, 48))
    assert (pixels(picture) == np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))).all()
    assert (picture.data == data) == (orientation == 1)
    assert (pixels(PictureReader().read(Image.open(io.BytesIO(data)))) == pixels(picture)).all()


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1), (6, 4, 3), (6, 4, 4)])
def test_arrays_of_bytes_are_pictures(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 255, np.uint8)
    array[..., :1] = 7
    got = pixels(PictureReader().read(array))
    grey = len(shape) == 2 or shape[2] == 1
    expected = [7, 7, 7] if grey else [7, 255, 255]
    assert got.shape == (6, 4, 3)
    assert got[0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (picture_file("PNG")[:200], r"damaged or cut short \(.*save it again"),
        (picture_file("JPEG")[:500], "damaged or cut short"),
        (b"", "it is empty"),
        (b"hello, this is no picture", "isn't a picture in any of the formats PNG"),
        (png_claiming(9000, 9000), "9000 x 9000 pixels by its header, and at most 64 x"),
        (png_claiming(60_000, 60_000), "its header claims more than the 64 x"),
        (picture_file("PNG", size=(402, 2)), "402 x 2 pixels: one side is more than 200 times"),
        (saved(Image.new("I;16", (4, 4))), "16 bits a channel, expected 8 bits"),
        (Image.new("F", (4, 4)), "the mode F, expected 8 bits"),
        (np.zeros((4, 4)), r"float64 is no picture, since nothing says which number is white; give \(array \* 255\)"),
        (np.zeros((3, 8, 8), np.uint8), r"channels first; give array.transpose\(1, 2, 0\)"),
        (np.zeros((8, 8, 2), np.uint8), r"shape \(8, 8, 2\) is no picture"),
        ("https://host/a.png", "on a network, and no picture is fetched"),
        ("nothing.png", r"'nothing.png' can't be read: No such file .*looked for '/.*nothing.png'"),
        ("/dev/zero", "isn't a file"),
        ("data:video/mp4;base64,AAAA", "a data URL of video/mp4 is no picture"),
        ("data:image/png;base64,@@@@@", "base64 is broken"),
        ({"bytes": "iVBOR"}, "its bytes are a text; write base64 as 'data:image/png;base64,...'"),
        ({"image": {"image": "a"}}, "a dict is no picture"),
        (GIF, "it has 2 frames; save the one that is meant"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_with_the_fix(value: Any, message: str) -> None:
    with pytest.raises(PictureError, match=message):
        PictureReader("/").read(value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PictureError, match="isn't a file"):
        PictureReader(tmp_path).read("pipe")


def test_16_bit_colour_is_refused_and_not_cut_to_8_bits() -> None:
    import struct
    import zlib

    rows = b"".join(b"\0" + bytes(range(24)) for _ in range(4))  # 4 x 4 pixels of 3 channels of 2 bytes

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert Image.open(io.BytesIO(data)).mode == "RGB"  # nothing in it tells
    with pytest.raises(PictureError, match="16 bits a channel"):
        picture_of_file(data)


def test_a_jpeg_that_is_too_short_for_its_size_is_refused() -> None:
    data = bytearray(picture_file("JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = (2000).to_bytes(2, "big") * 2
    Image.open(io.BytesIO(data)).load()  # its decoder fills it with grey
    with pytest.raises(PictureError, match="claims 2000 x 2000 pixels, more than its .* bytes can hold"):
        picture_of_file(bytes(data))
    # The smallest file of such a picture: white, with codes of one bit.
    assert picture_of_file(saved(Image.new("L", (2000, 2000), 255), "JPEG", quality=1, optimize=True)).width == 2000


def test_bad_pictures_get_a_sentence_each_in_bounded_memory() -> None:
    """The thousand of them: docs/testing.md."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}"}
    command = [sys.executable, "-W", "ignore", str(tests / "bad_pictures.py"), "75"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    refused = {name for name in BAD if found["outcomes"].get(f"{name}: refused") == 5}
    assert refused == set(BAD), found
    assert sum(found["outcomes"].values()) == 75
    assert found["grown_mib"] < 1200
    assert found["slowest_s"] < 20
