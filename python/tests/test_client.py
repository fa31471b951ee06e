"""Feed's arguments and what it says of itself: words of the spec, TLS and tokens, statistics, types, reconnecting."""

import gc
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import typing
import unittest
import weakref

import numpy as np
import torch
from torchvision import transforms as T

from support import Server
from test_feed import FeedCase

import shoal
from shoal._spec import of_torchvision, with_words, words, views

CERTS = os.environ.get("SHOAL_CERTS")


class Spec(unittest.TestCase):
    def test_words(self):
        self.assertEqual(words("RandomResizedCrop(224) | RandAugment(a='x|y', b=[1|2])|uint8"),
                         ["RandomResizedCrop(224)", "RandAugment(a='x|y', b=[1|2])", "uint8"])

    def test_dtype_and_layout(self):
        crop = "CenterCrop(8)"
        for dtype, word in (("fp16", "fp16"), (torch.float16, "fp16"), (np.float16, "fp16"),
                            (np.dtype("float32"), "fp32"), ("float32", "fp32"),
                            (torch.bfloat16, "bf16"), (torch.float32, "fp32"), (np.uint8, "uint8"),
                            (torch.uint8, "uint8"), ("FP32", "fp32")):
            self.assertEqual(with_words(crop, dtype, None), f"{crop}|{word}")
        for layout, word in (("nchw", "nchw"), ("NHWC", "nhwc"), (torch.channels_last, "nhwc")):
            self.assertEqual(with_words(crop, "fp32", layout), f"{crop}|fp32|{word}")
        self.assertEqual(with_words(f"{crop}|fp16|nhwc", "fp16", "nhwc"), f"{crop}|fp16|nhwc")
        self.assertEqual(with_words(f"{crop}|fp16", None, "nhwc"), f"{crop}|fp16|nhwc")
        self.assertIs(with_words(None, None, None), None)
        for spec, dtype, layout, word in ((f"{crop}|fp16", "fp32", None, "the transform says fp16"),
                                          (f"{crop}|nchw", None, "nhwc", "says nchw"),
                                          (None, "fp16", None, "raw samples"), ("raw", None, "nchw", "raw samples"),
                                          (crop, "int8", None, "uint8, fp16, bf16, fp32"),
                                          (crop, None, "cwh", "nchw, nhwc")):
            with self.assertRaisesRegex(ValueError, word):
                with_words(spec, dtype, layout)


