"""Shoal's client for trainers.

Feed receives finished batches from `shoal serve`. hint tells a Shoal mount the order in which a
DataLoader is about to read. open reads a mount's files round FUSE. placement and LocalSampler make ranks read what
their own nodes keep. Needs numpy and grpcio; uses torch if it is installed.

    import shoal
    feed = shoal.Feed("unix:///run/shoal/feed.sock", 256,
                      transform="RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw")
    for epoch in range(90):
        feed.set_epoch(epoch)
        for images, labels in feed:
            ...
"""

from ._batch import BadSample, Batch
from ._errors import FeedError, MapError
from ._feed import Feed
from ._hint import hint, predict
from ._open import open
from ._place import LocalSampler, placement
from ._version import __version__

__all__ = ["BadSample", "Batch", "Feed", "FeedError", "LocalSampler", "MapError", "__version__", "hint", "open",
           "placement", "predict"]
