"""The words of a transform spec that have arguments of their own: type and layout."""

from __future__ import annotations

import inspect
import math
from typing import Any, Dict, List, Optional

import numpy as np

_TYPES = {"uint8": "uint8", "u8": "uint8", "byte": "uint8", "fp16": "fp16", "float16": "fp16", "half": "fp16",
          "bf16": "bf16",
          "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32"}
_LAYOUTS = {"nchw": "nchw", "chw": "nchw", "nhwc": "nhwc", "hwc": "nhwc", "channels_last": "nhwc"}


def words(spec: str, at: str = "|") -> List[str]:
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
        elif c == at and depth == 0:
            out.append(spec[start:i].strip())
            start = i + 1
    return out + [spec[start:].strip()]


def views(spec: str) -> List[str]:
    """The spec of each view of views(2x[A|B], [C]), with the words behind it; nothing for another spec."""
    first, *behind = words(spec)
    if first.partition("(")[0].strip() != "views":
        return []
    groups = [group.partition("[") for group in words(first[first.index("(") + 1:first.rindex(")")], ",") if group]
    return ["|".join([inside.rstrip()[:-1], *behind]) for count, _, inside in groups
            for _ in range(int(count.rstrip(" x") or 1))]


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
OPERATIONS = {
    "RandomResizedCrop": ("size", "scale", "ratio", "interpolation"), "Resize": ("size", "interpolation", "max_size"),
    "CenterCrop": ("size",), "RandomCrop": ("size",) + _CROP_FILL, "Pad": ("padding", "fill", "padding_mode"),
    "RandomHorizontalFlip": ("p",), "RandomVerticalFlip": ("p",),
    "RandomRotation": ("degrees", "interpolation", "expand", "center", "fill"),
    "ColorJitter": ("brightness", "contrast", "saturation", "hue"), "Grayscale": ("num_output_channels",),
    "RandomGrayscale": ("p",),
    "RandomInvert": ("p",), "RandomAutocontrast": ("p",), "RandomEqualize": ("p",), "RandomPosterize": ("bits", "p"),
    "RandomSolarize": ("threshold", "p"), "RandomAdjustSharpness": ("sharpness_factor", "p"),
    "GaussianBlur": ("kernel_size", "sigma"),
    "RandAugment": ("num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill"),
    "TrivialAugmentWide": ("num_magnitude_bins", "interpolation", "fill"),
    "AutoAugment": ("policy", "interpolation", "fill"),
    "Normalize": ("mean", "std"), "RandomErasing": ("p", "scale", "ratio", "value"),
}
COMPOUNDS = "RandomApply", "RandomChoice"  # they hold operations


def of_torchvision(transform: Any) -> str:
    """The spec that says what a torchvision transform (v1 or v2, or a Compose of them) does, or a list of them: views.
    Raises ValueError for a step that has no equal, and names it."""
    if isinstance(transform, (list, tuple)):
        return _of_views([of_torchvision(view) for view in transform])
    operations: List[str] = []
    finish = _Finish()
    by: Dict[bool, str] = {}  # the first step that computes as v1 does (False), as v2 (True), where the two differ
    for step in steps(transform):
        name = type(step).__name__
        module = type(step).__module__
        if not module.startswith("torchvision.") or name not in (*OPERATIONS, *COMPOUNDS, *_TO_TENSOR):
            raise ValueError(f"transform: {name} has no equal in a feed (docs/transforms.md lists the operations); "
                             f"leave it out, and do it "
                             "by map= or in the trainer")
        inside = list(step.transforms) if name in COMPOUNDS else []
        for inner in inside:
            of_torchvision(inner)  # which names what it does not have
        v2 = module.startswith("torchvision.transforms.v2")
        if name in _TO_TENSOR:
            if finish.tensor(name, step):
                by.setdefault(v2 and name != "ToTensor", name)
        elif name in ("Normalize", "RandomErasing"):
            finish.value(name, step)
        elif finish.maker:
            raise ValueError(f"transform: {name} comes after {finish.maker}: a feed works on pictures as Pillow does; "
                             f"put it before")
        else:
            operations.append(_call(name, step))
            for each in [step, *inside]:
                name = type(each).__name__
                if name in ("TrivialAugmentWide", "AutoAugment") or name == "RandAugment" and _solarizes(each):
                    by.setdefault(v2, name)
    if len(by) > 1:
        raise ValueError(f"transform: {by[True]} is torchvision.transforms.v2's, {by[False]} is not, and the two "
                         f"versions round differently: "
                         "take both from one (in v2, ToImage() and ToDtype(torch.float32, scale=True) in place of "
                         "ToTensor())")
    return "|".join(operations + [finish.dtype, "nchw"] + finish.words() + (["v2"] if True in by else []))


def _of_views(specs: List[str]) -> str:
    groups: List[Any] = []
    behind = ""
    for spec in specs:
        split = words(spec)
        at = next(i for i, word in enumerate(split) if word in _TYPES)
        operations, after = "|".join(split[:at]), "|".join(split[at:])
        if behind not in ("", after):
            raise ValueError(f"transform: one view ends in {behind}, another in {after}: all views of a feed have one "
                             f"type and one Normalize")
        behind = after
        if groups and groups[-1][1] == operations:
            groups[-1][0] += 1
        else:
            groups.append([1, operations])
    return f"views({', '.join(f'{n}x[{operations}]' for n, operations in groups)})|{behind}"


_TO_TENSOR = "ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype", "ToPureTensor"