class Torchvision(unittest.TestCase):
    def test_spec(self):
        norm = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        for transform, spec in (
                (T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]),
                 "RandomResizedCrop((224, 224))|RandomHorizontalFlip(0.5)|fp32|nchw|Normalize((0.485, 0.456, 0.406), "
                 "std=(0.229, 0.224, 0.225))"),
                (T.Compose([T.Compose([T.Resize(256)]), T.CenterCrop(224), T.PILToTensor()]),
                 "Resize(256)|CenterCrop((224, 224))|uint8|nchw"),
                (T.Compose([T.PILToTensor(), T.ConvertImageDtype(torch.float16)]), "fp16|nchw"),
                (torch.nn.Sequential(T.RandomResizedCrop((8, 9), interpolation=T.InterpolationMode.BICUBIC),
                                     T.AutoAugment(), T.ColorJitter(0.25)),
                 "RandomResizedCrop((8, 9), interpolation='bicubic')|AutoAugment('imagenet')|ColorJitter((0.75, "
                 "1.25))|uint8|nchw"),
                (T.Compose([T.RandomCrop(32, padding=4, pad_if_needed=True), T.ToTensor(), norm,
                            T.RandomErasing(0.25)]),
                 "RandomCrop((32, 32), padding=4, pad_if_needed=True)|fp32|nchw|Normalize((0.485, 0.456, 0.406), "
                 "std=(0.229, 0.224, 0.225))|RandomErasing(0.25)")):
            self.assertEqual(of_torchvision(transform), spec)

    def test_views(self):
        def view(size, p):
            return T.Compose([T.RandomResizedCrop(size), T.RandomApply([T.ColorJitter(0.25), T.RandomGrayscale()], p=p),
                              T.ToTensor()])

        crops = [f"[RandomResizedCrop(({s}, {s}))|RandomApply([ColorJitter((0.75, 1.25)), "
                 f"RandomGrayscale(0.1)], p={p})]" for s, p in ((8, 0.5), (4, 1.0))]
        self.assertEqual(of_torchvision([view(8, .5), view(8, .5), view(4, 1)]),
                         f"views(2x{crops[0]}, 1x{crops[1]})|fp32|nchw")
        spec = f"views(2x{crops[0]}, {crops[1]}) | fp32|nchw"
        self.assertEqual(views(spec), [f"{c[1:-1]}|fp32|nchw" for c in (crops[0], crops[0], crops[1])])
        self.assertEqual(views("CenterCrop(8)|fp32"), [])
        self.assertEqual(with_words(f"views(2x{crops[0]})", "fp16", "nhwc"), f"views(2x{crops[0]})|fp16|nhwc")
        with self.assertRaisesRegex(ValueError, "one view ends in fp32"):
            of_torchvision([view(8, .5), T.CenterCrop(8)])
        one = T.RandomChoice([T.RandomInvert(), T.RandomEqualize(1.)], p=[1, 2])
        self.assertEqual(of_torchvision(one),
                         "RandomChoice([RandomInvert(0.5), RandomEqualize(1.0)], p=[1.0, 2.0])|uint8|nchw")
        for inside, word in ((T.RandomApply([T.RandomInvert()]), "holds RandomApply: in a feed it holds single "
                              "operations"), (T.Lambda(abs), "Lambda has no equal"),
                             (T.Compose([T.RandomInvert(), T.RandomEqualize()]), "holds Compose"),
                             (T.ToTensor(), "holds ToTensor")):
            with self.assertRaisesRegex(ValueError, word):
                of_torchvision(T.RandomChoice([inside]))

    def test_normalize(self):
        three = "(0.5, 0.25, 0.75)"
        for mean, std, words in (
                ((.5,), (.5,), "(0.5,), std=(0.5,)"), (.5, 2, "(0.5,), std=(2.0,)"),
                ([.5, .25, .75], np.float32(.5), f"{three}, std=(0.5,)"),
                (np.array([.5, .25, .75]), torch.tensor([.5, .25, .75]), f"{three}, std={three}"),
                (torch.tensor(.5), torch.tensor([.5, .25, .75]).view(3, 1, 1), f"(0.5,), std={three}"),
                ([np.float64(.5)] * 3, [torch.tensor(.5)] * 3, "(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)")):
            self.assertEqual(of_torchvision(T.Compose([T.ToTensor(), T.Normalize(mean, std)])),
                             f"fp32|nchw|Normalize({words})")
        for mean in ((.5, .5), torch.zeros(1, 3), "x", None):
            with self.assertRaisesRegex(ValueError, "a number, or three"):
                of_torchvision(T.Compose([T.ToTensor(), T.Normalize(mean, .5)]))
        norm, half = T.Normalize(.5, .5), T.ConvertImageDtype(torch.float16)
        for steps, spec in (([T.PILToTensor(), half, norm], "fp16|nchw|Normalize((0.5,), std=(0.5,), dtype='fp16')"),
                            ([T.ToTensor(), half, norm, T.ConvertImageDtype(torch.float32)],
                             "fp32|nchw|Normalize((0.5,), std=(0.5,), dtype='fp16')"),
                            ([T.ToTensor(), norm, half], "fp16|nchw|Normalize((0.5,), std=(0.5,))"),
                            ([T.ToTensor(), norm, T.RandomErasing(), half], "fp16|nchw|Normalize((0.5,), "
                             "std=(0.5,))|RandomErasing(0.5)")):
            self.assertEqual(of_torchvision(T.Compose(steps)), spec)

    def test_v2(self):
        def v2(name, **fields):  # Debian's torchvision has none
            return type(name, (), {"__module__": "torchvision.transforms.v2", "__init__": lambda self: None,
                                   **fields})()

        for scale, dtype, word in ((True, torch.float32, "fp32"), (False, torch.uint8, "uint8"),
                                   (True, torch.uint8, "uint8")):
            steps = v2("Resize", size=[256]), T.CenterCrop(224), v2("ToImage"), v2("ToDtype", dtype=dtype, scale=scale)
            self.assertEqual(of_torchvision(T.Compose(steps)), f"Resize(256)|CenterCrop((224, 224))|{word}|nchw" +
                             "|v2" * (word != "uint8"))
        scaled = [v2("ToImage"), v2("ToDtype", dtype=torch.float32, scale=True)]
        trivial = dict(num_magnitude_bins=31, interpolation=T.InterpolationMode.NEAREST, fill=None)
        half = v2("ToDtype", dtype=torch.float16, scale=False)
        for steps, spec in (([v2("TrivialAugmentWide", **trivial), v2("PILToTensor")],
                             "TrivialAugmentWide(31, interpolation='nearest')|uint8|nchw|v2"),
                            ([*scaled, T.Normalize(.5, .5), half], "fp16|nchw|Normalize((0.5,), std=(0.5,))|v2"),
                            ([*scaled, half, T.Normalize(.5, .5)], "fp16|nchw|Normalize((0.5,), std=(0.5,), "
                             "dtype='fp16')|v2"),
                            ([T.RandAugment(), *scaled], "RandAugment(2)|fp32|nchw|v2")):
            self.assertEqual(of_torchvision(T.Compose(steps)), spec)
        for steps in ([v2("TrivialAugmentWide", **trivial), T.ToTensor()], [T.AutoAugment(), *scaled],
                      [T.RandAugment(2, 8), *scaled]):
            with self.assertRaisesRegex(ValueError, "take both from one"):
                of_torchvision(T.Compose(steps))
        with self.assertRaisesRegex(ValueError, "scale=True"):
            of_torchvision(v2("ToDtype", dtype=torch.float32, scale=False))

    def test_no_equal(self):
        norm = T.Normalize((0.5,) * 3, (0.5,) * 3)
        for steps, word in (([T.Lambda(abs)], "Lambda has no equal"),
                            ([T.ToTensor(), T.Resize(8)], "Resize comes after ToTensor"),
                            ([norm], "put ToTensor"), ([T.ToTensor(), T.RandomErasing(), norm], "put it last"),
                            ([T.FiveCrop(8)], "FiveCrop has no equal"),
                            ([T.PILToTensor(), T.ConvertImageDtype(torch.int32)], "uint8, fp16, bf16 and fp32"),
                            ([T.PILToTensor(), T.ConvertImageDtype(torch.half), T.ToTensor()],
                             "changes the type of fractions once"),
                            ([T.ToTensor(), norm, norm], "twice"),
                            ([T.ToTensor(), T.RandomErasing(value="random")], "value='random'"),
                            ([T.ToTensor(), norm, T.ConvertImageDtype(torch.half), T.ConvertImageDtype(torch.float)],
                             "changes the type"),
                            ([T.RandomRotation(5, fill=[object()] * 3)], "numbers, strings and tuples")):
            with self.assertRaisesRegex(ValueError, word):
                of_torchvision(T.Compose(steps))


