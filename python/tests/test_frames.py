"""Frames: messages on a connection, whatever the pieces in which they come."""

import queue
import signal
import socket
import struct
import threading
import time
import unittest
from types import SimpleNamespace

import support  # noqa: F401: the path of shoal

from shoal import FeedError, _link
from shoal._frames import FrameError, Frames


def frame(message):
    return struct.pack("<I", len(message)) + message


class FramesCase(unittest.TestCase):
    def setUp(self):
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.addCleanup(self.here.close)
        self.addCleanup(self.there.close)
        self.frames = Frames(self.here)

    def test_any_pieces(self):
        messages = [b"a", bytes(300), bytes(range(256)) * 40]
        stream = b"".join(map(frame, messages))
        for size in (1, 3, 4, 5, 1000, len(stream)):
            with self.subTest(size=size):
                sender = threading.Thread(
                    target=lambda: [self.there.sendall(stream[at:at + size]) for at in range(0, len(stream), size)])
                sender.start()
                self.assertEqual([self.frames.get(10) for _ in messages], messages)
                sender.join()

    def test_nothing_comes(self):
        self.assertIsNone(self.frames.get(0))
        begin = time.monotonic()
        self.assertIsNone(self.frames.get(0.05))
        self.assertGreaterEqual(time.monotonic() - begin, 0.05)
        self.there.sendall(b"\x05\0")  # half a head
        self.assertIsNone(self.frames.get(0.01))
        self.there.sendall(b"\0\0abcde" + frame(b"next"))
        self.assertEqual([self.frames.get(0), self.frames.get(0)], [b"abcde", b"next"])

    def test_the_end(self):
        self.there.sendall(frame(b"last") + b"\x05\0\0\0ab")  # torn by the other end's death
        self.there.close()
        self.assertEqual(self.frames.get(1), b"last")
        for _ in range(2):
            with self.assertRaises(ConnectionError):
                self.frames.get(1)
        self.frames.send(b"for nobody")

    def test_all_was_said(self):
        self.there.sendall(frame(b"last") + frame(b""))
        self.assertEqual(self.frames.get(1), b"last")
        for _ in range(2):
            with self.assertRaises(EOFError):
                self.frames.get(1)

    def test_too_long(self):
        self.there.sendall(b"\xff\xff\xff\xff")
        with self.assertRaisesRegex(FrameError, "4294967295 bytes"):
            self.frames.get(1)

    def test_shut_by_another_thread(self):
        threading.Timer(0.05, self.frames.shut).start()
        with self.assertRaises(ConnectionError):
            self.frames.get(60)

    def test_closed(self):
        self.here.close()
        with self.assertRaises(ConnectionError):
            self.frames.get(1)
        self.frames.send(b"for nobody")
        self.frames.shut()

    def test_a_timeout_of_the_trainer(self):
        """What a handler of a signal raises does not look like the end of the connection."""
        def handler(*_):
            raise TimeoutError("mine")

        class Interrupted:
            def recv(self, *_):
                signal.raise_signal(signal.SIGALRM)

            sendall = recv

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handler))
        self.frames._connection = Interrupted()
        for do in (lambda: self.frames.get(1)), (lambda: self.frames.send(b"credit")):
            with self.assertRaisesRegex(TimeoutError, "^mine$"):
                do()

    def test_several_at_once(self):
        self.frames.send(b"one", b"", b"three")
        self.assertEqual(self.there.recv(100), frame(b"one") + frame(b"") + frame(b"three"))

    def test_the_end_comes_as_a_wait_does(self):
        # A wait is in vain; the last message, its end and the stream's come before anybody looks at the stream.
        link = _link.Link.__new__(_link.Link)
        link._ready, link._frames, link._address = queue.SimpleQueue(), self.frames, SimpleNamespace(addr="unix:///x")
        link._item = lambda message: ("batch", message)
        get = self.frames.get

        def in_vain(timeout):
            self.frames.get = get
            self.assertIsNone(get(0))
            self.there.sendall(frame(b"last") + frame(b""))
            link._ready.put(("error", FeedError("it was all", _link._ENDED)))

        self.frames.get = in_vain
        self.assertIsNone(link._poll(10))
        self.assertEqual(link._poll(10), ("batch", b"last"))
        kind, error = link._poll(10)
        self.assertEqual((kind, error.code), ("error", _link._ENDED))


if __name__ == "__main__":
    unittest.main()
