"""Slots in host memory that a device copies from, with torch.cuda as it is on several devices: see test_stage.py for
how these run."""

import ctypes
import mmap
import threading
import unittest
from unittest import mock

import torch

from cudasupport import Capture, Hold, TorchCuda, eventually

from shoal import _cuda, _cuda_driver, _link, _streams


def elsewhere(call):
    """What call() returns in a thread that nobody has given a device."""
    got = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    thread.join(60)
    return got[0]


class StreamsTest(unittest.TestCase):
    def setUp(self):
        self.cuda = TorchCuda(_cuda_driver.driver())
        patch = mock.patch.object(torch, "cuda", self.cuda)
        patch.start()
        self.addCleanup(patch.stop)
        self.cuda.set_device(1)  # as rank 1 of a host does
        self.stream = self.cuda.new_stream()
        self.streams = _streams.Streams()
        self.memory = mmap.mmap(-1, 4096)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.assertTrue(_streams.register(self.at, 4096))
        self.to = ctypes.c_uint64()
        self.cuda.driver.cuMemAlloc_v2(ctypes.byref(self.to), ctypes.c_size_t(4096))

    def tearDown(self):
        elsewhere(lambda: _streams.unregister(self.at))
        self.assertEqual(self.cuda.contexts(), [1])
        self.cuda.context()
        self.cuda.driver.cuMemFree_v2(self.to)

    def copy(self):
        """A copy from the slot on the trainer's stream."""
        with self.cuda.stream(self.stream):
            self.streams.taken()
            self.cuda.context()
            self.cuda.driver.cuMemcpyHtoDAsync_v2(self.to, ctypes.c_void_p(self.at), ctypes.c_size_t(4096),
                                                  ctypes.c_void_p(self.stream.cuda_stream))

    def test_no_thread_makes_a_context_on_another_device(self):
        for death in (elsewhere, lambda call: call()):
            with Hold("HtoD") as hold:
                self.copy()
                self.assertFalse(death(lambda: self.streams.idle(1)))
                self.assertEqual(elsewhere(self.streams.done), [])
                hold.go()
                eventually(lambda: elsewhere(self.streams.done) == [1], "the slot is given back")
            self.assertEqual(self.cuda.contexts(), [1])
        with Hold("HtoD") as hold:
            self.copy()
            self.assertFalse(self.streams.idle(1))
            hold.go()
            self.assertEqual(elsewhere(self.streams.finish), [1])
        self.assertEqual(self.cuda.contexts(), [1])

    def test_memory_for_chunks(self):
        def empty(size, dtype, pin_memory):
            made = ctypes.c_void_p()
            self.cuda.context()
            self.cuda.driver.cuMemHostAlloc(ctypes.byref(made), ctypes.c_size_t(size), 0)
            return torch.zeros(size, dtype=dtype)

        heap = _link.PinnedHeap(torch)
        with mock.patch.object(torch, "empty", empty), Capture(_cuda.Device(self.cuda.driver, 1)):
            self.assertEqual(len(elsewhere(lambda: heap.get(100))), 100)

    def test_a_capture_does_not_mind(self):
        device = _cuda.Device(self.cuda.driver, 1)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory := mmap.mmap(-1, 4096)))
        with Hold("HtoD") as hold:
            self.copy()
            self.assertFalse(elsewhere(lambda: self.streams.idle(1)))
            with Capture(device):
                self.assertTrue(_streams.register(at, len(memory)))
                elsewhere(lambda: _streams.unregister(at))
                self.assertEqual(elsewhere(self.streams.done), [])
                elsewhere(lambda: self.streams.idle(2))
                hold.go()
                got = []
                eventually(lambda: got.extend(elsewhere(self.streams.done)) or sorted(got) == [1, 2],
                           "the slots are given back")


if __name__ == "__main__":
    unittest.main()
