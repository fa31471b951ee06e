"""Megatron-Energon: what each worker is about to read of the tars of a WebDataset, as ranges.

In a copy of the worker the library goes on with its slices, takes samples without reading them, and looks up where they
lie.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from typing import Any, Dict, Iterator, List, Tuple

LIBRARY, VERSIONS = "megatron-energon", ("7.4.1",)


def watch(module: Any, run: Any) -> None:
    inner = module.WebdatasetSampleLoaderDataset._slices_iter

    @functools.wraps(inner)
    def _slices_iter(self: Any) -> Iterator[Any]:
        samples = inner(self)
        ahead: List[Any] = []
        for sample in samples:
            run.guarded(_took, run, module, self, sample, samples, ahead)
            yield sample

    module.WebdatasetSampleLoaderDataset._slices_iter = _slices_iter


def _took(run: Any, module: Any, dataset: Any, sample: Any, samples: Any, ahead: List[Any]) -> None:
    """Has windows written of what comes after a sample. ahead is empty for the first one of an iteration."""
    def rest() -> Any:  # in the copy, which has no open files
        reader.itar_files_cache = {}
        reader.cached_offset_reader = type(reader.cached_offset_reader)(cache_size=64)
        dataset._get_sample = lambda index: module.RawSampleData(__restore_key__=("Webdataset", index), data=({},))
        return samples

    reader = dataset.join_readers[0]
    if not ahead:
        ahead.append(None)  # whatever goes wrong, goes wrong once
        if len(dataset.join_readers) == 1 and type(reader).__name__ == "ShardInfosITarReader":
            ahead[0] = run.ahead_of("energon", dataset, str(reader.tar_filepaths[0]),
                                    functools.partial(_ranges, dataset, reader, {}))
        if ahead[0] is not None:
            ahead[0].write(lambda: itertools.chain([sample], rest())).finish(run.WAIT)
    if ahead[0] is not None:
        ahead[0].took(1, rest)


RUN = 4 << 20  # bytes of a slice that are told at once


def _ranges(dataset: Any, reader: Any, told: Dict[int, Tuple[int, int]], sample: Any) -> List[Tuple[str, int, int]]:
    """What a sample reads, with what follows it in its slice: samples of other slices come in between, and a request
    for each sample would cost more than the wait. Nothing for a sample that has been told so. The first header of a tar
    is read when that is opened."""
    first = sample.__restore_key__[1]
    which = bisect.bisect_right(dataset.slice_offsets, first) - 1
    if told.get(which, (0, 0))[0] < first < told.get(which, (0, 0))[1]:
        return []
    ranges: List[Tuple[str, int, int]] = []
    size = 0
    for index in range(first, dataset.slice_offsets[which + 1]):
        at = reader._get_itar_sample_pointer(index)
        path = str(reader.tar_filepaths[at.tar_file_id])
        if at.tar_file_id not in reader.itar_files_cache:
            reader.itar_files_cache[at.tar_file_id] = None
            ranges.append((path, 0, 512))
        if size and ranges[-1] == (path, at.byte_offset - ranges[-1][2], ranges[-1][2]):
            ranges[-1] = (path, ranges[-1][1], ranges[-1][2] + at.byte_size)
        else:
            ranges.append((path, at.byte_offset, at.byte_size))
        size += at.byte_size
        told[which] = first, index + 1
        if size >= RUN:
            break
    return ranges
