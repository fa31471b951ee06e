"""Saves three checkpoints as trainers do, and loads the newest: savers.py save|load SAVER FOLDER WANT; or saves many on
hosts of their
own: savers.py fleet SEED FOLDER....

save prints the newest checkpoint's path in FOLDER, and puts its tensors into the file WANT (NumPy's .npz). load has
FOLDER as that path in a mount, and compares what the saver's own loader makes of it with WANT. fleet has a rank for
each folder. For each number N from standard input DCP saves into step-N of every folder.
"""

import os
import random
import sys
import tempfile

import numpy as np

import shoal.checkpoint

STEPS = (1, 2, 3)
RANKS = 2
ROWS, COLUMNS = 1024, 4096  # 16 MiB: several parts of an upload


def arrays(step):
    """Other values in each step."""
    w = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) * step
    return {"w": w, "b": np.full(COLUMNS, step, np.float32)}


def tensors(step):
    import torch

    return {name: torch.from_numpy(a) for name, a in arrays(step).items()}


def empty():
    return {name: t.zero_() for name, t in tensors(1).items()}


def keep(want, values):
    np.savez(want, **{name: np.asarray(v) for name, v in values.items()})


def at(folder, step):
    return os.path.join(folder, f"step-{step}")


def on_one(save_one):
    """A saver of one process: save_one(path of the new folder, step)."""
    def save(folder, want):
        for step in STEPS:
            save_one(at(folder, step), step)
            shoal.checkpoint.wait(at(folder, step), timeout=120)
        keep(want, arrays(STEPS[-1]))
        return at(folder, STEPS[-1])
    return save


def on_ranks(save_one):
    """A saver of RANKS processes: save_one(path, a rank's shards, step). The other ranks save on while rank 0 waits."""
    def save(folder, want):
        import torch.multiprocessing

        with tempfile.TemporaryDirectory() as meet:
            torch.multiprocessing.spawn(rank, (save_one.__name__, folder, meet), nprocs=RANKS)
        keep(want, arrays(STEPS[-1]))
        return at(folder, STEPS[-1])
    return save


def rank(number, save_one, folder, meet):
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(LOCAL_RANK=str(number))
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}/store", rank=number, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for step in STEPS:
        whole = tensors(step)
        state = {"w": distribute_tensor(whole["w"], mesh, [Shard(0)]),
                 "b": distribute_tensor(whole["b"], mesh, [Replicate()])}
        path = at(folder, step)
        path = globals()[save_one](path, state, step) or path
        torch.distributed.barrier()
        if number == 0:
            shoal.checkpoint.wait(path, timeout=120)
    torch.distributed.destroy_process_group()


def fleet(seed, *folders):
    """Saves by a rank for each folder, of sizes by seed, and says when one is done."""
    import torch.multiprocessing

    spawn = torch.multiprocessing.get_context("spawn")
    todo, done = [spawn.SimpleQueue() for _ in folders], spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as meet:
        ranks = torch.multiprocessing.spawn(fleet_rank, (seed, folders, meet, todo, done), nprocs=len(folders),
                                            join=False)
        for line in sys.stdin:
            for queue in todo:
                queue.put(int(line))
            while done.empty():
                ranks.join(timeout=0.01)  # raises what a rank has raised
            print("saved", done.get(), flush=True)
        for queue in todo:
            queue.put(None)
        while not ranks.join():
            pass


def fleet_rank(number, seed, folders, meet, todo, done):
    import torch.distributed
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = len(folders)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}/store", rank=number, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for step in iter(todo[number].get, None):
        sizes = random.Random(f"{seed} {step}")
        state = {f"w{i}": distribute_tensor(torch.full((world * sizes.choice((250, 250, 250, 9 << 18)),), float(step)),
                                            mesh, [Shard(0)])
                 for i in range(sizes.randint(1, 3))}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(at(folders[number], step), single_file_per_rank=False))
        if number == 0:
            done.put(step)
    torch.distributed.destroy_process_group()


def torch_save(path, step):
    import torch

    os.mkdir(path)
    torch.save(tensors(step), os.path.join(path, "model.pt"))


def torch_load(path):
    import torch

    return torch.load(os.path.join(path, "model.pt"), mmap=True)


def safetensors_save(path, step):
    from safetensors.torch import save_file

    os.mkdir(path)
    save_file(tensors(step), os.path.join(path, "model.safetensors"))


def safetensors_load(path):
    from safetensors.torch import load_file

    return load_file(os.path.join(path, "model.safetensors"))


def dcp_save(path, state, step):
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=path)


def dcp_save_hosts(path, state, step):
    """Each rank has a folder of its own, as on hosts of their own."""
    import torch.distributed
    import torch.distributed.checkpoint as dcp

    folder, name = os.path.split(path)
    own = os.path.join(folder, f"host-{torch.distributed.get_rank()}", name)
    dcp.save(state, checkpoint_id=own)
    return own


def dcp_save_thread(path, state, step):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.THREAD).result()


def dcp_save_process(path, state, step):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()


