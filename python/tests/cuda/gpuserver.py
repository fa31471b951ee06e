"""What shoal-gpu does with its buffers, for test_import.py: makes them, hands them over on the socket whose descriptor
is the argument, then fills and reads one as it is told, a line of JSON each."""

import ctypes
import json
import os
import socket
import struct
import sys

from cudasupport import _cuda, planes

ROWS, SHAPE = 2, (2, 3, 4, 4)
PLANES, SIZE = planes(("data", "uint8", SHAPE), ("label", "int64", (ROWS,)), ("id", "int64", (ROWS,)),
                      ("valid", "uint8", (ROWS,)))
FIRST = PLANES[1].offset
SLOTS, SLOT_BYTES, HOST_BYTES = 2, 2 << 20, SIZE - FIRST


class Property(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("device", ctypes.c_int),
                ("_", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    device = _cuda.Device.open("cuda:0")
    d, at = device.driver, []
    fds, events = [], []
    with device:
        stream = device.stream()
        for _ in range(SLOTS):
            memory, address, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
            d.cuMemCreate(ctypes.byref(memory), ctypes.c_size_t(SLOT_BYTES), ctypes.byref(Property(1, 1, 1, 0)),
                          ctypes.c_uint64(0))
            d.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(SLOT_BYTES), ctypes.c_size_t(0),
                                  ctypes.c_uint64(0), ctypes.c_uint64(0))
            d.cuMemMap(address, ctypes.c_size_t(SLOT_BYTES), ctypes.c_size_t(0), memory, ctypes.c_uint64(0))
            d.cuMemSetAccess(address, ctypes.c_size_t(SLOT_BYTES), ctypes.byref((ctypes.c_int * 3)(1, 0, 3)),
                             ctypes.c_size_t(1))
            d.cuMemExportToShareableHandle(ctypes.byref(fd), memory, 1, ctypes.c_uint64(0))
            fds.append(fd.value)
            at.append(address)
            pair = []
            for _ in range(2):
                event, handle = ctypes.c_void_p(), (ctypes.c_ubyte * 64)()
                d.cuEventCreate(ctypes.byref(event), 1 | 2 | 4)
                d.cuIpcGetEventHandle(ctypes.byref(handle), event)
                pair.append((event, bytes(handle).hex()))
            events.append(pair)
    host = os.memfd_create("host")
    os.ftruncate(host, SLOTS * HOST_BYTES)
    answer = json.dumps({"v": 1, "slots": SLOTS, "slot_bytes": SLOT_BYTES, "device": "cuda:0", "uuid": device.uuid,
                         "host_bytes": HOST_BYTES,
                         "events": [{"ready": a, "free": b} for (_, a), (_, b) in events]}).encode()
    socket.send_fds(connection, [struct.pack("<I", len(answer)) + answer], [*fds, host])
    lines = connection.makefile("rw")
    for line in lines:
        order = json.loads(line)
        slot, value = order["slot"] - 1, order["value"]
        (ready, _), (free, _) = events[slot]
        with device:
            d.cuStreamWaitEvent(ctypes.c_void_p(stream), free, 0)
            d.cuMemsetD8Async(at[slot], ctypes.c_ubyte(value), ctypes.c_size_t(SIZE), ctypes.c_void_p(stream))
            d.cuEventRecord(ready, ctypes.c_void_p(stream))
        os.pwrite(host, bytes([value]) * HOST_BYTES, slot * HOST_BYTES)
        print("queued", file=lines, flush=True)


if __name__ == "__main__":
    main()
