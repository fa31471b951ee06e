"""The batch feed's client. See Feed."""

from __future__ import annotations

import json
import operator
import os
import sys
import threading
import time
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Type, Union

from . import _place, _spec, _wire
from ._batch import Batch
from ._errors import FeedError, whole_number
from ._link import HANDOVER, Address, Heap, Link, PinnedHeap, refuse_fork
from ._map import Mapper
from ._slots import log

if TYPE_CHECKING:
    import torch

_LAST_EPOCH = (1 << 31) - 1  # maxEpoch of loader/state.go
_SPARE_SLOTS = 4  # beyond the ready batches: for batches that the trainer works on or still refers to
# the server's counters in stats()
_SERVER_SECONDS = "fetch_seconds", "decode_seconds", "stall_seconds", "credit_seconds"
_RECONNECT_FIRST, _RECONNECT_MOST = 0.1, 2.0  # seconds between attempts


class Feed:
    """Batches from `shoal serve`, one epoch for each iteration. docs/python.md is the manual.

    addr        unix:///path, tcp://host:port or tls://host:port
    batch_size  samples in a batch of this rank; None after load_state_dict: from the state
    device      None or "cpu": host memory. "cuda", "cuda:0": arrays on the device, copied there during the step
                before: tensors if torch has CUDA, else objects with __cuda_array_interface__ and DLPack. Without
                such a device, or with too little memory, batches come in host memory, with a warning
    transform   spec of the decoding, such as "RandomResizedCrop(224)|uint8|nchw", or torchvision's transforms (v1 or v2,
                a Compose; a list of them: views): their spec is logged once. None: raw samples
    dtype       "uint8", "fp16", "bf16" or "fp32", or torch's or numpy's type: as if the transform said so
    layout      "nchw" or "nhwc": as if the transform said so
    order       "uniform", "torch" (DistributedSampler's order), or a spec with keys
    seed        of the augmentation, and of the order where its spec names none
    epochs      how many epochs there will be; without it, the feed reads ahead beyond the last
    world, rank this trainer's place among those that share each global batch
    tail        an incomplete last batch: "drop", "pad" (with rows marked as not valid) or "uneven"
    bad         samples that cannot be decoded: "error", "skip:0.1%" or "skip:N" for each epoch
    session     name of the job: the newest stream of a (session, rank) ends older ones. Default: a
                unique name for each Feed
    credits     batches kept ready in this process
    slots       batches in memory shared with a server on this host, at least credits + 1: the ready
                batches and those that the trainer refers to. None: credits + 4; 0: no shared memory. If the
                server has too little memory, there are fewer, down to credits + 1, or none
    readonly    the trainer never writes to the arrays, so that trainers of one spec share their memory
    pin_memory  page-lock the memory of batches, where torch has CUDA
    map         function(sample, label, id) applied to each sample, in threads ahead of the trainer. Its
                results, stacked if possible, replace data; dictionaries become fields of the batch.
                sample is an array of bytes, or decoded as the transform says
    map_over    "sample", or "batch": map is called with the whole data, label and id of a batch
    threads     number of the threads of map
    as_torch    True: tensors; False: numpy arrays, and torch is not imported; None: tensors if torch
                is installed
    rebatch     allow a state to be resumed with another global batch
    dataset     refuse any other version of the dataset; its first 12 digits, as messages show them, will do
    label       what labels are: "folder", "cls" or "json:KEY" (a file beside the sample), "COLUMN.int64" (of MDS), "none";
                None: the class folders, or where there are none .cls files
    place       "local": in each global batch, samples go to ranks on the nodes that own them in the servers' cluster, as far as
                possible. All ranks of torch.distributed then create their feeds at the same time, and these connect at
                once. Or a placement as shoal.placement returns it. None: ranks take samples in turn
    weight      of this feed's prefetching against the daemon's other streams, 1 to 1000
    token       for servers that require one
    ca, cert, key  PEM files for tls: authorities for the server's certificate (None: the system's), and this
                client's own certificate and key
    server_name   name in the server's certificate; None: the host of addr
    reconnect   seconds to wait for a server that is unreachable; then training goes on exactly where it was.
                0: FeedError at once

    With torch, a Feed is an IterableDataset for DataLoader(feed, batch_size=None). Workers are not needed, since
    the server decodes, and not possible: num_workers must be 0.

    The epoch advances by itself; set_epoch sets it. An iteration that ends early restarts its epoch. state_dict()
    counts only the batches that next() has returned. To resume in another process, call load_state_dict() before
    the first batch.

    A Feed belongs to one thread. It connects at the first use, so it can be created before a fork. Once a process
    has used a feed, feeds do not work in its forks.

    Raises ValueError and TypeError for wrong arguments, FeedError for refusals and failures of the server, MapError
    for failures of map.
    """

    def __new__(cls: Type[Feed], *args: Any, as_torch: Optional[bool] = None, **kwargs: Any) -> "Feed":
        if cls is Feed and as_torch is not False:
            cls = _torch_feed(required=bool(as_torch))
        return super(Feed, cls).__new__(cls)

    def __init__(self, addr: str, batch_size: Optional[int] = None, *, device: Union[str, "torch.device", None] = None,
                 transform: Any = None, dtype: Any = None, layout: Optional[str] = None, order: str = "uniform",
                 seed: int = 0, epochs: Optional[int] = None, world: int = 1, rank: int = 0, tail: str = "drop",
                 bad: str = "error",
                 session: Optional[str] = None, credits: int = 3, slots: Optional[int] = None, readonly: bool = False,
                 pin_memory: bool = False, map: Optional[Callable[[Any, Any, Any], Any]] = None,
                 map_over: str = "sample",
                 threads: int = 2, as_torch: Optional[bool] = None, rebatch: bool = False,
                 dataset: Optional[str] = None,
                 label: Optional[str] = None, place: Any = None, weight: int = 1, token: Optional[str] = None,
                 ca: Optional[str] = None,
                 cert: Optional[str] = None, key: Optional[str] = None, server_name: Optional[str] = None,
                 reconnect: float = 0) -> None:
        if epochs is not None:
            _checked_epoch("epochs", epochs, 1)
        for name, value, least in (("batch_size", batch_size, 1), ("world", world, 1), ("rank", rank, 0),
                                   ("credits", credits, 1), ("weight", weight, 1), ("slots", slots, 0),
                                   ("threads", threads, 1)):
            if value is not None and not least <= whole_number(name, value) < 1 << 32:
                raise ValueError(f"{name}={value}: it must be at least {least}, and below 4294967296")
        if slots and slots <= credits:
            raise ValueError(f"slots={slots} with credits={credits}: ready batches alone fill all slots; it must be "
                             f"at least "
                             f"{credits + 1}, or 0")
        if map is not None and not callable(map):
            raise TypeError(f"map={map!r}: it must be a function of a sample, its label and its id")
        if map_over not in ("sample", "batch"):
            raise ValueError(f"map_over={map_over!r}: it must be \"sample\" or \"batch\"")
        if not reconnect >= 0:
            raise ValueError(f"reconnect={reconnect}: it must be a number of seconds, 0 or more")
        device = None if device is None or str(device) == "cpu" else str(device)
        if device is not None and device.split(":")[0] != "cuda":
            raise ValueError(f"device={device!r}: it must be None, \"cpu\", \"cuda\" or \"cuda:N\"")
        if device is not None and map is not None:
            raise ValueError(f"device={device!r} with map=: the function works on host memory; leave device "
                             f"out and use "
                             f"batch.to({device!r})")
        if not 0 <= whole_number("seed", seed) < 1 << 64:
            raise ValueError(f"seed={seed}: it must be 0 or more, such as seed={abs(seed) % (1 << 64)}")
        if transform is not None and not isinstance(transform, str):
            transform = _spec.of_torchvision(transform)
            log.warning("these transforms are the spec transform=%r", transform)
        self._address = Address(addr, token, ca, cert, key, server_name)
        if isinstance(place, str) and place == "local":
            place = _place.gathered(self._address, world, rank)
        elif place is not None:
            place = _place.checked(place)
        self._args: Dict[str, Any] = dict(
            addr=addr, batch_size=batch_size, device=device, transform=transform, dtype=dtype, layout=layout,
            order=order,
            seed=operator.index(seed), epochs=epochs, world=world, rank=rank, tail=tail, bad=bad,
            session=session or "py-" + uuid.uuid4().hex[:12], credits=credits, slots=slots, readonly=readonly,
            pin_memory=pin_memory, map=map, map_over=map_over, threads=threads, as_torch=as_torch, rebatch=rebatch,
            dataset=dataset, label=label, place=place, weight=weight, token=token, ca=ca, cert=cert, key=key,
            server_name=server_name, reconnect=reconnect)
        self._spec = _spec.with_words(transform, dtype, layout)
        self._epoch = 0
        self._resume: Optional[Dict[str, Any]] = None  # state that the next iteration starts from
        self._state: Union[Dict[str, Any], str, None] = None  # state after the last batch that was returned
        self._at: Union[Dict[str, Any], str, int] = 0  # position of the iteration: a state, or an epoch to begin
        self._link: Optional[Link] = None
        self._iteration: Optional[_Iteration] = None
        self._torch = self._import_torch()
        self._heap: Any = None
        self._stats: Dict[str, Any] = {"batches": 0, "samples": 0, "bytes": 0, "slot_batches": 0, "epochs": 0,
                                       "bad_samples": 0, "reconnects": 0,
                                       "wait_seconds": 0.0}
        self._server: Dict[str, float] = dict.fromkeys(_SERVER_SECONDS, 0.0)

    # The trainer's side.

    def __iter__(self) -> "_Iteration":
        self._refuse_workers()
        caller = sys._getframe(1)
        # Of torch's _IterableDatasetFetcher alone: f_locals keeps what it shows alive for as long as that frame is.
        if "auto_collation" in caller.f_code.co_varnames and caller.f_locals["auto_collation"]:
            raise ValueError("a feed's batches are whole: write DataLoader(feed, batch_size=None)")
        self._linked()
        self._iteration = iteration = _Iteration(self)
        return iteration

    def __len__(self) -> int:
        """Batches in a whole epoch, for this rank."""
        self._refuse_workers()
        link = self._own_link() or self._linked()  # not a new one: the iteration goes on
        return int(link.opened.per_epoch)

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or is next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration. It starts at a loaded state's position if the state is of that epoch,
        else at the beginning."""
        epoch = _checked_epoch("epoch", epoch)
        if epoch == self._epoch:
            return
        self._epoch, self._resume = epoch, None
        if self._state is not None:
            self._state = {**_parsed(self._state), "epoch": epoch, "cursor": 0}
            self._state.pop("bad", None)  # the count belongs to the state's epoch

    def state_dict(self) -> Dict[str, Any]:
        """The trainer's progress, small enough for any checkpoint. It is the same for all ranks that have
        taken the same number of batches."""
        state = self._linked().opened.state if self._state is None else self._state
        self._state = parsed = _parsed(state)
        return dict(parsed)

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Makes the next iteration continue from this state. The feed's own arguments must match it.
        Raises ValueError if it is not a state."""
        if not isinstance(state, dict) or state.get("v") != 1:
            raise ValueError("not a state of a Shoal feed in format 1: "
                             f"{state.get('v') if isinstance(state, dict) else type(state).__name__}")
        for name in ("epoch", "cursor"):
            if type(state.get(name)) is not int:
                raise ValueError(f"not a state of a Shoal feed: its {name} is {state.get(name)!r}, not a number; pass "
                                 f"what state_dict() returned")
        self._resume, self._state, self._epoch = dict(state), dict(state), _checked_epoch("epoch", state["epoch"])
        self._iteration = None

    def stats(self) -> Dict[str, Any]:
        """Counters since the start.

        batches, samples, bytes, epochs, bad_samples, reconnects   returned by next(), and how often the feed
                        reconnected to its server
        slot_batches    batches that came in shared memory; the others came as messages
        wait_seconds    time that next() waited for a batch: the trainer's loss
        fetch_seconds, decode_seconds   of the server on the current stream, summed over its parallel
                        readers and workers: they show which of the two causes waits
        stall_seconds   time in which the server had no batch although this process could take one
        credit_seconds  time in which the server had a batch and this process could take none: it is the slower side
        slots, held_slots   slots that this process may hold, and does hold. 0 slots without shared memory: the
                        server is on another host, or has too little --memory

        The server's counters are fetched from it; while it is unreachable they are the last known ones.
        """
        link = self._link
        if link is not None or self._stats["batches"]:
            try:
                feed = json.loads(self._address.ask("Stats", _wire.STATS, timeout=10).json)["feed"]
                for one in feed.get("ended_list", []) + feed["session_list"]:  # the newest is last
                    if (one.get("session"), one.get("rank")) == (self._args["session"], self._args["rank"]):
                        self._server = {name: one.get(name, 0.0) for name in self._server}
            except (FeedError, OSError, ValueError, KeyError):
                pass  # unreachable, a fork, not a Shoal server, or a certificate that is just being replaced
        pool = link.pool if link is not None else None
        slots = dict(slots=pool.limit, held_slots=len(pool.live)) if pool is not None else dict(slots=0, held_slots=0)
        return {**self._stats, **self._server, **slots}

    def info(self) -> Dict[str, Any]:
        """The dataset that is served: dataset (version), samples, bytes, classes, server (version), and the server's
        node and weight in its cluster."""
        return dict(vars(self._address.ask("Info", _wire.INFO)))

    @property
    def classes(self) -> List[str]:
        """Names of the classes, by label."""
        return list(self.info()["classes"])

    def close(self) -> None:
        """Ends the session. The feed can be used again afterwards. Arrays still in use stay valid."""
        link, self._link, self._iteration = self._link, None, None
        if link is not None:
            link.close()

    def __del__(self) -> None:
        # Otherwise the thread would keep an abandoned session open until the process ends.
        if getattr(self, "_link", None) is not None:
            self.close()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __reduce__(self) -> Any:
        # Needed for spawned DataLoader workers, so that they can report why they do not work.
        state = None if self._state is None else _parsed(self._state)
        return _restore, (dict(self._args), self._epoch, self._resume, state)

    # The connection.

    def _import_torch(self) -> Any:
        return None

    def _refuse_workers(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            return
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise RuntimeError(
                f"shoal.Feed in a DataLoader worker: each of the {worker.num_workers} workers would be a separate "
                f"trainer and get "
                "every batch. Decoding already runs in the server, in parallel: use DataLoader(feed, batch_size=None, "
                "num_workers=0)")

    def _own_link(self) -> Optional[Link]:
        """The stream, if one is open. Raises FeedError in a fork of the process that opened it."""
        link = self._link
        if link is not None:
            refuse_fork(link.pid)
        return link

    def _linked(self) -> Link:
        """The stream for the next iteration: the open one if its position fits, else a new one."""
        want = self._resume if self._resume is not None else self._epoch
        link = self._own_link()
        if link is not None and (link.position != want or link.over()):
            self._link = None
            link.close()
            link = None
        self._at = want
        if link is None:
            try:
                link = self._link = self._open(want)
            except FeedError as e:
                link = self._reopen(e)
        return link

    def _open(self, start: Union[int, Dict[str, Any]]) -> Link:
        a = self._args
        if self._heap is None:  # not earlier: initialising CUDA would make it unusable in forks
            pinned = a["pin_memory"] and self._torch is not None and self._torch.cuda.is_available()
            self._heap = PinnedHeap(self._torch) if pinned else Heap(a["credits"] + _SPARE_SLOTS)
        slots = a["slots"] if a["slots"] is not None else a["credits"] + _SPARE_SLOTS
        open = dict(session=a["session"], order=a["order"], batch=a["batch_size"] or 0, world=a["world"],
                    rank=a["rank"],
                    transform=self._spec or "", seed=a["seed"], epochs=a["epochs"], tail=a["tail"], bad=a["bad"],
                    credits=a["credits"], rebatch=a["rebatch"], dataset=a["dataset"] or "", label=a["label"] or "",
                    weight=a["weight"], placement=_place.text(a["place"]) if a["place"] is not None else "",
                    slots=slots if self._address.path is not None else 0, readonly=a["readonly"])
        stage: Optional[Callable[[Any, Link], Any]] = None
        if a["map"] is not None:
            def mapper(opened: Any, link: Link) -> Mapper:
                return Mapper(a["map"], a["threads"], a["map_over"] == "batch", link, self._torch)
            stage = mapper
        elif a["device"] is not None:
            from . import _device
            open, stage = _device.prepare(a["device"], open)
        try:
            return Link(self._address, open, start, self._heap, self._torch, a["pin_memory"], stage)
        except FeedError as e:
            if e.code != HANDOVER or a["device"] is not None:
                raise
            log.warning("%s. Batches come as messages, at a lower rate; set slots=0 to choose that", e)
            return Link(self._address, {**open, "slots": 0}, start, self._heap, self._torch, a["pin_memory"], stage)

    def _reopen(self, error: FeedError) -> Link:
        """A stream from the iteration's position, once the server is back; otherwise raises the latest error."""
        patience = self._args["reconnect"]
        if error.code != "UNAVAILABLE" or not patience:
            raise error
        log.warning("%s. Retrying for %g s (reconnect=)", error, patience)
        start, delay = time.monotonic(), _RECONNECT_FIRST
        while True:
            left = patience - (time.monotonic() - start)
            if left <= 0:
                raise FeedError(f"{error} (gave up after {patience:g} s)", error.code) from None
            _pause.wait(min(delay, left))
            delay = min(2 * delay, _RECONNECT_MOST)
            try:
                link = self._link = self._open(self._at if isinstance(self._at, int) else _parsed(self._at))
            except (FileNotFoundError, PermissionError) as e:  # of a certificate that is being replaced
                error = FeedError(f"feed {self._address.addr}: {e}", "UNAVAILABLE")
                continue
            except FeedError as e:
                if e.code != "UNAVAILABLE":
                    raise
                error = e
                continue
            self._stats["reconnects"] += 1
            return link

    def _next(self) -> Optional[Batch]:
        """The next batch of the iteration, or None at the epoch's end."""
        start = time.perf_counter()
        try:
            while True:
                link = self._link
                assert link is not None
                try:
                    # before the wait: who interrupts it must not find this stream at its beginning
                    link.position = None
                    kind, value = link.get()
                    if kind == "batch":
                        header, made = value.take() if hasattr(value, "take") else value
                        batch = made if isinstance(made, Batch) else link.batch(header, made)
                    break
                except FeedError as e:
                    iteration = self._iteration
                    self.close()
                    self._reopen(e)
                    self._iteration = iteration
        finally:
            self._stats["wait_seconds"] += time.perf_counter() - start
        self._resume = None  # not before: who asks for an iterator to look at it has taken nothing
        if kind == "end":
            self._at = self._state = value.state
            self._epoch = value.epoch + 1
            link.position = self._epoch
            self._stats["epochs"] += 1
            self._iteration = None
            if link.over() and link.pool is not None:
                link.pool.close()  # releases can no longer be sent: the memory is freed with the last array
            return None
        link.taken()
        stats = self._stats
        stats["batches"] += 1
        stats["samples"] += header.valid
        stats["bytes"] += header.total_bytes
        stats["slot_batches"] += header.slot != 0
        stats["bad_samples"] += len(header.bad)
        self._at = self._state = header.state
        return batch


_pause = threading.Event()  # never set: a sleep that Ctrl-C can interrupt


def _checked_epoch(name: str, epoch: int, least: int = 0) -> int:
    number = whole_number(name, epoch)
    if not least <= number <= _LAST_EPOCH:
        raise ValueError(f"{name}={number}: it must be from {least} to {_LAST_EPOCH}")
    return number


def _parsed(state: Union[Dict[str, Any], str]) -> Dict[str, Any]:
    parsed = json.loads(state) if isinstance(state, str) else state
    assert isinstance(parsed, dict)
    return parsed


def _restore(args: Dict[str, Any], epoch: int, resume: Optional[Dict[str, Any]],
             state: Optional[Dict[str, Any]]) -> Feed:
    feed = Feed(**args)
    feed._epoch, feed._resume, feed._state = epoch, resume, state
    return feed


class _Iteration:
    """An epoch's iterator. Only a feed's newest one is usable."""

    def __init__(self, feed: Feed) -> None:
        self._feed: Optional[Feed] = feed
        self._busy = threading.Lock()  # held during next(), which two threads must not call at once

    def __iter__(self) -> "_Iteration":
        return self

    def __next__(self) -> Batch:
        feed = self._feed
        if feed is None:
            raise StopIteration
        feed._own_link()
        if feed._iteration is not self:
            raise RuntimeError("this iteration of the feed is over: it was interrupted or has failed, a newer one was "
                               "begun, a state was "
                               "loaded, or the feed was closed")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two threads call next() of one feed: give each thread a Feed with its own rank=, or "
                               "have one thread "
                               "hand batches on by a queue.Queue")
        try:
            batch = feed._next()
        except BaseException:  # such as Ctrl-C: it may have come between a batch and its return
            feed._iteration = None
            raise
        finally:
            self._busy.release()
        if batch is None:
            self._feed = None
            raise StopIteration
        return batch


_torch_class: Optional[Type[Feed]] = None


def _torch_feed(required: bool) -> Type[Feed]:
    """Feed as an IterableDataset, or Feed itself without torch."""
    global _torch_class
    if _torch_class is not None:
        return _torch_class
    try:
        import torch
        from torch.utils.data import IterableDataset
    except ImportError:
        if required:
            raise
        return Feed

    class TorchFeed(Feed, IterableDataset):  # type: ignore
        __doc__ = Feed.__doc__

        def _import_torch(self) -> Any:
            return torch

    TorchFeed.__qualname__ = TorchFeed.__name__ = "Feed"
    _torch_class = TorchFeed
    return TorchFeed