def dcp_load(path):
    import torch.distributed.checkpoint as dcp

    state = empty()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def dcp_hf_save(path, state, step):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(path, fqn_to_index_mapping={"w": 1, "b": 2}, save_distributed=True,
                                      enable_consolidation=True)
    dcp.save(state, storage_writer=writer)


def dcp_hf_load(path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = empty()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    return state


def manager():
    """It stages for a GPU, unless configured otherwise, and needs one to gather the metadata of several ranks.

    Its direct writes are of any length, which ext4 refuses.
    """
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    return CheckpointManager(CheckpointManager.Config(items={"model": ItemSpec(resharder=DefaultResharder())},
                                                      storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                                                      save=AsyncCheckpointSaverConfig(staging_config=staging)))


def torch_checkpointing_save(path, step):
    m = manager()
    m.save(path, {"model": tensors(step), "step": step}).result()
    m.close()


def torch_checkpointing_load(path):
    m = manager()
    try:
        return m.load(path, into={"model": empty()})["model"]
    finally:
        m.close()


def lightning_model():
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(COLUMNS, 256)

        def training_step(self, batch, _):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Model()


def lightning_save(folder, want):
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Waits(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step:
                shoal.checkpoint.wait(os.path.join(folder, f"step={trainer.global_step}.ckpt"), timeout=120)

    model = lightning_model()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(len(STEPS), COLUMNS)))
    saves = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(accelerator="cpu", max_steps=len(STEPS), callbacks=[saves, Waits()], logger=False,
                                enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, batches)
    path = os.path.join(folder, f"step={STEPS[-1]}.ckpt")
    shoal.checkpoint.wait(path, timeout=120)
    keep(want, model.state_dict())
    return path


def lightning_load(path):
    import torch

    model = lightning_model()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    return model.state_dict()


def trainer_save(folder, want):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Waits(TrainerCallback):
        def on_save(self, args, state, control, **_):
            shoal.checkpoint.wait(os.path.join(folder, f"checkpoint-{state.global_step}"), timeout=120)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=32, n_embd=256, n_layer=2, n_head=2))
    words = torch.arange(16)
    arguments = TrainingArguments(folder, max_steps=len(STEPS), save_strategy="steps", save_steps=1, report_to=[],
                                  use_cpu=True,
                                  per_device_train_batch_size=1, disable_tqdm=True)
    Trainer(model, arguments, train_dataset=[{"input_ids": words, "labels": words}] * len(STEPS),
            callbacks=[Waits()]).train()
    keep(want, model.state_dict())
    return os.path.join(folder, f"checkpoint-{STEPS[-1]}")


def trainer_load(path):
    from transformers import GPT2LMHeadModel, TrainerState

    if (found := TrainerState.load_from_json(os.path.join(path, "trainer_state.json")).global_step) != STEPS[-1]:
        sys.exit(f"{path} is of step {found}")
    return GPT2LMHeadModel.from_pretrained(path).state_dict()


def orbax_save(folder, want):
    import jax
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:  # which saves while the trainer goes on
        for step in STEPS:
            manager.save(step, args=ocp.args.StandardSave(jax.tree.map(jax.numpy.asarray, arrays(step))))
            manager.wait_until_finished()
            shoal.checkpoint.wait(os.path.join(folder, str(step)), timeout=120)
    keep(want, arrays(STEPS[-1]))
    return os.path.join(folder, str(STEPS[-1]))


def orbax_load(path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(os.path.dirname(path), options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        if (found := manager.latest_step()) != STEPS[-1]:
            sys.exit(f"the latest step is {found}")
        return manager.restore(STEPS[-1], args=ocp.args.StandardRestore())


SAVERS = {
    "torch": (on_one(torch_save), torch_load),
    "safetensors": (on_one(safetensors_save), safetensors_load),
    "dcp": (on_ranks(dcp_save), dcp_load),
    "dcp-hosts": (on_ranks(dcp_save_hosts), dcp_load),
    "dcp-thread": (on_ranks(dcp_save_thread), dcp_load),
    "dcp-process": (on_ranks(dcp_save_process), dcp_load),
    "dcp-hf": (on_ranks(dcp_hf_save), dcp_hf_load),
    "torch-checkpointing": (on_one(torch_checkpointing_save), torch_checkpointing_load),
    "lightning": (lightning_save, lightning_load),
    "trainer": (trainer_save, trainer_load),
    "orbax": (orbax_save, orbax_load),
}


def main(verb, saver, folder, want):
    save, load = SAVERS[saver]
    if verb == "save":
        newest = save(folder, want)
        print("newest:", os.path.relpath(newest, folder))
        return
    loaded, wanted = load(folder), np.load(want)
    if set(loaded) != set(wanted):
        sys.exit(f"loaded {sorted(loaded)}, want {sorted(wanted)}")
    for name, value in wanted.items():
        if not np.array_equal(np.asarray(loaded[name]), value):
            sys.exit(f"{name} is not what was saved")


if __name__ == "__main__":
    if sys.argv[1] == "fleet":
        fleet(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
