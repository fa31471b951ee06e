"""Batches from slots to a device. These run against the software driver of lab/driver, whose tests run them:
the script there holds steps and copies in their streams (cudasupport.Hold), and ends the process at an access to memory
that is free again, or at an asynchronous copy of memory that is not page-locked."""

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import unittest

import numpy as np
import torch

from cudasupport import Capture, Hold, Slots, Trainer, eventually, free_memory, plane, planes

from shoal import _cuda, _cuda_driver

NORM = "Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))"


def trace():
    with open(os.environ["SHOAL_CUDA_TRACE"]) as f:
        return [json.loads(line) for line in f]


class StageTest(unittest.TestCase):
    def setUp(self):
        self.device = _cuda.Device.open("cuda:0")
        self.trainer = Trainer(self.device)
        self.released = []
        gc.collect()
        self.before = free_memory(self.device)

    def stage(self, slots, buffers=2):
        stage = _cuda.Stage(self.device, slots.opened, slots.memory, slots.slot_bytes, buffers=buffers)
        self.addCleanup(stage.close)
        return stage

    def put(self, stage, slots, slot, rows=None):
        header, content = slots.fill(slot, rows)

        def release():
            slots.spoil(slot)
            self.released.append(slot)

        return stage.put(header, release), content

    def test_bytes(self):
        dtypes = {"uint8": "uint8", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
        for word, dtype in dtypes.items():
            for layout in ("nchw", "nhwc"):
                for width in (7, 8):
                    with self.subTest(dtype=word, layout=layout, width=width):
                        slots = Slots(width=width,
                                      transform=f"{word}|{layout}" + ("" if word == "uint8" else f"|{NORM}"),
                                      seed=width)
                        stage = self.stage(slots)
                        for slot, rows in ((1, None), (2, 2)):  # the last batch of an epoch is smaller
                            staged, content = self.put(stage, slots, slot, rows)
                            got = staged.take()
                            finish = _cuda.Finish.of(slots.transform, content["data"].shape)
                            self.assertEqual(got["data"].dtype, dtype)
                            np.testing.assert_array_equal(got["data"].get(),
                                                          finish.on_host(content["data"], content["finish"]))
                            np.testing.assert_array_equal(got["label"].get(), content["label"])
                            for name in ("id", "valid"):
                                self.assertIsInstance(got[name], np.ndarray)
                                np.testing.assert_array_equal(got[name], content[name])
                            self.assertEqual(set(got), {"data", "label", "id", "valid"})
                        stage.close()

    def test_numbers_are_torchs(self):
        from torchvision.transforms.functional import normalize
        pictures = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 256, 1).expand(1, 1, 256, 3).numpy()
        params = np.array([[0, 0, 2, 0]], np.uint16)
        want = normalize(torch.from_numpy(pictures.copy()).permute(0, 3, 1, 2).float() / 255, (0.485, 0.456, 0.406),
                         (0.229, 0.224, 0.225))
        for word, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
            got = _cuda.Finish.of(f"CenterCrop(size=(1, 256))|{word}|nchw|{NORM}|pillow(9.4)|device",
                                  pictures.shape).on_host(pictures, params)
            bits = want.to(dtype).contiguous().view(torch.int32 if word == "fp32" else torch.int16).numpy()
            np.testing.assert_array_equal(got.view(bits.dtype), bits, err_msg=word)

    def test_the_hosts_part_alone(self):
        slots = Slots(transform="uint8|nhwc", device=False)
        staged, content = self.put(self.stage(slots), slots, 1)
        got = staged.take()
        np.testing.assert_array_equal(got["data"].get(), content["data"])
        np.testing.assert_array_equal(got["label"].get(), content["label"])

    def test_raw_samples(self):
        slots = Slots(device=False)
        made, size = planes(("data", "uint8", (10,)), ("label", "int64", (2,)), ("id", "int64", (2,)),
                            ("valid", "uint8", (2,)),
                            ("offsets", "uint64", (3,)))
        slots.opened.planes = [plane("data", "uint8", (0,), 0), *made[1:]]
        slots.array(1, made[0])[:] = range(10)
        slots.array(1, made[4])[:] = 0, 4, 10
        stage = self.stage(slots)
        staged = stage.put(types.SimpleNamespace(slot=1, planes=made, total_bytes=size, index=0, epoch=0), lambda: None)
        self.assertEqual([row.get().tolist() for row in staged.take()["data"]], [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]])

    def test_a_slot_is_given_back_when_it_was_copied_and_not_before(self):
        slots = Slots(transform="fp16|nchw")
        stage = self.stage(slots)
        with Hold("HtoD") as hold:
            staged, content = self.put(stage, slots, 1)
            got = staged.take(self.trainer.stream)  # returns, though nothing is there yet
            out = self.trainer.step(got["label"])
            self.assertTrue(self.trainer.busy())
            self.assertEqual(self.released, [])
            hold.go()
            eventually(lambda: self.released == [1], "the slot is given back")
        np.testing.assert_array_equal(self.trainer.result(out, content["label"]), content["label"])
        finish = _cuda.Finish.of(slots.transform, content["data"].shape)
        np.testing.assert_array_equal(got["data"].get(), finish.on_host(content["data"], content["finish"]))

    def test_copies_lie_under_the_step(self):
        slots = Slots(transform="fp32|nchw")
        stage = self.stage(slots, buffers=3)
        with Hold("step") as hold:
            first, content = self.put(stage, slots, 1)
            data = first.take(self.trainer.stream)["data"]
            out = self.trainer.step(data)
            begun = len(trace())
            second, later = self.put(stage, slots, 2)
            eventually(lambda: 2 in self.released, "the next batch is copied while the step is under way")
            got = second.take(0)["label"].get()  # and its kernel has run
            self.assertTrue(self.trainer.busy())
            hold.go()
        np.testing.assert_array_equal(got, later["label"])
        self.trainer.result(out, data.get())
        entries = trace()
        step = [e for e in entries if e.get("name") == "step"][-1]
        copies = [e for e in entries[begun:] if e.get("name") == "HtoD"]
        kernels = [e for e in entries[begun:] if str(e.get("name")).startswith("shoal_finish")]
        self.assertTrue(copies and kernels)
        for e in copies + kernels:
            self.assertNotEqual(e["stream"], step["stream"])
            self.assertLess(e["end"], step["end"])

    def recycled(self, use):
        """A batch dies while work on it is under way; others come, more than there are buffers. Returns what the
        work saw and what it should have seen."""
        slots = Slots(transform="uint8|nhwc")
        stage = self.stage(slots, buffers=2)
        with Hold("step") as hold:
            staged, content = self.put(stage, slots, 1)
            planes_ = staged.take(use(self, None))
            use(self, planes_["label"])
            out = self.trainer.step(planes_["label"])
            del staged, planes_
            eventually(lambda: self.released == [1], "the first batch is copied")
            others = []
            for slot in (2, 3):
                others.append(self.put(stage, slots, slot)[0])
            eventually(lambda: 2 in self.released, "the other buffer is filled")
            self.assertTrue(self.trainer.busy())
            self.assertNotIn(3, self.released)  # its copy would overwrite what the step reads
            hold.go()
        eventually(lambda: 3 in self.released, "the first buffer is used again")
        np.testing.assert_array_equal(self.trainer.result(out, content["label"]), content["label"])

    def test_a_buffer_is_not_used_again_under_the_trainers_stream(self):
        self.recycled(lambda self, array: self.trainer.stream)

    def test_record_stream(self):
        def use(self, array):
            if array is None:
                return 0  # taken on another stream than the one that works
            _cuda.record_stream(array, self.trainer.stream)

        self.recycled(use)

    def test_record_stream_by_address(self):
        class Tensor:
            def __init__(self, array):
                self._at = array.__cuda_array_interface__["data"][0]

            def data_ptr(self):
                return self._at

        def use(self, array):
            if array is None:
                return 0
            _cuda.record_stream(Tensor(array), types.SimpleNamespace(cuda_stream=self.trainer.stream))

        self.recycled(use)

    def test_a_capture_does_not_mind(self):
        slots = Slots(transform="fp16|nchw")
        with Capture(self.device):
            stage = self.stage(slots, buffers=1)
            for slot in (1, 2):
                staged, content = self.put(stage, slots, slot)
                eventually(lambda: slot in self.released, "the slot is given back")
                got = staged.take()
                np.testing.assert_array_equal(got["label"].get(), content["label"])
                del staged, got
            stage.close()

    def test_a_capture_that_the_default_stream_waits_for(self):
        slots = Slots(transform="fp16|nchw")
        stage = self.stage(slots, buffers=1)
        staged, _ = self.put(stage, slots, 1)
        got = staged.take()  # on the default stream
        with Capture(self.device, blocking=True):
            del staged, got
            gc.collect()
        came = []
        threading.Thread(target=lambda: came.append(self.put(stage, slots, 2)), daemon=True).start()
        eventually(lambda: came, "the only buffer is not lost")
        staged, content = came.pop()
        np.testing.assert_array_equal(staged.take()["label"].get(), content["label"])
        del staged
        stage.close()

    def test_views_keep_the_buffer(self):
        slots = Slots(transform="uint8|nhwc")
        stage = self.stage(slots, buffers=1)
        staged, content = self.put(stage, slots, 1)
        row = staged.take()["data"][1]
        del staged
        gc.collect()
        begun, came = threading.Event(), []

        def more():
            begun.set()
            came.append(self.put(stage, slots, 2)[0])

        thread = threading.Thread(target=more)
        thread.start()
        begun.wait()
        finish = _cuda.Finish.of(slots.transform, content["data"].shape)
        want = finish.on_host(content["data"], content["finish"])[1]
        np.testing.assert_array_equal(row.get(), want)
        self.assertEqual(came, [])
        del row
        thread.join(60)
        self.assertEqual(len(came), 1)

    def test_closing_ends_the_wait_for_a_buffer(self):
        slots = Slots(transform="uint8|nhwc")
        stage = self.stage(slots, buffers=1)
        held = self.put(stage, slots, 1)[0]
        errors = []

        def more():
            try:
                self.put(stage, slots, 2)
            except RuntimeError as e:
                errors.append(str(e))

        thread = threading.Thread(target=more)
        thread.start()
        stage.close()
        thread.join(60)
        self.assertEqual(errors, ["the feed was closed"])
        del held

    def test_close_gives_everything_back(self):
        slots = Slots(transform="fp16|nchw|" + NORM)
        stage = self.stage(slots)
        staged, content = self.put(stage, slots, 1)
        data = staged.take()["data"]
        stage.close()
        self.assertEqual(self.released, [1])
        slots.memory.close()  # nothing refers to the mapping any more
        finish = _cuda.Finish.of(slots.transform, content["data"].shape)
        # it outlives the stage
        np.testing.assert_array_equal(data.get(), finish.on_host(content["data"], content["finish"]))
        del staged, data
        gc.collect()
        self.assertEqual(free_memory(self.device), self.before)

    def test_memory_that_torch_has_page_locked(self):
        slots = Slots(transform="uint8|nhwc")
        import ctypes
        whole = (ctypes.c_ubyte * len(slots.memory)).from_buffer(slots.memory)
        at = ctypes.c_void_p(ctypes.addressof(whole))
        with self.device:
            self.device.driver.cuMemHostRegister_v2(at, ctypes.c_size_t(len(slots.memory)), 0)
        stage = self.stage(slots)
        staged, content = self.put(stage, slots, 1)
        np.testing.assert_array_equal(staged.take()["label"].get(), content["label"])
        stage.close()
        with self.device:
            self.device.driver.cuMemHostUnregister(at)  # it is still registered: by its owner

    def test_rows_out_of_bounds_are_refused(self):
        slots = Slots(transform="uint8|nhwc")
        stage = self.stage(slots)
        header, _ = slots.fill(1)
        slots.array(1, header.planes[1])[0, 0] = 1
        with self.assertRaisesRegex(ValueError, "crop at"):
            stage.put(header, lambda: None)

    def test_the_wait_for_a_buffer_is_told(self):
        from shoal import _cuda as module
        slots = Slots(transform="uint8|nhwc")
        stage = self.stage(slots, buffers=1)
        held = [self.put(stage, slots, 1)[0]]
        old, module._HELD_SECONDS = module._HELD_SECONDS, 0.0
        self.addCleanup(setattr, module, "_HELD_SECONDS", old)
        thread = threading.Thread(target=lambda: self.put(stage, slots, 2))
        with self.assertLogs("shoal", logging.WARNING) as logs:
            thread.start()
            eventually(lambda: logs.output, "the message")
        self.assertIn("all 1 batches on cuda:0 are still referred to", logs.output[0])
        held.clear()
        thread.join(60)


