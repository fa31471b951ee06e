import os
import signal
import socket
import tempfile
import threading
import unittest

import support  # noqa: F401 (sets the path)
import shoal.checkpoint


class Wait(unittest.TestCase):
    @unittest.skipUnless(os.geteuid() == 0, "makes another user's socket")
    def test_another_users_socket(self):
        """In a folder like /tmp anybody can make one that says everything is in the bucket."""
        for mode, believed in (0o1777, False), (0o755, True):
            with self.subTest(mode=oct(mode)), tempfile.TemporaryDirectory() as folder, socket.socket(
                    socket.AF_UNIX) as listener:
                os.chmod(folder, mode)
                home = os.path.join(folder, ".shoal")
                os.mkdir(home)
                listener.bind(os.path.join(home, "ckpt.sock"))
                listener.listen()
                os.chown(home, 12345, 12345)

                def answer():
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b'HTTP/1.0 200 OK\r\n\r\n{"whole": true}')

                threading.Thread(target=answer, daemon=True).start()
                if believed:
                    shoal.checkpoint.wait(folder)
                else:
                    with self.assertRaisesRegex(ConnectionError, "no shoal ckpt carries it"):
                        shoal.checkpoint.wait(folder)

    def test_a_timeout_of_the_trainer(self):
        """What a handler of a signal raises is no answer of the daemon's."""
        def handler(*_):
            raise TimeoutError("mine")

        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            os.mkdir(os.path.join(folder, ".shoal"))
            listener.bind(os.path.join(folder, ".shoal", "ckpt.sock"))
            listener.listen()  # and never answers
            self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handler))
            with self.assertRaisesRegex(TimeoutError, "^mine$"):
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                shoal.checkpoint.wait(folder)