class Moves(unittest.TestCase):
    def test_keeps_nothing(self):
        """A batch that was moved gives its memory back at once, not when garbage is collected: its slot waits for
        that."""
        gc.disable()
        self.addCleanup(gc.enable)
        rows = [torch.zeros(4) for _ in range(4)]
        batch = shoal.Batch(*rows, 0, 0, fields={"view0": rows[0]}).to("cpu")
        self.assertIs(batch.data, batch.fields["view0"])
        held = weakref.ref(rows[0])
        del rows, batch
        self.assertIsNone(held())


class Arguments(FeedCase):
    def test_typical_mistakes(self):
        with self.assertRaisesRegex(ValueError, "such as seed=1"):
            self.feed(seed=-1)
        with self.assertRaisesRegex(ValueError, r"DataLoader\(feed, batch_size=None\)"):
            next(iter(torch.utils.data.DataLoader(self.feed())))
        self.assertGreater(len(list(torch.utils.data.DataLoader(self.feed(), batch_size=None))), 1)
        batches = iter(self.feed())
        with batches._busy, self.assertRaisesRegex(RuntimeError, "two threads"):
            next(batches)
        batches._busy.acquire()  # Ctrl-C may come before next() can release it
        self.assertEqual(next(iter(batches._feed)).index, 0)

    def test_dtype(self):
        b = next(iter(self.feed(transform="ramp(2,2)", dtype=torch.float32)))
        self.assertEqual(b.data.dtype, torch.float32)

    def test_wrong_ones(self):
        for wrong, word in ((dict(slots=3), "at least 4"), (dict(slots=-1), "at least 0"),
                            (dict(reconnect=-1), "reconnect"), (dict(device="mps"), "cuda:N"),
                            (dict(ca="x"), "tls://"), (dict(addr="tls://x:1", cert="x"), "go together"),
                            (dict(token="s3cret\n"), "^token= has spaces, a line break or [^3]*$")):
            with self.assertRaisesRegex(ValueError, word):
                self.feed(**wrong)

    def test_epochs(self):
        for epochs in (0, -1, 1 << 31, 1 << 32, 1 << 64):
            with self.assertRaisesRegex(ValueError, f"epochs={epochs}: it must be from 1 to 2147483647"):
                self.feed(epochs=epochs)
        feed = self.feed(transform="ramp(2,2)")
        for epoch in (-1, 1 << 31, 1 << 32, (1 << 32) + 1):
            with self.assertRaisesRegex(ValueError, f"epoch={epoch}: it must be from 0 to 2147483647"):
                feed.set_epoch(epoch)
        feed.set_epoch((1 << 31) - 1)
        self.assertEqual({b.epoch for b in feed}, {(1 << 31) - 1})

    def test_bad_states(self):
        feed = self.feed(transform="ramp(2,2)")
        good = feed.state_dict()
        for bad in (None, "x", [], {}, {"v": 1}, {"v": 2}, {**good, "epoch": None}, {**good, "epoch": "1"},
                    {**good, "epoch": 1.5}, {**good, "epoch": -1},
                    {**good, "epoch": 1 << 32}, {**good, "cursor": None},
                    {k: v for k, v in good.items() if k != "cursor"}):
            with self.subTest(bad), self.assertRaises(ValueError):
                feed.load_state_dict(bad)
        feed.load_state_dict(good)
        self.assertGreater(len(list(feed)), 1)

    def test_short_version(self):
        version = self.feed().info()["dataset"]
        for short in (version, version[:12], version[:20]):
            self.assertGreater(len(list(self.feed(transform="ramp(2,2)", dataset=short))), 1)
        for wrong in (version[:11], version[:1], version + "0", "0" * 12):
            with self.subTest(wrong), self.assertRaisesRegex(shoal.FeedError, "requires dataset"):
                iter(self.feed(transform="ramp(2,2)", dataset=wrong))

    def test_device_without_one(self):
        with self.assertRaisesRegex(shoal.FeedError, r"device='cuda'.*batch.to\('cuda'\)"):
            iter(self.feed(transform="ramp(2,2)", device="cuda"))
        self.assertEqual(len(list(self.feed(transform="ramp(2,2)", device=torch.device("cpu")))), 10)