class ArrayTest(unittest.TestCase):
    def setUp(self):
        self.device = _cuda.Device.open("cuda")
        self.slots = Slots(transform="fp32|nchw")
        self.stage = _cuda.Stage(self.device, self.slots.opened, self.slots.memory, self.slots.slot_bytes, buffers=2)
        self.addCleanup(self.stage.close)
        header, _ = self.slots.fill(1)
        self.array = self.stage.put(header, lambda: None).take()["data"]

    def test_interface(self):
        a = self.array
        face = a.__cuda_array_interface__
        self.assertEqual((face["shape"], face["typestr"], face["version"], face["strides"]),
                         ((3, 3, 5, 7), "<f4", 3, None))
        self.assertEqual((face["data"][1], face["stream"]), (False, 1))
        self.assertEqual((len(a), a.ndim, a.size, a.nbytes, a.device), (3, 4, 315, 1260, "cuda:0"))
        self.assertEqual(a[1].__cuda_array_interface__["data"][0], face["data"][0] + 420)
        self.assertEqual(a[-1].shape, (3, 5, 7))
        self.assertEqual(a[1:].shape, (2, 3, 5, 7))
        np.testing.assert_array_equal(a[1:].get(), a.get()[1:])
        for bad in (3, -4, slice(None, None, 2)):
            with self.assertRaises(IndexError):
                a[bad]

    def test_dlpack(self):
        import ctypes

        from shoal import _cuda_array as module
        self.assertEqual(self.array.__dlpack_device__(), (2, 0))
        capsule = self.array.__dlpack__(stream=1)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        managed = module._Managed.from_address(get(capsule, b"dltensor"))
        t = managed.tensor
        self.assertEqual((t.data, t.device_type, t.device_id, t.ndim),
                         (self.array.__cuda_array_interface__["data"][0], 2, 0, 4))
        self.assertEqual((t.code, t.bits, t.lanes, t.byte_offset), (2, 32, 1, 0))
        self.assertEqual((t.shape[:4], t.strides[:4]), ([3, 3, 5, 7], [105, 35, 7, 1]))
        # A capsule that nobody took gives its reference up.
        kept = len(module._managed)
        del managed, t, capsule
        self.assertEqual(len(module._managed), kept - 1)
        # A consumer renames it and calls the deleter when it is done: until then the memory stays.
        capsule = self.array.__dlpack__(stream=-1)
        at = get(capsule, b"dltensor")
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        used = b"used_dltensor"
        rename(capsule, used)
        del capsule
        self.assertIn(at, module._managed)
        live = len(module._leases)
        del self.array
        gc.collect()
        self.assertEqual(len(module._leases), live)
        module._Managed.from_address(at).deleter(at)
        self.assertNotIn(at, module._managed)
        eventually(lambda: len(module._leases) < live, "the lease ends")

    def test_dlpack_has_the_consumers_stream_wait(self):
        trainer = Trainer(self.device)
        with Hold("HtoD") as hold:
            header, content = self.slots.fill(2)
            label = self.stage.put(header, lambda: None).take()["label"]
            label.__dlpack__(stream=trainer.stream)
            out = trainer.step(label)
            self.assertTrue(trainer.busy())
            hold.go()
        np.testing.assert_array_equal(trainer.result(out, content["label"]), content["label"])


