"""Slots, with the server played by hand: who holds a slot, and when it is given back."""

import gc
import itertools
import os
import threading
import unittest
import weakref
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

import support  # noqa: F401: the path of shoal
from handover import Pool

from shoal import FeedError
from shoal import _cuda, _cuda_driver, _device, _draws, _holders, _slots, _verify
from shoal._batch import Layout, _maker, _tensor_maker, in_buffer

ROWS = 4


def planes():
    return [SimpleNamespace(name=n, dtype=d, shape=list(s), offset=o,
                            length=int(np.prod(s)) * np.dtype("u2" if d == "bfloat16" else d).itemsize)
            for n, d, s, o in (("data", "uint8", (ROWS, 3, 8, 8), 0), ("boxes", "float32", (ROWS, 2, 4), 768),
                               ("half", "bfloat16", (ROWS, 2), 896),
                               ("label", "int64", (ROWS,), 960), ("id", "int64", (ROWS,), 1024),
                               ("valid", "uint8", (ROWS,), 1088))]


TOTAL = 1092


class SlotCase(unittest.TestCase):
    def open(self, torch_=None, readonly=False, debug=False, slots=3):
        self.server = Pool(slots)
        self.woken = 0
        pool = _slots.SlotPool(self.server.path, "k", self._wake, readonly=readonly, debug=debug)
        self.layout = Layout(planes(), torch_, readonly, checked=debug)
        self.addCleanup(self.server.close)
        self.addCleanup(pool.close)
        return pool

    def _wake(self):
        self.woken += 1

    def batch(self, pool, slot=1, sequence=1, index=0):
        payload = bytearray(np.arange(TOTAL, dtype=np.uint8).tobytes())
        payload[960:1088] = np.concatenate([np.arange(ROWS), np.zeros(4), np.arange(ROWS) + 50, np.zeros(4)]).astype(
            "<i8").tobytes()
        payload[1088:1092] = b"\1\1\1\1"
        self.server.fill(slot, bytes(payload), sequence, index=index)
        batch = in_buffer(self.layout, pool.lease(slot, index, 0, TOTAL), index, 0, ())
        pool.live[slot] = weakref.ref(batch)
        return batch


