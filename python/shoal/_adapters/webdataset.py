"""WebDataset: the shards that each worker is about to open, whatever shuffles, splits and resamples them."""

from __future__ import annotations

import functools
import sys
from typing import Any
from urllib.parse import urlparse

LIBRARY, VERSIONS = "webdataset", ("1.0.2",)


def watch(module: Any, run: Any) -> None:
    for opener in (module.cache.StreamingOpen, module.cache.FileCache):  # of WebDataset
        _wrap(opener, "__call__", 1, run)
    _wrap(sys.modules["webdataset.tariterators"], "url_opener", 0, run)  # of tarfile_to_samples


def _wrap(owner: Any, name: str, at: int, run: Any) -> None:
    """Has what a function of an owner takes its shards from, its argument at a place, told."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **options: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], run.Shards("webdataset", args[at], _path), *args[at + 1:])
        return inner(*args, **options)

    setattr(owner, name, outer)


def _path(item: Any) -> str:
    url = item["url"] if isinstance(item, dict) else item
    parsed = urlparse(url)
    if parsed.scheme not in ("", "file"):
        raise ValueError(f"{url} is no file")
    return parsed.path if parsed.scheme else str(url)  # as the library opens it: a name may have a # or ?
