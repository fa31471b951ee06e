"""Slots against the server: a feed over a unix socket."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader

from support import Server, ramp, sample

import shoal
from shoal import _link, _slots


def maps():
    with open("/proc/self/maps") as f:
        return sum("shoal-slots" in line for line in f)


def until(what, seconds=60):
    """Polls until what() is true, and returns that."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise AssertionError("it did not come true")
        time.sleep(0.01)
    return what()


class SharedCase(unittest.TestCase):
    args = ("-samples", "403")

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = Server(*cls.args, "-listen", f"unix://{cls.folder.name}/feed.sock")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        cls.folder.cleanup()

    def feed(self, batch_size=10, **kwargs):
        feed = shoal.Feed(kwargs.pop("addr", self.server.addr), batch_size,
                          **{**dict(transform="ramp(6,5)", tail="uneven"), **kwargs})
        self.addCleanup(feed.close)
        return feed

    def debugged(self):
        os.environ["SHOAL_DEBUG"] = "slots"
        self.addCleanup(os.environ.pop, "SHOAL_DEBUG", None)


class Shared(SharedCase):
    def test_batches(self):
        self.debugged()
        for kwargs in (dict(as_torch=True), dict(as_torch=False), dict(as_torch=False, readonly=True),
                       dict(as_torch=True, readonly=True)):
            for slots in (4, 9):
                feed = self.feed(seed=5, slots=slots, **kwargs)
                for epoch in range(3):
                    ids = []
                    for b in feed:
                        ids += b.id.tolist()
                        self.assertEqual((b.data.__array_interface__["data"][0] if isinstance(b.data, np.ndarray)
                                          else b.data.data_ptr()) % 64, 0)
                        for row, i, y in zip(b.data.tolist(), b.id.tolist(), b.label.tolist()):
                            self.assertEqual((np.ravel(row).tolist(), y), (ramp(i, 90, 5, epoch), i % 10))
                        if not kwargs.get("readonly"):
                            b.data[...] = 0  # it is ours: nobody sees it
                    self.assertEqual(sorted(ids), list(range(403)))
                self.assertEqual(feed.stats()["slots"], slots)
                feed.close()

    def test_raw(self):
        for kwargs in (dict(as_torch=True), dict(as_torch=False), dict(as_torch=False, readonly=True)):
            feed = self.feed(transform=None, tail="pad", **kwargs)
            seen = [bytes(np.asarray(row)) for b in feed for row in b.data]
            self.assertEqual(sorted(seen[:403]), sorted(map(sample, range(403))))
            self.assertEqual(seen[403:], [b""] * 7)
            self.assertGreater(feed.stats()["slots"], 0)

    def test_it_is_the_servers_memory(self):
        feed = self.feed()
        b = next(iter(feed))
        pool = feed._link.pool
        self.assertTrue(pool.address <= b.data.data_ptr() < pool.address + pool.slots * pool.slot_bytes)
        self.assertGreater(maps(), 0)
        seen = {b.data.data_ptr() for b in feed}
        self.assertLessEqual(len(seen), pool.slots)  # mapped once, used again
        del b
        feed.close()
        self.assertIsNone(pool.memory)

    def test_no_slots(self):
        for feed in (self.feed(slots=0), shoal.Feed(self.server.addr, 10, slots=0, as_torch=False)):
            with feed:
                self.assertEqual((len([b.index for b in feed]), feed.stats()["slots"]), (len(feed), 0))

    def test_a_socket_that_is_forwarded(self):
        # As ssh -L does it: bytes come through, descriptors do not. Then batches come as messages.
        path = f"{self.folder.name}/forwarded.sock"
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(path)
        listener.listen()

        def pump(a, b):
            with contextlib.suppress(OSError):
                while data := a.recv(65536):
                    b.sendall(data)
            for s in (a, b):
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
                    self.addCleanup(near.close)
                    self.addCleanup(far.close)
                    far.connect(self.server.addr[len("unix://"):])
                    for pair in ((near, far), (far, near)):
                        threading.Thread(target=pump, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        for extra in ({}, dict(map=lambda x, label, i: x + 0)):
            with shoal.Feed("unix://" + path, 10, transform="ramp(6,5)", order="sequential", **extra) as feed:
                with self.assertLogs("shoal", "WARNING") as logs:
                    it = iter(feed)
                self.assertRegex(logs.output[0], "0 descriptors instead of 1.*messages")
                self.assertEqual(next(it).data[3].reshape(-1).tolist(), ramp(3, 90, 0, 0))
                self.assertEqual((feed.stats()["slots"], len(list(it))), (0, 39))

    def test_held_batches_are_never_overwritten(self):
        self.debugged()
        feed = self.feed(slots=9, credits=3, transform="ramp(40,40)", epochs=4)
        held = []
        for k, b in enumerate(batch for _ in range(4) for batch in feed):
            want = [ramp(i, 4800, 0, b.epoch) for i in b.id.tolist()[:1]]
            held.append((b.data[0], want[0]))
            del b
            if len(held) == 6:  # of nine slots
                for view, want in held:
                    self.assertEqual(view.reshape(-1).tolist(), want)
                del held[:1 + k % 5]
                del view

    @mock.patch.object(_link, "_HELD_SECONDS", 0.1)
    def test_all_held(self):
        feed = self.feed(slots=4, as_torch=False)
        it = iter(feed)
        kept = [next(it).data[1:] for _ in range(4)]
        before = [k.copy() for k in kept]
        dropped = threading.Event()

        class Watch(logging.Handler):
            def emit(self, record):
                said.append(record.getMessage())
                kept.pop()  # the remedy, from another place, while next() waits
                dropped.set()

        said, watch = [], Watch()
        logging.getLogger("shoal").addHandler(watch)
        self.addCleanup(logging.getLogger("shoal").removeHandler, watch)
        self.assertEqual(next(it).index, 4)
        self.assertTrue(dropped.is_set())
        self.assertEqual(len(said), 1)
        self.assertRegex(said[0],
                         r"all 4 of its 4 slots are held.*4 by arrays.*seen: 4 numpy.ndarray \(9, 3, 6, 5\) in a list.*slots=8")
        for now, was in zip(kept, before):
            self.assertTrue((now == was).all())

    def test_little_memory(self):
        # 5 slots of 12288 bytes fit, and are taken; 3 are too few for 3 credits: the batches come as messages, which is
        # told once.
        for room, slots in ((5, 5), (3, 0)):
            folder = tempfile.TemporaryDirectory()
            self.addCleanup(folder.cleanup)
            server = Server("-samples", "403", "-memory", str(room * 12288), "-listen",
                            f"unix://{folder.name}/feed.sock")
            self.addCleanup(server.close)
            with self.assertLogs("shoal") as logs:
                logging.getLogger("shoal").warning("-")
                for _ in range(2):
                    feed = self.feed(addr=server.addr, batch_size=20, transform="ramp(8,8)")
                    self.assertEqual(len([b.index for b in feed]), 21)
                    stats = feed.stats()
                    self.assertEqual((stats["slots"], stats["slot_batches"]), (slots, 21 if slots else 0))
                    feed.close()
            self.assertEqual(len(logs.output), 1 if slots else 2)
            if not slots:
                self.assertRegex(logs.output[1], "no shared memory for batches of 0 MiB.*4 of them.*--memory.*slots=0")
        feed = self.feed(addr=server.addr, batch_size=20, transform="ramp(8,8)", slots=0)
        with self.assertLogs("shoal") as logs:
            logging.getLogger("shoal").warning("-")
            self.assertEqual(len(list(feed)), 21)
        self.assertEqual(len(logs.output), 1)

    def test_all_held_is_told_on_stderr(self):
        code = f"""
            import sys; sys.path[:0] = {sys.path!r}
            import shoal
            it = iter(shoal.Feed({self.server.addr!r}, 10, transform="ramp(6,5)", slots=4))
            kept = [next(it) for _ in range(5)]
        """
        p = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True)
        self.addCleanup(p.stderr.close)
        self.addCleanup(p.wait)
        self.addCleanup(p.kill)
        self.assertRegex(p.stderr.readline(),
                         r"all 4 of its 4 slots are held in this process: 4 by whole Batch objects.*\.copy\(\).*slots=8")
        p.send_signal(signal.SIGINT)  # which ends it all the same
        self.assertRegex(p.stderr.read(), "KeyboardInterrupt")

    def test_a_slot_goes_back_though_the_trainer_rests(self):
        # Two trainers share slots. What the one has dropped is free for the other, without the one's next step.
        feed = self.feed(slots=4)
        it = iter(feed)
        b = next(it)
        pool = feed._link.pool
        del b
        until(lambda: not pool.freed and not pool.live)

    def test_shared_by_trainers(self):
        self.debugged()
        feeds = [self.feed(readonly=True, seed=2, session=f"s{i}", as_torch=False) for i in range(3)]
        for batches in zip(*feeds):
            for b in batches[1:]:
                self.assertTrue((b.data == batches[0].data).all() and (b.id == batches[0].id).all())

    def test_map_over_slots(self):
        self.debugged()
        for fn in (lambda x, label, i: x, lambda x, label, i: x.sum(), lambda x, label, i: x[:, :i % 4 + 1]):
            feed = self.feed(map=fn, threads=3, slots=5, order="sequential")
            # and no views, which would keep slots
            got = [torch.as_tensor(row).tolist() for b in feed for row in b.data]
            self.assertEqual(len(got), 403)
            x = torch.tensor(ramp(402, 90, 0, 0), dtype=torch.uint8).reshape(3, 6, 5)
            self.assertEqual(got[-1], torch.as_tensor(fn(x, 2, 402)).tolist())

    def test_dataloader(self):
        feed = self.feed(tail="drop", slots=5)
        loader = DataLoader(feed, batch_size=None)
        for epoch in range(2):
            feed.set_epoch(epoch)
            self.assertEqual(sum(len(y) for _, y in loader), 400)

    def test_an_abandoned_feed(self):
        len(self.feed(session="first"))  # grpc has descriptors of its own, as soon as it was used
        self.doCleanups()
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            feed = shoal.Feed(self.server.addr, 10, transform="ramp(6,5)")
            data = next(iter(feed)).data
            want, pool = data.clone(), feed._link.pool
            del feed
            gc.collect()
            self.assertTrue(torch.equal(data, want))  # still ours
            self.assertIsNotNone(pool.memory)
            del data
            self.assertIsNone(pool.memory)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    def test_a_server_that_dies(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        server = Server("-samples", "400", "-listen", f"unix://{folder.name}/s")
        feed = shoal.Feed(server.addr, 10, transform="ramp(6,5)", order="sequential", tail="drop")
        self.addCleanup(feed.close)
        it = iter(feed)
        first = last = next(it)
        server.kill()
        with self.assertRaisesRegex(shoal.FeedError, "shoal serve"):
            while True:
                last = next(it)
        self.assertEqual(first.data[3].reshape(-1).tolist(), ramp(3, 90, 0, 0))  # memory outlives the server
        server = Server("-samples", "400", "-listen", f"unix://{folder.name}/s")
        self.addCleanup(server.close)
        feed.load_state_dict(feed.state_dict())
        self.assertEqual(next(iter(feed)).index, last.index + 1)
        self.assertEqual(first.data[3].reshape(-1).tolist(), ramp(3, 90, 0, 0))

    def test_fork(self):
        # A child's copies of arrays give nothing back: the parent's batch stays what it is.
        self.debugged()
        feed = self.feed(slots=4, order="sequential")
        it = iter(feed)
        b = next(it)
        pid = os.fork()
        if pid == 0:
            del b, it, feed
            gc.collect()
            os._exit(0)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        for _ in range(20):
            next(it)
        self.assertEqual(b.data[3].reshape(-1).tolist(), ramp(3, 90, 0, 0))

    def test_use_after_release_is_caught(self):
        # What holds a bare address, and not the array, reads poison in debug mode.
        self.debugged()
        feed = self.feed(slots=6, credits=1)
        it = iter(feed)
        next(it)
        b = next(it)
        address, n = b.data.data_ptr(), b.data.numel()
        pool = feed._link.pool
        with pool_paused(pool):
            del b
            self.assertEqual(ctypes.string_at(address, n), bytes([_slots.POISON]) * n)

    def test_pickle_and_copy(self):
        import copy
        import pickle
        b = next(iter(self.feed(order="sequential")))
        for again in (pickle.loads(pickle.dumps(b)), copy.deepcopy(b)):
            self.assertTrue(torch.equal(again.data, b.data))
            self.assertNotEqual(again.data.data_ptr(), b.data.data_ptr())
            self.assertEqual((again.index, again.id.tolist()), (0, list(range(10))))

    def test_messages_a_step(self):
        # Releases go with credits: a step costs the connection two messages, however small it is.
        sent = []
        encode = _link._wire.encode

        def count(schema, **values):
            if "release" in values or "credit" in values:
                sent.append(values)
            return encode(schema, **values)

        _link._wire.encode = count
        self.addCleanup(setattr, _link._wire, "encode", encode)
        feed = self.feed(epochs=1)
        n = len(list(b.index for b in feed))
        self.assertLessEqual(len(sent), 2 * n + 2)
        # the rest goes with the stream
        until(lambda: sum(len(v["release"]["slots"]) for v in sent if "release" in v) >= n - 8)
        until(lambda: feed._link.pool.memory is None)


class pool_paused:
    """Holds back what is to be released, so that the server does not fill it meanwhile."""

    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        self.take, self.pool.take_freed = self.pool.take_freed, lambda: []

    def __exit__(self, *exc):
        self.pool.take_freed = self.take


if __name__ == "__main__":
    unittest.main()
