"""DistributedDataParallel on a feed: each rank gets its part of every global batch.

    shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock --daemon
    torchrun --nproc_per_node 2 torch_ddp.py unix:///run/shoal/feed.sock --checkpoint job.pt

Debian 12's torchrun does not start under its own Python 3.11; there, on one machine:

    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2
    for r in 0 1; do RANK=$r LOCAL_RANK=$r python3 torch_ddp.py unix:///run/shoal/feed.sock --checkpoint job.pt & done;
    wait

Started again with the same checkpoint it goes on where it was, with any number of ranks that divides the global batch.
With order="torch" ranks get exactly what a DistributedSampler gives them; that order, and so a state, is tied to the
number of ranks.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import shoal


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("addr", help="unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--checkpoint", default="job.pt")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")  # torchrun has set the environment
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(args.seed)

    feed = shoal.Feed(args.addr, args.global_batch // world, world=world, rank=rank, seed=args.seed,
                      session="ddp-example",
                      transform="RandomResizedCrop(64, scale=(0.5, "
                      "1))|RandomHorizontalFlip()|fp32|nchw|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))")
    model = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Flatten(),
                          nn.Linear(16 * 15 * 15, len(feed.classes))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        feed.load_state_dict(saved["feed"])  # the state of any rank: all have the same
    ddp = nn.parallel.DistributedDataParallel(model)

    for epoch in range(feed.epoch, args.epochs):
        seen = torch.zeros(2, dtype=torch.float64)  # samples, sum of losses
        for batch in feed:
            images, labels = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(images), labels)
            loss.backward()
            optimizer.step()
            seen += torch.tensor([len(labels), loss.item() * len(labels)])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: {world} ranks, {seen[0]:.0f} samples, loss {seen[1] / seen[0]:.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feed": feed.state_dict()}
            torch.save(state, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)
    feed.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
