"""Placements: in a job of four processes on two nodes, and what is refused."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest

import numpy as np
from torch.utils.data import DataLoader, DistributedSampler

from support import Server

import shoal
from shoal import _place

SAMPLES, WORLD, BATCH = 103, 4, 5
GLOBAL = WORLD * BATCH
PLACE = dict(v=2, nodes=[dict(id="n0", weight=100), dict(id="n1", weight=200)], ranks=[0, 1, 1, 0])

RANK = textwrap.dedent("""
    import json, sys
    import torch.distributed as dist
    import shoal
    rank, store, addr, other = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=4)
    feed = shoal.Feed(addr, 5, world=4, rank=rank, seed=2, tail="pad", place="local", as_torch=False)
    ids = [b.id.tolist() for b in feed]
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    sampler = shoal.LocalSampler(range(103), 5, addr, seed=2)
    sampler.set_epoch(1)
    indices = list(sampler)
    out = dict(ids=ids, state=feed.state_dict(), place=shoal.placement(addr), pair=shoal.placement(addr, group=group), indices=indices,
               predicted=shoal.predict(sampler), length=len(sampler), errors=[])
    for make in (lambda: shoal.Feed(addr, 5, world=2, rank=0, place="local"),
                 lambda: shoal.placement(other if rank == 3 else addr)):
        try:
            make()
            out["errors"].append("")
        except (ValueError, shoal.FeedError) as e:
            out["errors"].append(type(e).__name__ + ": " + str(e))
    feed.close()
    print(json.dumps(out))
    dist.destroy_process_group()
