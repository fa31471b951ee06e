"""What pyarrow reads of Parquet files. The adapters of libraries that read them with it share this."""

from __future__ import annotations

import concurrent.futures
import sys
from typing import Any, Callable, List, Tuple


class AtOnce(concurrent.futures.Executor):
    """In place of a pool of threads: does what is submitted at once, so always in the same order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def submit(self, do: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        future: Any = concurrent.futures.Future()
        future.set_result(do(*args, **options))
        return future


def look(file: Any, columns: Any = None) -> List[Tuple[int, List[Tuple[int, int]]]]:
    """The number of rows, and the chunks of some columns, of each row group of a file: of its path, or opened."""
    footer = getattr(file, "metadata", None) or sys.modules["pyarrow.parquet"].read_metadata(file)
    return [(group.num_rows, sorted(
        (min(c.dictionary_page_offset or c.data_page_offset, c.data_page_offset), c.total_compressed_size)
        for c in map(group.column, range(group.num_columns))
        if columns is None or any(f"{c.path_in_schema}.".startswith(f"{name}.") for name in columns)))
            for group in map(footer.row_group, range(footer.num_row_groups))]


def joined(groups: List[List[Tuple[int, int]]], options: Any = None) -> List[List[Tuple[int, int]]]:
    """The ranges that pyarrow makes of the column chunks of row groups, and reads with the group in which each
    begins."""
    if options is not None and not options.pre_buffer:
        raise ValueError("what pyarrow reads without pre_buffer is not known")
    cache = sys.modules["pyarrow"].CacheOptions() if options is None else options.cache_options
    ranges: List[List[Tuple[int, int]]] = []
    last: List[Tuple[int, int]] = []  # the ranges of the group that has the last one
    for chunks in groups:
        ranges.append([])
        for begin, size in chunks:
            if last and begin <= sum(last[-1]) + cache.hole_size_limit and (
                    begin + size - last[-1][0] <= cache.range_size_limit):
                last[-1] = (last[-1][0], begin + size - last[-1][0])
            else:
                last = ranges[-1]
                last.append((begin, size))
    return ranges
