"""What TestDLIO needs beside DLIO: its order, and readers that fetch objects, which it names as reader_classname.

The readers are DLIO's own but for open(): a file's bytes come from the object of its name, by boto3, whose settings are
in the environment. DLIO 2.0.0 has the storage type s3, but no code for it with PyTorch.
"""

import functools
import io
import os
import sys

import numpy as np


@functools.cache
def client():  # one in each worker
    import boto3

    return boto3.client("s3")


def fetch(args, filename):
    bucket, prefix = os.environ["DLIO_OBJECTS"].split("/", 1)
    key = prefix + "/" + os.path.relpath(filename, args.data_folder)
    return io.BytesIO(client().get_object(Bucket=bucket, Key=key)["Body"].read())


def order(folder, epochs):
    """The files of each epoch. DLIO's sampler seeds numpy anew and shuffles what the last epoch has left."""
    names = sorted(os.listdir(os.path.join(folder, "train")))
    for _ in range(epochs):
        np.random.seed(123)
        np.random.shuffle(names)
        print("\n".join("train/" + name for name in names))


def forget(folder):
    """Takes a folder's files out of the kernel's cache."""
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    if sys.argv[1] == "order":
        order(sys.argv[2], int(sys.argv[3]))
    else:
        forget(sys.argv[2])
else:
    from dlio_benchmark.reader.image_reader import ImageReader
    from dlio_benchmark.reader.npz_reader import NPZReader
    from PIL import Image

    class S3Image(ImageReader):
        def open(self, filename):
            return np.asarray(Image.open(fetch(self._args, filename)))

    class S3Array(NPZReader):
        def open(self, filename):
            return np.load(fetch(self._args, filename), allow_pickle=True)["x"]
