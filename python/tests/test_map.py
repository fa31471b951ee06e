"""The trainer's own function on samples: map=."""

import collections
import gc
import io
import queue
import signal
import threading
import time
import unittest
from types import SimpleNamespace

import numpy as np
import torch

from support import CLASSES, ramp, sample
from test_feed import FeedCase

import shoal
from shoal._map import Job, Mapper, collate


class Map(FeedCase):
    def test_raw(self):
        for as_torch in (True, False):
            def read(data, label, i):
                self.assertIsInstance(data, np.ndarray)
                self.assertEqual((io.BytesIO(data).read(), label), (sample(i), i % CLASSES))
                return np.frombuffer(data, np.uint8)[:20].astype(np.float32)

            feed = self.feed(map=read, threads=3, tail="pad", seed=3, as_torch=as_torch)
            plain = self.feed(tail="pad", seed=3, as_torch=as_torch)
            self.assertEqual(len(feed), 11)
            for epoch in range(2):
                plain.set_epoch(epoch)  # zip does not look for its end
                for b, want in zip(feed, plain):
                    self.assertIsInstance(b.data, torch.Tensor if as_torch else np.ndarray)
                    self.assertEqual((tuple(b.data.shape), str(b.data.dtype)[-7:]), ((10, 20), "float32"))
                    self.assertEqual((b.index, b.epoch, b.id.tolist(), b.label.tolist()),
                                     (want.index, want.epoch, want.id.tolist(), want.label.tolist()))
                    for row, i in zip(b.data.tolist(), b.id.tolist()):
                        self.assertEqual(row, list(sample(i)[:20]) if i >= 0 else [0.0] * 20)

    def test_decoded(self):
        for as_torch in (True, False):
            feed = self.feed(transform="ramp(5,4)", seed=7, map=lambda x, label, i: x[:, ::2].sum(), as_torch=as_torch)
            rows = {i: float(v) for b in feed for i, v in zip(b.id.tolist(), b.data.tolist())}
            self.assertEqual(len(rows), 100)
            for i, v in rows.items():
                self.assertEqual(v, np.array(ramp(i, 60, 7, 0), np.int64).reshape(3, 5, 4)[:, ::2].sum())

    def test_ragged_is_a_list(self):
        feed = self.feed(map=lambda x, label, i: x[:i % 5 + 1], tail="pad", order="sequential")
        *_, last = feed
        self.assertIsInstance(last.data, list)
        self.assertEqual([None if x is None else len(x) for x in last.data],
                         [i % 5 + 1 for i in range(100, 103)] + [None] * 7)
        self.assertEqual([bytes(x) for x in last.data[:3]], [sample(i)[:i % 5 + 1] for i in range(100, 103)])

    def test_fields_and_tuples(self):
        feed = self.feed(map=lambda x, label,
                         i: {"data": float(i), "label": label + 100, "pair": (i, np.zeros(3)), "text": str(i)})
        b = next(iter(feed))
        ids = b.id.tolist()
        self.assertEqual((b.data.tolist(), b.label.tolist()), (ids, [i % CLASSES + 100 for i in ids]))
        self.assertEqual((b.pair[0].tolist(), tuple(b.pair[1].shape), b.text), (ids, (10, 3), [str(i) for i in ids]))
        self.assertEqual(sorted(b.fields), ["pair", "text"])
        data, label = next(iter(self.feed(map=lambda x, label, i: (i, -i))))
        self.assertEqual(data[0].tolist(), [-i for i in data[1].tolist()])

    def test_whole_batches(self):
        calls = []

        def halve(data, label, i):
            calls.append(len(i))
            return data[:, :, ::2]

        feed = self.feed(transform="ramp(4,4)", map=halve, map_over="batch", tail="uneven", epochs=1)
        self.assertEqual([tuple(b.data.shape) for b in feed], [(10, 3, 2, 4)] * 10 + [(3, 3, 2, 4)])
        self.assertEqual(calls, [10] * 10 + [3])

    def test_order_and_state(self):
        # Threads that finish in any order deliver in one, and the state counts what was delivered.
        ahead, going = threading.Semaphore(0), threading.Event()

        def late(x, label, i):
            ahead.release()
            if i % 3 == 0:
                going.wait(0.01)
            return i

        feed = self.feed(map=late, threads=7, order="sequential", tail="pad", credits=4)
        it = iter(feed)
        first = next(it)
        for _ in range(40):  # four batches are mapped though one was taken
            self.assertTrue(ahead.acquire(timeout=30))
        self.assertEqual((first.data.tolist(), feed.state_dict()["cursor"]), (list(range(10)), 10))
        state = feed.state_dict()
        rest = [b.data.tolist() for b in it]
        again = self.feed(map=late, threads=2, order="sequential", tail="pad")
        again.load_state_dict(state)
        self.assertEqual([b.data.tolist() for b in again], rest)
        self.assertEqual(sum(rest, [])[:93], list(range(10, 103)))

    def test_errors(self):
        def fail(x, label, i):
            if i in (36, 34, 71):
                raise KeyError(f"no mask for {i}")
            return i

        feed = self.feed(map=fail, threads=4, order="sequential")
        it = iter(feed)
        self.assertEqual([next(it).index for _ in range(3)], [0, 1, 2])
        with self.assertRaisesRegex(shoal.MapError,
                                    "sample 34 in batch 3 of epoch 0: KeyError: 'no mask for 34'") as caught:
            next(it)
        self.assertEqual((caught.exception.sample, type(caught.exception.__cause__), feed.state_dict()["cursor"]),
                         (34, KeyError, 30))
        feed = self.feed(map=lambda d, y, i: 1 / 0, map_over="batch")
        with self.assertRaisesRegex(shoal.MapError, "the whole batch in batch 0.*ZeroDivisionError"):
            next(iter(feed))
        for wrong, error in ((dict(map=3), TypeError), (dict(map=print, threads=0), ValueError),
                             (dict(map=print, map_over="row"), ValueError),
                             (dict(map=print, device="cuda"), ValueError)):
            with self.assertRaises(error):
                self.feed(**wrong)

    def test_interrupt(self):
        # Ctrl-C in a notebook: next() ends at once, more often than there are credits, and the epoch can then begin
        # again, whole.
        quick = threading.Event()
        with self.feed(order="sequential", map=lambda x, label, i: quick.wait(0.3) and i) as feed:
            for _ in range(5):
                it = iter(feed)
                threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                began = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    next(it)
                self.assertLess(time.monotonic() - began, 2)
                with self.assertRaisesRegex(RuntimeError, "interrupted"):
                    next(it)
            quick.set()
            self.assertEqual([i for b in feed for i in b.id.tolist()], list(range(100)))

    def test_closed_while_next_waits(self):
        """A handler of a signal may close the feed. The batch that next() waits for then comes to an end."""
        work, begun, closing = queue.SimpleQueue(), threading.Event(), threading.Event()

        def put(item):
            work.put(item)
            if item is None:
                closing.set()

        mapper = Mapper(lambda data, label, i: begun.set() or closing.wait(30), 0, True, None, None)
        mapper._work = SimpleNamespace(get=work.get, put=put)
        mapper._threads = [threading.Thread(target=mapper._run)]
        mapper._threads[0].start()
        batch = SimpleNamespace(data=[], label=[], id=[], index=7, epoch=0)
        running, waiting = (Job(None, batch, (), [], [], [1]) for _ in range(2))
        put((running, -1))
        put((waiting, -1))
        self.assertTrue(begun.wait(30))
        mapper.close()
        self.assertTrue(waiting.done.wait(5))
        with self.assertRaisesRegex(shoal.MapError, "the whole batch in batch 7 of epoch 0: .*the feed was closed"):
            waiting.take()

    def test_nothing_is_left(self):
        def threads():
            return [t for t in threading.enumerate() if t.name.startswith("shoal-")]

        before = threads()
        feed = self.feed(map=lambda x, label, i: i, threads=5)
        next(iter(feed))
        self.assertEqual(len(threads()), len(before) + 6)
        feed.close()
        self.assertEqual(threads(), before)
        next(iter(feed))
        del feed
        self.doCleanups()  # which refer to it
        gc.collect()
        self.assertEqual(threads(), before)

    def test_a_batch_of_padding_only(self):
        # However long the batch before it takes.
        def slow(x, label, i):
            arrived.wait(30)
            return np.ones(2, np.float32), "text"

        arrived, put = threading.Event(), Mapper.put

        def second(mapper, header, array):
            job = put(mapper, header, array)
            if header.index == 1:
                arrived.set()
            return job

        self.addCleanup(setattr, Mapper, "put", put)
        Mapper.put = second
        feed = self.feed(1, world=60, rank=59, tail="pad", map=slow, order="sequential")
        self.assertEqual([(b.data[0].tolist(), b.data[1], b.valid.tolist()) for b in feed],
                         [([[1, 1]], ["text"], [1]), ([[0, 0]], [None], [0])])