@unittest.skipUnless(CERTS, "SHOAL_CERTS is not set: run the tests by `go test ./loader/...`")
class Security(unittest.TestCase):
    def server(self, *args):
        cert = [f"-tls-cert={CERTS}/server.crt", f"-tls-key={CERTS}/server.key"]
        server = Server("-samples", "40", *(cert if any("tls://" in a for a in args) else ()), *args)
        self.addCleanup(server.close)
        return server

    def ids(self, addr, **kwargs):
        with shoal.Feed(addr, 10, order="sequential", transform="ramp(2,2)", epochs=1, **kwargs) as feed:
            self.assertEqual(feed.info()["samples"], 40)
            ids = [i for b in feed for i in b.id.tolist()]
            self.assertEqual(feed.stats()["samples"], 40)
        return ids

    def test_tls(self):
        server = self.server("-listen=tls://127.0.0.1:0")
        self.assertEqual(self.ids(server.addr, ca=f"{CERTS}/ca.crt"), list(range(40)))
        named = server.addr.replace("127.0.0.1", "localhost")  # which the certificate does not have
        with self.assertRaises(shoal.FeedError):
            self.ids(named, ca=f"{CERTS}/ca.crt")
        self.assertEqual(self.ids(named, ca=f"{CERTS}/ca.crt", server_name="127.0.0.1"), list(range(40)))
        for ca in (f"{CERTS}/other.crt", None):
            with self.assertRaisesRegex(shoal.FeedError, "ca= holds the issuer"):
                iter(shoal.Feed(server.addr, 10, ca=ca))
        with self.assertRaises(FileNotFoundError):
            iter(shoal.Feed(server.addr, 10, ca="/nonexistent/ca.crt"))
        with tempfile.TemporaryDirectory() as folder:
            ca = shutil.copy(f"{CERTS}/ca.crt", folder)
            with shoal.Feed(server.addr, 10, ca=ca) as feed:
                next(iter(feed))
                os.remove(ca)
                self.assertEqual(feed.stats()["batches"], 1)

    def test_certificates_of_clients(self):
        server = self.server("-listen=tls://127.0.0.1:0", f"-tls-client-ca={CERTS}/ca.crt")
        both = dict(cert=f"{CERTS}/client.crt", key=f"{CERTS}/client.key")
        self.assertEqual(self.ids(server.addr, ca=f"{CERTS}/ca.crt", **both), list(range(40)))
        with self.assertRaisesRegex(shoal.FeedError, "client's certificate: pass cert= and key="):
            iter(shoal.Feed(server.addr, 10, ca=f"{CERTS}/ca.crt"))
        with self.assertRaisesRegex(shoal.FeedError, "client's certificate: pass cert= and key="):
            shoal.Feed(server.addr, 10, ca=f"{CERTS}/ca.crt").info()

    def test_token(self):
        for listen, ca in (("tcp://127.0.0.1:0", None), ("tls://127.0.0.1:0", f"{CERTS}/ca.crt")):
            server = self.server("-token=s3cret", f"-listen={listen}")
            self.assertEqual(self.ids(server.addr, ca=ca, token="s3cret"), list(range(40)))
            for token in (None, "other"):
                with self.assertRaisesRegex(shoal.FeedError, "token") as caught:
                    iter(shoal.Feed(server.addr, 10, ca=ca, token=token))
                self.assertEqual(caught.exception.code, "UNAUTHENTICATED")


