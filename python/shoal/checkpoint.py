"""Waits for checkpoints that `shoal ckpt` carries to a bucket.

import shoal.checkpoint
torch.save(state, "/nvme/ckpt/step-1000/model.pt")
shoal.checkpoint.wait("/nvme/ckpt/step-1000")  # it survives the loss of this machine from here on
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import time
import urllib.parse
from typing import Any, Dict, Optional, Union

from ._run import by_handler

_SOCKET = os.path.join(".shoal", "ckpt.sock")


class _Connection(http.client.HTTPConnection):
    """To the daemon of a folder. The socket's own path may be longer than an address can be."""

    def __init__(self, folder: str, timeout: float) -> None:
        super().__init__("shoal", timeout=timeout)
        self._folder = folder

    def connect(self) -> None:
        home = os.open(os.path.join(self._folder, os.path.dirname(_SOCKET)), os.O_PATH | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{home}/{os.path.basename(_SOCKET)}")
        finally:
            os.close(home)


def wait(path: Union[str, "os.PathLike[str]"], timeout: Optional[float] = None) -> None:
    """Returns when the bucket has all that is at or below path now: a file, or a folder.

    It waits for files that are being written. path lies in a folder that `shoal ckpt` carries. timeout is in seconds.

    Raises FileNotFoundError if there is nothing at path that can be published, ConnectionError if no daemon carries it,
    PermissionError if this user may not ask it, and TimeoutError.
    """
    end = None if timeout is None else time.monotonic() + timeout
    folder, inside = _carried(os.fspath(path))
    look = True
    while True:
        state = _ask(folder, inside, look, 60 if end is None else min(60, max(end - time.monotonic(), 0) + 5))
        look = False
        if state["whole"]:
            return
        if end is not None and time.monotonic() >= end:
            raise TimeoutError(f"{path} is not whole in the bucket after {timeout} s: {state['lacks']} is "
                               f"{state['why']}")


def _carried(path: str) -> "tuple[str, str]":
    parent, name = os.path.split(os.path.abspath(path))
    path = os.path.join(os.path.realpath(parent), name)
    folder = path
    denied = None
    while True:
        try:
            os.lstat(os.path.join(folder, _SOCKET))
            home, around = os.lstat(os.path.join(folder, os.path.dirname(_SOCKET))), os.lstat(folder)
            # In a folder like /tmp anybody can make one, which says what he likes.
            if not around.st_mode & stat.S_IWOTH or home.st_uid in (0, os.geteuid(), around.st_uid):
                return folder, os.path.relpath(path, folder)
        except PermissionError as e:
            denied = denied or e
        except OSError:
            pass
        if folder == os.path.dirname(folder):
            raise denied or ConnectionError(f"{path}: no shoal ckpt carries it (start one: shoal ckpt DIR "
                                            f"s3://BUCKET/PREFIX)")
        folder = os.path.dirname(folder)


def _ask(folder: str, inside: str, look: bool, limit: float) -> Dict[str, Any]:
    connection = _Connection(folder, timeout=limit)  # an answer comes within seconds
    try:
        question = {"path": os.fsencode(inside), **({"look": "1"} if look else {})}
        connection.request("GET", "/wait?" + urllib.parse.urlencode(question))
        answer = connection.getresponse()
        body: Dict[str, Any] = json.loads(answer.read())
    except PermissionError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as e:
        if by_handler(e):  # the trainer's own timeout, perhaps
            raise
        if isinstance(e, socket.timeout) and limit < 60:
            raise TimeoutError(f"the shoal ckpt of {folder} has not answered within the timeout") from e
        raise ConnectionError(f"the shoal ckpt of {folder} does not answer (start it again): {e}") from e
    finally:
        connection.close()
    if answer.status != 200:
        raise FileNotFoundError(body["error"])
    return body
