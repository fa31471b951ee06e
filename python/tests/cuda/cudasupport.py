"""What the device tests share: slots as a server would fill them, and a trainer's work on the device."""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
import types

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

import numpy as np

from shoal import _cuda, _cuda_driver

HEADER = 4096
DIR = os.environ.get("SHOAL_CUDA_DIR", "")  # of the files that hold operations: see Hold

# The trainer's step: copies n words, after whatever the script holds it for.
STEP = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry step(.param .u64 src, .param .u64 dst, .param .u32 n)
{
.reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<6>;
ld.param.u64 %rd1, [src]; ld.param.u64 %rd2, [dst]; ld.param.u32 %r1, [n];
mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
mad.lo.s32 %r5, %r2, %r3, %r4;
setp.ge.u32 %p1, %r5, %r1;
@%p1 bra DONE;
mul.wide.u32 %rd3, %r5, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
ld.global.u32 %r6, [%rd4]; st.global.u32 [%rd5], %r6;
DONE:
ret;
}
\0"""


class Hold:
    """Holds operations of a kind (step, HtoD) in their streams, as the script's hold.KIND=DIR/KIND says, until go()."""

    def __init__(self, kind):
        self._path = os.path.join(DIR, kind)

    def __enter__(self):
        os.unlink(self._path)
        return self

    def go(self):
        with open(self._path, "w"):
            pass

    def __exit__(self, *exc):
        self.go()


