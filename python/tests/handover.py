"""A server's side of the slots' handover, in this process: for tests that play the server by hand."""

import json
import mmap
import os
import socket
import struct
import tempfile
import threading

HEADER = 4096


class Pool:
    """slots of slot_bytes in a memfd, given to whoever asks with the key. gone is set when a taker has hung up."""

    def __init__(self, slots=3, slot_bytes=HEADER + 8192, key="k", answer=None):
        self.slots, self.slot_bytes, self.key = slots, slot_bytes, key
        self.fd = os.memfd_create("shoal-test")
        os.ftruncate(self.fd, slots * slot_bytes)
        self.memory = mmap.mmap(self.fd, slots * slot_bytes)
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "feed.sock")
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self.gone = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                c, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(c,), daemon=True).start()

    def _serve(self, c):
        with c:
            start = self._exactly(c, 12)
            assert start[:8] == b"SHOALFD1"
            ask = json.loads(self._exactly(c, struct.unpack("<I", start[8:])[0]))
            answer = self._answer or {"v": 1, "slots": self.slots, "slot_bytes": self.slot_bytes}
            if ask != {"v": 1, "key": self.key}:
                answer = {"v": 1, "error": "no such pool"}
            text = json.dumps(answer).encode()
            text = struct.pack("<I", len(text)) + text
            if "error" in answer:
                c.sendall(text)
            else:
                socket.send_fds(c, [text[:3]], [self.fd])  # in pieces, as a stream may deliver it
                c.sendall(text[3:])
            while c.recv(1):
                pass
        self.gone.set()

    @staticmethod
    def _exactly(c, n):
        got = b""
        while len(got) < n:
            got += c.recv(n - len(got))
        return got

    def fill(self, slot, payload, sequence=1, epoch=0, index=0, flags=0):
        """A filling of the slot, with its header."""
        at = (slot - 1) * self.slot_bytes
        struct.pack_into("<8sIIIIQIIQ", self.memory, at, b"SHOALSLT", 1, HEADER, slot, flags, sequence, epoch, 1, index)
        self.memory[at + HEADER:at + HEADER + len(payload)] = payload

    def payload(self, slot, n):
        at = (slot - 1) * self.slot_bytes + HEADER
        return self.memory[at:at + n]

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.memory.close()
        os.close(self.fd)
        self.folder.cleanup()

