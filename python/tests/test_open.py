"""Files that shoal.open has in memory beside those of the builtin open: every method with good and bad arguments."""

import errno
import io
import itertools
import json
import os
import resource
import socket
import struct
import sys
import tempfile
import threading
import unittest
from unittest import mock

import support  # noqa: F401  the path
from shoal import _open

CONTENT = b"".join(b"line %d\n" % i for i in range(3000))  # larger than a buffer
BAD = (None, "x", 1.5, -1, -2, -10**6, 0, 1, 7, 10**6, 2**31, 2**63, -2**63 - 1, b"x", (), True)


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "file.bin")
        with open(self.path, "wb") as f:
            f.write(CONTENT)

    def both(self, before, act):
        """What happens to both files: the result and the position after it, or the exception's type and number."""
        told = []
        for file in (open(self.path, "rb", io.DEFAULT_BUFFER_SIZE), _open.File(_open._Bytes(CONTENT, self.path))):
            with file as f:
                try:
                    before(f)
                    result = act(f)
                    told.append(("returned", type(result), result if not isinstance(result, io.RawIOBase) else None,
                                 None if f.closed else f.tell(), f.closed))
                except Exception as e:
                    told.append((type(e), getattr(e, "errno", None)))
        return told

    def test_every_method(self):
        befores = {"begin": lambda f: None, "middle": lambda f: f.seek(9000), "read": lambda f: f.read(100),
                   "end": lambda f: f.read(),
                   "beyond": lambda f: f.seek(10**6), "closed": lambda f: f.close()}
        calls = {}
        for name in ("read", "read1", "readline", "readlines", "readinto", "readinto1", "peek", "seek", "truncate",
                     "write", "writelines", "flush",
                     "tell", "readable", "writable", "seekable", "isatty", "close", "__next__", "__iter__", "__enter__",
                     "__exit__"):
            if name == "__iter__" or name == "__enter__":
                calls[name] = lambda f, name=name: getattr(f, name)() is f
                continue
            calls[name] = lambda f, name=name: getattr(f, name)()
            for bad in BAD:
                calls[f"{name}({bad!r})"] = lambda f, name=name, bad=bad: getattr(f, name)(bad)
            calls[name + "(1, 2, 3, 4)"] = lambda f, name=name: getattr(f, name)(1, 2, 3, 4)
        for whence in (-1, 0, 1, 2, os.SEEK_DATA, os.SEEK_HOLE, 5, None, "x", 1.5):
            for offset in BAD:
                calls[f"seek({offset!r}, {whence!r})"] = lambda f, offset=offset, whence=whence: f.seek(offset, whence)
        for name in ("name", "mode", "closed", "getvalue", "getbuffer", "nothing"):
            calls[name] = lambda f, name=name: getattr(f, name)
        for name, args in (("readall", ()), ("read", (7,)), ("write", (b"x",)), ("truncate", (1,)), ("seek", (-1,))):
            calls[f"raw.{name}"] = lambda f, name=name, args=args: getattr(f.raw, name)(*args)
        calls["fileno"] = lambda f: isinstance(f.fileno(), int)
        for when, before in befores.items():
            for what, act in calls.items():
                with self.subTest(f"{when}: {what}"):
                    plain, ours = self.both(before, act)
                    self.assertEqual(plain, ours)

    def test_fileno(self):
        f = _open.File(_open._Bytes(CONTENT, self.path))
        f.read(10)
        fd = f.fileno()
        self.assertEqual((os.fstat(fd).st_size, os.pread(fd, 100, 50), f.fileno()), (len(CONTENT), CONTENT[50:150], fd))
        self.assertEqual(f.read(), CONTENT[10:])
        with self.assertRaises(OSError):
            os.write(fd, b"x")
        f.close()
        with self.assertRaises(OSError) as caught:
            os.fstat(fd)
        self.assertEqual(caught.exception.errno, errno.EBADF)

    def answered(self, offset, owner=None):
        """What open reads of a file below a folder .shoal, where somebody answers that it lies at an offset of a
        segment of his."""
        folder = os.path.dirname(self.path)
        cache = tempfile.TemporaryDirectory()
        self.addCleanup(cache.cleanup)
        with open(os.path.join(cache.name, "00000001.seg"), "wb") as f:
            f.write(bytes(16) + struct.pack("<Q", 7) + b"another")
        os.makedirs(os.path.join(folder, ".shoal"))
        with open(os.path.join(folder, ".shoal", "stats"), "w", encoding="utf-8") as f:
            json.dump({"shortcut_v2": "key", "cache_dir": cache.name}, f)
        if owner is not None:
            os.chown(os.path.join(folder, ".shoal"), owner, owner)
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(os.path.join(cache.name, "shoal.sock"))
        listener.listen()

        def serve():
            conn = listener.accept()[0]
            with conn, conn.makefile("rb") as f:
                f.readline()
                hello = struct.pack("<Q", 1) + cache.name.encode()
                conn.sendall(struct.pack("<IB", len(hello), ord("H")) + hello)
                f.read(5)
                body = f.read(4) + struct.pack("<QIIIQQI", 1, 1, 0, 1, 7, offset, 7) + b"file.bin\0"
                conn.sendall(struct.pack("<IB", len(body), ord("P")) + body)
                f.read()

        threading.Thread(target=serve, daemon=True).start()
        with _open.open(self.path) as f:
            return f.read()

    def test_answers(self):
        self.assertEqual(self.answered(24), b"another")

    def test_descriptors(self):
        """A program that waits for its own by select can have none above 1023."""
        self.assertEqual(self.answered(24), b"another")
        held = [s.fileno() for known in list(_open._connections) for s in known.segments.values()]
        self.assertGreaterEqual(min(held), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1024))

    def test_a_file_mounted_over_this_one(self):
        """As containers have theirs in a folder of others: its folder's device does not show it."""
        with mock.patch.object(_open, "mount_points", lambda: ["/", os.path.realpath(self.path)]):
            self.assertEqual(self.answered(24), CONTENT)

    def test_an_exception_of_a_handler_in_a_library(self):
        """It is not lost there, whatever that expects of files."""
        library = os.path.dirname.__code__.co_filename
        for step in itertools.count(1):
            left = step

            def trace(frame, event, _):
                nonlocal left
                if frame.f_code.co_filename != library:
                    return None
                left -= event == "line"
                if left == 0:
                    sys.settrace(None)
                    raise TimeoutError("mine")
                return trace

            _open._folders.clear()
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                with _open.open(self.path):
                    pass
            except TimeoutError:
                continue
            finally:
                sys.settrace(before)
            self.assertGreater(left, 0)
            break
        self.assertGreater(step, 1)

    def test_odd_answers(self):
        self.assertEqual(self.answered(2**64 - 1), CONTENT)

    def test_another_users_folder(self):
        """In a folder like /tmp anybody can make a folder .shoal. It is no mount."""
        if os.geteuid() != 0:
            self.skipTest("only root can make another user's folder")
        self.assertEqual(self.answered(24, owner=1234), CONTENT)


if __name__ == "__main__":
    unittest.main()
