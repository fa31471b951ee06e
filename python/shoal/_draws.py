"""The random draws of a transform of pictures for each row: see Batch.params, and docs/transforms.md for the rules."""

from __future__ import annotations

import ast
import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ._spec import linspace, words

Params = List[Tuple[str, Dict[str, Any]]]

_ERASE = 0xFFFF  # RandomErasing's place among the operations
_PLACES = 256  # from one view to the next
_WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> Tuple[int, int, int, int]:
    """A block of Philox4x32-10."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & _WORD, (p >> 32) ^ d ^ m, p & _WORD
        k, m = (k + 0x9E3779B9) & _WORD, (m + 0xBB67AE85) & _WORD
    return a, b, c, d


class Rand:
    """The random numbers of one operation for one occurrence of a sample."""

    def __init__(self, seed: int, epoch: int, sample: int, occurrence: int, operation: int) -> None:
        self._key = seed & _WORD, seed >> 32 & _WORD
        self._counter = sample & _WORD, (sample >> 32) << 16 & _WORD | occurrence & 0xFFFF, epoch
        self._operation, self._block = operation << 16, 0
        self._rest: Optional[int] = None

    def uint64(self) -> int:
        if self._rest is not None:
            value, self._rest = self._rest, None
            return value
        w0, w1, w2, w3 = philox((*self._counter, self._operation | self._block), self._key)
        self._block = self._block + 1 & 0xFFFF
        self._rest = w3 << 32 | w2
        return w1 << 32 | w0

    def float64(self) -> float:
        return (self.uint64() >> 11) * 2.0 ** -53

    def uniform(self, lo: float, hi: float) -> float:
        return lo + self.float64() * (hi - lo)

    def below(self, n: int) -> int:
        while True:
            product = self.uint64() * n
            if product & 0xFFFFFFFFFFFFFFFF >= (1 << 64) % n:
                return product >> 64


def parse(transform: str) -> List[Tuple[str, Dict[str, Any]]]:
    """The operations and words of a transform in its canonical form, with their arguments."""
    out: List[Tuple[str, Dict[str, Any]]] = []
    for word in words(transform):
        call = ast.parse(word, mode="eval").body
        out.append(_call(call) if isinstance(call, ast.Call) else (word, {}))
    return out


def _call(call: Any) -> Tuple[str, Dict[str, Any]]:
    named = {k.arg: [_call(c) for c in k.value.elts] if isinstance(k.value, ast.List) else ast.literal_eval(k.value)
             for k in call.keywords}
    return call.func.id, {**named, **({"": [ast.literal_eval(a) for a in call.args]} if call.args else {})}


def draw(operations: List[Tuple[str, Dict[str, Any]]], seed: int, epoch: int, sample: int, occurrence: int,
         size: Tuple[int, int],
         view: int = 0) -> Params:
    """The draws of the operations of a parsed transform for a picture of (width, height), in order; of a view, its own.
    Raises ValueError for operations whose draws it does not know."""
    out: Params = []
    v2 = ("v2", {}) in operations
    for place, (name, given) in enumerate((name, given) for name, given in operations if name not in _BESIDE):
        if name == "RandomErasing":
            width, height = size
            r = Rand(seed, epoch, sample, occurrence, _ERASE - view * _PLACES)
            out.append((name, {"box": _erased(r, given, width, height)}))
        elif name[:1].isupper() and name not in _BEHIND and not ("transforms" in given
                and given["transforms"][0][0] in _BEHIND):
            if name not in _OPERATIONS:
                raise ValueError(f"the draws of {name} are unknown")
            drawn, size = _OPERATIONS[name](Rand(seed, epoch, sample, occurrence, view * _PLACES + place),
                                            {**given, "v2": v2}, size)
            out.append((name, drawn))
    return out


_BEHIND = "Normalize", "MixUp", "CutMix"  # operations without draws for a row
_BESIDE = "Detection", "Segmentation"  # what follows the picture
_Size = Tuple[int, int]
_Drawn = Tuple[Dict[str, Any], _Size]


def _box(left: int, top: int, width: int, height: int) -> Dict[str, Any]:
    return dict(left=left, top=top, width=width, height=height)


def _area(r: Rand, given: Dict[str, Any], width: int, height: int) -> Tuple[float, float]:
    """A target area, and an aspect ratio."""
    target = width * height * r.uniform(*given["scale"])
    return target, math.exp(r.uniform(*map(math.log, given["ratio"])))


def _resized_crop(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    width, height = size
    out = given["size"][1], given["size"][0]
    for _ in range(10):
        target, aspect = _area(r, given, width, height)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = r.below(height - h + 1)
            return _box(r.below(width - w + 1), top, w, h), out
    w, h = width, height
    low, high = given["ratio"]
    if w / h < low:
        h = max(1, round(w / low))
    elif w / h > high:
        w = max(1, round(h * high))
    return _box((width - w) // 2, (height - h) // 2, w, h), out


def _erased(r: Rand, given: Dict[str, Any], width: int, height: int) -> Optional[Dict[str, Any]]:
    if r.float64() >= given["p"]:
        return None
    for _ in range(10):
        target, aspect = _area(r, given, width, height)
        h, w = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if h < height and w < width:
            top = r.below(height - h + 1)
            return _box(r.below(width - w + 1), top, w, h)
    return None


def _crop(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    (height, width), (w, h) = given["size"], size
    left, top, right, bottom = given["padding"] or (0, 0, 0, 0)
    w, h = w + left + right, h + top + bottom
    if given["pad_if_needed"]:  # the missing pixels are added on both sides, as in torchvision
        w += 2 * max(0, width - w)
        h += 2 * max(0, height - h)
    y = r.below(max(1, h - height + 1))
    return _box(r.below(max(1, w - width + 1)), y, width, height), (width, height)


def _resize(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    to = given["size"]
    if not isinstance(to, int):
        return {}, (to[1], to[0])
    short, long = min(size), max(size)
    s, l = to, int(to * long / short)
    if given["max_size"] and l > given["max_size"]:
        s, l = int(given["max_size"] * s / l), given["max_size"]
    return {}, (s, l) if size[0] <= size[1] else (l, s)


def _rotation(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    if given["expand"]:
        raise ValueError("the draws of operations after RandomRotation(expand=True) are unknown")
    return {"angle": r.uniform(*given["degrees"])}, size


def _jitter(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    order = ["brightness", "contrast", "saturation", "hue"]
    for i in range(3):
        j = i + r.below(4 - i)
        order[i], order[j] = order[j], order[i]
    amounts = {name: r.uniform(*given[name]) for name in ("brightness", "contrast", "saturation", "hue")}
    on = {name for name in order if tuple(given[name]) != ((0, 0) if name == "hue" else (1, 1))}
    return {"changes": [(name, amounts[name]) for name in order if name in on]}, size


def _chance(name: str) -> Callable[[Rand, Dict[str, Any], _Size], _Drawn]:
    return lambda r, given, size: ({name: r.float64() < given["p"]}, size)


DEEDS = ["Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
         "Sharpness", "Posterize",
          "Solarize", "AutoContrast", "Equalize"]
GRADED, SIGNED = DEEDS[1:12], DEEDS[1:10]
# The ranges of magnitudes: shear, pixels of translation (0: 150/331 of the side), degrees, factor, bits.
USUAL, WIDE = (0.3, 0, 30.0, 0.9, 4), (0.99, 32.0, 135.0, 0.99, 6)


def magnitude(space: Tuple[float, ...], deed: str, n: int, i: int, size: _Size, v2: bool) -> float:
    """The i-th of an operation's n magnitudes."""
    shear, translate, degrees, factor, bits = space
    if deed == "Posterize":
        return 8 - round(float(np.float32(i) / np.float32((n - 1) / bits)))
    if deed == "Solarize":
        return 255 * linspace(1, 0, n, i) if v2 else linspace(255, 0, n, i)
    if deed.startswith("Translate"):
        return linspace(0, translate or 150.0 / 331.0 * size[deed == "TranslateY"], n, i)
    return linspace(0, shear if deed.startswith("Shear") else degrees if deed == "Rotate" else factor, n, i)


