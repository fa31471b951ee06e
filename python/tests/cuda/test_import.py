"""Batches that another process has put on the device: see test_stage.py for how these run."""

import gc
import json
import os
import socket
import struct
import subprocess
import sys
import types
import unittest

import numpy as np

import gpuserver
from cudasupport import Hold, Trainer, free_memory

from shoal import _cuda


class Server:
    def __init__(self):
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-B", "gpuserver.py", str(theirs.fileno())],
                                            pass_fds=[theirs.fileno()],
                                            cwd=os.path.dirname(os.path.abspath(__file__)))
        got, self.fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 16)
        while len(got) < 4 or len(got) < 4 + struct.unpack("<I", got[:4])[0]:
            more = self.connection.recv(1 << 16)
            if not more:
                raise AssertionError("the server is gone")
            got += more
        self.answer = json.loads(got[4:])
        self.lines = self.connection.makefile("rw")

    def fill(self, slot, value):
        """A batch whose bytes are all this value: queued on the server's stream when this returns."""
        print(json.dumps({"slot": slot, "value": value}), file=self.lines, flush=True)
        if self.lines.readline() != "queued\n":
            raise AssertionError("the server is gone")
        return types.SimpleNamespace(slot=slot, planes=gpuserver.PLANES, index=value, epoch=0,
                                     total_bytes=gpuserver.SIZE)

    def close(self):
        self.lines.close()
        self.connection.close()
        for fd in self.fds:
            os.close(fd)
        self.process.wait(60)


class ImportTest(unittest.TestCase):
    def setUp(self):
        self.device = _cuda.Device.open("cuda:0")
        self.trainer = Trainer(self.device)
        self.server = Server()
        self.addCleanup(self.server.close)
        self.released = []

    def imported(self):
        made = _cuda.Imported(self.device, None, self.server.answer, self.server.fds)
        self.addCleanup(made.close)
        return made

    def put(self, imported, slot, value):
        return imported.put(self.server.fill(slot, value), lambda: self.released.append(slot))

    def unmapped(self):
        with open(os.environ["SHOAL_CUDA_TRACE"]) as f:
            return sum(e.get("call") == "cuMemUnmap" and e["pid"] == os.getpid() for e in map(json.loads, f))

    def test_planes(self):
        got = self.put(self.imported(), 2, 7).take()
        np.testing.assert_array_equal(got["data"].get(), np.full(gpuserver.SHAPE, 7, np.uint8))
        np.testing.assert_array_equal(got["label"].get(), np.full(2, 0x0707070707070707))
        for name in ("id", "valid"):
            self.assertIsInstance(got[name], np.ndarray)
            self.assertTrue((got[name].view(np.uint8) == 7).all())
        self.assertEqual(set(got), {"data", "label", "id", "valid"})

    def test_the_trainers_stream_waits_for_the_server(self):
        imported = self.imported()
        with Hold("memset") as hold:
            data = self.put(imported, 1, 3).take(self.trainer.stream)["data"]
            out = self.trainer.step(data)
            self.assertTrue(self.trainer.busy())
            hold.go()
        self.assertTrue((self.trainer.result(out, np.empty(gpuserver.SHAPE, np.uint8)) == 3).all())

    def test_the_server_waits_for_the_trainers_stream(self):
        imported = self.imported()
        like = np.empty(gpuserver.SHAPE, np.uint8)
        with Hold("step") as hold:
            staged = self.put(imported, 1, 3)
            data = staged.take(self.trainer.stream)["data"]
            out = self.trainer.step(data)
            self.assertEqual(self.released, [])
            del staged, data
            self.assertEqual(self.released, [1])  # at once: the rest is between the two streams
            other = self.put(imported, 1, 4)
            self.assertTrue(self.trainer.busy())
            hold.go()
        self.assertTrue((self.trainer.result(out, like) == 3).all())
        self.assertTrue((other.take()["data"].get() == 4).all())

    def test_batches_that_nobody_took_go_back(self):
        imported = self.imported()
        for value in range(1, 6):
            staged = self.put(imported, 1, value)
            del staged
        self.assertEqual(self.released, [1] * 5)
        self.assertTrue((self.put(imported, 1, 9).take()["data"].get() == 9).all())

    def test_a_buffer_that_is_held_is_not_taken_twice(self):
        imported = self.imported()
        held = self.put(imported, 1, 1)
        with self.assertRaisesRegex(RuntimeError, "buffer 1 again while this process holds it"):
            self.put(imported, 1, 2)
        del held

    def test_close(self):
        before = free_memory(self.device)
        imported = self.imported()
        data = self.put(imported, 1, 5).take()["data"]
        unmapped = self.unmapped()
        imported.close()
        self.assertTrue((data.get() == 5).all())
        del data
        gc.collect()
        self.assertEqual(self.released, [1])
        self.assertEqual(free_memory(self.device), before)
        self.assertEqual(self.unmapped(), unmapped + 1)
        with self.assertRaisesRegex(RuntimeError, "closed"):
            self.put(imported, 2, 5)

    def test_a_forked_worker_does_not_keep_the_servers_memory(self):
        mine, servers = socket.socketpair()
        with servers, mine.dup():  # as a fork copies it
            _cuda.Imported(self.device, None, self.server.answer, self.server.fds, mine).close()
            servers.settimeout(10)
            self.assertEqual(servers.recv(1), b"")

    def test_another_gpu(self):
        answer = {**self.server.answer, "uuid": "GPU-00000000-0000-0000-0000-000000000000"}
        with self.assertRaisesRegex(_cuda.Unavailable, "shoal-gpu uses GPU-0000.*CUDA_VISIBLE_DEVICES"):
            _cuda.Imported(self.device, None, answer, self.server.fds)
        instance = _cuda.Device(self.device.driver, 1)  # of the same GPU
        with self.assertRaisesRegex(_cuda.Unavailable, "shoal-gpu uses GPU-.*CUDA_VISIBLE_DEVICES"):
            _cuda.Imported(instance, None, self.server.answer, self.server.fds)

    def test_descriptors_of_something_else(self):
        with self.assertRaisesRegex(_cuda.Unavailable,
                                    "cannot be imported: cuMemImportFromShareableHandle: invalid argument"):
            _cuda.Imported(self.device, None, self.server.answer, [self.server.fds[-1], *self.server.fds[1:]])
        made = self.imported()  # nothing was left
        self.assertTrue((self.put(made, 1, 6).take()["data"].get() == 6).all())


if __name__ == "__main__":
    unittest.main()