""")


class Job(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        nodes = [Server("-samples", str(SAMPLES), "-node", f"n{i}", "-weight", str(100 + 100 * i)) for i in range(2)]
        alone = Server("-samples", str(SAMPLES))
        cls.addr, cls.alone = nodes[0].addr, alone.addr
        for server in (*nodes, alone):
            cls.addClassCleanup(server.close)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([sys.executable, "-B", "-c", RANK, str(rank), os.path.join(folder, "store"),
                                       nodes[node].addr, alone.addr],
                                      stdout=subprocess.PIPE, env={**os.environ,
                                          "PYTHONPATH": os.pathsep.join(sys.path)})
                     for rank, node in enumerate(PLACE["ranks"])]
            cls.ranks = [json.loads(p.communicate(timeout=120)[0]) for p in ranks]

    def test_all_ranks_agree(self):
        for rank in self.ranks:
            self.assertEqual(rank["place"], PLACE)
            self.assertEqual(rank["state"], self.ranks[0]["state"])
        self.assertEqual(len(self.ranks[0]["state"]["placement"]), 32)
        self.assertEqual([rank["pair"]["ranks"] for rank in self.ranks], [[0, 1]] * 2 + [[1, 0]] * 2)

    def local(self, ids):
        """The share of reads on the owner's node, by rank."""
        owners = _place._owners(shoal._link.Address(self.addr), PLACE)
        return np.mean([owners[i] == PLACE["ranks"][rank] for rank, mine in enumerate(ids) for i in mine])

    def test_feed(self):
        with shoal.Feed(self.addr, GLOBAL, seed=2, tail="pad", as_torch=False) as feed:
            plain = [b.id.tolist() for b in feed]
        for k, want in enumerate(plain):
            shares = [rank["ids"][k] for rank in self.ranks]
            self.assertEqual(sorted(i for share in shares for i in share), sorted(want))
            for rank, share in enumerate(shares):
                self.assertEqual(sum(i >= 0 for i in share), sum(i >= 0 for i in want[rank::WORLD]))
        self.assertGreater(self.local([[i for b in r["ids"] for i in b if i >= 0] for r in self.ranks]), 0.75)

    def test_sampler(self):
        plain = []
        for rank in range(WORLD):
            sampler = DistributedSampler(range(SAMPLES), WORLD, rank, seed=2)
            sampler.set_epoch(1)
            plain.append(list(sampler))
        for rank, mine in enumerate(self.ranks):
            self.assertEqual(len(mine["indices"]), len(plain[rank]))
            self.assertEqual(mine["length"], len(plain[rank]))
            self.assertEqual(mine["predicted"], mine["indices"])
        for start in range(0, len(plain[0]), BATCH):
            self.assertEqual(sorted(i for rank in self.ranks for i in rank["indices"][start:start + BATCH]),
                             sorted(i for rank in plain for i in rank[start:start + BATCH]))
        self.assertGreater(self.local([rank["indices"] for rank in self.ranks]), 0.75)

    def test_sampler_deals_as_the_server(self):
        for ranks in ([0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1, 0, 1]):
            place = {**PLACE, "ranks": ranks}
            for rank in range(len(ranks)):
                sampler = shoal.LocalSampler(range(SAMPLES), BATCH, self.addr, place=place, num_replicas=len(ranks),
                                             rank=rank, seed=4)
                loader = DataLoader(range(SAMPLES), batch_size=BATCH, sampler=sampler)
                with shoal.Feed(self.addr, BATCH, order="torch", seed=4, world=len(ranks), rank=rank, tail="uneven",
                                place=place, as_torch=False) as feed:
                    self.assertEqual([b.tolist() for b in loader], [b.id.tolist() for b in feed])

    def test_errors(self):
        for rank in self.ranks:
            world, cluster = rank["errors"]
            self.assertIn("ValueError: place=\"local\" with world=2", world)
            self.assertIn("of 4 in torch.distributed", world)
            self.assertIn("FeedError: no placement, because of rank 3", cluster)
            self.assertIn("start it with --cluster", cluster)

    def test_a_rank_without_a_certificate(self):
        """It takes part, so that the others do not wait for it, and all are told."""
        answer = _place._node(shoal._link.Address("tls://localhost:1", ca="/none/ca.pem"))
        with self.assertRaisesRegex(shoal.FeedError, "because of rank 1: .*'/none/ca.pem'"):
            _place._join([("n0", 100, "v", ""), answer])

    def test_refused(self):
        def feed(**kwargs):
            shoal.Feed(self.addr, BATCH, **kwargs).close()
        with self.assertRaisesRegex(RuntimeError, "init_process_group"):
            shoal.placement(self.addr)
        with self.assertRaisesRegex(RuntimeError, "init_process_group"):
            feed(world=2, place="local")
        with self.assertRaisesRegex(shoal.FeedError, "in no cluster"):
            shoal.Feed(self.alone, BATCH, place="local")
        with self.assertRaisesRegex(TypeError, "shoal.placement"):
            feed(place="near")
        for bad in ({}, {**PLACE, "v": 1}, {**PLACE, "ranks": []}, {**PLACE, "ranks": [2]}, {**PLACE, "ranks": [-1]},
                    {**PLACE, "nodes": PLACE["nodes"] * 2}):
            with self.assertRaisesRegex(ValueError, "not a placement"):
                feed(place=bad)
        with self.assertRaisesRegex(ValueError, "num_replicas=2"):
            shoal.LocalSampler(range(SAMPLES), BATCH, self.addr, place=PLACE, num_replicas=2, rank=0)
        with self.assertRaisesRegex(ValueError, "100 samples"):
            shoal.LocalSampler(range(100), BATCH, self.addr, place=PLACE, num_replicas=4, rank=0)
        for wrong in (dict(batch_size="4"), dict(seed="7")):
            with self.assertRaisesRegex(TypeError, f"{list(wrong)[0]}=.*whole number"):
                shoal.LocalSampler(range(SAMPLES),
                                   **{"batch_size": BATCH, "addr": self.addr, "place": PLACE, "num_replicas": 4,
                                      "rank": 0, **wrong})
        with self.assertRaisesRegex(ValueError, "batch_size=0"):
            shoal.LocalSampler(range(SAMPLES), 0, self.addr, place=PLACE, num_replicas=4, rank=0)
        with shoal.Feed(self.addr, BATCH, place=PLACE) as wrong:
            with self.assertRaisesRegex(shoal.FeedError, "placement of 4 ranks: the session's world has 1"):
                len(wrong)

    def test_alone(self):
        # A job of one rank needs no process group, and reads everything.
        with shoal.Feed(self.addr, BATCH, place="local", tail="pad", seed=1, as_torch=False) as placed, \
                shoal.Feed(self.addr, BATCH, tail="pad", seed=1, as_torch=False) as plain:
            self.assertEqual([b.id.tolist() for b in placed], [b.id.tolist() for b in plain])


class Deal(unittest.TestCase):
    def test_shares(self):
        random = np.random.default_rng(0)
        for _ in range(200):
            nodes, world, n = random.integers(1, 6), random.integers(1, 9), random.integers(0, 60)
            owners, ranks = random.integers(0, nodes, n), random.integers(0, nodes, world)
            shares = [_place.deal(owners, ranks, nodes, rank).tolist() for rank in range(world)]
            self.assertEqual(sorted(i for share in shares for i in share), list(range(n)))
            self.assertEqual([len(share) for share in shares], [len(range(rank, n, world)) for rank in range(world)])


if __name__ == "__main__":
    unittest.main()
