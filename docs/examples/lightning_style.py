"""A Lightning data module on a feed that resumes in the middle of an epoch from Lightning's own checkpoints.

    shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock --daemon
    python3 lightning_style.py unix:///run/shoal/feed.sock --max-steps 10     # is stopped in the middle
    python3 lightning_style.py unix:///run/shoal/feed.sock                    # resumes with the 11th batch

ShoalData and Classifier are what Lightning wants. Debian has no Lightning: Trainer below stands in for it, with its
hooks in its order (setup, load_state_dict, train_dataloader, training_step, state_dict, teardown) and nothing else of
it.
"""

import argparse
import hashlib
import os
from typing import Any

import torch
from torch import nn

import shoal


class ShoalData:  # (lightning.LightningDataModule)
    """The feed, whose state is part of the checkpoint: Lightning saves and loads the state of data modules."""

    def __init__(self, addr: str, batch_size: int, seed: int) -> None:
        # connects when it is first used
        self.feed = shoal.Feed(addr, batch_size, seed=seed, session="lightning-example",
                               transform="RandomResizedCrop(64, scale=(0.5, 1))|RandomHorizontalFlip()|fp32|nchw")

    def train_dataloader(self) -> shoal.Feed:
        return self.feed

    def state_dict(self) -> dict[str, Any]:
        return self.feed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.feed.load_state_dict(state)

    def teardown(self, stage: str) -> None:
        self.feed.close()


class Classifier(nn.Module):  # (lightning.LightningModule)
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, classes))

    def training_step(self, batch: Any, step: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.003, momentum=0.9)


class Trainer:
    """Replaces lightning.Trainer. history is a digest of all samples that the job has trained on, in order."""

    def __init__(self, max_epochs: int, max_steps: int, checkpoint: str) -> None:
        self.max_epochs, self.max_steps, self.checkpoint = max_epochs, max_steps, checkpoint
        self.step, self.history = 0, b""

    def fit(self, model: Classifier, data: ShoalData) -> float:
        optimizer = model.configure_optimizers()
        if os.path.exists(self.checkpoint):
            saved = torch.load(self.checkpoint)
            self.step, self.history = saved["step"], saved["history"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            data.load_state_dict(saved["data"])
        loader, loss = data.train_dataloader(), torch.tensor(float("nan"))  # if there is nothing left to train
        while loader.epoch < self.max_epochs and self.step != self.max_steps:
            for batch in loader:
                optimizer.zero_grad()
                loss = model.training_step(batch, self.step)
                loss.backward()
                optimizer.step()
                self.step += 1
                self.history = hashlib.sha256(self.history + batch.id.numpy().tobytes()).digest()
                if self.step == self.max_steps:
                    break
        torch.save({"step": self.step, "history": self.history, "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "data": data.state_dict()}, self.checkpoint)
        data.teardown("fit")
        return float(loss.item())


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("addr", help="unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT")
    p.add_argument("--max-epochs", type=int, default=2)
    p.add_argument("--max-steps", type=int, default=-1)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--checkpoint", default="lightning.pt")
    args = p.parse_args()

    torch.manual_seed(args.seed)
    data = ShoalData(args.addr, args.batch, args.seed)
    trainer = Trainer(args.max_epochs, args.max_steps, args.checkpoint)
    loss = trainer.fit(Classifier(len(data.feed.classes)), data)
    print(f"step {trainer.step}, loss {loss:.4f}, history {trainer.history.hex()[:16]}")


if __name__ == "__main__":
    main()