def eventually(condition, what):
    """Waits until condition() holds."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never: {what}")
        time.sleep(0.001)


class Trainer:
    """A stream with work on it."""

    def __init__(self, device):
        self.device = device
        with device:
            self.stream = device.stream()
            module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
            device.driver.cuModuleLoadData(ctypes.byref(module), STEP)
            device.driver.cuModuleGetFunction(ctypes.byref(self._kernel), module, b"step")

    def step(self, array):
        """Queues work that reads the array. Returns where the copy of it will be."""
        n = array.nbytes // 4
        address = array.__cuda_array_interface__["data"][0]
        with self.device:
            out = self.device.allocate(4 * n)
            values = ctypes.c_uint64(address), ctypes.c_uint64(out), ctypes.c_uint32(n)
            arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
            self.device.driver.cuLaunchKernel(self._kernel, (n + 63) // 64, 1, 1, 64, 1, 1, 0,
                                              ctypes.c_void_p(self.stream), arguments, None)
        return out

    def busy(self):
        try:
            with self.device:
                self.device.driver.cuStreamQuery(ctypes.c_void_p(self.stream))
        except _cuda.CUDAError as e:
            if e.code != _cuda_driver.NOT_READY:
                raise
            return True
        return False

    def result(self, out, like):
        """What step made of an array like this one."""
        got = np.empty(like.shape, like.dtype)
        with self.device:
            self.device.driver.cuStreamSynchronize(ctypes.c_void_p(self.stream))
            self.device.download(ctypes.c_void_p(got.ctypes.data), out, got.nbytes)
            self.device.free(out)
        return got


class Capture:
    """A graph that a trainer captures as torch.cuda.graph does by default: no unsafe call of any thread may come
    between."""

    def __init__(self, device, blocking=False):
        self._device, self.driver = device, device.driver
        self._stream = ctypes.c_void_p()
        with device:
            self.driver.cuStreamCreate(ctypes.byref(self._stream), 0 if blocking else 1)

    def __enter__(self):
        with self._device:
            self.driver.cuStreamBeginCapture_v2(self._stream, 0)
        return self

    def __exit__(self, *exc):
        graph = ctypes.c_void_p()
        with self._device:
            self.driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            self.driver.cuGraphDestroy(graph)


class TorchCuda:
    """As much of torch.cuda as the client uses, on the driver. As CUDA's runtime has it, a thread is on device 0 until
    it is given another, and a call makes the primary context of the device that it is on."""

    class Stream:
        def __init__(self, device, number):
            self.device, self.cuda_stream = device, number

        def __eq__(self, other):
            return (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __init__(self, driver):
        self.driver, self._thread, runtime = driver, threading.local(), self

        class Event:
            def __init__(self):
                self._event = ctypes.c_void_p()

            def record(self, stream):
                with runtime.device(stream.device):
                    runtime.context()
                    if not self._event:
                        driver.cuEventCreate(ctypes.byref(self._event), 2)
                    driver.cuEventRecord(self._event, ctypes.c_void_p(stream.cuda_stream))

            def query(self):
                runtime.context()
                try:
                    driver.cuEventQuery(self._event)
                except _cuda.CUDAError as e:
                    if e.code != _cuda_driver.NOT_READY:
                        raise
                    return False
                return True

            def synchronize(self):
                runtime.context()
                driver.cuEventSynchronize(self._event)

        self.Event = Event

    def context(self):
        made = ctypes.c_void_p()
        self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), self.current_device())
        self.driver.cuCtxSetCurrent(made)

    def contexts(self):
        """The devices that have one."""
        count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        self.driver.cuDeviceGetCount(ctypes.byref(count))
        out = []
        for n in range(count.value):
            self.driver.cuDevicePrimaryCtxGetState(n, ctypes.byref(flags), ctypes.byref(active))
            out += [n] if active.value else []
        return out

    def is_initialized(self):
        return True

    is_available = is_initialized

    def current_device(self):
        return getattr(self._thread, "device", 0)

    def set_device(self, device):
        self._thread.device = device

    @contextlib.contextmanager
    def device(self, device):
        was = self.current_device()
        self.set_device(device)
        yield
        self.set_device(was)

    def new_stream(self):
        made = ctypes.c_void_p()
        self.context()
        self.driver.cuStreamCreate(ctypes.byref(made), 1)
        return self.Stream(self.current_device(), made.value)

    def current_stream(self):
        return getattr(self._thread, "stream", None) or self.Stream(self.current_device(), 0)

    @contextlib.contextmanager
    def stream(self, stream):
        was = getattr(self._thread, "stream", None)
        with self.device(stream.device):
            self._thread.stream = stream
            yield
            self._thread.stream = was

    def is_current_stream_capturing(self):
        status = ctypes.c_int()
        self.context()
        self.driver.cuStreamIsCapturing(ctypes.c_void_p(self.current_stream().cuda_stream), ctypes.byref(status))
        return status.value != 0

    def cudart(self):
        return types.SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address, size, flags):
        self.context()
        self.driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
        return 0

    def _unregister(self, address):
        self.context()
        self.driver.cuMemHostUnregister(ctypes.c_void_p(address))


def free_memory(device):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with device:
        device.driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value


def plane(name, dtype, shape, offset):
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return types.SimpleNamespace(name=name, dtype=dtype, shape=tuple(shape), offset=offset,
                                 length=size * int(np.prod(shape)))


def planes(*specs):
    """(name, dtype, shape) one after the other, at multiples of 64."""
    out, at = [], 0
    for name, dtype, shape in specs:
        out.append(plane(name, dtype, shape, at))
        at = -(-(at + out[-1].length) // 64) * 64
    return out, at


class Slots:
    """A memfd with slots, and the messages of a session of pictures whose last part is left to a device."""

    def __init__(self, rows=3, height=5, width=7, slots=4, transform="", device=True, seed=1):
        self.rows, self.height, self.width = rows, height, width
        self.transform = f"CenterCrop(size=({height}, {width}))|{transform}|pillow(9.4)" + ("|device" if device else "")
        self._device = device
        self.rng = np.random.default_rng(seed)
        made, size = self.planes(rows)
        self.opened = types.SimpleNamespace(transform=self.transform, planes=made)
        self.slot_bytes = -(-(HEADER + size) // 4096) * 4096
        fd = os.memfd_create("slots")
        os.ftruncate(fd, slots * self.slot_bytes)
        self.memory = mmap.mmap(fd, slots * self.slot_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        self._index = 0

    def planes(self, rows):
        specs = [("data", "uint8", (rows, self.height, self.width, 3))]
        if self._device:
            specs.append(("finish", "uint16", (rows, 4)))
        return planes(*specs, ("label", "int64", (rows,)), ("id", "int64", (rows,)), ("valid", "uint8", (rows,)))

    def array(self, slot, p):
        start = (slot - 1) * self.slot_bytes + HEADER + p.offset
        return np.frombuffer(self.memory, np.uint8)[start:start + p.length].view(p.dtype).reshape(p.shape)

    def fill(self, slot, rows=None):
        """A batch in the slot: its header, and copies of its planes."""
        rows = self.rows if rows is None else rows
        made, size = self.planes(rows)
        for p in made:
            array = self.array(slot, p)
            if p.name == "finish":
                array[:] = 0
                array[:, 2] = self.rng.integers(0, 4, rows)
            elif p.name == "valid":
                array[:] = 1
            else:
                array[...] = self.rng.integers(0, 255, p.shape)
        header = types.SimpleNamespace(slot=slot, planes=made, total_bytes=size, index=self._index, epoch=0)
        self._index += 1
        return header, {p.name: self.array(slot, p).copy() for p in made}

    def spoil(self, slot):
        """What a server does with a slot that was given back."""
        self.array(slot, plane("all", "uint8", (self.slot_bytes - HEADER,), 0))[:] = 0xEE
