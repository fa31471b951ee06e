"""A trainer of TestRunTrainers: Hugging Face's Trainer and Lightning's, with workers and without, say what they read of
what was told."""

import json
import os
import sys

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from mounted import Files, plan

mount, out = sys.argv[1:]
EPOCHS = 3
epochs, seen = [], {"told": None, "read": []}


def step(indices):
    seen["told"] = seen["told"] or plan(mount, *os.listdir(os.path.join(mount, ".shoal/plans")))
    seen["read"] += [files.files[int(i)] for i in indices]


def end(name, epoch):
    epochs.append([name, epoch, seen["told"], seen["read"]])
    seen.update(told=None, read=[])


class Pictures(Files):
    def __getitem__(self, i):
        index, size = super().__getitem__(i)
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([float(size)])}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        step(x.flatten().tolist())
        return {"loss": (self.layer(x) - labels).square().mean()}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def on_train_epoch_end(self):
        end(f"Lightning, {workers} workers", self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


class Ends(TrainerCallback):
    def on_epoch_end(self, args, state, control, **_):
        end(f"HF Trainer, {workers} workers", state.epoch)


files = Pictures(mount)
for workers, persistent in (0, False), (2, False), (2, True):
    args = TrainingArguments(out, per_device_train_batch_size=6, num_train_epochs=EPOCHS, report_to=[],
                             save_strategy="no", use_cpu=True, disable_tqdm=True,
                             dataloader_num_workers=workers, dataloader_persistent_workers=persistent)
    Trainer(Model(), args, train_dataset=files, callbacks=[Ends()]).train()
    loader = DataLoader(files, 6, shuffle=True, num_workers=workers, persistent_workers=persistent)
    lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, default_root_dir=out).fit(Module(), loader)
    del loader
with open(f"{out}/{os.environ['RANK']}.json", "w", encoding="utf-8") as f:
    json.dump(epochs, f)
