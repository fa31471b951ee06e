"""Megatron-Core: GPTDataset, alone and in a BlendedDataset, over .bin and .idx files in a mount.

The dataset itself says what it reads: in the copy of the process its readers of .bin files note what they are asked
for, and return nothing of it.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

LIBRARY, VERSIONS = "megatron-core", ("0.16.1",)

_Reads = Callable[[List[int]], List[Tuple[str, int, int]]]


def watch(module: Any, run: Any) -> None:
    run.READING.append(lambda dataset: _known(dataset, module.GPTDataset))


def _known(dataset: Any, gpt: Any) -> Optional[Tuple[str, _Reads]]:
    # of Megatron-LM's cyclic loader
    inner = dataset.dataset if type(dataset).__name__ == "RandomSeedDataset" else dataset
    blended = sys.modules.get("megatron.core.datasets.blended_dataset")
    parts = inner.datasets if blended is not None and type(inner) is blended.BlendedDataset else [inner]
    if not all(type(p) is gpt and type(p.dataset).__name__ == "IndexedDataset" and
               type(p.dataset.bin_reader).__name__ in ("_MMapBinReader", "_FileBinReader") for p in parts):
        return None
    read: List[Tuple[str, int, int]] = []
    noting = False

    def reads(indices: List[int]) -> List[Tuple[str, int, int]]:
        nonlocal noting
        if not noting:
            noting = True
            # without masks, which take long
            gpt.__getitem__ = lambda self, i: self._query_document_sample_shuffle_indices(i) and {}
            for part in parts:
                part.dataset.bin_reader = _Reader(part.dataset.path_prefix + ".bin", read)
        read.clear()
        for index in indices:
            inner[index]
        return read

    return "megatron", reads


class _Reader:
    """Stands in for the reader of a .bin file."""

    def __init__(self, path: str, read: List[Tuple[str, int, int]]) -> None:
        self._path, self._read = path, read

    def read(self, dtype: Any, count: int, offset: int) -> Any:
        numpy = sys.modules["numpy"]
        if count > 0:
            self._read.append((self._path, int(offset), int(count) * numpy.dtype(dtype).itemsize))
        return numpy.zeros(count, dtype)
