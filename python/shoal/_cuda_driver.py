"""libcuda.so.1 by ctypes: the calls that batches on a device need, and their errors."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from typing import Any, Dict, Optional

OLDEST = 10010  # CUDA 10.1, the first with cuThreadExchangeStreamCaptureMode
_CAPABILITY = 5, 0  # the target of finish.ptx

INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, ALREADY_REGISTERED, NOT_READY, CAPTURE_IMPLICIT = 1, 2, 100, 712, 600, 906
_MAJOR, _MINOR, _VMM, _MULTIPROCESSORS = 75, 76, 102, 16
_EVENT_FLAGS = 1 | 2  # wait by sleeping; no timing
_NON_BLOCKING = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Unavailable(RuntimeError):
    """There is no such device, or it is not usable: batches stay in host memory. The text has the cause and a
    remedy."""


class CUDAError(RuntimeError):
    """A call of the driver failed. code is CUresult's number."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} (CUDA error {code})")
        self.code = code


class Driver:
    """The library. driver.cuX(...) raises CUDAError unless the call returns 0."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._calls: Dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Unavailable(f"the NVIDIA driver has no {name}: it is too old; install a newer one") from None
        function.restype = ctypes.c_int

        def call(*args: Any) -> None:
            code = function(*args)
            if code:
                raise CUDAError(name, code, self.text(code))

        self._calls[name] = call
        setattr(self, name, call)
        return call

    def text(self, code: int) -> str:
        """The driver's text for a result."""
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(code, ctypes.byref(text)) or not text.value:
            return "unknown error"
        return text.value.decode("ascii", "replace")


_driver: Optional[Driver] = None
_driver_lock = threading.Lock()


def driver() -> Driver:
    """The library, initialised. Raises Unavailable."""
    global _driver
    with _driver_lock:
        if _driver is None:
            try:
                loaded = Driver(ctypes.CDLL("libcuda.so.1"))
            except OSError as e:
                raise Unavailable(f"there is no NVIDIA driver here ({e}). Install it, or run the container with GPUs "
                                  "(docker run --gpus all; in Kubernetes a limit of nvidia.com/gpu)") from None
            try:
                loaded.cuInit(0)
            except CUDAError as e:
                if e.code == NO_DEVICE:
                    raise Unavailable("the driver sees no GPU: look at `nvidia-smi -L`; CUDA_VISIBLE_DEVICES hides GPUs") from None
                raise Unavailable(f"the driver does not start: {e}. Check that `nvidia-smi` works") from None
            version = ctypes.c_int()
            loaded.cuDriverGetVersion(ctypes.byref(version))
            if version.value < OLDEST:
                raise Unavailable(f"the driver supports CUDA {_version(version.value)}; {_version(OLDEST)} or newer is "
                                  f"needed: update it")
            _driver = loaded
        return _driver


class Relaxed:
    """`with Relaxed(driver):` lets this thread call the driver while another thread captures a graph. By default a
    wait, a query or an allocation in any thread fails while torch captures a graph, and invalidates the capture."""

    def __init__(self, library: Driver) -> None:
        self._exchange, self._mode = library.cuThreadExchangeStreamCaptureMode, ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._exchange(ctypes.byref(self._mode))

    def __exit__(self, *exc: Any) -> None:
        self._exchange(ctypes.byref(self._mode))  # _mode holds the previous mode


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def address(value: int) -> ctypes.c_uint64:
    """An address of the device."""
    return ctypes.c_uint64(value)


