"""Which rank reads which sample, by the nodes that own them. See placement and LocalSampler; docs/placement.md explains
them."""

from __future__ import annotations

import json
import operator
import sys
from typing import Any, Dict, Iterator, List, Optional, Tuple

import grpc
import numpy as np

from . import _wire
from ._errors import FeedError, explain, whole_number
from ._link import SERVICE, Address

Placement = Dict[str, Any]  # {"v": 2, "nodes": [{"id": str, "weight": int}, …], "ranks": [index of each rank's node]}


def placement(addr: str, *, group: Any = None, token: Optional[str] = None, ca: Optional[str] = None,
              cert: Optional[str] = None,
              key: Optional[str] = None, server_name: Optional[str] = None) -> Placement:
    """Where the job's ranks run: a value for Feed(place=) and LocalSampler(place=), the same on all ranks.

    addr        of this rank's own server: unix:///path, tcp://host:port or tls://host:port
    group       a group of torch.distributed whose ranks share each global batch; None: all ranks
    token, ca, cert, key, server_name   as in Feed

    All ranks of the group call it at the same time, after init_process_group. Each asks its server for its node in the
    cluster, and torch.distributed hands the answers round. The nodes' weights are the sizes of their caches.

    Raises RuntimeError without a process group, FeedError on all ranks if a server is in no cluster, cannot be reached,
    or has another version of the dataset than the others.
    """
    return gathered(Address(addr, token, ca, cert, key, server_name), None, None, group)


def gathered(address: Address, world: Optional[int], rank: Optional[int], group: Any = None) -> Placement:
    """The placement of all ranks. world and rank are what the caller has been told, None if nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if world == 1:
            return _join([_node(address)])
        raise RuntimeError("a placement needs torch.distributed, through which ranks tell each other their nodes, and "
                           "it is not initialized: call "
                           "torch.distributed.init_process_group first, or pass place= a placement that all ranks have")
    have = distributed.get_world_size(group), distributed.get_rank(group)
    if world is not None and have != (world, rank):
        raise ValueError(f"place=\"local\" with world={world}, rank={rank}: this process is rank {have[1]} of "
                         f"{have[0]} in torch.distributed: pass "
                         "these, or place=shoal.placement(addr, group=) with the group of the ranks that share each "
                         "global batch")
    answers: List[Any] = [None] * have[0]
    # A rank whose server does not answer takes part: otherwise the others would wait for it.
    distributed.all_gather_object(answers, _node(address), group=group)
    return _join(answers)


_Answer = Tuple[str, int, str, str]  # id, weight, version of the dataset, error


def _node(address: Address) -> _Answer:
    try:
        info = address.ask("Info", _wire.INFO)
    except (FeedError, OSError, ValueError) as e:  # also of a certificate, or an answer that is no feed server's
        return "", 0, "", str(e)
    if not info.node:
        return "", 0, "", (f"feed {address.addr}: its server is in no cluster, so it owns no samples: start it with "
                           f"--cluster, or leave place= out")
    return info.node, info.weight, info.dataset, ""


def _join(answers: List[_Answer]) -> Placement:
    weights: Dict[str, int] = {}
    for rank, (node, weight, dataset, error) in enumerate(answers):
        if error:
            raise FeedError(f"no placement, because of rank {rank}: {error}", "FAILED_PRECONDITION")
        if dataset != answers[0][2]:
            raise FeedError(f"no placement: rank {rank}'s server has version {dataset[:12]} of the dataset, rank 0's "
                            f"has {answers[0][2][:12]}: "
                            "refresh both (`shoal refresh`)", "FAILED_PRECONDITION")
        if weights.setdefault(node, weight) != weight:
            raise FeedError(f"no placement: node {node} has weight {weights[node]} and, for rank {rank}, {weight}: are "
                            f"two servers "
                            "using copies of one cache directory? Otherwise try again", "FAILED_PRECONDITION")
    nodes = sorted(weights)
    return dict(v=2, nodes=[dict(id=node, weight=weights[node]) for node in nodes],
                ranks=[nodes.index(a[0]) for a in answers])


def checked(place: Any) -> Placement:
    """A placement with its nodes sorted. Raises TypeError and ValueError."""
    if not isinstance(place, dict):
        raise TypeError(f"place={place!r}: it must be \"local\", or a placement as shoal.placement returns it")
    try:
        ids = [str(node["id"]) for node in place["nodes"]]
        nodes = sorted((dict(id=str(n["id"]), weight=operator.index(n["weight"])) for n in place["nodes"]),
                       key=lambda n: str(n["id"]))
        order = sorted(ids)
        if place["v"] != 2 or len(set(ids)) != len(ids) or not ids or min(place["ranks"]) < 0:
            raise ValueError
        return dict(v=2, nodes=nodes, ranks=[order.index(ids[operator.index(r)]) for r in place["ranks"]])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"place={place!r}: it is not a placement; shoal.placement() makes one") from None


def text(place: Placement) -> str:
    """The placement in a message."""
    return json.dumps(place, separators=(",", ":"))


def deal(owners: np.ndarray, ranks: np.ndarray, nodes: int, rank: int) -> np.ndarray:
    """Which samples of a global batch a rank reads: owner.Placement.Deal (cache/owner/placement.go), with each sample's
    owner and each rank's node."""
    n, world = len(owners), len(ranks)
    shares = (n - np.arange(world) + world - 1) // world
    room = np.bincount(ranks, weights=shares, minlength=nodes).astype(np.int64)
    order = np.argsort(owners, kind="stable")
    nth = np.empty(n, np.int64)  # how many samples of the same owner come before
    nth[order] = np.arange(n) - np.searchsorted(owners[order], np.arange(nodes))[owners[order]]
    stays = nth < room[owners]
    to = owners.astype(np.int64)
    to[~stays] = np.repeat(np.arange(nodes), room - np.bincount(owners[stays], minlength=nodes))
    home = np.flatnonzero(ranks == ranks[rank])
    return np.flatnonzero(to == ranks[rank])[int(np.searchsorted(home, rank))::len(home)]


