"""Training without torch: numpy arrays from a feed, and a pure update function as in JAX.

    shoal serve s3://photos/train --listen unix:///run/shoal/feed.sock --daemon
    python3 numpy_jax.py unix:///run/shoal/feed.sock

Arrays are views of memory that is shared with the server. numpy computes here. With JAX, import jax.numpy as np, let
jax.grad write gradient(), and take batches by jax.dlpack.from_dlpack(batch.data): it holds the memory as long as it
needs it.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

import shoal

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
Params = dict[str, Floats]


def predict(params: Params, images: Floats) -> Floats:
    """Log-probabilities of a softmax regression: (n, classes)."""
    logits = images @ params["w"] + params["b"]
    logits = logits - logits.max(axis=1, keepdims=True)
    result: Floats = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def loss_of(params: Params, images: Floats, labels: Labels) -> float:
    return -float(predict(params, images)[np.arange(len(labels)), labels].mean())


def gradient(params: Params, images: Floats, labels: Labels) -> Params:
    error = np.exp(predict(params, images))
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    return {"w": images.T @ error, "b": error.sum(axis=0)}


def update(params: Params, images: Floats, labels: Labels, rate: float) -> Params:
    """Returns the parameters after one step, without changing the old ones."""
    slope = gradient(params, images, labels)
    return {name: params[name] - rate * slope[name] for name in params}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("addr", help="unix:///PATH, tcp://HOST:PORT or tls://HOST:PORT")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--seed", type=int, default=7)
    args = p.parse_args()

    with shoal.Feed(args.addr, args.batch, seed=args.seed, epochs=args.epochs, tail="uneven", as_torch=False,
                    transform="Resize(20)|CenterCrop(16)|fp32|nhwc|Normalize((0.485,0.456,0.406),(0.229,0.224,0.225))") as feed:
        params = {"w": np.zeros((16 * 16 * 3, len(feed.classes)), np.float32),
                  "b": np.zeros(len(feed.classes), np.float32)}
        for epoch in range(args.epochs):
            samples, total = 0, 0.0
            for images, labels in feed:
                images = images.reshape(len(images), -1)
                total += loss_of(params, images, labels) * len(labels)
                params = update(params, images, labels, rate=0.01)
                samples += len(labels)
            print(f"epoch {epoch}: {samples} samples, loss {total / samples:.4f}")


if __name__ == "__main__":
    main()
