"""The client's side of TestClientModel (internal/shortcut): reads files by shoal.open, amid exceptions, threads and
forks."""

import json
import os
import signal
import sys
import threading
import time

import shoal._open as client

client._RECONNECT = 0.0
client._AGAIN = 0.01
CODE = client._read.__code__.co_filename


class Interrupted(BaseException):
    pass


KINDS = {"Interrupted": Interrupted, "TimeoutError": TimeoutError, "KeyboardInterrupt": KeyboardInterrupt}
root = ""


def read(i):
    path = f"{root}/c/{i:02d}.bin"
    r = dict(Path=path, Begin=time.monotonic_ns(), Got="", Raised="", Round=False)
    try:
        with client.open(path) as f:
            got, r["Round"] = f.read(), isinstance(f, client.File)
    except BaseException as e:
        r["Raised"] = type(e).__name__ if type(e) in KINDS.values() else repr(e)
    else:
        r["Got"] = got.decode()
    r["End"] = time.monotonic_ns()
    return r


def interrupted(play, act):
    """Does something with one exception in its midst."""
    left, kind = play["Step"], KINDS.get(play["Kind"])

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != CODE or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event in ("opcode", "line"):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise kind
        return trace

    def handler(*_):
        raise kind

    signal.signal(signal.SIGALRM, handler)
    try:
        if play["Step"]:
            sys.settrace(trace)
        if play["Micros"]:
            signal.setitimer(signal.ITIMER_REAL, play["Micros"] / 1e6)
        return act()
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def until(play, act):
    """Repeats it until the exception has come inside, not beside, act."""
    while True:
        try:
            return interrupted(play, act)
        except BaseException as e:
            if type(e) not in KINDS.values():
                raise
            play = dict(play, Step=0, Micros=0)


def plainly(play):
    got = []
    until(play, lambda: [got.append(read(i)) for i in play["Files"]])
    return got


def threads(play):
    got = []
    all = [threading.Thread(target=lambda: [got.append(read(i)) for i in play["Files"]]) for _ in range(3)]
    for t in all:
        t.start()
    got += plainly(play)
    for t in all:
        t.join()
    return got


def child(act):
    """Runs it in a forked child as well, and returns what both have read."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(w, json.dumps(act()).encode())
        finally:
            os._exit(0)
    got = act()
    os.close(w)
    with os.fdopen(r, "rb") as f:
        theirs = json.load(f)
    os.waitpid(pid, 0)
    return got + theirs


def fork(play):
    return child(lambda: plainly(play))


def handler(play):
    """A handler that forks in the midst of a read, which then goes on in both; and one that reads itself."""
    got, mine, parent = [], [], os.getpid()
    r, w = os.pipe()
    pid, forked = None, 0

    def on_alarm(*_):
        nonlocal pid, forked
        mine.append(read(play["Files"][0]))
        forked = time.monotonic_ns()
        pid = os.fork()

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, (play["Micros"] or 300) / 1e6)
    for i in play["Files"]:
        got.append(read(i))
        if got[-1]["Begin"] < forked < got[-1]["End"] and not got[-1]["Round"]:
            got.pop()  # both have read with one offset
    while pid is None:
        time.sleep(0.0001)
    if os.getpid() != parent:
        got.append(read(play["Files"][-1]))
        os.write(w, json.dumps(got).encode())
        os._exit(0)
    os.close(w)
    with os.fdopen(r, "rb") as f:
        theirs = json.load(f)
    os.waitpid(pid, 0)
    return got + mine + theirs


def forget(_):
    for mount in client._mounts.values():
        if mount.known is not None:
            mount.known.places.clear()
    return []


def begin(play):
    global root
    root = play["Root"]
    for mount in client._mounts.values():
        mount.leave(mount.known)
    client._mounts.clear()
    client._folders.clear()
    return []


for line in sys.stdin:
    play = json.loads(line)
    print(json.dumps(globals()[play["Do"]](play)), flush=True)