class _Finish:
    """What follows the operations: types, Normalize, RandomErasing. A feed divides by 255 and normalizes in one type,
    rounds to the batch's, and erases."""

    def __init__(self) -> None:
        self.maker = ""  # the step that made a tensor of the picture
        self.dtype = "uint8"
        self._rounded = False  # to this type, from a wider one
        self._norm = self._erase = ""

    def tensor(self, name: str, step: Any) -> bool:
        """Takes a step that makes a tensor, or changes its type. Returns whether it scales to 0 to 1."""
        self.maker = self.maker or name
        if name in ("PILToTensor", "ToImage", "ToPureTensor"):
            return False
        to = "fp32" if name == "ToTensor" else _TYPES.get(_name(step.dtype), "")
        if not to:
            raise ValueError(f"transform: {name} makes {step.dtype}: a feed has uint8, fp16, bf16 and fp32")
        if to == self.dtype:
            return False
        if self.dtype == "uint8":
            if not getattr(step, "scale", True):
                raise ValueError("transform: ToDtype without scale=True has no equal in a feed: write "
                                 "ToDtype(torch.float32, scale=True)")
            self.dtype = to
            return True
        narrow = self._rounded or self.dtype != "fp32" and (not self._norm or self._erase)
        if narrow or to == "uint8":
            raise ValueError(f"transform: {name} makes {to} of {self.dtype}: a feed changes the type of fractions "
                             f"once; leave one of the "
                             "two steps out")
        self.dtype, self._rounded = to, True
        return False

    def value(self, name: str, step: Any) -> None:
        """Takes Normalize or RandomErasing."""
        if self.dtype == "uint8":
            raise ValueError(f"transform: {name} needs values of a float type: put ToTensor() before it")
        if self._erase:
            raise ValueError(f"transform: RandomErasing comes before {name}: a feed erases finished values, once; "
                             f"put it last")
        if name == "RandomErasing":
            if getattr(step, "value", None) in (None, "random"):
                raise ValueError("transform: RandomErasing(value='random') has no equal in a feed: give a "
                                 "number or three")
            self._erase = _call(name, step)
            return
        if self._norm:
            raise ValueError("transform: Normalize comes twice: a feed normalizes once; put the two together")
        numbers = []
        for what in ("mean", "std"):
            given = _literal(getattr(step, what))
            flat = given if isinstance(given, tuple) else (given,)
            shape = tuple(getattr(getattr(step, what), "shape", ()))
            if len(flat) not in (1, 3) or shape[1:] not in ((), (1, 1)) or not all(isinstance(x, (int, float))
                    for x in flat):
                raise ValueError(f"transform: Normalize has {what}={getattr(step, what)!r}: it must be a number, or "
                                 f"three, one for each channel")
            numbers.append("(" + ", ".join(repr(float(x)) for x in flat) + ("," if len(flat) == 1 else "") + ")")
        self._norm = f"Normalize({numbers[0]}, std={numbers[1]}" + ("" if self.dtype == "fp32"
            else f", dtype={self.dtype!r}") + ")"
        self._rounded = False

    def words(self) -> List[str]:
        return [word for word in (self._norm, self._erase) if word]


def _solarizes(step: Any) -> bool:
    """Whether RandAugment's threshold of Solarize is another one in v2."""
    n, i = step.num_magnitude_bins, step.magnitude
    return math.ceil(linspace(255, 0, n, i)) != math.ceil(255 * linspace(1, 0, n, i))


def linspace(lo: float, hi: float, n: int, i: int) -> float:
    """The i-th of n numbers from lo to hi, as torch.linspace has it, by fused multiply-adds."""
    start, end = np.float32(lo), np.float32(hi)
    step = float((end - start) / np.float32(n - 1))
    return float(np.float32(float(start) + step * i if i < n // 2 else float(end) - step * (n - i - 1)))


def steps(transform: Any) -> List[Any]:
    """The steps of Compose and Sequential, those inside of others among them."""
    inside = getattr(transform, "transforms", None)
    if inside is None and type(transform).__name__ == "Sequential":
        inside = list(transform)
    return [transform] if inside is None or type(transform).__name__ not in ("Compose", "Sequential") else [s
        for t in inside for s in steps(t)]


def _call(name: str, step: Any) -> str:
    """A step in a spec's words: RandomResizedCrop((224, 224), scale=(0.2, 1.0))."""
    if name in COMPOUNDS:
        inside = [type(t).__name__ for t in step.transforms]
        if not set(inside) <= set(OPERATIONS) - {"Normalize", "RandomErasing"}:
            raise ValueError(f"transform: {name} holds {', '.join(inside)}: in a feed it holds single operations "
                             f"on pictures")
        p = getattr(step, "p", getattr(step, "probabilities", None))
        weights = "" if p is None else f", p={float(p) if name == 'RandomApply' else [float(w) for w in p]}"
        return f"{name}([{', '.join(_call(*pair) for pair in zip(inside, step.transforms))}]{weights})"
    known = inspect.signature(type(step)).parameters
    args = []
    for i, parameter in enumerate(OPERATIONS[name]):
        given = getattr(step, parameter, None)
        value = _literal(given)
        default = known[parameter].default if parameter in known else None
        if value is None or i > 0 and value == _literal(default):
            continue
        if not all(isinstance(v, (bool, int, float, str)) for v in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"transform: {name} has {parameter}={given!r}: a feed takes numbers, strings and "
                             f"tuples of them")
        args.append(repr(value) if i == 0 else f"{parameter}={value!r}")
    return f"{name}({', '.join(args)})"


def _literal(value: Any) -> Any:
    """A value as a Python literal: an enumeration's value, tuples in place of lists, what numpy's and torch's values
    are. A sequence of one item is the item: v2's Resize has [256], and a mean may have the shape (3, 1, 1)."""
    value = value.tolist() if hasattr(value, "tolist") else getattr(value, "value", value)
    if isinstance(value, (list, tuple)):
        value = tuple(_literal(v) for v in value) if len(value) != 1 else _literal(value[0])
    return value
