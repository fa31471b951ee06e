"""Hugging Face datasets: the rows of a Dataset whose Arrow files are mapped from a mount, as load_from_disk does.

Arrow says at which addresses a row lies, and the process's maps of which file these are. What has at most 8 bytes a
row, and the offsets of texts and lists, are not told: the copy of the process reads them, for many record batches at
once, and the kernel keeps them.
"""

from __future__ import annotations

import bisect
import ctypes
import sys
from typing import Any, Callable, List, Optional, Tuple

LIBRARY, VERSIONS = "datasets", ("5.0.1", "5.2.0")

_Reads = Callable[[List[int]], List[Tuple[str, int, int]]]
_Spans = Callable[[int, int], List[Tuple[int, int]]]

_PAGE, _WILLNEED = 4096, 3
_TOGETHER, _FEW = 64, 8192  # record batches that are read ahead at once, if there are not many


def watch(module: Any, run: Any) -> None:
    run.READING.append(lambda dataset: _known(dataset, module.Dataset, run))


def _known(dataset: Any, kind: Any, run: Any) -> Optional[Tuple[str, _Reads]]:
    if type(dataset) is not kind or not any(run.in_mount(file["filename"]) for file in dataset.cache_files) or _opens(
            dataset, run):
        return None
    rows: List[_Rows] = []

    def reads(indices: List[int]) -> List[Tuple[str, int, int]]:
        if not rows:  # in the copy
            rows.append(_Rows(dataset))
        return rows[0].reads(indices)

    return "datasets", reads


def _opens(dataset: Any, run: Any) -> bool:
    """Whether samples may be files of their own, of which the rows have the paths."""
    first = dataset._data._batches[0]
    elsewhere = any(map(_elsewhere, first.columns))
    if elsewhere or dataset._format_type != "custom":
        return elsewhere
    texts = [first.column(name)[0].as_py()
             for name, feature in dataset.features.items() if getattr(feature, "dtype", "") in ("string",
                     "large_string")]
    return any(text and text.startswith("/") and run.in_mount(text) for text in texts)  # the transform may open them


def _elsewhere(array: Any) -> bool:
    """Whether values are pictures, or sounds, without their bytes."""
    array = getattr(array, "storage", array)
    kind, inner = array.type, []
    if sys.modules["pyarrow"].types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if "bytes" in names and "path" in names:
            data = array.field("bytes").buffers()[2]
            return data is None or data.size == 0
        inner = list(map(array.field, names))
    elif hasattr(array, "values"):  # of lists
        inner = [array.values]
    return any(map(_elsewhere, inner))


class _Rows:
    def __init__(self, dataset: Any) -> None:
        table, names = dataset._data, dataset._format_columns
        self._order, self._batches, self._firsts = dataset._indices, table._batches, table._offsets.tolist()
        self._columns = table.column_names if names is None or dataset._output_all_columns else names
        # of what is not small, in the record batches that were looked at
        self._layouts: List[Any] = [None] * len(self._batches)
        self._libc = ctypes.CDLL(None)
        with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as maps:
            parts = [line.rstrip("\n").split(None, 5) for line in maps]
        self._maps: List[Tuple[int, int, int, str]] = []  # addresses, and the one after the last; where in which file
        for part in parts:
            if len(part) == 6 and part[5].startswith("/"):
                begin, end = part[0].split("-")
                self._maps.append((int(begin, 16), int(end, 16), int(part[2], 16), part[5]))

    def reads(self, indices: List[int]) -> List[Tuple[str, int, int]]:
        """What a batch reads: column by column, as the library makes a table of its rows."""
        rows = []
        for index in indices:
            row = int(index) if self._order is None else self._order.column(0)[int(index)].as_py()
            row += self._firsts[-1] if row < 0 else 0
            which = bisect.bisect_right(self._firsts, row) - 1
            if self._layouts[which] is None:
                self._look(which)
            rows.append((self._layouts[which], row - self._firsts[which]))
        columns = range(len(self._columns))
        return [place for c in columns for layouts, row in rows if layouts[c] is not None for span in layouts[c](row, 1)
                for place in self._place(*span)]

    def _look(self, which: int) -> None:
        """Finds how a record batch is laid out, and has the kernel read what is small of it, and of those that follow
        it."""
        for i in range(which, min(which + _TOGETHER, len(self._batches)) if len(self._batches) <= _FEW else which + 1):
            if self._layouts[i] is None:
                # Arrow pads to that
                columns, small = [self._batches[i].column(name) for name in self._columns], 8 * self._batches[
                    i].num_rows + 64
                ahead = [b for column in columns for b in column.buffers() if b is not None and b.size <= small]
                self._layouts[i] = [_layout(column, small, ahead) for column in columns]
                for buffer in ahead:
                    begin = buffer.address & -_PAGE
                    self._libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(buffer.address + buffer.size - begin),
                                       _WILLNEED)

    def _place(self, address: int, size: int) -> List[Tuple[str, int, int]]:
        """Where a span of memory is in a file; nothing for one of no file."""
        begin, end, offset, path = self._maps[max(bisect.bisect_right(self._maps, (address, sys.maxsize)) - 1, 0)]
        return [(path, offset + address - begin, size)] if begin <= address < end else []


def _layout(array: Any, small: int, ahead: List[Any]) -> Optional[_Spans]:
    """How the values of an array are laid out: what says the addresses and sizes of some of them, from a first one on;
    None if all is in buffers that are small. Adds the offsets that have to be read for that."""
    types, numpy = sys.modules["pyarrow"].types, sys.modules["numpy"]
    array = getattr(array, "storage", array)  # of an extension
    kind, at, buffers = array.type, array.offset, array.buffers()
    if types.is_struct(kind):
        fields = [f for f in (_layout(array.field(i), small, ahead) for i in range(kind.num_fields)) if f is not None]
        return (lambda first, count: [span for f in fields for span in f(first, count)]) if fields else None
    if types.is_fixed_size_list(kind):
        one, size = _layout(array.values, small, ahead), kind.list_size
        return None if one is None else lambda first, count: one((at + first) * size, count * size)
    if types.is_null(kind) or buffers[1] is None:
        return None
    lists = types.is_list(kind) or types.is_large_list(kind)
    if not lists and not (types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind)
                          or types.is_large_binary(kind)):
        bits, begin = kind.bit_width, buffers[1].address  # an error, if a value has no fixed width
        return (lambda first, count: [(begin + (at + first) * bits // 8, -(-count * bits // 8))]) if buffers[
            1].size > small else None
    ahead.append(buffers[1])
    offsets = numpy.frombuffer(buffers[1], "i8" if str(kind).startswith("large") else "i4")
    inner = _layout(array.values, small, ahead) if lists else None
    data = 0 if lists or buffers[2] is None or buffers[2].size <= small else buffers[2].address

    def spans(first: int, count: int) -> List[Tuple[int, int]]:
        begin, end = int(offsets[at + first]), int(offsets[at + first + count])
        return [] if begin == end else inner(begin, end - begin) if inner else [(data + begin, end - begin)]

    return spans if inner or data else None