class Collate(unittest.TestCase):
    def test_named_tuples(self):
        """What a function returns is copied, pinned and moved as what it is."""
        Pair = collections.namedtuple("Pair", "a b")
        results = collate([Pair(1.0, "x"), Pair(2.0, "y")], [1, 1], None)
        batch = shoal.Batch(results, np.zeros(2), np.arange(2), np.ones(2), 0, 0, (), {"beside": (results.a, 3)})
        for made in batch.copy(), batch.numpy(), batch.pin_memory():
            self.assertIs(type(made.data), Pair)
            self.assertEqual((made.data.a.tolist(), made.data.b), ([1.0, 2.0], ["x", "y"]))
            self.assertEqual((made.beside[0].tolist(), made.beside[1]), ([1.0, 2.0], 3))
        self.assertFalse(np.shares_memory(batch.copy().data.a, results.a))

    def test_kinds(self):
        v = [1, 1]
        for results, want in (([1, 2], np.array([1, 2])), ([1, 2.5], np.array([1, 2.5])),
                              ([True, False], np.array([True, False])),
                              ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
                              ([np.zeros((2, 3), np.int8)] * 2, np.zeros((2, 2, 3), np.int8))):
            got = collate(results, v, None)
            self.assertEqual((got.dtype, got.tolist()), (want.dtype, want.tolist()))
            self.assertEqual(collate(results, v, torch).tolist(), want.tolist())
        for results in (["a", "b"], [b"a", b"b"], [None, 1], [np.zeros(2), np.zeros(3)],
                        [np.zeros(2, np.int8), np.zeros(2)],
                        [torch.zeros(2), torch.zeros(3)], [{"a": 1}, {"b": 1}], [(1,), (1, 2)], [[1], [2]]):
            self.assertIs(type(collate(results, v, torch)), list)
        self.assertEqual(collate([torch.ones(2)], [0, 1, 0], torch).tolist(), [[0, 0], [1, 1], [0, 0]])
        self.assertEqual(collate([7, 8], [1, 0, 1], None).tolist(), [7, 0, 8])
        self.assertEqual(collate(["a"], [0, 1], None), [None, "a"])


if __name__ == "__main__":
    unittest.main()