class LocalSampler:
    """torch's DistributedSampler, with each sample of a global batch on a rank whose node owns it, as far as possible.

    dataset     read from a mount, with the samples in ImageFolder's order
    batch_size  the DataLoader's
    addr        of a feed server of this rank's daemon, which knows the owners (`shoal serve --mount` has both): unix:///path,
                tcp://host:port or tls://host:port
    place       "local": of all ranks of torch.distributed, which construct their samplers at the same time; or a placement
    num_replicas, rank, shuffle, seed, drop_last   as in DistributedSampler
    token, ca, cert, key, server_name   as in Feed

        sampler = shoal.LocalSampler(dataset, 256, "unix:///run/shoal/feed.sock")
        loader = DataLoader(dataset, batch_size=256, sampler=sampler)
        for epoch in range(90):
            sampler.set_epoch(epoch)
            shoal.hint(loader)
            for images, labels in loader:
                ...

    Each global batch has the samples that it has with a DistributedSampler, and each rank as many of them.

    Raises ValueError and TypeError for wrong arguments, FeedError for refusals and failures of the server, and what
    placement raises.
    """

    def __init__(self, dataset: Any, batch_size: int, addr: str, *, place: Any = "local",
                 num_replicas: Optional[int] = None,
                 rank: Optional[int] = None, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
                 token: Optional[str] = None,
                 ca: Optional[str] = None, cert: Optional[str] = None, key: Optional[str] = None,
                 server_name: Optional[str] = None) -> None:
        from torch.utils.data import DistributedSampler

        if whole_number("batch_size", batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1")
        whole_number("seed", seed)
        whole: Any = DistributedSampler(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed,
                                        drop_last=drop_last)
        self.num_replicas, self.rank, self.epoch, self._length, self._batch = whole.num_replicas, whole.rank, 0, int(
            whole.num_samples), batch_size
        # With these it yields what all ranks read, step by step.
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        self._whole = whole
        address = Address(addr, token, ca, cert, key, server_name)
        self.place = gathered(address, self.num_replicas, self.rank) if isinstance(place,
            str) and place == "local" else checked(place)
        if len(self.place["ranks"]) != self.num_replicas:
            raise ValueError(f"place has {len(self.place['ranks'])} ranks, and num_replicas={self.num_replicas}: make "
                             f"the placement with these ranks")
        self._ranks, self._nodes = np.array(self.place["ranks"]), len(self.place["nodes"])
        self._owners = _owners(address, self.place)
        if len(self._owners) != len(dataset):
            raise ValueError(f"the dataset has {len(dataset)} samples, and that of {addr} has {len(self._owners)}: "
                             f"both must be the same files, "
                             "in ImageFolder's order")

    def __iter__(self) -> Iterator[int]:
        whole = np.fromiter(iter(self._whole), np.int64)
        size = self._batch * self.num_replicas
        for start in range(0, len(whole), size):
            batch = whole[start:start + size]
            yield from batch[deal(self._owners[batch], self._ranks, self._nodes, self.rank)].tolist()

    def __len__(self) -> int:
        """Samples that this rank reads in an epoch."""
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, as in DistributedSampler."""
        self.epoch = whole_number("epoch", epoch)
        self._whole.set_epoch(self.epoch)


def _owners(address: Address, place: Placement) -> np.ndarray:
    """The owner of each sample, as an index into the placement's nodes."""
    request = _wire.encode(_wire.OWNERS_REQUEST, placement=text(place))
    with address.channel() as channel:
        try:
            parts = channel.unary_stream(SERVICE + "Owners")(request, timeout=600, metadata=address.metadata)
            return np.frombuffer(b"".join(_wire.decode(_wire.OWNERS_PART, part).owners for part in parts), "<u2")
        except grpc.RpcError as e:
            raise explain(e, address.addr) from None