class Says(FeedCase):
    args = ("-samples", "103", "-delay", "1ms")

    def test_stats(self):
        feed = self.feed(transform="ramp(64,64)")
        self.assertEqual(feed.stats()["fetch_seconds"], 0)
        it = iter(feed)
        for _ in range(10):
            next(it)
        stats = feed.stats()
        self.assertGreaterEqual(stats["fetch_seconds"], 0.1)  # a hundred samples, each of which took a millisecond
        self.assertGreater(stats["decode_seconds"], 0)
        self.assertGreater(stats["wait_seconds"], 0)
        self.assertEqual(set(stats),
                         {"batches", "samples", "bytes", "slot_batches", "epochs", "bad_samples", "reconnects",
                          "wait_seconds", "fetch_seconds",
                                      "decode_seconds", "stall_seconds", "credit_seconds", "slots", "held_slots"})
        feed.close()
        # the session's last, after its end
        self.assertGreaterEqual(feed.stats()["decode_seconds"], stats["decode_seconds"])
        json.dumps(stats)
        documented = inspect.getdoc(shoal.Feed.stats)
        for name in stats:
            self.assertIn(name, documented)

    def test_types(self):
        for thing in (shoal.Feed, shoal.Batch, shoal.FeedError, shoal.MapError, shoal.BadSample):
            members = [thing.__init__] + [f for n, f in vars(thing).items() if inspect.isfunction(f)
                                          and not n.startswith("_")]
            members += [p.fget for p in vars(thing).values() if isinstance(p, property)
                        and isinstance(p.fget, type(lambda: 0))]
            for f in members:
                if not inspect.isfunction(f):
                    continue
                hints = typing.get_type_hints(f, {**vars(sys.modules[f.__module__]), "torch": torch})
                missing = set(inspect.signature(f).parameters) - {"self"} - set(hints)
                self.assertEqual((missing, "return" in hints), (set(), True), f.__qualname__)
        self.assertTrue(os.path.exists(os.path.join(os.path.dirname(shoal.__file__), "py.typed")))
        for name in inspect.signature(shoal.Feed.__init__).parameters:
            self.assertIn(name, "self " + shoal.Feed.__doc__)

    def test_python_3_9(self):
        # Syntax and names of what this Python can tell: the package promises 3.9.
        import ast
        folder = os.path.dirname(shoal.__file__)
        for name in os.listdir(folder):
            if name.endswith(".py"):
                with open(os.path.join(folder, name)) as f:
                    text = f.read()
                ast.parse(text, name, feature_version=(3, 9))


