"""What the tests share: the test server of the Go side as a subprocess."""

import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

# The binary of the Go test that runs these tests.
BINARY = os.environ.get("SHOAL_FEEDSERVER")
CLASSES = 10


class Server:
    """The test server, with the dataset of loader/dataset_test.go."""

    def __init__(self, *args):
        if BINARY is None:
            raise RuntimeError("SHOAL_FEEDSERVER is not set: run the tests by `go test ./loader`, or name the "
                               "binary of `go test -c ./loader` there")
        self.process = subprocess.Popen([BINARY, "serve", *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        self.addr = self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(10)


def sample(i):
    """The content of sample i."""
    return bytes((i * 31 + j * 7) & 255 for j in range(20 + i % 50))


def ramp(i, n, seed, epoch, occurrence=0):
    """What the transform ramp makes of sample i, as n numbers."""
    src = sample(i)
    return [(src[k % len(src)] + seed + 7 * epoch + 13 * i + 31 * occurrence + k) & 255 for k in range(n)]
