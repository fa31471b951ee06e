"""The device's part of a transform, as the kernel (finish.ptx) computes it. See Finish."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ._spec import words

WORD = "|device"  # after a transform: the server leaves to the device what it can
_FLIP, _FILLED = 1, 2


class Finish(NamedTuple):
    """The device's part of a transform (docs/gpu.md). Input: rows of uint8 [source_height, source_width, 3]."""

    dtype: str  # of numpy, or bfloat16
    layout: str
    height: int
    width: int
    source_height: int
    source_width: int
    table: Optional[np.ndarray]  # [3, 256], bits of the type; None: bytes stay as they are

    @staticmethod
    def left(opened: Any) -> "Optional[Finish]":
        """The part that a server leaves to the device, from its Opened message; None: nothing."""
        if not opened.transform.endswith(WORD):
            return None
        return Finish.of(opened.transform, next(p.shape for p in opened.planes if p.name == "data"))

    @staticmethod
    def of(transform: str, data_shape: Sequence[int]) -> "Finish":
        """From the canonical form of a transform, and the shape of its rows."""
        dtype, layout, v2 = "uint8", "nchw", False
        norm: Optional[Tuple[Any, Any, str]] = None
        for word in words(transform):
            if word in _DTYPES:
                dtype = _DTYPES[word]
            elif word in ("nchw", "nhwc"):
                layout = word
            elif word == "v2":
                v2 = True
            elif word.startswith("Normalize("):
                arguments = ast.parse(word, mode="eval").body
                assert isinstance(arguments, ast.Call)
                given = [ast.literal_eval(a) for a in arguments.args]
                named = {k.arg: ast.literal_eval(k.value) for k in arguments.keywords}
                mean, std = [*given, *(named[name] for name in ("mean", "std")[len(given):])]
                norm = mean, std, named.get("dtype", "fp32")
        height, width = int(data_shape[1]), int(data_shape[2])
        return Finish(dtype, layout, height, width, height, width, _table(dtype, norm, v2))

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def kernel(self) -> str:
        return f"shoal_finish_u{self.itemsize * 8}_{self.layout}"

    def shape(self, rows: int) -> Tuple[int, int, int, int]:
        return (rows, 3, self.height, self.width) if self.layout == "nchw" else (rows, self.height, self.width, 3)

    def nbytes(self, rows: int) -> int:
        return rows * 3 * self.height * self.width * self.itemsize

    def check(self, params: np.ndarray) -> None:
        """Checks params, uint16 [rows, 4]: the kernel does not check windows."""
        x, y = self.source_width - self.width, self.source_height - self.height
        if params.size and (int(params[:, 0].max()) > x or int(params[:, 1].max()) > y):
            raise ValueError(f"the server sent a crop at ({params[:, 0].max()}, {params[:, 1].max()}), beyond the "
                             f"limit of ({x}, {y})")

    def on_host(self, data: np.ndarray, params: np.ndarray) -> np.ndarray:
        """The kernel's result, computed with numpy; bfloat16 as uint16."""
        self.check(params)
        out = np.zeros((len(data), self.height, self.width, 3), np.uint8 if self.table is None else self.table.dtype)
        for i, (x, y, flags, _) in enumerate(params.tolist()):
            if flags & _FILLED:
                row = data[i, y:y + self.height, x:x + self.width]
                row = row[:, ::-1] if flags & _FLIP else row
                out[i] = row if self.table is None else self.table[np.arange(3), row]
        out = out.transpose(0, 3, 1, 2) if self.layout == "nchw" else out
        return np.ascontiguousarray(out if self.dtype == "bfloat16" else out.view(self.dtype))


_DTYPES = {"uint8": "uint8", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _table(dtype: str, norm: Optional[Tuple[Sequence[float], Sequence[float], str]],
           v2: bool) -> Optional[np.ndarray]:
    """ToTensor and Normalize of each byte value of each channel, as makeTable of gpuingest/transform.go has it: in
    Normalize's type, each step rounded, then rounded to the batch's, half to even."""
    if dtype == "uint8":
        return None
    values = np.tile(np.arange(256, dtype=np.float32), (3, 1))
    values = values * np.float32(1 / 255) if v2 else values / np.float32(255)
    if norm is not None:
        kind = _DTYPES[norm[2]]
        mean, std = (_rounded(np.asarray(given, np.float32)[:, None], kind) for given in norm[:2])
        values = _rounded(_rounded(_rounded(values, kind) - mean, kind) / std, kind)
    return _bits(values, dtype)


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of the nearest numbers of a type."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return bits if dtype == "float32" else ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of a type, as float32."""
    bits = _bits(values, dtype)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values