class Reconnect(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addr = f"unix://{folder.name}/%41#b?c"  # no URL
        logging.getLogger("shoal").addHandler(handler := logging.NullHandler())
        self.addCleanup(logging.getLogger("shoal").removeHandler, handler)

    def start(self):
        server = Server("-samples", "400", "-listen", self.addr)
        self.addCleanup(server.close)
        return server

    def want(self, **kwargs):
        server = self.start()
        with shoal.Feed(self.addr, 10, transform="ramp(2,2)", seed=3, epochs=2, **kwargs) as feed:
            out = [(b.epoch, b.index, b.id.tolist()) for _ in range(2) for b in feed]
        server.kill()
        return out

    def test_exactly_once(self):
        for extra in ({}, dict(map=lambda x, label, i: i, threads=3), dict(slots=0)):
            want = self.want(**extra)
            server, got = self.start(), []
            coming = threading.Timer(0, lambda: None)
            with shoal.Feed(self.addr, 10, transform="ramp(2,2)", seed=3, epochs=2, reconnect=60, **extra) as feed:
                for _ in range(2):
                    for b in feed:
                        got.append((b.epoch, b.index, b.id.tolist()))
                        # what was ready is delivered still, then the feed looks for the next one
                        if len(got) in (7, 20, 39, 61):
                            server.kill()
                            coming = threading.Timer(0.2, self.start_next)
                            coming.start()
                        elif len(got) in (19, 38, 60):
                            coming.join()
                            server = self.next
                coming.join()
                self.assertEqual(got, want)
                self.assertEqual(feed.stats()["reconnects"], 4)
            self.next.kill()

    def start_next(self):
        self.next = self.start()

    def test_a_server_that_comes_late(self):
        threading.Timer(0.3, self.start).start()
        with shoal.Feed(self.addr, 10, transform="ramp(2,2)", reconnect=60) as feed:
            self.assertEqual(next(iter(feed)).index, 0)

    def test_a_certificate_that_is_being_replaced(self):
        self.start()
        with shoal.Feed(self.addr, 10, reconnect=60) as feed:
            errors, open = iter([shoal.FeedError("away", "UNAVAILABLE"), FileNotFoundError("key.pem")]), feed._open

            def failing(start):
                for error in errors:
                    raise error
                return open(start)
            feed._open = failing
            self.assertEqual(next(iter(feed)).index, 0)

    def test_patience_ends(self):
        with shoal.Feed(self.addr, 10, reconnect=0.2) as feed:
            with self.assertLogs("shoal", "WARNING") as logs, self.assertRaisesRegex(shoal.FeedError,
                    "gave up after 0.2 s") as caught:
                iter(feed)
        self.assertEqual(caught.exception.code, "UNAVAILABLE")
        self.assertRegex(logs.output[0], "Retrying for 0.2 s")

    def test_what_is_not_waited_for(self):
        self.start()
        with shoal.Feed(self.addr, 10, transform="nonsense", reconnect=60) as feed, self.assertRaisesRegex(
                shoal.FeedError, "nonsense") as caught:
            iter(feed)
        self.assertEqual(caught.exception.code, "INVALID_ARGUMENT")


class Ends(FeedCase):
    args = ("-samples", "400", "-delay", "1ms")

    def run_script(self, code, stop=None):
        code = f"import sys; sys.path[:0] = {sys.path!r}\nADDR = {self.server.addr!r}\n" + textwrap.dedent(code)
        p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(p.kill)
        if stop is not None:
            self.assertEqual(p.stdout.readline(), "ready\n")
            p.send_signal(stop)
        return (*p.communicate(timeout=60), p.returncode)

    def test_at_the_interpreters_end(self):
        # With a feed open, threads at work in the user's function, batches held, and an exception on its way.
        out = self.run_script("""
            import logging, shoal, time
            feed = shoal.Feed(ADDR, 10, map=lambda x, label, i: time.sleep(0.001), threads=4)
            it = iter(feed)
            held = [next(it) for _ in range(3)]
            logging.held = next(iter(shoal.Feed(ADDR, 10, transform="ramp(2,2)")))  # freed after shoal's modules
            print("done")
        """)
        self.assertEqual(out, ("done\n", "", 0))
        out, err, code = self.run_script("""
            import shoal
            feed = shoal.Feed(ADDR, 10, map=lambda x, label, i: x, threads=4)
            for b in feed:
                raise SystemExit(3)
        """)
        self.assertEqual((out, err, code), ("", "", 3))

    def test_interrupt_with_threads(self):
        import signal
        out, err, code = self.run_script("""
            import shoal, time
            feed = shoal.Feed(ADDR, 10, map=lambda x, label, i: time.sleep(0.01) or i, threads=4)
            try:
                for k in range(1000):
                    for b in feed:
                        print("ready", flush=True)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """, signal.SIGINT)
        self.assertEqual((out.replace("ready\n", ""), err, code), ("interrupted\n", "", 0))


class EndsWithSlots(Ends):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = Server(*cls.args, "-listen", f"unix://{cls.folder.name}/feed.sock")

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()


if __name__ == "__main__":
    unittest.main()
