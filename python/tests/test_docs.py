"""The recipes of docs/python.md, run. The test server's dataset is small: sizes and the transform are
replaced; where it says Pillow, the samples are JPEG files. Lightning is a stand-in that calls the hooks in Lightning's
order."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
from unittest import mock

from PIL import Image

from support import Server

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

LIGHTNING = '''
class LightningDataModule:
    def __init__(self):
        self.trainer = None


def fit(data, steps, checkpoint=None):
    """What Trainer.fit does with a data module, until steps are done; returns the ids and a checkpoint."""
    if checkpoint:
        data.load_state_dict(checkpoint)
    data.setup("fit")
    loader, ids = data.train_dataloader(), []
    while len(ids) < steps:
        for batch in loader:
            ids.append(batch.id.tolist())
            saved = data.state_dict()
            if len(ids) == steps:
                break
    data.teardown("fit")
    return ids, saved
'''


class Recipes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(os.path.join(ROOT, "docs", "python.md")) as f:
            text = f.read()
        cls.blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
        cls.folder = tempfile.TemporaryDirectory()
        cls.server = Server("-samples", "100", "-listen", f"unix://{cls.folder.name}/feed.sock")
        for i in range(5):
            Image.linear_gradient("L").resize((90 + i, 70)).save(os.path.join(cls.folder.name, f"{i}.jpg"))
        cls.pictures = Server("-samples", "40", "-listen", f"unix://{cls.folder.name}/pictures.sock", "-files",
                              os.path.join(cls.folder.name, "*.jpg"))

    @classmethod
    def tearDownClass(cls):
        cls.server.close()
        cls.pictures.close()
        cls.folder.cleanup()

    def block(self, *words):
        """The one block that has all the words."""
        found = [b for b in self.blocks if all(w in b for w in words)]
        self.assertEqual(len(found), 1, words)
        addr = (self.pictures if "PIL" in found[0] else self.server).addr
        text = found[0].replace("unix:///run/shoal/feed.sock", addr).replace("256", "20")
        return text.replace("RandomResizedCrop(224)|RandomHorizontalFlip()",
                            "ramp(8,8)").replace("RandomResizedCrop(224)", "ramp(8,8)")

    def run_block(self, *words, more=""):
        """Runs it here, a process for each being dear; returns its variables."""
        variables = {"__name__": "recipe"}
        exec(compile(self.block(*words) + textwrap.dedent(more), f"docs/python.md, {words[0]}", "exec"), variables)
        return variables

    def test_all_are_run(self):
        tests = [n for n in dir(self) if n.startswith("test_") and n != "test_all_are_run"]
        self.assertEqual(len(tests), len(self.blocks))

    def test_first(self):
        self.run_block("feed.set_epoch(epoch)", "labels.shape[0]")

    def test_state(self):
        self.assertEqual(len(self.run_block("checkpoint = json.dumps")["seen"]), 5)

    def test_torch(self):
        feed = self.run_block("DataLoader(feed")["feed"]
        self.assertEqual(feed.stats()["samples"], 220)  # one batch was for the shapes
        feed.close()

    def test_ddp(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        checkpoint = os.path.join(self.folder.name, "checkpoint.pt")
        code = self.block("DistributedDataParallel(model)")
        env = {**os.environ, "PYTHONPATH": os.path.join(ROOT, "python"), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), "CHECKPOINT": checkpoint, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([sys.executable, "-B", "-c", code], env={**env, "RANK": str(r)},
                                  stderr=subprocess.PIPE, text=True) for r in range(2)]
        for p in ranks:
            self.addCleanup(p.wait)
            self.addCleanup(p.kill)
        for p in ranks:
            _, err = p.communicate(timeout=240)
            self.assertEqual((p.returncode, err), (0, ""))
        import torch
        state = torch.load(checkpoint)["feed"]
        self.assertEqual((state["epoch"], state["cursor"]), (2, 0))

    def test_lightning(self):
        lightning = types.ModuleType("lightning")
        exec(LIGHTNING, vars(lightning))
        with mock.patch.dict(sys.modules, lightning=lightning):
            make = self.run_block("LightningDataModule")["ShoalData"]
        args = self.server.addr, 20, "ramp(8,8)"
        whole, _ = lightning.fit(make(*args), 10)
        first, checkpoint = lightning.fit(make(*args), 3)
        second, checkpoint = lightning.fit(make(*args), 4, checkpoint)
        third, _ = lightning.fit(make(*args), 3, checkpoint)
        self.assertEqual(first + second + third, whole)
        self.assertEqual(len(set(map(str, whole))), 10)

    def test_numpy(self):
        v = self.run_block("mean = total / rows")
        self.assertEqual((v["rows"], v["mean"].shape), (100, (3,)))
        self.assertTrue(0 < v["mean"].min() <= v["mean"].max() < 255)

    def test_map(self):
        v = self.run_block("def decode(sample")
        self.assertEqual(v["feed"].stats()["batches"], 2)
        self.assertLess(v["batch"].data.min(), v["batch"].data.max())


if __name__ == "__main__":
    unittest.main()
