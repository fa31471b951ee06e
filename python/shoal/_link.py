"""One stream from the server: one thread receives, the trainer's thread consumes."""

from __future__ import annotations

import atexit
import collections
import ctypes
import json
import os
import queue
import sys
import threading
import time
import urllib.parse
import weakref
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple, Union

import grpc
import numpy as np

from . import _holders, _streams, _trace, _wire
from ._batch import BadSample, Batch, Layout, _maker, _tensor_maker, in_buffer
from ._errors import FeedError, explain
from ._frames import Frames
from ._slots import SlotPool, handover, log, warn_once

SERVICE = "/shoal.feed.v1.Feed/"
_ENDED = "OUT_OF_RANGE"  # the code of the error after the last epoch
HANDOVER = "HANDOVER"  # the code of errors that a stream without slots may avoid
_ALIGN = 64
_IDLE_SECONDS = 1.0  # the longest time before a freed slot is given back
_HELD_SECONDS = 5.0  # the wait for a slot after which it is reported
_DEVICE_SECONDS = 0.002  # between checks of a device's events while waiting for a slot

_user: Optional[int] = None  # the process that uses grpc


def refuse_fork(user: int) -> None:
    """Raises FeedError in a process other than user, which has used the feed."""
    if user != os.getpid():
        raise FeedError(f"the feed was in use in process {user}, of which this one is a fork, and grpc does not "
                        f"survive a fork: "
                        "open feeds after forking only, or start processes with the spawn method")


class Address:
    """The server's address and how to connect to it."""

    def __init__(self, addr: str, token: Optional[str] = None, ca: Optional[str] = None, cert: Optional[str] = None,
                 key: Optional[str] = None, server_name: Optional[str] = None) -> None:
        scheme, _, rest = addr.partition("://") if isinstance(addr, str) else ("", "", "")
        if scheme not in ("unix", "tcp", "tls") or not rest or scheme == "unix" and not rest.startswith("/"):
            raise ValueError(f"feed address {addr!r}: must be unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT")
        if (ca or cert or key or server_name) and scheme != "tls":
            raise ValueError(f"feed address {addr!r}: ca=, cert=, key= and server_name= need tls://HOST:PORT")
        if bool(cert) != bool(key):
            raise ValueError("cert= and key= go together: the client's certificate and its key, PEM files")
        if token and not all("!" <= c <= "~" for c in token):  # grpc would say so with the token in the text
            raise ValueError("token= has spaces, a line break or non-ASCII characters; of what was read from a file, "
                             "pass strip()")
        self.addr, self.path = addr, rest if scheme == "unix" else None
        # grpc takes it as a URL, and a path may have a %, # or ?
        self._target = "unix://" + urllib.parse.quote(os.fsencode(rest)) if scheme == "unix" else rest
        self._files = (ca, key, cert) if scheme == "tls" else None
        self._name = server_name
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def channel(self) -> grpc.Channel:
        """A new channel. FeedError in a fork of a process that has used one."""
        global _user
        if _user is not None:
            refuse_fork(_user)
        _user = os.getpid()
        options: List[Tuple[str, Any]] = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", 8 << 20),
            ("grpc.http2.lookahead_bytes", 64 << 20),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.use_local_subchannel_pool", 1),  # no back-off left over from an earlier channel
        ]
        if self._files is None:
            return grpc.insecure_channel(self._target, options=options)
        if self._name:
            options.append(("grpc.ssl_target_name_override", self._name))
        credentials = grpc.ssl_channel_credentials(*(_read(name) for name in self._files))
        return grpc.secure_channel(self._target, credentials, options=options)

    def ask(self, method: str, schema: Any, timeout: float = 30) -> Any:
        """One unary call."""
        with self.channel() as channel:
            try:
                reply = channel.unary_unary(SERVICE + method)(b"", timeout=timeout, metadata=self.metadata)
                return _wire.decode(schema, reply)
            except grpc.RpcError as e:
                raise explain(e, self.addr) from None


def _read(name: Optional[str]) -> Optional[bytes]:
    if name is None:
        return None
    with open(name, "rb") as f:
        return f.read()


