"""The words of a transform spec that have arguments of their own: type and layout."""

from __future__ import annotations

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