def _rand_augment(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    done = []
    for _ in range(given["num_ops"]):
        deed, m = DEEDS[r.below(len(DEEDS))], 0.0
        if deed in GRADED:
            m = magnitude(USUAL, deed, given["num_magnitude_bins"], given["magnitude"], size, given["v2"])
        if deed in SIGNED and r.below(2) == 1:
            m = -m
        done.append((deed, m))
    return {"operations": done}, size


def _trivial_augment(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    deed, m = DEEDS[r.below(len(DEEDS))], 0.0
    if deed in GRADED:
        m = magnitude(WIDE, deed, given["num_magnitude_bins"], r.below(given["num_magnitude_bins"]), size, given["v2"])
    if deed in SIGNED and r.below(2) == 1:
        m = -m
    return {"operations": [(deed, m)]}, size


def _auto_augment(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy  # its table is the reference
    policies = AutoAugment(AutoAugmentPolicy(given["policy"])).policies
    pair = policies[r.below(len(policies))]
    chance = r.float64(), r.float64()
    negative = r.below(2) == 0, r.below(2) == 0
    done = []
    for i, (deed, p, level) in enumerate(pair):
        if chance[i] <= p:
            m = magnitude(USUAL, deed, 10, level, size, given["v2"]) if deed in GRADED else 0.0
            done.append((deed, -m if deed in SIGNED and negative[i] else m))
    return {"operations": done}, size


def _inside(r: Rand, given: Dict[str, Any], operations: Params, size: _Size) -> Tuple[Params, _Size]:
    """The draws of operations inside of another one."""
    out = []
    for name, arguments in operations:
        drawn, size = _OPERATIONS[name](r, {**arguments, "v2": given["v2"]}, size)
        out.append((name, drawn))
    return out, size


def _apply(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    apply = r.float64() < given["p"]
    inside, size = _inside(r, given, given["transforms"] if apply else [], size)
    return {"apply": apply, "transforms": inside}, size


def _choice(r: Rand, given: Dict[str, Any], size: _Size) -> _Drawn:
    n, u, at = len(given["transforms"]), r.float64(), 0
    if given["p"] is None:
        at = int(u * n)
    else:
        u *= sum(given["p"])
        while at < n - 1 and u >= given["p"][at]:
            u -= given["p"][at]
            at += 1
    inside, size = _inside(r, given, [given["transforms"][at]], size)
    return {"choice": at, "transforms": inside}, size


_OPERATIONS: Dict[str, Callable[[Rand, Dict[str, Any], _Size], _Drawn]] = {
    "RandomResizedCrop": _resized_crop, "RandomCrop": _crop, "Resize": _resize, "RandomRotation": _rotation,
    "ColorJitter": _jitter,
    "RandomHorizontalFlip": _chance("flip"), "RandomVerticalFlip": _chance("flip"),
    **{name: _chance("apply") for name in ("RandomGrayscale", "RandomInvert", "RandomAutocontrast", "RandomEqualize",
                                           "RandomPosterize",
                                           "RandomSolarize", "RandomAdjustSharpness")},
    "Grayscale": lambda r, given, size: ({}, size),
    "CenterCrop": lambda r, given, size: ({}, (given["size"][1], given["size"][0])),
    "Pad": lambda r, given, size: ({},
                                   (size[0] + given["padding"][0] + given["padding"][2],
                                    size[1] + given["padding"][1] + given["padding"][3])),
    "GaussianBlur": lambda r, given, size: ({"sigma": r.uniform(*given["sigma"])}, size),
    "RandomApply": _apply, "RandomChoice": _choice, "RandAugment": _rand_augment,
    "TrivialAugmentWide": _trivial_augment, "AutoAugment": _auto_augment,
}