class Heap:
    """Memory for batches that come in chunks, reused once nothing refers to it.

    Every view of an array, numpy's or torch's, holds a reference to the array that owns the memory.
    So an array to which only the pool's list refers has no views.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._arrays: List[np.ndarray] = []
        probe = [np.empty(1, np.uint8)]
        count = getattr(sys, "getrefcount", None)
        self._idle = count(probe[0]) if count else None

    def get(self, size: int) -> np.ndarray:
        """A writable array of size bytes, aligned to 64 bytes."""
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
                    self._arrays.pop(0)  # its memory lives as long as it is in use
                self._arrays.append(owner)
        start = -owner.ctypes.data % _ALIGN
        return owner[start:start + size]


class PinnedHeap:
    """The same in page-locked memory. torch's allocator reuses it, and knows of copies in progress. It is allocated in
    the trainer's thread, on the trainer's device."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._device = torch, torch.cuda.current_device()

    def get(self, size: int) -> np.ndarray:
        with _streams.on(self._torch.cuda, self._device):
            array: np.ndarray = self._torch.empty(size + _ALIGN, dtype=self._torch.uint8, pin_memory=True).numpy()
        start = -array.ctypes.data % _ALIGN
        return array[start:start + size]


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Freeing a grpc call takes a lock. While the interpreter shuts down, a thread that was stopped for good
    # may hold it, so calls are freed here and not by the shutdown.
    for link in list(_links):
        link.close()


def _forked() -> None:
    # The same holds in a forked child: the threads are missing, the locks are as they were. The parent's
    # calls must not be freed there at all.
    for link in list(_links):
        for thing in (link._call, link._channel):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_forked)

_CREDIT, _WAKE = "credit", "wake"
_ONE_CREDIT = _wire.encode(_wire.CLIENT_MESSAGE, credit=dict(n=1))


