import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from support import CLASSES, Server, ramp, sample

import shoal


class FeedCase(unittest.TestCase):
    args = ("-samples", "103")

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.args)

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def feed(self, batch_size=10, **kwargs):
        feed = shoal.Feed(kwargs.pop("addr", self.server.addr), batch_size, **kwargs)
        self.addCleanup(feed.close)
        return feed


class Batches(FeedCase):
    def test_raw(self):
        for as_torch in (True, False):
            feed = self.feed(seed=3, tail="pad", as_torch=as_torch)
            seen = []
            for data, label in feed:
                for row, y in zip(data, label.tolist()):
                    seen.append((bytes(row.numpy() if as_torch else row), y))
            self.assertEqual(len(seen), 110)
            self.assertEqual(sorted(seen[:103]), sorted((sample(i), i % CLASSES) for i in range(103)))
            self.assertEqual(seen[103:], [(b"", -100)] * 7)

    def test_decoded_numpy(self):
        feed = self.feed(transform="ramp(5,4)", seed=7, tail="uneven", as_torch=False)
        for epoch in range(2):
            rows = 0
            for k, batch in enumerate(feed):
                self.assertEqual((batch.epoch, batch.index), (epoch, k))
                self.assertEqual(batch.data.dtype, np.uint8)
                self.assertEqual(batch.data.shape[1:], (3, 5, 4))
                self.assertEqual(batch.data.ctypes.data % 64, 0)
                self.assertTrue(batch.data.flags.writeable and batch.label.flags.writeable)
                for row, i, y, valid in zip(batch.data, batch.id.tolist(), batch.label.tolist(), batch.valid.tolist()):
                    self.assertEqual(row.ravel().tolist(), ramp(i, 60, 7, epoch))
                    self.assertEqual((y, valid), (i % CLASSES, 1))
                rows += len(batch.data)
            self.assertEqual(rows, 103)
            self.assertEqual(feed.epoch, epoch + 1)

    def test_types(self):
        for spec, dtype in (("uint8", torch.uint8), ("fp32", torch.float32)):
            feed = self.feed(transform=f"ramp(2,2)|{spec}")
            batch = next(iter(feed))
            self.assertEqual((batch.data.dtype, batch.label.dtype, batch.id.dtype), (dtype, torch.int64, torch.int64))
            want = torch.tensor([ramp(i, 12, 0, 0) for i in batch.id.tolist()]).to(dtype)
            self.assertTrue(torch.equal(batch.data.reshape(10, 12), want))
            batch.data.mul_(2)  # in place: the memory is the trainer's
            self.assertTrue(torch.equal(batch.to(torch.float64).data.reshape(10, 12), want.mul(2).to(torch.float64)))

    def test_torch_order(self):
        # The feed gives each rank what torch's DistributedSampler gives it, padding included.
        for rank in range(4):
            feed = self.feed(order="torch", seed=11, world=4, rank=rank, tail="uneven")
            for epoch in (0, 3):
                feed.set_epoch(epoch)
                sampler = DistributedSampler(range(103), num_replicas=4, rank=rank, seed=11)
                sampler.set_epoch(epoch)
                self.assertEqual([i for b in feed for i in b.id.tolist()], list(sampler))

    def test_ranks_share_the_epoch(self):
        ids = [[b.id.tolist() for b in self.feed(4, world=3, rank=r, seed=1, tail="pad")] for r in range(3)]
        whole = [b.id.tolist() for b in self.feed(12, seed=1, tail="pad")]
        for step, want in enumerate(whole):
            self.assertEqual([ids[p % 3][step][p // 3] for p in range(12)], want)
        self.assertEqual(sorted(i for step in whole for i in step if i >= 0), list(range(103)))

    def test_memory_is_not_reused_while_held(self):
        feed = self.feed(transform="ramp(40,40)", tail="uneven", as_torch=True)
        held = [b.data for _ in range(3) for b in feed]
        copies = [t.clone() for t in held]
        views = [t[0] for t in held]
        del held
        for _ in feed:
            pass
        for view, want in zip(views, copies):
            self.assertTrue(torch.equal(view, want[0]))

    def test_memory_is_reused_when_released(self):
        feed = self.feed(transform="ramp(40,40)", epochs=4, as_torch=False)
        places = {b.data.ctypes.data for _ in range(4) for b in feed}
        self.assertLessEqual(len(places), 7)

    def test_info_and_stats(self):
        feed = self.feed(transform="ramp(2,2)")
        info = feed.info()
        self.assertEqual((info["samples"], info["bytes"], info["server"]),
                         (103, sum(len(sample(i)) for i in range(103)), "test"))
        self.assertEqual(feed.classes, [f"class{i}" for i in range(CLASSES)])
        list(feed)
        stats = feed.stats()
        self.assertEqual((stats["batches"], stats["samples"], stats["epochs"]), (10, 100, 1))
        self.assertGreater(stats["wait_seconds"], 0)
        self.assertGreater(stats["bytes"], 100 * 12)


class Loader(FeedCase):
    def test_dataloader(self):
        feed = self.feed(transform="ramp(2,2)", seed=2, tail="uneven")
        self.assertIsInstance(feed, torch.utils.data.IterableDataset)
        loader = DataLoader(feed, batch_size=None)
        self.assertEqual(len(loader), 11)
        orders = []
        for epoch in range(3):
            feed.set_epoch(epoch)
            ids = []
            for batch in loader:
                images, labels = batch
                self.assertIsInstance(images, torch.Tensor)
                self.assertEqual(labels.tolist(), [i % CLASSES for i in batch.id.tolist()])
                ids += batch.id.tolist()
            self.assertEqual(sorted(ids), list(range(103)))
            orders.append(ids)
        self.assertNotEqual(orders[0], orders[1])

    def test_workers_are_refused(self):
        for context in ("fork", "spawn"):
            feed = self.feed(transform="ramp(2,2)")
            next(iter(feed))  # a connection that the workers must not touch
            with self.assertRaisesRegex(RuntimeError, "num_workers=0"):
                next(iter(DataLoader(feed, batch_size=None, num_workers=2, multiprocessing_context=context)))
            self.assertEqual(len(list(feed)), 10)  # and which still works

    def test_pickle(self):
        feed = self.feed(transform="ramp(2,2)", seed=5)
        it = iter(feed)
        next(it), next(it)
        feed.load_state_dict(feed.state_dict())
        again = pickle.loads(pickle.dumps(feed))
        self.addCleanup(again.close)
        self.assertEqual(next(iter(again)).index, 2)

    def test_without_torch(self):
        code = f"""
            import sys; sys.path[:0] = {sys.path!r}
            sys.modules["torch"] = None  # import torch now fails
            import numpy, shoal
            feed = shoal.Feed({self.server.addr!r}, 10, transform="ramp(2,2)", tail="uneven")
            assert all(isinstance(b.data, numpy.ndarray) for b in feed)
            assert feed.stats()["samples"] == 103
            try:
                shoal.Feed({self.server.addr!r}, 10, as_torch=True)
            except ImportError:
                print("fine")
        """
        out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
        self.assertEqual(out.stdout, "fine\n", out.stderr)

    def test_numpy_does_not_import_torch(self):
        code = f"import sys; sys.path[:0] = {sys.path!r}; import shoal; shoal.Feed('tcp://x:1', 1, as_torch=False); print('torch' in sys.modules)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertEqual(out.stdout, "False\n", out.stderr)


class State(FeedCase):
    def run_on(self, feed, most=None):
        """(epoch, index, ids) of the rest of the epoch, or of some batches of it."""
        out = []
        for b in feed:
            out.append((b.epoch, b.index, b.id.tolist(), b.data.tolist()))
            if most is not None and len(out) == most:
                break
        return out

    def make(self, **kwargs):
        return self.feed(transform="ramp(2,2)", seed=9, tail="pad", **kwargs)

    def test_repeated_resumes(self):
        feed = self.make()
        want = self.run_on(feed) + self.run_on(feed)
        got, state = [], None
        while len(got) < len(want):
            feed = self.make()
            if state is not None:
                feed.load_state_dict(state)
            got += self.run_on(feed, most=1 + len(got) % 3)  # the batches ahead do not count
            state = feed.state_dict()
            feed.close()
        self.assertEqual(got[:len(want)], want)

    def test_epochs(self):
        feed = self.make()
        self.assertEqual(feed.state_dict()["cursor"], 0)
        first = self.run_on(feed)
        self.assertEqual(len(first), len(feed))
        state = feed.state_dict()
        self.assertEqual((state["epoch"], state["cursor"], feed.epoch), (1, 0, 1))
        second = self.run_on(feed)
        self.assertEqual({e for e, *_ in second}, {1})
        feed.set_epoch(0)
        self.assertEqual(feed.state_dict()["epoch"], 0)
        self.assertEqual(self.run_on(feed), first)

        # Left early: from the beginning again. In the middle of an epoch: state and set_epoch agree.
        self.assertEqual(self.run_on(feed, most=3), second[:3])
        middle = feed.state_dict()
        self.assertEqual(self.run_on(feed), second)
        feed.load_state_dict(middle)
        feed.set_epoch(1)  # as a trainer's loop does, for the epoch that the state is of
        self.assertEqual(self.run_on(feed), second[3:])
        feed.load_state_dict(middle)
        iter(feed)  # as Lightning does, to see whether it can
        self.assertEqual(self.run_on(feed), second[3:])
        feed.load_state_dict(middle)
        feed.set_epoch(0)
        self.assertEqual(self.run_on(feed), first)

    def test_length_in_mid_epoch(self):
        feed = self.make()
        it = iter(feed)
        seen = []
        for batch, _ in zip(it, range(11)):
            seen.append((batch.index, len(feed), feed.state_dict()["cursor"]))
        self.assertEqual(seen, [(k, 11, min(10 * k + 10, 103)) for k in range(11)])

    def test_state_of_a_finished_epoch(self):
        feed = self.make()
        batches = self.run_on(feed, most=len(feed))  # the last batch is taken, the end is not seen
        self.assertEqual(len(batches), 11)
        state = feed.state_dict()
        feed = self.make()
        feed.load_state_dict(state)
        self.assertEqual(self.run_on(feed), [])
        self.assertEqual(self.run_on(feed)[0][:2], (1, 0))

    def test_other_world_size(self):
        whole = [b.id.tolist() for b in self.feed(12, seed=4, tail="pad")]
        feed = self.feed(4, world=3, rank=1, seed=4, tail="pad")
        self.assertEqual([b.id.tolist() for b in feed][:2], [w[1::3] for w in whole[:2]])
        feed.set_epoch(0)
        it = iter(feed)
        next(it), next(it)
        state = feed.state_dict()
        for world in (1, 2, 4, 6):
            for rank in range(world):
                feed = self.feed(None, world=world, rank=rank, seed=4, tail="pad")
                feed.load_state_dict(state)
                self.assertEqual([b.id.tolist() for b in feed], [w[rank::world] for w in whole[2:]])

    def test_refusals(self):
        feed = self.make()
        next(iter(feed))
        state = feed.state_dict()
        for kwargs, word in ((dict(seed=8), "seed=9"), (dict(tail="drop"), "pad"), (dict(order="torch"), "uniform@1"),
                             (dict(transform="ramp(3,3)"), "ramp"), (dict(batch_size=5), "10")):
            feed = self.feed(**{**dict(transform="ramp(2,2)", seed=9, tail="pad"), **kwargs})
            feed.load_state_dict(state)
            with self.assertRaisesRegex(shoal.FeedError, word) as caught:
                iter(feed)
            self.assertEqual(caught.exception.code, "FAILED_PRECONDITION")
        for bad in ({"v": 2}, {}, "text"):
            with self.assertRaises(ValueError):
                feed.load_state_dict(bad)

    def test_last_epoch(self):
        feed = self.make(epochs=2)
        self.assertEqual([len(self.run_on(feed)) for _ in range(3)], [11, 11, 11])


class Failures(FeedCase):
    args = ("-samples", "400", "-bad", "205", "-delay", "1ms")

    def test_bad_samples(self):
        feed = self.feed(transform="ramp(2,2)", order="sequential")
        with self.assertRaisesRegex(shoal.FeedError, "bad sample 205.*class5/000205.bin") as caught:
            list(feed)
        self.assertEqual((caught.exception.code, feed.stats()["batches"]), ("DATA_LOSS", 20))
        self.assertEqual(feed.state_dict()["cursor"], 200)

        feed = self.feed(transform="ramp(2,2)", order="sequential", bad="skip:0.1%")
        batch = list(feed)[20]
        self.assertEqual((batch.valid[5], batch.label[5], batch.id[5], int(batch.data[5].sum())), (0, -100, 205, 0))
        self.assertEqual([(b.row, b.id, b.path) for b in batch.bad], [(5, 205, "class5/000205.bin")])
        self.assertEqual(feed.stats()["bad_samples"], 1)

    def test_arguments(self):
        for wrong in (dict(batch_size=0), dict(batch_size=-3), dict(world=0), dict(rank=-1), dict(epochs=0),
                      dict(credits=0)):
            with self.assertRaisesRegex(ValueError, "at least|from 1 to"):
                self.feed(**wrong)
        for wrong in (dict(batch_size=2.5), dict(seed=0.5), dict(world="2")):
            with self.assertRaisesRegex(TypeError, f"{list(wrong)[0]}=.*whole number"):
                self.feed(**wrong)
        with self.assertRaisesRegex(ValueError, "feed address None"):
            shoal.Feed(None, 10)
        self.assertEqual(len(self.feed(np.int64(10), seed=np.int64(1), epochs=np.int32(1))), 40)

    @unittest.skipUnless(os.getuid() == 0, "needs root to become somebody else")
    def test_socket_of_others(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        os.chmod(folder.name, 0o755)
        server = Server("-samples", "4", "-listen", f"unix://{folder.name}/feed.sock")
        self.addCleanup(server.close)
        script = "import os, sys, shoal; os.setgid(65534); os.setuid(65534); shoal.Feed(sys.argv[1], 4).info()"
        run = subprocess.run([sys.executable, "-B", "-c", script, server.addr], capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(shoal.__file__))})
        self.assertRegex(run.stderr, "--socket-group")

    def test_no_server(self):
        for addr in ("unix:///nonexistent/feed.sock", "tcp://127.0.0.1:1"):
            with self.assertRaisesRegex(shoal.FeedError, f"{addr}.*shoal serve") as caught:
                iter(self.feed(addr=addr))
            self.assertEqual(caught.exception.code, "UNAVAILABLE")
        for addr in ("localhost:70", "http://x", ""):
            with self.assertRaisesRegex(ValueError, "unix:///PATH"):
                shoal.Feed(addr, 1)

    def test_server_death_and_return(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "feed%41 #?.sock")
        server = Server("-samples", "400", "-listen", "unix://" + path)
        feed = self.feed(addr=server.addr, transform="ramp(2,2)")
        it = iter(feed)
        ids = [next(it).id.tolist() for _ in range(5)]
        server.kill()
        with self.assertRaisesRegex(shoal.FeedError, "shoal serve") as caught:
            while True:
                ids.append(next(it).id.tolist())
        self.assertEqual(caught.exception.code, "UNAVAILABLE")
        state = feed.state_dict()
        self.assertEqual(state["cursor"], 10 * len(ids))
        server = Server("-samples", "400", "-listen", "unix://" + path)  # the dead one's socket is in its way
        self.addCleanup(server.close)
        feed.load_state_dict(state)
        ids += [b.id.tolist() for b in feed]
        self.assertEqual(sorted(i for b in ids for i in b), list(range(400)))

    def test_fencing(self):
        old, newer = (self.feed(transform="ramp(2,2)", session="job") for _ in range(2))
        it = iter(old)
        next(it)
        self.assertEqual(next(iter(newer)).index, 0)
        with self.assertRaisesRegex(shoal.FeedError, "newer stream") as caught:
            list(it)
        self.assertEqual(caught.exception.code, "ABORTED")

    def test_stale_iterator(self):
        feed = self.feed(transform="ramp(2,2)")
        first = iter(feed)
        next(first)
        second = iter(feed)
        with self.assertRaisesRegex(RuntimeError, "newer"):
            next(first)
        self.assertEqual(next(second).index, 0)

    def test_interrupt(self):
        # Ctrl-C while the trainer waits: KeyboardInterrupt at once, and the process ends by itself.
        code = f"""
            import sys; sys.path[:0] = {sys.path!r}
            import shoal
            feed = shoal.Feed({self.server.addr!r}, 400, transform="ramp(2,2)", bad="skip:5", as_torch=False)
            said = False
            try:
                for epoch in range(1000):
                    for _ in feed:
                        if not said:
                            said = True
                            print("ready", flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """
        p = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        self.addCleanup(p.kill)
        self.assertEqual(p.stdout.readline(), "ready\n")
        time.sleep(0.5)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=120)
        self.assertEqual((out, err, p.returncode), ("interrupted\n", "", 0))

    def test_fork(self):
        # A feed that is used after forking only works, with one session for each process. A fork of a
        # process that uses feeds says what is wrong, ends normally, and disturbs nothing.
        code = f"""
            import os, sys; sys.path[:0] = {sys.path!r}
            import shoal
            feed = shoal.Feed({self.server.addr!r}, 10, transform="ramp(2,2)", order="sequential", as_torch=False)

            def forked(f):
                pid = os.fork()
                if pid == 0:
                    try:
                        f()
                    finally:
                        sys.stdout.flush()
                    sys.exit(0)
                assert os.waitpid(pid, 0)[1] == 0

            def work():
                print([next(it).index for it in [iter(feed)] for _ in range(3)])

            def refuse():
                # Whatever would need the parent's stream, in this order: none of them changes what the next one says.
                for use in (lambda: next(it), lambda: iter(feed), lambda: next(it), lambda: len(feed), feed.info, lambda: feed.classes,
                            lambda: feed.load_state_dict(feed.state_dict()), lambda: next(it), lambda: iter(feed), feed.stats,
                            feed.close, lambda: iter(feed)):
                    try:
                        use()
                        print("fine", end=" ")
                    except shoal.FeedError as e:
                        print("spawn" in str(e), end=" ")
                print()

            forked(work)
            it = iter(feed)
            next(it)
            forked(refuse)
            forked(lambda: None)
            print([next(it).index for _ in range(3)])
        """
        out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
        refused = "True True True True True True fine True True fine fine True "
        self.assertEqual((out.stdout, out.stderr), (f"[0, 1, 2]\n{refused}\n[1, 2, 3]\n", ""))

    def test_nothing_is_left(self):
        def threads():
            return [t for t in threading.enumerate() if t.name == "shoal-feed"]

        before = len(threads())
        feed = shoal.Feed(self.server.addr, 10, transform="ramp(2,2)", order="sequential")
        next(iter(feed))
        self.assertEqual(len(threads()), before + 1)
        feed.close()
        self.assertEqual(len(threads()), before)
        next(iter(feed))  # it can be used again
        self.assertEqual(len(threads()), before + 1)
        del feed  # and forgotten
        gc.collect()
        self.assertEqual(len(threads()), before)


if __name__ == "__main__":
    unittest.main()
