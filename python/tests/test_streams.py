"""Copies to a device that do not block, against a torch.cuda played by hand: its streams have work, and
finish it when the test says so. What it cannot show is that real CUDA behaves like this."""

import contextlib
import types
import unittest
from unittest import mock

import torch

from test_slots import SlotCase

from shoal import _streams


class Stream:
    """Work is a list of closures; run() does it, in order."""

    def __init__(self, name):
        self.name, self.work, self.capturing, self.device = name, [], False, 0

    def run(self):
        while self.work:
            self.work.pop(0)()

    def __repr__(self):
        return self.name


class Cuda:
    """As much of torch.cuda as the client uses."""

    def __init__(self):
        self.main, self.current, self.registered, self.code = Stream("main"), None, {}, 0
        self.current = self.main
        self.initialized = self.available = True
        cuda = self

        class Event:
            def __init__(self):
                self.over = None

            def record(self, stream):
                if stream.capturing:
                    raise AssertionError("an event recorded into a graph")
                self.over = not stream.work
                if stream.work:
                    stream.work.append(lambda: setattr(self, "over", True))

            def synchronize(self):
                cuda.main.run()

            def query(self):
                if any(s.capturing for s in (cuda.main, cuda.current)):
                    raise AssertionError("a query during a capture")
                return self.over

        self.Event = Event

    def is_initialized(self):
        return self.initialized

    def is_available(self):
        return self.available

    def current_device(self):
        return 0

    def device(self, device):
        return contextlib.nullcontext()

    def current_stream(self, device=None):
        return self.current

    def is_current_stream_capturing(self):
        return self.current.capturing

    def stream(self, stream):
        cuda = self

        class Context:
            def __enter__(self):
                self.was, cuda.current = cuda.current, stream

            def __exit__(self, *exc):
                cuda.current = self.was

        return Context()

    def cudart(self):
        return types.SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop)

    def _register(self, address, size, flags):
        if not self.code:
            self.registered[address] = size
        return self.code

    def copy(self, tensor, stream=None):
        """What tensor.to("cuda", non_blocking=True) does: it reads the source when the stream comes to it."""
        stream, address, n = stream or self.current, tensor.data_ptr(), tensor.numel()
        import ctypes
        got = bytearray(n)
        stream.work.append(lambda: got.__setitem__(slice(None), ctypes.string_at(address, n)))
        return got


class Streams(SlotCase):
    def setUp(self):
        self.cuda = Cuda()
        patch = mock.patch.object(torch, "cuda", self.cuda)
        patch.start()
        self.addCleanup(patch.stop)

    def take(self, pool, slot=1):
        b = self.batch(pool, slot)
        pool.streams.taken()
        return b

    def recycled(self, pool):
        """Whether the slot came back; then the server overwrites it at once."""
        pool.poll()
        if pool.take_freed() == [1]:
            self.server.fill(1, bytes(1000), 2)
            return True
        return False

    def test_a_copy_under_way_keeps_the_slot(self):
        pool = self.open(torch)
        b = self.take(pool)
        want = b.data.numpy().tobytes()
        got = self.cuda.copy(b.data)
        del b
        self.assertFalse(self.recycled(pool))
        self.assertEqual((list(pool.live), pool.streams.waiting), ([1], 1))
        self.cuda.main.run()
        self.assertTrue(self.recycled(pool))
        self.assertEqual((bytes(got), list(pool.live)), (want, []))

    def test_the_stand_in_can_fail(self):
        # Without the events the copy would read what came after: the test above can fail.
        pool = self.open(torch)
        b = self.take(pool)
        want = b.data.numpy().tobytes()
        got = self.cuda.copy(b.data)
        self.cuda.initialized = False
        del b
        self.assertTrue(self.recycled(pool))
        self.cuda.main.run()
        self.assertNotEqual(bytes(got), want)

    def test_streams(self):
        for declare in ("current", "at death", "to", "record_stream"):
            with self.subTest(declare):
                pool, side = self.open(torch), Stream("side")
                if declare == "current":
                    with self.cuda.stream(side):
                        b = self.take(pool)
                    self.cuda.copy(b.data, side)
                    del b
                elif declare == "at death":
                    b = self.take(pool)
                    with self.cuda.stream(side):
                        self.cuda.copy(b.data)
                        del b
                elif declare == "to":
                    b = self.take(pool)
                    with self.cuda.stream(side):
                        self.cuda.copy(b.data)
                        b._used("cuda:0")  # as to() does when it has made a tensor there
                    del b
                else:
                    b = self.take(pool)
                    b.record_stream(side)
                    self.cuda.copy(b.data, side)
                    del b
                self.assertFalse(self.recycled(pool))
                self.cuda.main.run()
                self.assertFalse(self.recycled(pool))
                side.run()
                self.assertTrue(self.recycled(pool))

    def test_a_declaration_is_of_one_filling(self):
        pool, side = self.open(torch), Stream("side")
        b = self.take(pool)
        b.record_stream(side)
        del b
        self.assertTrue(self.recycled(pool))
        b = self.take(pool)
        self.cuda.copy(b.data, side)
        del b
        self.assertTrue(self.recycled(pool))

    def test_capture(self):
        pool = self.open(torch)
        b = self.take(pool)
        self.cuda.main.capturing = True
        del b
        self.assertFalse(self.recycled(pool))
        self.cuda.main.capturing = False
        self.cuda.main.work.append(lambda: None)
        self.assertFalse(self.recycled(pool))
        self.cuda.main.run()
        self.assertTrue(self.recycled(pool))

    def test_a_closed_pool_waits(self):
        # There is no next step that could look for the events.
        for last in ("pool", "lease"):
            pool = self.open(torch)
            b = self.take(pool)
            want, got = b.data.numpy().tobytes(), self.cuda.copy(b.data)
            if last == "pool":
                del b
                pool.close()
            else:
                pool.close()
                self.assertIsNotNone(pool.memory)
                del b
            self.assertIsNone(pool.memory)
            self.assertEqual(bytes(got), want)

    def test_page_locking(self):
        pool = self.open(torch)
        self.assertTrue(_streams.register(pool.address, 4096))
        self.assertEqual(self.cuda.registered, {pool.address: 4096})
        _streams.unregister(pool.address)
        self.assertEqual(self.cuda.registered, {})
        self.cuda.code = 2
        with self.assertLogs("shoal", "WARNING") as logs:
            self.assertFalse(_streams.register(pool.address, 4096))
        self.assertRegex(logs.output[0], "error 2.*slots=")
        self.cuda.available = False
        with self.assertLogs("shoal", "WARNING") as logs:
            self.assertFalse(_streams.register(pool.address, 4096))
        self.assertRegex(logs.output[0], "no CUDA device")


if __name__ == "__main__":
    unittest.main()