class Link:
    """One stream.

    position is an epoch or a state if no batch was taken yet, else None. stage, if given, is called once with
    (opened, link). Its result converts each batch, on the receiving thread, to the value that get() returns: it
    has put(header, batch, slot) and close().
    """

    def __init__(self, address: Address, open: Dict[str, Any], start: Union[int, Dict[str, Any]], heap: Any,
                 torch: Any = None,
                 pin: bool = False, stage: Optional[Callable[[Any, "Link"], Any]] = None) -> None:
        self.pid = os.getpid()
        self.position: Union[int, Dict[str, Any], None] = start
        self.pool: Optional[SlotPool] = None
        self.readonly, self._slots, self._least = bool(open.get("readonly")), open["slots"], open["credits"] + 1
        self._address, self._heap, self._torch, self._pin = address, heap, torch, pin
        self._stage_maker, self._stage = stage, None
        self._layouts: Dict[Tuple[Any, ...], Layout] = {}
        self._ready: "queue.SimpleQueue[Tuple[str, Any]]" = queue.SimpleQueue()
        self._requests: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._given: Deque[int] = collections.deque()  # slots of a device's pool, for give_back
        self._frames: Optional[Frames] = None  # source of the messages until it ends; None: the receiving thread
        self._header: Any = None  # of the batch whose chunks are being received
        self._array: Any = None
        self._room: Any = None
        self._at = 0
        self._seed, self._transform = open["seed"], ""
        self._error: Optional[FeedError] = None
        self._closed = False
        state = start if isinstance(start, dict) else None
        epoch = start["epoch"] if isinstance(start, dict) else start
        epochs = open.get("epochs")
        self._first, self._epochs = epoch, max(1, epochs - epoch) if epochs else 0
        self._requests.put(_wire.encode(_wire.CLIENT_MESSAGE, open={
            **open, "client": f"python pid {self.pid}", "epoch": 0 if state is not None else epoch,
            "epochs": self._epochs,
            "state": json.dumps(state) if state is not None else ""}))
        self._channel: Any = address.channel()
        stream = self._channel.stream_stream(SERVICE + "Stream")
        self._call: Any = stream(_sending(self._requests, weakref.ref(self), self._given),
                                 metadata=address.metadata + _trace.headers())
        _links.add(self)
        self._thread = threading.Thread(target=self._receive, name="shoal-feed", daemon=True)
        self._thread.start()
        try:
            _, self.opened = self.get()
        except BaseException:
            self.close()
            raise

    # The receiving thread.

    def _receive(self) -> None:
        put = self._ready.put
        try:
            for message in self._call:
                item = self._item(message)
                if item is not None:
                    put(item)
            put(("error", FeedError(f"feed {self._address.addr}: the server ended the stream after the last epoch",
                                    _ENDED)))
        except grpc.RpcError as e:
            put(("error", explain(e, self._address.addr)))
            e.__traceback__ = None  # e is the call itself, and its frames refer to it: break the cycle
        except FeedError as e:
            put(("error", FeedError(f"feed {self._address.addr}: {e}", e.code)))
        except Exception as e:  # report every error to the trainer
            put(("error", FeedError(f"feed {self._address.addr}: {type(e).__name__}: {e}")))

    def _item(self, message: bytes) -> Optional[Tuple[str, Any]]:
        """The item of get() for a message; None if the batch is not complete yet."""
        payload = _wire.chunk(message)
        if payload is None:
            m = _wire.decode(_wire.SERVER_MESSAGE, message)
            if m.opened is not None:
                self._open(m.opened)
                return "opened", m.opened
            if m.epoch_end is not None:
                return "end", m.epoch_end
            if m.batch is not None and m.batch.slot:
                return self._batch_item(m.batch, None)
            if m.batch is not None:
                self._header, self._at = m.batch, 0
                self._array = self._heap.get(m.batch.total_bytes)
                self._room = memoryview(self._array)
            return None
        header, end = self._header, self._at + len(payload)
        if header is None or end > header.total_bytes:
            raise _wire.WireError("a chunk outside of a batch")
        self._room[self._at:end] = payload
        self._at = end
        if end < header.total_bytes:
            return None
        array = self._array
        self._header = self._array = self._room = None
        return self._batch_item(header, array)

    def _open(self, opened: Any) -> None:
        self._transform = opened.transform
        self.on_device = opened.pool is not None and bool(opened.pool.device)
        if opened.pool is None and self._slots:
            self._tell_no_slots(opened)
        if opened.pool is not None and not opened.pool.device:
            path = self._address.path
            if path is None:
                raise FeedError("the server offers slots to a client that did not connect over its unix socket")
            try:
                self.pool = SlotPool(path, opened.pool.key, self._wake, self.readonly, self._pin, limit=self._slots,
                                     # a stage needs its batches before get() is called
                                     frames=self._stage_maker is None)
            except FeedError as e:
                raise FeedError(f"the handover of the server's memory failed: {e}", HANDOVER) from None
        if self._stage_maker is not None:
            self._stage = self._stage_maker(opened, self)

    def _tell_no_slots(self, opened: Any) -> None:
        mib = sum(p.length for p in opened.planes) / (1 << 20)
        text = (f"shoal: feed {self._address.addr} gave no shared memory for batches of {mib:.0f} MiB: they come as "
                f"messages, at a fraction of the "
                f"rate. {self._least} of them must fit in a third of --memory: raise `shoal serve --memory`, or lower "
                f"the demand (batch_size=, "
                "credits=, or dtype=\"uint8\" and normalise on the device); the server's log has the figures. slots=0 "
                "silences this warning")
        warn_once(text)

    def _batch_item(self, header: Any, array: Optional[np.ndarray]) -> Tuple[str, Any]:
        if header.slot and self.pool is None and not self.on_device:
            raise _wire.WireError("a batch in a slot of a stream without slots")
        return "batch", (header, array) if self._stage is None else self._stage.put(header, array)

    def layout(self, header: Any) -> Layout:
        """Where a batch's planes are."""
        planes, in_slot = header.planes, header.slot != 0
        key = (in_slot, *map(id, planes))
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= 64:
                self._layouts.clear()
            pool = self.pool if in_slot else None
            # The entry refers to the planes, so that their id stays in use as long as it is a key.
            layout = self._layouts[key] = Layout(planes, self._torch, self.readonly, pool.pinned if pool else self._pin,
                                                 pool is not None and pool.debug)
        return layout

    def batch(self, header: Any, array: Optional[np.ndarray]) -> Batch:
        """The batch, as views of its slot or array."""
        bad = [BadSample(b.row, b.id, b.path, b.cause) for b in header.bad] if header.bad else ()
        draws = (self._transform, self._seed, header.draws) if header.draws else None
        if array is not None:
            return in_buffer(self.layout(header), array, header.index, header.epoch, bad, draws)
        pool = self.pool
        assert pool is not None
        owner = pool.lease(header.slot, header.index, header.epoch, header.total_bytes)
        batch = in_buffer(self.layout(header), owner, header.index, header.epoch, bad, draws)
        pool.live[header.slot] = weakref.ref(batch)
        return batch

    # The trainer's thread.

    def get(self) -> Tuple[str, Any]:
        """The next ("opened"|"batch"|"end", value), in order; raises FeedError, then on every call."""
        if self._error is None:
            pool = self.pool
            if pool is not None and pool.fault is not None:
                self._error = FeedError(f"feed {self._address.addr}: {pool.fault}")
                raise self._error
            item = self._poll(0)
            if item is None:
                item = self._ready.get() if pool is None else self._wait(pool)
            kind, value = item
            if kind == "opened" and self.pool is not None:
                self._frames = self.pool.frames
                self._wake()  # slots must be given back even while the trainer is idle
            if kind != "error":
                return kind, value
            assert isinstance(value, FeedError)
            self._error = value
        raise self._error

    def _poll(self, timeout: float) -> Optional[Tuple[str, Any]]:
        """The next item, if it comes within the timeout."""
        if self._frames is not None:
            return self._poll_frames(self._frames, timeout)
        try:
            return self._ready.get(timeout=timeout) if timeout > 0 else self._ready.get_nowait()
        except queue.Empty:
            return None

    def _poll_frames(self, frames: Frames, timeout: float) -> Optional[Tuple[str, Any]]:
        broken = False
        try:
            while True:
                # before the wait: a message may arrive with the end, after a wait that timed out
                over = not self._ready.empty()
                message = frames.get(timeout)
                if message is None:
                    if timeout <= 0 or not over:
                        return None
                    raise ConnectionError  # the stream has ended, but the connection has not
                item = self._item(message)
                if item is not None:
                    return item
        except EOFError:
            pass
        except ConnectionError:
            broken = True
        except (FeedError, ValueError) as e:
            return "error", FeedError(f"feed {self._address.addr}: {e}", getattr(e, "code", None))
        self._frames = None
        kind, error = self._ready.get()  # how the stream ended
        if broken and error.code == _ENDED:  # batches are missing
            error = FeedError(f"feed {self._address.addr}: the handover connection closed before its last message",
                              "UNAVAILABLE")
        return kind, error

    def _wait(self, pool: SlotPool) -> Tuple[str, Any]:
        """Waits for an item; gives slots back as they are freed, and warns once if the trainer holds all of them."""
        pool.waited, told = True, False
        since = time.monotonic()
        try:
            self._give_freed(pool)
            while True:
                if pool.streams.waiting:
                    pool.poll()
                item = self._poll(_DEVICE_SECONDS if pool.streams.waiting else 1.0)
                if item is not None:
                    return item
                if not told and time.monotonic() - since >= _HELD_SECONDS and len(pool.live) >= pool.limit:
                    told = True
                    log.warning("%s", _holders.told(pool.live, pool.streams.waiting, pool.address,
                                                    pool.slots * pool.slot_bytes, pool.limit,
                                                    self._slots, self._address.addr))
        finally:
            pool.waited = False

    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or self._closed or bool(
            self._epochs) and self.position == self._first + self._epochs

    def taken(self) -> None:
        """The trainer has taken a batch: another may be sent."""
        pool, frames = self.pool, self._frames
        if pool is not None:
            pool.streams.taken()
        if pool is None or frames is None:
            self._requests.put(_CREDIT)
            return
        if pool.streams.waiting:
            pool.poll()
        frames.send(_ONE_CREDIT, *_releases(pool))

    def array(self, plane: Any, owner: Any) -> Any:
        """The plane in the owner's buffer, as the feed returns it."""
        return (_maker(plane, False) if self._torch is None else _tensor_maker(plane, self._torch))(owner)

    def handover(self, key: str, descriptors: int) -> Tuple[Any, Dict[str, Any], List[int]]:
        """Requests a pool's memory (_slots.handover)."""
        if self._address.path is None:
            raise FeedError("the server offers memory to a client that did not connect over its unix socket")
        return handover(self._address.path, key, descriptors)

    def give_back(self, slot: int) -> None:
        """Releases a slot of a device's pool. From any thread."""
        self._given.append(slot)
        self._wake()

    def _give_freed(self, pool: SlotPool) -> None:
        frames = self._frames
        if frames is None:
            self._wake()
            return
        releases = _releases(pool)
        if releases:
            frames.send(*releases)

    def _wake(self) -> None:
        self._requests.put(_WAKE)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.pid != os.getpid():
            return  # the parent's
        self._call.cancel()
        self._requests.put(None)
        frames = self._frames
        if frames is not None:
            frames.shut()
        if self._stage is not None:
            self._stage.close()
        if self._thread is not threading.current_thread():  # the garbage collector may run this in it
            self._thread.join(5)
        self._channel.close()
        self._call = self._channel = None
        if self.pool is not None:
            self.pool.close()