def handle(stream: Any) -> int:
    """A CUstream's number, from a number or from an object such as torch.cuda.Stream or cupy.cuda.Stream."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    return int(stream)


class Device:
    """A GPU, by its primary context, which torch and other libraries of this process also use.

    `with device:` makes the context current in the thread, and is safe during the capture of a graph (Relaxed).
    """

    @staticmethod
    def open(name: str) -> "Device":
        """name: "cuda" (torch's current device, else the first) or "cuda:N", as CUDA_VISIBLE_DEVICES numbers them.
        Raises Unavailable."""
        match = re.fullmatch(r"cuda(?::(\d+))?", str(name))
        if match is None:
            raise ValueError(f"device {name!r}: it must be \"cuda\" or \"cuda:N\"")
        cuda = torch_cuda()
        ordinal = int(match[1]) if match[1] else cuda.current_device() if cuda is not None else 0
        return Device(driver(), ordinal)

    def __init__(self, library: Driver, ordinal: int) -> None:
        self.driver, self.ordinal, self.pid = library, ordinal, os.getpid()
        self._entered = threading.local()
        count = ctypes.c_int()
        library.cuDeviceGetCount(ctypes.byref(count))
        if ordinal >= count.value:
            raise Unavailable(f"there is no device cuda:{ordinal}: the driver sees {count.value}, from cuda:0 on "
                              "(CUDA_VISIBLE_DEVICES hides GPUs and renumbers them)")
        number = ctypes.c_int()
        library.cuDeviceGet(ctypes.byref(number), ordinal)
        self.number = number.value
        capability = self.attribute(_MAJOR), self.attribute(_MINOR)
        if capability < _CAPABILITY:
            raise Unavailable(f"cuda:{ordinal} has compute capability {capability[0]}.{capability[1]}; "
                              f"{_CAPABILITY[0]}.{_CAPABILITY[1]} or "
                              "newer is needed")
        context = ctypes.c_void_p()
        try:
            library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.number)
        except CUDAError as e:
            raise Unavailable(f"cuda:{ordinal} gives no context: {e}. Its memory may be full, or another process may "
                              "use it in exclusive mode (see nvidia-smi)") from None
        self._context = context

    @property
    def name(self) -> str:
        return f"cuda:{self.ordinal}"

    @property
    def multiprocessors(self) -> int:
        return self.attribute(_MULTIPROCESSORS)

    @property
    def maps_memory(self) -> bool:
        """Whether memory of another process can be mapped."""
        return bool(self.attribute(_VMM))

    @property
    def uuid(self) -> str:
        raw = (ctypes.c_ubyte * 16)()
        try:
            call = self.driver.cuDeviceGetUuid_v2  # knows MIG instances
        except Unavailable:
            call = self.driver.cuDeviceGetUuid
        call(ctypes.byref(raw), self.number)
        digits = bytes(raw).hex()
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self.driver.cuDeviceGetAttribute(ctypes.byref(value), which, self.number)
        return value.value

    def __enter__(self) -> "Device":
        self.driver.cuCtxPushCurrent_v2(self._context)
        relaxed = Relaxed(self.driver)
        relaxed.__enter__()
        self._entered.__dict__.setdefault("modes", []).append(relaxed)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._entered.modes.pop().__exit__()
        self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def usable(self) -> bool:
        """Whether driver calls are still possible: not in a forked child, nor at the interpreter's exit."""
        return self.pid == os.getpid() and not sys.is_finalizing()

    # All methods below need the context to be current.

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self.driver.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
        assert made.value is not None
        return made.value

    def event(self) -> int:
        made = ctypes.c_void_p()
        self.driver.cuEventCreate(ctypes.byref(made), _EVENT_FLAGS)
        assert made.value is not None
        return made.value

    def destroy(self, event: int) -> None:
        self.driver.cuEventDestroy_v2(ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self.driver.cuEventRecord(ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        """Makes later work on the stream wait for the event."""
        self.driver.cuStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def synchronize(self, event: int) -> None:
        self.driver.cuEventSynchronize(ctypes.c_void_p(event))

    def capturing(self, stream: int) -> bool:
        """Whether the stream, or one that it would have to wait for as the default stream does, is being captured into
        a graph."""
        status = ctypes.c_int()
        try:
            self.driver.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
        except CUDAError as e:
            if e.code != CAPTURE_IMPLICIT:
                raise
            return True
        return status.value != 0

    def allocate(self, size: int) -> int:
        made = ctypes.c_uint64()
        self.driver.cuMemAlloc_v2(ctypes.byref(made), ctypes.c_size_t(size))
        return made.value

    def free(self, at: int) -> None:
        self.driver.cuMemFree_v2(address(at))

    def upload(self, to: int, source: int, size: int, stream: int) -> None:
        """An asynchronous copy from page-locked memory."""
        self.driver.cuMemcpyHtoDAsync_v2(address(to), ctypes.c_void_p(source), ctypes.c_size_t(size),
                                         ctypes.c_void_p(stream))

    def download(self, to: Any, source: int, size: int) -> None:
        """A synchronous copy to host memory."""
        self.driver.cuMemcpyDtoH_v2(to, address(source), ctypes.c_size_t(size))


_torch_cuda: Any = None


def torch_cuda() -> Any:
    """torch.cuda if this process uses torch and it has a device; else None."""
    global _torch_cuda
    if _torch_cuda is None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_available():
            _torch_cuda = cuda
    return _torch_cuda
