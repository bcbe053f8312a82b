"""Pictures of environments as files: PNG, and APNG for what moves. Needs nothing but numpy and zlib."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_bytes(pixels: Pixels) -> bytes:
    """Return a PNG of uint8 [height, width, 3]."""
    _check(pixels)
    return SIGNATURE + _header(pixels) + _chunk(b"IDAT", _compressed(pixels)) + _chunk(b"IEND", b"")


def apng_bytes(frames: Sequence[Pixels], seconds_per_frame: float = 0.5) -> bytes:
    """Return an animated PNG that loops for ever; programs that know only PNG show the first frame."""
    if not frames:
        raise ValueError("no frames; expected at least one picture")
    for frame in frames:
        _check(frame)
        if frame.shape != frames[0].shape:
            raise ValueError(f"got frames of {frames[0].shape} and {frame.shape}, expected all of one size")
    height, width, _ = frames[0].shape
    delay = max(round(seconds_per_frame * 1000), 1)
    chunks = [SIGNATURE, _header(frames[0]), _chunk(b"acTL", struct.pack(">II", len(frames), 0))]
    sequence = 0
    for number, frame in enumerate(frames):
        control = struct.pack(">IIIIIHHBB", sequence, width, height, 0, 0, delay, 1000, 0, 0)
        chunks.append(_chunk(b"fcTL", control))
        sequence += 1
        if number == 0:
            chunks.append(_chunk(b"IDAT", _compressed(frame)))
        else:
            chunks.append(_chunk(b"fdAT", struct.pack(">I", sequence) + _compressed(frame)))
            sequence += 1
    return b"".join([*chunks, _chunk(b"IEND", b"")])


def _check(pixels: Pixels) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"got {pixels.dtype} {list(pixels.shape)}, expected uint8 [height, width, 3]")


def _header(pixels: Pixels) -> bytes:
    height, width, _ = pixels.shape
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))  # 8 bits, RGB


def _compressed(pixels: Pixels) -> bytes:
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # byte 0 of a row: it is not filtered
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    return zlib.compress(rows.tobytes(), level=6)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