class Lifetime(SlotCase):
    def test_views_are_the_memory(self):
        for t in (None, torch):
            with self.subTest(torch=t):
                pool = self.open(t)
                b = self.batch(pool, 2)
                self.assertEqual(b.data[0, 0, 0].tolist(), list(range(8)))
                b.data[1, 2, 3, 4] = 77
                self.assertEqual(self.server.payload(2, TOTAL)[192 + 128 + 24 + 4], 77)
                self.assertEqual(b.label.tolist(), list(range(ROWS)))
                self.assertEqual(list(b.fields), ["boxes", "half"])
                self.assertEqual(tuple(b.boxes.shape), (ROWS, 2, 4))
                self.assertEqual(b.half.dtype, torch.bfloat16 if t else np.uint16)
                with self.assertRaisesRegex(AttributeError, "no masks; its fields: boxes, half"):
                    b.masks
                del b

    def test_every_kind_of_view_holds_the_slot(self):
        kinds = {
            "the batch": lambda b: b,
            "the array": lambda b: b.data,
            "a small plane": lambda b: b.valid,
            "a field": lambda b: b.boxes,
            "a slice of a slice": lambda b: b.data[1:][0, ..., ::2],
            "a transpose": lambda b: b.data.transpose(0, 1) if hasattr(b.data, "clone") else b.data.transpose(),
            "another type": lambda b: b.data.view(torch.int8) if hasattr(b.data, "clone") else b.data.view(np.int8),
            "a reshape": lambda b: b.data.reshape(-1),
            "the unpacked pair": lambda b: tuple(b),
            "numpy()": lambda b: b.numpy().data if not isinstance(b.data, torch.Tensor) else b.data.numpy(),
        }
        numpy_only = {
            "a memoryview": lambda b: memoryview(b.data)[1:],
            "a tensor": lambda b: torch.from_numpy(b.data)[2],
            "numpy's from_dlpack": lambda b: np.from_dlpack(b.data),
            "torch's from_dlpack": lambda b: torch.from_dlpack(b.data),
            "frombuffer": lambda b: np.frombuffer(b.data, np.uint8),
            "a record of a memoryview": lambda b: np.asarray(memoryview(b.boxes))[0],
        }
        torch_only = {
            "a DLPack capsule": lambda t: t.data.__dlpack__(),
            "numpy's from_dlpack of a tensor": lambda b: np.from_dlpack(b.data),
            "a storage": lambda b: b.data.storage(),
            "bfloat16": lambda b: b.half[1],
            "a parameter's data": lambda b: torch.nn.Parameter(b.boxes, requires_grad=True),
            "what autograd saved": lambda b: (torch.ones(4, requires_grad=True) * b.boxes).sum(),
        }
        for t, more in ((None, numpy_only), (torch, torch_only)):
            pool = self.open(t)
            for name, take in {**kinds, **more}.items():
                with self.subTest(torch=t is not None, view=name):
                    held = take(self.batch(pool))
                    gc.collect()
                    self.assertEqual((list(pool.live), list(pool.freed)), ([1], []))
                    del held
                    gc.collect()
                    self.assertEqual((list(pool.live), pool.take_freed()), ([], [1]))

    def test_copies_do_not(self):
        for t in (None, torch):
            pool = self.open(t)
            b = self.batch(pool)
            want = b.data.tolist()
            copy = b.copy()
            del b
            self.assertEqual(pool.take_freed(), [1])
            self.server.fill(1, bytes(TOTAL), 2)
            self.assertEqual((copy.data.tolist(), copy.index), (want, 0))

    def test_release_is_at_once_and_wakes_who_waits(self):
        pool = self.open()
        b = self.batch(pool)
        del b
        self.assertEqual((list(pool.freed), self.woken), ([1], 0))
        pool.waited = True
        b = self.batch(pool, 2)
        t = threading.Thread(target=lambda held: None, args=(b.data,))
        del b
        t.start()
        t.join()
        del t
        self.assertEqual((list(pool.freed), self.woken), ([1, 2], 1))

    def test_readonly(self):
        pool = self.open(readonly=True)
        b = self.batch(pool)
        for a in (b.data, b.label, b.boxes, b.data[0]):
            with self.assertRaises(ValueError):
                a[...] = 0
            with self.assertRaises(ValueError):
                a.flags.writeable = True
        del a, b
        self.assertEqual(pool.take_freed(), [1])

    def test_memory_lives_as_long_as_views(self):
        pool = self.open()
        b = self.batch(pool)
        data = b.data
        del b
        pool.close()
        gc.collect()
        self.assertEqual(data[0, 0, 0].tolist(), list(range(8)))
        self.assertFalse(self.server.gone.is_set())  # the connection says that the memory is in use
        del data
        self.assertIsNone(pool.memory)
        self.assertTrue(self.server.gone.wait(30))

    def test_nothing_is_left(self):
        def count():
            with open("/proc/self/maps") as f:
                return len(os.listdir("/proc/self/fd")), sum("shoal-test" in line for line in f)

        server = Pool()
        self.addCleanup(server.close)
        before = count()
        for _ in range(3):
            pool = _slots.SlotPool(server.path, "k", lambda: None)
            lease = pool.lease(1, 0, 0, 10)
            pool.close()
            del lease, pool
            gc.collect()
            self.assertTrue(server.gone.wait(30))
            server.gone.clear()
        self.assertEqual(count(), before)

    def test_forks_give_nothing_back(self):
        pool = self.open()
        b = self.batch(pool)
        pid = os.fork()
        if pid == 0:
            del b
            os._exit(0 if not pool.freed and pool._connection.fileno() < 0 else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertEqual(list(pool.live), [1])
        self.assertFalse(self.server.gone.is_set())
        del b
        self.assertEqual(pool.take_freed(), [1])

    def test_what_a_server_must_not_send(self):
        pool = self.open()
        held = pool.lease(1, 0, 0, 10)
        for slot, total, word in ((0, 1, "slot 0 of 3"), (4, 1, "slot 4 of 3"), (1, 1, "still holds"),
                                  (2, 8193, "8193 bytes")):
            with self.assertRaisesRegex(FeedError, word):
                pool.lease(slot, 0, 0, total)
        del held

    def test_refused_handovers(self):
        for key, answer, word in (("other", None, "no such pool"), ("k", {"v": 2}, "version 2"),
                                  ("k", {"v": 1, "error": "full"}, "full"),
                                  ("k", {"v": 1, "slots": 9, "slot_bytes": 8192},
                                   "9 slots of 8192 bytes in a memory of")):
            server = Pool(answer=answer)
            self.addCleanup(server.close)
            gc.collect()  # what other tests left open would be closed in between, and hide a leak
            before = len(os.listdir("/proc/self/fd"))
            with self.assertRaisesRegex(_slots.HandoverError, word):
                _slots.SlotPool(server.path, key, lambda: None)
            self.assertTrue(server.gone.wait(30))
            self.assertLessEqual(len(os.listdir("/proc/self/fd")), before)
        with self.assertRaisesRegex(_slots.HandoverError, "FileNotFoundError"):
            _slots.SlotPool("/nonexistent/sock", "k", lambda: None)


class Debug(SlotCase):
    def test_poison(self):
        # A pointer that outlives its slot, as a consumer of data_ptr() has it: what it reads is no picture.
        pool = self.open(torch, debug=True)
        b = self.batch(pool)
        address = b.data.data_ptr()
        del b
        import ctypes
        self.assertEqual(ctypes.string_at(address, TOTAL), bytes([_slots.POISON]) * TOTAL)
        self.assertEqual(ctypes.string_at(address + TOTAL, 64), bytes(64))  # no further than the batch
        self.assertIsNone(pool.fault)

    def test_a_slot_that_is_filled_while_it_is_held(self):
        for t in (None, torch):
            pool = self.open(t, debug=True)
            b = self.batch(pool)
            b.data
            self.server.fill(1, bytes(TOTAL), 2)
            with self.assertRaisesRegex(FeedError, "slot 1 was filled again.*sequence is 2, and was 1"):
                b.data
            with self.assertRaisesRegex(FeedError, "slot 1 was filled again"):
                b.boxes
            del b
            self.assertRegex(pool.fault, "slot 1 was filled again")
        pool = self.open(debug=True)
        b = self.batch(pool)
        data = b.data
        self.server.fill(1, b"", 1, flags=1)  # it has begun
        del b, data
        self.assertRegex(pool.fault, "slot 1 was filled again")

    def test_a_header_that_is_of_another_batch(self):
        pool = self.open(debug=True)
        self.server.fill(1, bytes(TOTAL), index=5)
        with self.assertRaisesRegex(FeedError, "does not hold batch 4 of epoch 0: its header says slot 1, batch 5"):
            pool.lease(1, 4, 0, TOTAL)

    def test_writes_to_a_shared_slot(self):
        pool = self.open(torch, readonly=True, debug=True)
        b = self.batch(pool)
        b.data.add_(1)
        del b
        self.assertRegex(pool.fault, "somebody wrote to slot 1 of a feed with readonly=True")
        pool = self.open(torch, readonly=True, debug=True)
        b = self.batch(pool)
        before = self.server.payload(1, TOTAL)
        del b
        self.assertIsNone(pool.fault)
        self.assertEqual(self.server.payload(1, TOTAL), before)  # others read it: no poison

    def test_without_debug_nothing_is_touched(self):
        pool = self.open()
        b = self.batch(pool)
        before = self.server.payload(1, TOTAL)
        del b
        self.assertEqual(self.server.payload(1, TOTAL), before)


class Holders(SlotCase):
    def test_they_are_named(self):
        pool = self.open(torch, slots=5)
        whole = self.batch(pool, 1)
        kept = [self.batch(pool, s).data[:2] for s in (2, 3)]
        a_variable = self.batch(pool, 4).label.numpy()
        attribute = SimpleNamespace(boxes=self.batch(pool, 5).boxes)
        text = _holders.told(pool.live, 0, pool.address, pool.slots * pool.slot_bytes, pool.slots, pool.slots,
                             "unix:///x")
        self.assertIn("--memory: 9 slots",
                      _holders.told(pool.live, 0, pool.address, pool.slots * pool.slot_bytes, pool.slots, 9,
                                    "unix:///x"))
        self.assertRegex(text, r"all 5 of its 5 slots are held")
        self.assertRegex(text, r"1 by whole Batch objects; 4 by arrays, tensors or views")
        self.assertRegex(text, r"2 torch.Tensor \(2, 3, 8, 8\) in a list")
        self.assertRegex(text, r"1 numpy.ndarray \(4,\) in the variable a_variable of test_they_are_named")
        self.assertRegex(text, r"1 Batch in the variable whole of test_they_are_named")
        self.assertRegex(text, r"1 torch.Tensor \(4, 2, 4\) in a ")
        self.assertRegex(text, r"slots=10")
        del whole, kept, a_variable, attribute


class OnADevice(unittest.TestCase):
    def test_numbers_are_torchs(self):
        pictures = np.arange(256, dtype=np.uint8).reshape(1, 1, 256, 1).repeat(3, 3)
        norm = "|Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)"
        for words in itertools.product(("fp32", "fp16", "bf16"), ("", norm + ")", norm + ", dtype='fp16')",
                                                                  norm + ", dtype='bf16')"), ("", "|v2")):
            with self.subTest(words):
                transform = f"CenterCrop(size=(1, 256))|{words[0]}|nchw{words[1]}{words[2]}|pillow(9.4)"
                got = _cuda.Finish.of(transform + "|device", pictures.shape).on_host(
                    pictures, np.array([[0, 0, 2, 0]], np.uint16))[0]
                if words[0] == "bf16":
                    got = (got.astype(np.uint32) << 16).view(np.float32)
                value = torch.from_numpy(pictures[0].transpose(2, 0, 1).copy())
                np.testing.assert_array_equal(got, _verify._finish(value, _draws.parse(transform), iter(())))

    @mock.patch.object(_cuda, "Stage")
    def test_a_batch_that_comes_as_messages(self, stage):
        # One can in a shared pass, among others in slots. What the server leaves to the device is done here.
        made = [SimpleNamespace(name=n, dtype=d, shape=s, offset=o, length=int(np.prod(s)) * np.dtype(d).itemsize)
                for n, d, s, o in (("data", "uint8", (2, 4, 5, 3), 0), ("finish", "uint16", (2, 4), 128),
                                   ("label", "int64", (2,), 192), ("id", "int64", (2,), 256),
                                   ("valid", "uint8", (2,), 320))]
        transform = "CenterCrop(size=(4, 5))|fp16|nchw|Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.5))|device"
        array = np.arange(322).astype(np.uint8)
        array[128:144].view("<u2")[:] = 0, 0, 3, 0, 0, 0, 2, 0
        want = _cuda.Finish.of(transform, (2, 4, 5, 3)).on_host(array[:120].reshape(2, 4, 5, 3),
                                                                array[128:144].view("<u2").reshape(2, 4))
        stage.return_value.device.name = "cpu"
        for cuda, library in ((None, None), (torch.cuda, torch)):
            layout = Layout(made, library)
            link = SimpleNamespace(
                on_device=False, pool=SimpleNamespace(memory=None, slot_bytes=8192),
                batch=lambda header, a: in_buffer(layout, a, 0, 0, ()),
                array=lambda p, a: (_maker(p, False) if library is None else _tensor_maker(p, torch))(a))
            opened = SimpleNamespace(transform=transform, planes=made)
            with mock.patch.object(_cuda_driver, "torch_cuda", lambda: cuda):
                taken = _device.DeviceStage(SimpleNamespace(name="cuda:0"), opened, link)
                _, batch = taken.put(SimpleNamespace(planes=made, slot=0, index=0, epoch=0), array).take()
            np.testing.assert_array_equal(np.asarray(batch.data), want)
            self.assertEqual((batch.fields, type(batch.data), type(batch.id)),
                             ({}, torch.Tensor if library else np.ndarray, np.ndarray))


if __name__ == "__main__":
    unittest.main()