class FaultTest(unittest.TestCase):
    """Each in a process of its own, since what a driver is does not change under one."""

    def outcome(self, script, code, **env):
        body = textwrap.dedent("""
            from cudasupport import Slots, _cuda, eventually, free_memory
            slots = Slots(transform="fp16|nchw")

            def stage():
                return _cuda.Stage(device, slots.opened, slots.memory, slots.slot_bytes, buffers=2)

            try:
                device = _cuda.Device.open("cuda:0")
            {}
            except _cuda.Unavailable as e:
                print("Unavailable:", e)
            """).format(textwrap.indent(textwrap.dedent(code), "    "))
        here = os.path.dirname(os.path.abspath(__file__))
        run = subprocess.run([sys.executable, "-B", "-c", body], cwd=here,
                             env={**os.environ, "SHOAL_CUDA_SCRIPT": script, **env},
                             capture_output=True, text=True, timeout=120)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout.strip()

    def test_no_driver(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        with open(os.path.join(folder, "libcuda.so.1"), "w"):
            pass  # found before one that the machine may have
        self.assertRegex(self.outcome("", "", LD_LIBRARY_PATH=folder),
                         "Unavailable: there is no NVIDIA driver here .* Install it")

    def test_no_device(self):
        self.assertRegex(self.outcome("devices=0", ""), "Unavailable: the driver sees no GPU: .*CUDA_VISIBLE_DEVICES")

    def test_no_such_device(self):
        self.assertRegex(self.outcome("", "_cuda.Device.open('cuda:1')"),
                         "Unavailable: there is no device cuda:1: the driver sees 1")

    def test_old_driver(self):
        self.assertRegex(self.outcome("version=8000", ""),
                         "Unavailable: the driver supports CUDA 8.0; 10.1 or newer is needed: update it")

    def test_old_device(self):
        self.assertRegex(self.outcome("attr.75=3;attr.76=5", ""),
                         "Unavailable: cuda:0 has compute capability 3.5; 5.0 or newer is needed")

    def test_no_context(self):
        self.assertRegex(self.outcome("cuDevicePrimaryCtxRetain:1=2", ""),
                         "Unavailable: cuda:0 gives no context: .*out of memory")

    # What fails in between leaves nothing behind: the same works the next time.
    again = """
        before = free_memory(device)
        for n in range(2):
            try:
                s = stage()
            except _cuda.Unavailable as e:
                print("Unavailable:", e)
                assert free_memory(device) == before
        staged = s.put(slots.fill(1)[0], lambda: None)
        print(staged.take()["data"].get().shape)
        """

    def test_out_of_memory(self):
        for n in (1, 2, 3, 4):
            got = self.outcome(f"cuMemAlloc:{n}=2", self.again)
            self.assertRegex(got, r"\AUnavailable: cuda:0: cuMemAlloc_v2: out of memory .*: 2 batches do not fit.*smaller batch\n\(3, 3, 5, 7\)\Z")

    def test_no_page_locking(self):
        self.assertRegex(self.outcome("cuMemHostRegister:1=800", self.again),
                         r"\AUnavailable: cuda:0: cuMemHostRegister_v2: operation not permitted")

    def test_no_stream_event_or_module(self):
        for call in ("cuStreamCreate", "cuEventCreate", "cuModuleLoadData", "cuModuleGetFunction"):
            self.assertRegex(self.outcome(f"{call}:1=999", self.again),
                             rf"\AUnavailable: cuda:0: {call}: unknown error .*\n\(3, 3, 5, 7\)\Z")

    def test_a_copy_that_fails_loses_the_context(self):
        got = self.outcome("copy:2=719", """
            s, done = stage(), []
            header, _ = slots.fill(1)
            for n in range(2):
                try:  # the first fails in its stream, and may be told of it at once or later
                    s.put(header, lambda: done.append(1))
                    eventually(lambda: s._failed, "the failure is known")
                except RuntimeError as e:
                    last = e
            print(last)
            """)
        self.assertRegex(got, r"\A.* cuda:0: cu\w+: unspecified launch failure \(CUDA error 719\)")

    def test_a_slot_whose_copy_cannot_be_waited_for_stays(self):
        hold = os.path.join(os.environ["SHOAL_CUDA_DIR"], "wait")
        got = self.outcome(f"cuEventSynchronize:1=900;hold.HtoD={hold}", f"""
            import os
            import numpy as np
            open({hold!r}, "w").close()
            s, done = stage(), []
            os.unlink({hold!r})
            header, content = slots.fill(1)
            staged = s.put(header, lambda: done.append(slots.spoil(1)))
            eventually(lambda: s._failed, "the wait fails")
            try:
                s.put(slots.fill(2)[0], lambda: None)
            except RuntimeError as e:
                print(e)
            print(done)
            open({hold!r}, "w").close()
            np.testing.assert_array_equal(staged.take()["label"].get(), content["label"])
            s.close()
            print(len(done))
            """)
        self.assertRegex(got, r"\Aa batch could not be copied to cuda:0: cuEventSynchronize: operation not permitted .*\(CUDA error 900\)\. Resume .*\n\[\]\n1\Z")

    def test_a_slot_stays_where_the_end_of_its_copy_is_never_known(self):
        got = self.outcome("cuEventSynchronize:1=900;cuStreamSynchronize:*=900", """
            s, done = stage(), []
            s.put(slots.fill(1)[0], lambda: done.append(1))
            eventually(lambda: s._failed, "the wait fails")
            s.close()
            print(done, slots.memory.closed)
            """)
        self.assertRegex(got, r"\A\[\] False\Z")


if __name__ == "__main__":
    unittest.main()
