"""LitData: the chunks that each worker is about to copy from a mount (local:). To tell those that it maps there gained
a trainer no time."""

from __future__ import annotations

import functools
import os
from typing import Any

LIBRARY, VERSIONS = "litdata", ("0.2.76",)


def watch(module: Any, run: Any) -> None:
    begin = module.StreamingDataset.__iter__

    @functools.wraps(begin)
    def __iter__(self: Any) -> Any:
        iterator = begin(self)
        run.guarded(_tell, run, self)
        return iterator

    module.StreamingDataset.__iter__ = __iter__


def _tell(run: Any, dataset: Any) -> None:
    config = dataset.cache._reader.config
    if not config._remote_dir:
        raise ValueError("LitData maps its chunks where they are: give input_dir with local: before it")
    folder = config._remote_dir.replace("local:", "")
    # a resumed one has begun with its chunk
    chunks = dataset.worker_chunks[max(dataset.worker_next_chunk_index - 1, 0):]
    paths = [os.path.join(folder, config._chunks[chunk]["filename"]) for chunk in chunks]
    ahead = run.ahead_of("litdata", dataset, paths[0], lambda path: [(path,)], True,
                         run.WINDOW) if paths and "://" not in folder else None
    if ahead is not None:
        ahead.write(lambda: paths).finish(run.WAIT)
