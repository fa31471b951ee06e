"""The batch feed's client. See Feed."""

import atexit
import ctypes
import errno
import json
import operator
import os
import queue
import sys
import threading
import time
import uuid
import weakref

import grpc
import numpy as np

from . import _wire

_SERVICE = "/shoal.feed.v1.Feed/"
_ALIGN = 64


class FeedError(RuntimeError):
    """The feed failed. code is the gRPC status code's name, such as "UNAVAILABLE"."""

    def __init__(self, text, code=None):
        super().__init__(text)
        self.code = code


class Batch:
    """One batch. Unpacks to (data, label): `for images, labels in feed`.

    data   [rows, ...] of the transform's shape and type; for raw samples a list of one-dimensional
           uint8 arrays, one a sample
    label  int64 [rows], class numbers; -100 in rows that are not valid, which torch's losses ignore
    id     int64 [rows], sample numbers; -1 in rows of padding
    valid  uint8 [rows], 1, or 0 for padding and skipped samples, whose data are zeros
    index, epoch   number of the batch in its epoch, and the epoch
    bad    skipped samples: objects with row, id, path and cause

    Arrays are the caller's to write to and to keep: memory is used again only when nothing refers to
    it any more.
    """

    __slots__ = ("data", "label", "id", "valid", "index", "epoch", "bad")

    def __init__(self, data, label, id, valid, index, epoch, bad=()):
        self.data, self.label, self.id, self.valid = data, label, id, valid
        self.index, self.epoch, self.bad = index, epoch, bad

    def __iter__(self):
        yield self.data
        yield self.label

    def _map(self, f):
        data = [f(row) for row in self.data] if isinstance(self.data, list) else f(self.data)
        return Batch(data, f(self.label), f(self.id), f(self.valid), self.index, self.epoch, self.bad)

    def pin_memory(self, device=None):
        """A copy in page-locked memory (torch only). DataLoader(pin_memory=True) calls it."""
        return self._map(lambda t: t.pin_memory())

    def to(self, *args, **kwargs):
        """A copy elsewhere: Tensor.to on every tensor (torch only)."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def __repr__(self):
        return f"Batch(epoch={self.epoch}, index={self.index}, rows={len(self.valid)}, valid={int(self.valid.sum())})"


class Feed:
    """Batches from a `shoal serve`, an epoch an iteration.

    addr        unix:///path or tcp://host:port
    batch_size  samples a batch of this rank; None after load_state_dict: what the state implies
    transform   spec of the decoding, such as "RandomResizedCrop(224)|uint8|nchw"; None: raw samples
    order       "uniform", "torch" (DistributedSampler's order), or a spec with keys
    seed        of the augmentation, and of the order where its spec names none
    epochs      how many epochs there will be; without it, the feed reads ahead beyond the last
    world, rank this trainer's place among those that share each global batch
    tail        an incomplete last batch: "drop", "pad" (with rows marked as not valid) or "uneven"
    bad         samples that cannot be decoded: "error", "skip:0.1%" or "skip:N" an epoch
    session     name of the job: the newest stream of a (session, rank) ends older ones. Default: one
                of its own for each Feed
    credits     batches kept ready in this process
    as_torch    True: tensors; False: numpy arrays, and torch is not imported; None: tensors if torch
                is installed
    rebatch     allow a state to be resumed with another global batch
    dataset     refuse any other version of the dataset

    With torch, a Feed is an IterableDataset for DataLoader(feed, batch_size=None). Workers are not
    needed, since decoding happens in the server, and not possible: num_workers must be 0.

    The epoch counts up by itself; set_epoch sets it. An iteration that was left early starts its
    epoch again. state_dict() counts the batches that next() has returned, no others, and resumes in
    another process with load_state_dict() before the first batch.

    A Feed belongs to one thread. It connects at the first use, so that it can be made before processes
    are forked; once a process has used one, its forks cannot.
    """

    def __new__(cls, *args, as_torch=None, **kwargs):
        if cls is Feed and as_torch is not False:
            cls = _torch_feed(required=bool(as_torch))
        return super().__new__(cls)

    def __init__(self, addr, batch_size=None, *, transform=None, order="uniform", seed=0, epochs=None, world=1, rank=0,
                 tail="drop", bad="error", session=None, credits=3, as_torch=None, rebatch=False, dataset=None):
        for name, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("world", world, 1), ("rank", rank, 0),
                                   ("credits", credits, 1)):
            if value is not None and not least <= operator.index(value) < 1 << 32:
                raise ValueError(f"{name}={value}: it must be at least {least}")
        seed = operator.index(seed)
        self._args = dict(addr=addr, batch_size=batch_size, transform=transform, order=order, seed=seed, epochs=epochs,
                          world=world, rank=rank, tail=tail, bad=bad, session=session or "py-" + uuid.uuid4().hex[:12],
                          credits=credits, as_torch=as_torch, rebatch=rebatch, dataset=dataset)
        self._target = _target(addr)
        self._epoch = 0
        self._resume = None  # state that the next iteration starts from
        self._state = None  # state after the last batch that was returned
        self._link = None
        self._iteration = None
        self._pool = _Pool(credits + 4)
        self._stats = {"batches": 0, "samples": 0, "bytes": 0, "epochs": 0, "bad_samples": 0, "wait_seconds": 0.0}

    # The trainer's side.

    def __iter__(self):
        self._refuse_workers()
        link = self._linked()
        self._resume = None
        self._iteration = iteration = _Iteration(self, link)
        return iteration

    def __len__(self):
        """Batches in a whole epoch, for this rank."""
        self._refuse_workers()
        return self._linked().opened.per_epoch

    @property
    def epoch(self):
        """The epoch that is being iterated, or is next."""
        return self._epoch

    def set_epoch(self, epoch):
        """The next iteration is of this epoch: from where a loaded state stands, if it is that of
        the state, else from the beginning."""
        if epoch == self._epoch:
            return
        self._epoch, self._resume = epoch, None
        if self._state is not None:
            self._state = {**self._state, "epoch": epoch, "cursor": 0}

    def state_dict(self):
        """Where the trainer stands, small enough for any checkpoint. It is the same for all ranks
        that have taken the same number of batches."""
        if self._state is None:
            self._state = json.loads(self._linked().opened.state)
        return dict(self._state)

    def load_state_dict(self, state):
        """The next iteration goes on from this state. The feed's own arguments have to fit it."""
        if not isinstance(state, dict) or state.get("v") != 1:
            raise ValueError("not a state of a Shoal feed in format 1: "
                             f"{state.get('v') if isinstance(state, dict) else type(state).__name__}")
        self._resume, self._state, self._epoch = dict(state), dict(state), int(state["epoch"])
        self._iteration = None

    def stats(self):
        """Counters since the start: batches, samples, bytes, epochs, bad_samples, wait_seconds (the
        time that next() waited for a batch)."""
        return dict(self._stats)

    def info(self):
        """What the server serves: dataset (version), samples, bytes, classes, server (version)."""
        with _channel(self._target) as channel:
            call = channel.unary_unary(_SERVICE + "Info")
            try:
                return vars(_wire.decode(_wire.INFO, call(b"", timeout=30)))
            except grpc.RpcError as e:
                raise _explain(e, self._args["addr"]) from None

    @property
    def classes(self):
        """Names of the classes, by label."""
        return self.info()["classes"]

    def close(self):
        """Ends the session. The feed can be used again afterwards."""
        link, self._link, self._iteration = self._link, None, None
        if link is not None:
            link.close()

    def __del__(self):
        # Without this, the thread would keep an abandoned session open until the process ends.
        if getattr(self, "_link", None) is not None:
            self.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __reduce__(self):
        # For DataLoader workers that are spawned, so that they can say why this does not work.
        args = dict(self._args)
        return _restore, (args, self._epoch, self._resume, self._state)

    # The connection.

    def _refuse_workers(self):
        torch = sys.modules.get("torch")
        if torch is None:
            return
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise RuntimeError(
                f"shoal.Feed in a DataLoader worker: each of the {worker.num_workers} workers would be a trainer of its own and get "
                "every batch. Decoding already runs in the server, in parallel: use DataLoader(feed, batch_size=None, num_workers=0)")

    def _linked(self):
        """The stream for the next iteration: the open one if it stands there, else a new one."""
        want = self._resume if self._resume is not None else self._epoch
        link = self._link
        if link is not None and (link.pid != os.getpid() or link.position != want or link.over()):
            self._link = None
            link.close()
            link = None
        if link is None:
            link = self._link = _Link(self._args, self._target, want, self._pool)
        return link

    def _next(self, link):
        """The next batch of the iteration, or None at the epoch's end."""
        start = time.perf_counter()
        try:
            kind, value = link.get()
        except FeedError:
            self._iteration = None
            self.close()
            raise
        finally:
            self._stats["wait_seconds"] += time.perf_counter() - start
        if kind == "end":
            self._state, self._epoch = json.loads(value.state), value.epoch + 1
            link.position = self._epoch
            self._stats["epochs"] += 1
            self._iteration = None
            return None
        link.position = None
        header, raw = value
        link.credit()
        batch = self._batch(header, raw)
        self._stats["batches"] += 1
        self._stats["samples"] += header.valid
        self._stats["bytes"] += header.total_bytes
        self._stats["bad_samples"] += len(header.bad)
        self._state = json.loads(header.state)
        return batch

    def _batch(self, header, raw):
        planes = {p.name: self._plane(p, raw) for p in header.planes}
        data = planes["data"]
        if "offsets" in planes:
            cuts = _numbers(next(p for p in header.planes if p.name == "offsets"), raw).tolist()
            data = [data[a:b] for a, b in zip(cuts, cuts[1:])]
        return Batch(data, planes["label"], planes["id"], planes["valid"], header.index, header.epoch, header.bad)

    def _plane(self, plane, raw):
        return _numbers(plane, raw)


def _numbers(plane, raw):
    dtype = np.dtype("<u2") if plane.dtype == "bfloat16" else np.dtype(plane.dtype).newbyteorder("<")
    return raw[plane.offset:plane.offset + plane.length].view(dtype).reshape(plane.shape)


def _restore(args, epoch, resume, state):
    feed = Feed(**args)
    feed._epoch, feed._resume, feed._state = epoch, resume, state
    return feed


class _Iteration:
    """An epoch's iterator. Only a feed's newest one goes on."""

    def __init__(self, feed, link):
        self._feed, self._link = feed, link

    def __iter__(self):
        return self

    def __next__(self):
        feed = self._feed
        if feed is None:
            raise StopIteration
        if feed._iteration is not self:
            raise RuntimeError("this iteration of the feed is over: a newer one was begun, a state was loaded, or the feed was closed")
        batch = feed._next(self._link)
        if batch is None:
            self._feed = None
            raise StopIteration
        return batch


_torch_class = None


def _torch_feed(required):
    """Feed as an IterableDataset, or Feed itself if there is no torch."""
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

    class TorchFeed(Feed, IterableDataset):
        __doc__ = Feed.__doc__

        def _plane(self, plane, raw):
            array = _numbers(plane, raw)
            if plane.dtype == "bfloat16":
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            if plane.dtype == "uint64":
                array = array.view(np.int64)
            return torch.from_numpy(array)

    TorchFeed.__qualname__ = TorchFeed.__name__ = "Feed"
    _torch_class = TorchFeed
    return TorchFeed


def _target(addr):
    if addr.startswith("unix:///"):
        return addr
    if addr.startswith("tcp://"):
        return addr[len("tcp://"):]
    raise ValueError(f"feed address {addr!r}: must be unix:///PATH or tcp://HOST:PORT")


_user = None  # the process that uses grpc


def _channel(target):
    global _user
    if _user not in (None, os.getpid()):
        raise FeedError(f"the feed was in use in process {_user}, of which this one is a fork, and grpc does not survive a fork: "
                        "open feeds after forking only, or start processes with the spawn method")
    _user = os.getpid()
    return grpc.insecure_channel(target, options=[
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", 8 << 20),
        ("grpc.http2.lookahead_bytes", 64 << 20),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ])


def _explain(error, addr):
    code = error.code().name if isinstance(error, grpc.Call) else None
    text = error.details() if isinstance(error, grpc.Call) else str(error)
    remedy = ""
    if code == "UNAVAILABLE" and text.endswith(os.strerror(errno.EACCES)):
        remedy = ". The socket is for others: see --socket-mode and --socket-group of `shoal serve`"
    elif code == "UNAVAILABLE":
        remedy = (". Is `shoal serve` running there? Start it, or correct the address; the training goes on from the last "
                  "state_dict()")
    return FeedError(f"feed {addr}: {text}{remedy}", code)


class _Pool:
    """Memory for batches, used again once nobody refers to it.

    Every view of an array, numpy's or torch's, holds a reference to the array that owns the memory.
    So an array to which only the pool's list refers has no views.
    """

    def __init__(self, most):
        self._most, self._arrays = most, []
        probe = [np.empty(1, np.uint8)]
        count = getattr(sys, "getrefcount", None)
        self._idle = count(probe[0]) if count else None

    def get(self, size):
        """A writable array of size bytes that begins at a multiple of 64."""
        owner = None
        if self._idle is not None:
            arrays = self._arrays
            for i in range(len(arrays)):
                if sys.getrefcount(arrays[i]) == self._idle and size <= arrays[i].size - _ALIGN <= 2 * size:
                    owner = arrays[i]
                    break
        if owner is None:
            owner = np.empty(size + _ALIGN, np.uint8)
            if self._idle is not None:
                if len(self._arrays) >= self._most:
                    self._arrays.pop(0)  # its memory lives as long as its user
                self._arrays.append(owner)
        start = -owner.ctypes.data % _ALIGN
        return owner[start:start + size]


_links = weakref.WeakSet()


@atexit.register
def _close_all():
    # Freeing a grpc call takes a lock. Once the interpreter is being torn down, a thread that was
    # stopped for good may hold it, so calls are freed here and not by the tear-down.
    for link in list(_links):
        link.close()


def _forked():
    # The same holds in a forked child: the threads are not there, the locks are as they were. The
    # parent's calls must not be freed there at all.
    for link in list(_links):
        for thing in (link._call, link._channel):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class _Link:
    """One stream: a thread receives, the trainer's thread takes."""

    def __init__(self, args, target, start, pool):
        self.pid = os.getpid()
        self.position = start  # an epoch or a state if nothing was taken since, else None
        self._addr = args["addr"]
        self._pool = pool
        self._ready = queue.SimpleQueue()
        self._requests = queue.SimpleQueue()
        self._error = None
        self._closed = False
        state = start if isinstance(start, dict) else None
        epoch = state["epoch"] if state is not None else start
        self._first, self._epochs = epoch, max(1, args["epochs"] - epoch) if args["epochs"] else 0
        self._requests.put(_wire.encode(_wire.CLIENT_MESSAGE, open=dict(
            session=args["session"], client=f"python pid {self.pid}", order=args["order"], batch=args["batch_size"] or 0,
            world=args["world"], rank=args["rank"], transform=args["transform"] or "", seed=args["seed"] % (1 << 64),
            epoch=0 if state is not None else epoch, epochs=self._epochs,
            tail=args["tail"], bad=args["bad"], state=json.dumps(state) if state is not None else "",
            credits=args["credits"], rebatch=args["rebatch"], dataset=args["dataset"] or "")))
        self._channel = _channel(target)
        self._call = self._channel.stream_stream(_SERVICE + "Stream")(iter(self._requests.get, None))
        _links.add(self)
        self._thread = threading.Thread(target=self._receive, name="shoal-feed", daemon=True)
        self._thread.start()
        try:
            _, self.opened = self.get()
        except BaseException:
            self.close()
            raise

    def _receive(self):
        put = self._ready.put
        try:
            header = None
            for message in self._call:
                payload = _wire.chunk(message)
                if payload is None:
                    m = _wire.decode(_wire.SERVER_MESSAGE, message)
                    if m.opened is not None:
                        put(("opened", m.opened))
                    elif m.epoch_end is not None:
                        put(("end", m.epoch_end))
                    elif m.batch is not None:
                        header, at = m.batch, 0
                        array = self._pool.get(header.total_bytes)
                        room = memoryview(array)
                    continue
                if header is None or at + len(payload) > header.total_bytes:
                    raise _wire.WireError("a chunk that belongs to no batch")
                room[at:at + len(payload)] = payload
                at += len(payload)
                if at == header.total_bytes:
                    put(("batch", (header, array)))
                    header = array = room = None
            put(("error", FeedError(f"feed {self._addr}: the server ended the stream after the last epoch", "OUT_OF_RANGE")))
        except grpc.RpcError as e:
            put(("error", _explain(e, self._addr)))
            e.__traceback__ = None  # e is the call itself, its frames refer to it: no cycle may keep it
        except Exception as e:  # whatever it is, the trainer has to hear of it
            put(("error", FeedError(f"feed {self._addr}: {type(e).__name__}: {e}")))

    def get(self):
        """The next ("opened"|"batch"|"end", value), in order; raises FeedError, again and again."""
        if self._error is None:
            kind, value = self._ready.get()
            if kind != "error":
                return kind, value
            self._error = value
        raise self._error

    def over(self):
        """Nothing more will come."""
        return self._error is not None or self._closed or self._epochs and self.position == self._first + self._epochs

    def credit(self):
        self._requests.put(_wire.encode(_wire.CLIENT_MESSAGE, credit=dict(n=1)))

    def close(self):
        if self._closed:
            return
        self._closed = True
        if self.pid != os.getpid():
            return  # the parent's
        self._call.cancel()
        self._requests.put(None)
        if self._thread is not threading.current_thread():  # which may be collecting garbage
            self._thread.join(5)
        self._channel.close()
        self._call = self._channel = None
