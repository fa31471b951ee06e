"""Shoal as a file system of fsspec: shoal:///mnt/train/a/1.jpg is that file of a mount, read as shoal.open does.

Installed packages register it. Otherwise: fsspec.register_implementation("shoal", "shoal._fsspec.ShoalFileSystem").
"""

from __future__ import annotations

from typing import Any, List, Optional, Union

from fsspec.implementations.local import LocalFileSystem

from ._open import File, _Bytes, read_place
from ._open import open as open_file


class ShoalFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local file system, but for files that are opened to be read: these are read round FUSE where they can be."""

    protocol = "shoal"

    @classmethod
    def _strip_protocol(cls, path: Union[str, List[str]], *args: Any, **options: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(p, *args, **options) for p in path]
        path = str(path)
        return LocalFileSystem._strip_protocol(path[len("shoal://"):] if path.startswith("shoal://") else path, *args,
                                               **options)

    def unstrip_protocol(self, name: str) -> str:
        return "shoal://" + str(self._strip_protocol(name))

    def _open(self, path: str, mode: str = "rb", block_size: Optional[int] = None, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            data = read_place(path)
            if data is not None:
                file = File(_Bytes(data, path))
                file.size, file.path = len(data), path  # as those of LocalFileSystem have
                return file
        return super()._open(path, mode, block_size, **options)

    def cat_file(self, path: str, start: Optional[int] = None, end: Optional[int] = None, **options: Any) -> Any:
        with open_file(self._strip_protocol(path)) as f:
            if start is None and end is None:
                return f.read()
            size = f.seek(0, 2)
            start, end = (max(size + n, 0) if n < 0 else n for n in (start or 0, size if end is None else end))
            f.seek(start)
            return f.read(max(end - start, 0))
