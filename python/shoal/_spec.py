"""The words of a transform spec that have arguments of their own: type and layout."""

from __future__ import annotations

import inspect
from typing import Any, List, Optional

_TYPES = {"uint8": "uint8", "u8": "uint8", "byte": "uint8", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
          "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32"}
_LAYOUTS = {"nchw": "nchw", "chw": "nchw", "nhwc": "nhwc", "hwc": "nhwc", "channels_last": "nhwc"}


def words(spec: str) -> List[str]:
    """The operations of a spec, split at the bars outside of brackets and quotes."""
    out, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(spec):
        if quote:
            quote = "" if c == quote else quote
        elif c in "'\"":
            quote = c
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif c == "|" and depth == 0:
            out.append(spec[start:i].strip())
            start = i + 1
    return out + [spec[start:].strip()]


def with_words(spec: Optional[str], dtype: Any, layout: Optional[str]) -> Optional[str]:
    """The spec with dtype and layout, added if it has no such word. Raises ValueError if it has a different one, or if
    there is no spec."""
    for what, value, known in (("dtype", dtype, _TYPES), ("layout", layout, _LAYOUTS)):
        if value is None:
            continue
        word = known.get(_name(value))
        if word is None:
            raise ValueError(f"{what}={value!r}: must be one of {', '.join(dict.fromkeys(known.values()))}")
        if not spec or spec.strip() == "raw":
            raise ValueError(f"{what}={value!r}: raw samples are bytes as they are stored; give a transform, such as "
                             f"transform=\"RandomResizedCrop(224)\"")
        have = [w for w in words(spec) if w in known]
        if not have:
            spec = f"{spec}|{word}"
        elif known[have[0]] != word:
            raise ValueError(f"{what}={value!r}: the transform says {have[0]} already; leave one of the two out")
    return spec


def _name(value: Any) -> str:
    """The name in "fp16", numpy.float16, numpy.dtype("float16"), torch.float16, torch.channels_last."""
    if isinstance(value, str):
        return value.lower()
    name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    return str(name).rpartition(".")[2].lower()


# What torchvision's classes are called here, and which of their attributes are arguments. Everything that is not the
# class's default is written out. Pictures are Pillow's until ToTensor, which always antialiases.
_CROP_FILL = ("padding", "pad_if_needed", "fill", "padding_mode")
_OPERATIONS = {
    "RandomResizedCrop": ("size", "scale", "ratio", "interpolation"), "Resize": ("size", "interpolation", "max_size"),
    "CenterCrop": ("size",), "RandomCrop": ("size",) + _CROP_FILL, "Pad": ("padding", "fill", "padding_mode"),
    "RandomHorizontalFlip": ("p",), "RandomVerticalFlip": ("p",),
    "RandomRotation": ("degrees", "interpolation", "expand", "center", "fill"),
    "ColorJitter": ("brightness", "contrast", "saturation", "hue"), "Grayscale": ("num_output_channels",), "RandomGrayscale": ("p",),
    "RandomInvert": ("p",), "RandomAutocontrast": ("p",), "RandomEqualize": ("p",), "RandomPosterize": ("bits", "p"),
    "RandomSolarize": ("threshold", "p"), "RandomAdjustSharpness": ("sharpness_factor", "p"), "GaussianBlur": ("kernel_size", "sigma"),
    "RandAugment": ("num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill"),
    "TrivialAugmentWide": ("num_magnitude_bins", "interpolation", "fill"), "AutoAugment": ("policy", "interpolation", "fill"),
    "Normalize": ("mean", "std"), "RandomErasing": ("p", "scale", "ratio", "value"),
}


def of_torchvision(transform: Any) -> str:
    """The spec that says what a torchvision transform (v1 or v2, or a Compose of them) does. Raises ValueError for a step
    that has no equal, and names it."""
    out: List[str] = []
    tensor = ""  # the step that made a tensor of the picture
    dtype = "uint8"
    for step in _steps(transform):
        name = type(step).__name__
        if not type(step).__module__.startswith("torchvision.") or name not in _OPERATIONS and name not in _TO_TENSOR:
            raise ValueError(f"transform: {name} has no equal in a feed (docs/transforms.md lists the operations); leave it out, and do it "
                             "by map= or in the trainer")
        if name in _TO_TENSOR:
            tensor = tensor or name
            if name == "ToTensor" or name != "PILToTensor" and getattr(step, "scale", name == "ConvertImageDtype"):
                dtype = _TYPES.get(_name(getattr(step, "dtype", "float32")), "")
            elif name == "ToDtype" and _TYPES.get(_name(step.dtype)) != dtype:
                raise ValueError("transform: ToDtype without scale=True has no equal in a feed: write ToDtype(torch.float32, scale=True)")
            if not dtype:
                raise ValueError(f"transform: {name} makes {step.dtype}: a feed has uint8, fp16, bf16 and fp32")
        elif name in ("Normalize", "RandomErasing"):
            if dtype == "uint8":
                raise ValueError(f"transform: {name} needs values of a float type: put ToTensor() before it")
            if name == "Normalize" and any(word.startswith("RandomErasing") for word in out):
                raise ValueError("transform: RandomErasing comes before Normalize: a feed erases finished values; put it last")
            out.append(_call(name, step))
        elif tensor:
            raise ValueError(f"transform: {name} comes after {tensor}: a feed works on pictures as Pillow does; put it before")
        else:
            out.append(_call(name, step))
    words = [w for w in out if w.startswith(("Normalize", "RandomErasing"))]
    return "|".join([w for w in out if w not in words] + [dtype, "nchw"] + words)


_TO_TENSOR = "ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "ToPureTensor"


def _steps(transform: Any) -> List[Any]:
    """The steps of Compose and Sequential, those inside of others among them."""
    inside = getattr(transform, "transforms", None)
    if inside is None and type(transform).__name__ == "Sequential":
        inside = list(transform)
    return [transform] if inside is None or type(transform).__name__ not in ("Compose", "Sequential") else [s for t in inside for s in _steps(t)]


def _call(name: str, step: Any) -> str:
    """A step in a spec's words: RandomResizedCrop((224, 224), scale=(0.2, 1.0))."""
    known = inspect.signature(type(step)).parameters
    args = []
    for i, parameter in enumerate(_OPERATIONS[name]):
        value = _literal(getattr(step, parameter, None))
        default = known[parameter].default if parameter in known else None
        if value is None or i > 0 and value == _literal(default):
            continue
        args.append(repr(value) if i == 0 else f"{parameter}={value!r}")
    return f"{name}({', '.join(args)})"


def _literal(value: Any) -> Any:
    """A value as a Python literal: an enumeration's value, and tuples in place of lists."""
    value = getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        value = tuple(_literal(v) for v in value) if len(value) != 1 else _literal(value[0])  # v2's Resize has [256]
    return value
