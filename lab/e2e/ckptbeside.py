"""Saves checkpoints with PyTorch's DCP, in several ways: ckptbeside.py BYTES.

Each line of its input is a save, `WAY PATH [WITH]`, made by a process of its own. It prints the seconds that the
trainer was blocked, inside the save, and those from the save's beginning until the bucket had all.
"""

import os
import subprocess
import sys
import time

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

TENSORS = 16


def state(size):
    """On one thread: the processes that save are forked."""
    rng = np.random.default_rng(1)
    return {f"layer-{i}": torch.from_numpy(rng.random(size // TENSORS // 4, np.float32)) for i in range(TENSORS)}


def folder(path, _):
    return dcp.FileSystemWriter(path), None


def shoal(path, _):
    import shoal.checkpoint

    return dcp.FileSystemWriter(path), lambda: shoal.checkpoint.wait(path, timeout=300)


def juicefs(path, cache):
    """Written back is what is no longer below rawstaging in its cache."""
    def staged():
        return any("rawstaging" in at.split(os.sep) and files for at, _, files in os.walk(cache))

    def uploaded():
        while staged():
            time.sleep(0.02)
    return dcp.FileSystemWriter(path), uploaded


def rclone(path, to):
    """Without a bundle of certificates, with which Debian's does not start."""
    env = {**os.environ, "AWS_CA_BUNDLE": ""}
    return dcp.FileSystemWriter(path), lambda: subprocess.run(["rclone", "copy", "--quiet", path, to], env=env,
                                                              check=True)


def s3torchconnector(path, _):
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    return S3StorageWriter(os.environ["AWS_REGION"], path, s3client_config=config), None


def s3fs(path, _):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(path, sync_files=False), None  # or it calls sync(2), for the server's disk on this machine


def msc(path, _):
    from multistorageclient.contrib.torch.filesystem import MultiStorageFileSystemWriter

    return MultiStorageFileSystemWriter(path, sync_files=False), None


WAYS = {"folder": folder, "shoal": shoal, "juicefs": juicefs, "rclone": rclone, "s3torchconnector": s3torchconnector,
        "s3fs": s3fs, "multi-storage-client": msc}


def save(values, way, path, more=""):
    writer, upload = WAYS[way](path, more)
    began = time.monotonic()
    dcp.save(values, storage_writer=writer, no_dist=True)
    blocked = time.monotonic() - began
    if upload:
        upload()
    print(blocked, time.monotonic() - began, flush=True)


def main(size):
    values = state(int(size))
    for line in sys.stdin:
        if child := os.fork():
            if status := os.waitpid(child, 0)[1]:
                sys.exit(f"{line.strip()}: status {status}")
        else:
            save(values, *line.split())
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
