"""shoal verify: replays batches of a feed with this Python's torchvision, and compares. See main."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
from io import BytesIO
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ._draws import parse
from ._errors import FeedError
from ._feed import Feed
from ._own import with_draws
from ._spec import COMPOUNDS, OPERATIONS, of_torchvision, steps, views

EQUAL, DIFFERS, NOT_COMPARED = 0, 1, 2
_TRANSFORM = "RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw"
_NOT_REPLAYED = {"MixUp": "it mixes whole batches", "CutMix": "it mixes whole batches", "dct": "dct is not exact"}


def main(arguments: Sequence[str]) -> int:
    """Runs the verb. Returns the exit code: 0 if all rows are equal, 1 if one differs, 2 if they could not be
    compared."""
    p = argparse.ArgumentParser(prog="shoal verify",
                                description="Replays batches of a feed in this Python's own torchvision, and compares "
                                "every row with what the server made. Exit code 0: all are equal; 1: some differ; 2: "
                                "it could not be compared.")
    p.add_argument("verb", choices=["verify"])
    p.add_argument("addr", metavar="ADDR", help="address of the feed")
    p.add_argument("--transform", default=_TRANSFORM,
                   help="of pictures, or MODULE:NAME of a torchvision transform, whose own classes then replay "
                   "(default: %(default)s)")
    p.add_argument("--batch", type=int, default=16, help="rows of a batch (default: %(default)s)")
    p.add_argument("--batches", type=int, default=1, help="how many to compare (default: %(default)s)")
    p.add_argument("--order", default="uniform", help="order of the samples (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of order and augmentation (default: %(default)s)")
    p.add_argument("--epoch", type=int, default=0, help="epoch (default: %(default)s)")
    for name in ("ca", "cert", "key", "server-name"):
        p.add_argument(f"--{name}", help="for tls:// addresses, as `shoal feed` takes it")
    given = p.parse_args(arguments)
    try:
        return _run(given)
    except (_NothingToCompare, FeedError, ValueError) as e:
        print(f"shoal verify: {e}", file=sys.stderr)
    except Exception as e:  # any other error is not a difference
        print(f"shoal verify: {type(e).__name__}: {e}", file=sys.stderr)
    return NOT_COMPARED


class _NothingToCompare(Exception):
    pass


def _run(given: Any) -> int:
    missing = [name for name in ("torch", "torchvision", "PIL") if not _there(name)]
    if missing:
        raise _NothingToCompare(f"{sys.executable} has no {' and no '.join(missing)}, which are needed to replay "
                                f"batches: "
                                f"{sys.executable} -m pip install torch torchvision pillow, or use another Python")
    if given.batches < 1:
        raise _NothingToCompare(f"--batches={given.batches}: it must be at least 1")
    import PIL
    import torchvision
    own = _named(given.transform)
    spec = given.transform if own is None else of_torchvision(own)
    if own is not None and int(PIL.__version__.split(".")[0]) >= 13:
        spec += "|pillow(13)"
    for name, why in _NOT_REPLAYED.items():
        if re.search(rf"\b{name}\b", spec):
            raise _NothingToCompare(f"{name} is not replayed, since {why}: remove it from --transform")
    common = dict(order=given.order, seed=given.seed, tail="uneven", bad="skip:100%", credits=1, as_torch=False,
                  token=os.environ.get("SHOAL_FEED_TOKEN"), ca=given.ca, cert=given.cert, key=given.key,
                  server_name=given.server_name)
    rows = differ = 0
    transform = spec
    with Feed(given.addr, given.batch, transform=spec, **common) as made, Feed(given.addr, given.batch,
            **common) as raw:
        made.set_epoch(given.epoch)
        raw.set_epoch(given.epoch)
        batches = zip(range(given.batches), made, raw)
        for _, batch, stored in batches:
            transform = made._link._transform  # type: ignore[union-attr]
            if batch._draws is None:
                raise _NothingToCompare(f"{given.transform} is not a transform of pictures: only those are replayed")
            for row, drawn in enumerate(batch.params):
                if drawn is None:
                    continue
                assert batch.id[row] == stored.id[row]
                difference = _difference(batch, row, bytes(stored.data[row]), transform, drawn, own)
                rows += 1
                differ += difference is not None
                print(f"sample {batch.id[row]}: {'equal' if difference is None else 'differs, ' + difference}"
                      + (f"; drawn: {drawn}" if difference is not None else ""))
    print(f"{rows - differ} of {rows} rows equal, {transform}, with torchvision {torchvision.__version__} on Pillow "
          f"{PIL.__version__}")
    if differ and (int(PIL.__version__.split(".")[0]) >= 13) != ("pillow(13)" in transform):
        print("the transform resizes by the rule of another Pillow version: see pillow(9.4) and pillow(13) in "
              "docs/transforms.md")
    return DIFFERS if differ else EQUAL


def _difference(batch: Any, row: int, stored: bytes, transform: str, drawn: Any, own: Any) -> Optional[str]:
    """How a row differs, and which of its views; None if it is equal."""
    specs = views(transform)
    if not specs:
        return _compare(batch.data[row], replay(stored, transform, drawn, own), transform)
    made = batch.data if isinstance(batch.data, list) else [batch.data]
    found = [_compare(made[k][row], replay(stored, spec, drawn[k], own and own[k]), spec)
             for k, spec in enumerate(specs)]
    return "; ".join(f"view {k}: {difference}" for k, difference in enumerate(found) if difference) or None


def _named(transform: str) -> Any:
    """The object MODULE:NAME, None of a spec."""
    module, colon, name = transform.partition(":")
    if not colon or not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        return None
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as e:
        raise _NothingToCompare(
            f"--transform {transform}: {e}; name a module on PYTHONPATH and a transform in it") from None


def _there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _compare(got: np.ndarray, want: np.ndarray, transform: str) -> Optional[str]:
    """The difference, None if there is none."""
    if "|bf16" in transform:  # numpy has it as uint16
        got = (got.astype(np.uint32) << 16).view(np.float32)
    if got.shape != want.shape:
        return f"shape {got.shape}, here {want.shape}"
    unequal = ~((got == want) | (got != got) & (want != want))
    if "GaussianBlur(" in transform and unequal.any():  # exact within 1 of 255
        unequal &= ~_neighbours(got, want, parse(transform))
    if not unequal.any():
        return None
    far = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return f"{int(unequal.sum())} of {got.size} values, by {far[unequal].max():g} at most and {far[unequal].mean():g} on average"


def _neighbours(got: np.ndarray, want: np.ndarray, operations: _Operations) -> np.ndarray:
    """Where two pictures have values of bytes that differ by 1."""
    import torch
    scale = _finish(torch.arange(256, dtype=torch.uint8).expand(3, 1, 256),
                    [o for o in operations if o[0] not in ("RandomErasing", "nhwc")], iter(()))
    near = np.zeros(got.shape, bool)
    for channel, values in enumerate(scale[:, 0]):
        at = (slice(None), slice(None), channel) if ("nhwc", {}) in operations else (channel,)
        for one, other in ((values[1:], values[:-1]), (values[:-1], values[1:])):
            for a, b in zip(one, other):
                near[at] |= (got[at] == a) & (want[at] == b)
    return near


_Operations = List[Tuple[str, Dict[str, Any]]]


def replay(stored: bytes, transform: str, drawn: Any, own: Any = None) -> np.ndarray:
    """torchvision's result for a stored picture, given the draws: of its functions, or of the caller's own transform;
    bf16 as float32."""
    from torchvision.transforms import functional as F
    operations, by = parse(transform), iter(drawn)
    picture = _decoded(stored)
    if own is not None:
        value = picture
        for step in steps(own):
            if type(step).__name__ in (*OPERATIONS, *COMPOUNDS) and type(step).__name__ != "Normalize":
                name, draws = next(by)
                value = with_draws(step, name, draws, value)
            else:
                value = step(value)
        return _array(F.pil_to_tensor(value) if hasattr(value, "getbands") else value)
    for name, arguments in operations:
        if name[:1].isupper() and name not in ("Detection", "Segmentation", "Normalize", "RandomErasing"):
            picture = _do(picture, name, arguments, next(by)[1])
    return _finish(F.pil_to_tensor(picture), operations, by)


def _decoded(stored: bytes) -> Any:
    from PIL import Image
    with Image.open(BytesIO(stored)) as image:
        return image.convert("RGB")


def _finish(value: Any, operations: _Operations, by: Iterator[Any]) -> np.ndarray:
    """What is made of the bytes of a picture."""
    import torch
    from torchvision.transforms import functional as F
    words = dict(operations)
    dtype = next((name for name in ("fp32", "fp16", "bf16") if name in words), "uint8")
    if dtype != "uint8":
        norm = words.get("Normalize")
        to = _torch_type(norm.get("dtype", "fp32") if norm else "fp32")
        # Old versions of torch would round 1 / 255 to half precision, too.
        value = value.to(torch.float32).mul_(1.0 / 255).to(to) if "v2" in words else F.convert_image_dtype(value, to)
        if norm:
            value = F.normalize(value, norm["mean"], norm["std"])
        value = value.to(_torch_type(dtype))
    if "RandomErasing" in words:
        box = next(by)[1]["box"]
        if box is not None:
            fill = torch.tensor(words["RandomErasing"]["value"], dtype=torch.float64).to(value.dtype)[:, None, None]
            value = F.erase(value, box["top"], box["left"], box["height"], box["width"], fill)
    return _array(value.permute(1, 2, 0) if "nhwc" in words else value)


def _array(value: Any) -> np.ndarray:
    import torch
    array: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return array


def _torch_type(dtype: str) -> Any:
    import torch
    return {"uint8": torch.uint8, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]


def _do(picture: Any, name: str, given: Dict[str, Any], drawn: Dict[str, Any]) -> Any:
    """One operation on a PIL picture."""
    from torchvision import transforms as T
    from torchvision.transforms import functional as F
    from torchvision.transforms.autoaugment import _apply_op
    how = T.InterpolationMode(given["interpolation"]) if "interpolation" in given else None
    fill = list(given["fill"]) if isinstance(given.get("fill"), tuple) else given.get("fill")
    if "transforms" in drawn:
        for (name, given), (_, inside) in zip(given["transforms"][drawn.get("choice", 0):], drawn["transforms"]):
            picture = _do(picture, name, given, inside)
        return picture
    if name == "RandomResizedCrop":
        return F.resized_crop(picture, drawn["top"], drawn["left"], drawn["height"], drawn["width"],
                              list(given["size"]), how)
    if name == "RandomCrop":
        mode = given["padding_mode"]
        if given["padding"]:
            picture = F.pad(picture, list(given["padding"]), tuple(given["fill"]), mode)
        for short, sides in ((given["size"][1] - picture.size[0], [1, 0]),
                             (given["size"][0] - picture.size[1], [0, 1])):
            if given["pad_if_needed"] and short > 0:
                picture = F.pad(picture, [short * side for side in sides], tuple(given["fill"]), mode)
        return F.crop(picture, drawn["top"], drawn["left"], drawn["height"], drawn["width"])
    if name == "Resize":
        size = given["size"] if isinstance(given["size"], int) else list(given["size"])
        return F.resize(picture, size, how, given["max_size"])
    if name == "CenterCrop":
        return F.center_crop(picture, list(given["size"]))
    if name == "Pad":
        return F.pad(picture, list(given["padding"]), tuple(given["fill"]), given["padding_mode"])
    if name == "RandomHorizontalFlip":
        return F.hflip(picture) if drawn["flip"] else picture
    if name == "RandomVerticalFlip":
        return F.vflip(picture) if drawn["flip"] else picture
    if name == "RandomRotation":
        return F.rotate(picture, drawn["angle"], how, False, given["center"], fill)
    if name == "Grayscale":
        return F.to_grayscale(picture, 3)
    if name == "GaussianBlur":
        return F.gaussian_blur(picture, list(given["kernel_size"]), [drawn["sigma"]] * 2)
    for deed, amount in drawn.get("changes", ()):
        picture = getattr(F, f"adjust_{deed}")(picture, amount)
    for deed, magnitude in drawn.get("operations", ()):
        picture = _apply_op(picture, deed, magnitude, interpolation=how, fill=fill)
    if drawn.get("apply"):
        picture = {
            "RandomGrayscale": lambda: F.to_grayscale(picture, 3), "RandomInvert": lambda: F.invert(picture),
            "RandomAutocontrast": lambda: F.autocontrast(picture), "RandomEqualize": lambda: F.equalize(picture),
            "RandomPosterize": lambda: F.posterize(picture, given["bits"]),
            "RandomSolarize": lambda: F.solarize(picture, given["threshold"]),
            "RandomAdjustSharpness": lambda: F.adjust_sharpness(picture, given["sharpness_factor"]),
        }[name]()
    return picture
