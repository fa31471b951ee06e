"""Times what a training loop waits for and what it computes, and tells it line by line as JSON.

    {"event": "start", ...}       once, when the loop begins
    {"event": "step", "t", "wait", "compute", "samples", "loss"}   seconds; t counts from the start
    {"event": "end", "seconds", "cpu_seconds", ...}
"""

import json
import os
import resource
import sys
import time


class Recorder:
    def __init__(self):
        # The pipe to whoever started us; what the trainer itself prints goes to stderr.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def _write(self, event, **fields):
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def steps(self, loader, limit, size, **about):
        """Yields up to limit batches of loader (None: all), timing them. size(batch) counts its samples."""
        self._write("start", **about)
        self._cpu = self._cpu_now()
        self._begin = time.perf_counter()
        batches = iter(loader)  # starts the workers: a wait like any other
        n, asked = 0, self._begin
        while limit is None or n < limit:
            batch = next(batches, None)
            if batch is None:
                break
            got = time.perf_counter()
            self.loss = None
            yield batch
            asked_next = time.perf_counter()
            self._write("step", t=got - self._begin, wait=got - asked, compute=asked_next - got,
                        samples=size(batch), loss=self.loss)
            n, asked = n + 1, asked_next
        self._seconds = time.perf_counter() - self._begin
        del batches  # ends the workers, so that their CPU time can be counted

    def end(self, **about):
        self._write("end", seconds=self._seconds, cpu_seconds=self._cpu_now() - self._cpu, **about)
        self._out.close()

    @staticmethod
    def _cpu_now():
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += usage.ru_utime + usage.ru_stime
        return total


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(1)
