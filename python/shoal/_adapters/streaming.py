"""MosaicML Streaming: the shards that the processes of a node copy from a mount (remote=). What lies in one (local=) is
left to readahead.

The first process of a node works out all processes' samples, so it tells the node's order, one plan for all.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Iterator, List, Tuple

LIBRARY, VERSIONS = "mosaicml-streaming", ("0.13.0",)


def watch(module: Any, run: Any) -> None:
    inner = module.generate_work

    def generate_work(batching: str, dataset: Any, world: Any, *rest: Any) -> Any:
        work = inner(batching, dataset, world, *rest)
        run.guarded(_tell, run, dataset, work[world.node])
        return work

    module.generate_work = generate_work


def _tell(run: Any, dataset: Any, work: Any) -> None:
    """Tells the order of samples of shape (ranks, workers, batches, samples of a batch), -1 where there is none."""
    first = next(_files(dataset, range(len(dataset.shards))), None)
    ahead = run.ahead_of("streaming", dataset, first[0][0], lambda files: files, False, run.WINDOW) if first else None
    if ahead is not None:
        ahead.write(lambda: _files(dataset, _shards(dataset, work))).finish(run.WAIT)


def _shards(dataset: Any, work: Any) -> List[int]:
    """The shards, in the order in which they are needed: all workers go from batch to batch."""
    numpy = sys.modules["numpy"]
    samples = work.transpose(2, 1, 0, 3).reshape(-1)
    shards = numpy.searchsorted(dataset.sample_offset_per_shard, samples[samples >= 0], "right") - 1
    found, at = numpy.unique(shards, return_index=True)
    return found[at.argsort()].tolist()  # type: ignore[no-any-return]


def _files(dataset: Any, shards: Any) -> Iterator[List[Tuple[str]]]:
    """The files of those shards that are in a file system, and not here yet."""
    for shard in shards:
        stream = dataset.streams[dataset.stream_per_shard[shard]]
        pairs = dataset.shards[shard].file_pairs
        if stream.remote and "://" not in stream.remote:
            files = [(os.path.join(stream.remote, stream.split or "", (zipped or raw).basename),)
                     for raw, zipped in pairs
                     if not os.path.exists(os.path.join(stream.local, stream.split or "", raw.basename))]
            if files:
                yield files
