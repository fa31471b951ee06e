"""Where the records of an ArrayRecord file lie: as its footer says, which is a chunk of Riegeli's format."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, Tuple

import numpy

_BLOCK = 1 << 16  # bytes from one of Riegeli's block headers to the next


def footer(path: str) -> Tuple[Any, int]:
    """Where the chunks of an ArrayRecord file begin, and the last one ends, and how many records each has."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        end = _varint(_chunk(file, size - _BLOCK, size)[1], 1)[0]
        sizes, values = _chunk(file, end, size - _BLOCK)
    first, at = _varint(sizes, 0)  # what it says of all chunks; of each it says less than 128 bytes
    ends = first + numpy.cumsum(numpy.frombuffer(sizes, "u1")[at:], dtype="i8")
    text = numpy.frombuffer(values + b"\0", "u1")
    offsets, places = _varints(text, numpy.r_[first, ends[:-1]] + 1)
    counts, places = _varints(text, _varints(text, places + 1)[1] + 1)
    if (places != ends).any() or (counts[:-1] != counts[0]).any():
        raise ValueError(f"the footer of {path} is not known")
    return numpy.r_[offsets, end], int(counts[0])


def _chunk(file: Any, begin: int, end: int) -> Tuple[bytes, bytes]:
    """The sizes and the values of a simple chunk of Riegeli's."""
    file.seek(begin)
    text, data = file.read(end - begin), b""
    for block in range(begin // _BLOCK * _BLOCK, end, _BLOCK):
        data += text[max(block + 24 - begin, 0) if block >= begin else 0:block + _BLOCK - begin]
    if data[24:25] != b"r":
        raise ValueError("this chunk of Riegeli's is not known")
    data = data[40:40 + int.from_bytes(data[8:16], "little")]
    size, at = _varint(data, 1)
    return _plain(data[0], data[at:at + size]), _plain(data[0], data[at + size:])


def _plain(codec: int, data: bytes) -> bytes:
    if codec == 0:
        return data
    if codec != ord("z"):
        raise ValueError("of the compressions of ArrayRecord only zstd is known")
    size, at = _varint(data, 0)
    out, zstd = ctypes.create_string_buffer(size), ctypes.CDLL("libzstd.so.1")
    zstd.ZSTD_decompress.restype = ctypes.c_size_t
    if zstd.ZSTD_decompress(out, ctypes.c_size_t(size), data[at:], ctypes.c_size_t(len(data) - at)) != size:
        raise ValueError("zstd failed")
    return out.raw


def _varint(data: bytes, at: int) -> Tuple[int, int]:
    """A number, and where it ends."""
    end = next(i for i in itertools.count(at) if data[i] < 128)
    return sum((byte & 127) << 7 * i for i, byte in enumerate(data[at:end + 1])), end + 1


def _varints(text: Any, places: Any) -> Tuple[Any, Any]:
    """The numbers at some places, and where each ends."""
    numbers, more, shift = numpy.zeros(len(places), "i8"), numpy.ones(len(places), bool), 0
    while more.any():
        bytes_ = text[places].astype("i8")
        numbers += numpy.where(more, bytes_ & 127, 0) << shift
        places, more, shift = places + more, more & (bytes_ > 127), shift + 7
    return numbers, places