def _releases(pool: SlotPool) -> List[bytes]:
    """The message that gives freed slots back, if there are any."""
    freed = pool.take_freed()
    return [_wire.encode(_wire.CLIENT_MESSAGE, release=dict(slots=freed))] if freed else []


def _sending(requests: "queue.SimpleQueue[Any]", link: "weakref.ref[Link]", given: Deque[int]) -> Iterator[bytes]:
    """The messages to the server. Credits and slots are collected, so that a step sends few messages."""
    yield requests.get()
    pool: Optional[SlotPool] = None
    while True:
        credits, end = 0, False
        try:
            token = requests.get() if pool is None else requests.get(timeout=_IDLE_SECONDS)
            while True:
                end = end or token is None
                credits += token is _CREDIT
                token = requests.get_nowait()
        except queue.Empty:
            pass
        if pool is None:
            at = link()
            pool = at.pool if at is not None else None
            del at
        freed: List[int] = []
        if pool is not None:
            pool.poll()
            freed = pool.take_freed()
        while given:
            freed.append(given.popleft())
        if freed:
            yield _wire.encode(_wire.CLIENT_MESSAGE, release=dict(slots=freed))
        if credits:
            yield _wire.encode(_wire.CLIENT_MESSAGE, credit=dict(n=credits))
        if end:
            return
