"""Torchvision's own transforms, v1's and v2's, made to draw what a feed has drawn: for _verify."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from unittest import mock

from ._draws import DEEDS, GRADED, SIGNED, USUAL, WIDE, magnitude

_AMOUNTS = "brightness", "contrast", "saturation", "hue"


class _Chance(NamedTuple):
    """An answer to torch.rand and to torch.randint(2), which the versions use in turn."""

    fraction: float
    number: int


def with_draws(step: Any, name: str, drawn: Dict[str, Any], value: Any) -> Any:
    """What a transform makes of a value, given its draws as in Batch.params."""
    if "transforms" in drawn:
        for inner, (name, inside) in zip(list(step.transforms)[drawn.get("choice", 0):], drawn["transforms"]):
            value = with_draws(inner, name, inside, value)
        return value
    step = copy.copy(step)
    if "operations" in drawn:
        return _automatic(step, name, drawn["operations"], value)
    applied = drawn.get("flip", drawn.get("apply"))
    if name == "RandomErasing":
        applied = drawn["box"] is not None
    if applied is not None:
        step.p = float(applied)
    if name == "ColorJitter":
        on = dict(drawn["changes"])
        order = [_AMOUNTS.index(what) for what, _ in drawn["changes"]]
        _drawing(step, (order, *map(on.get, _AMOUNTS)),
                 {"fn_idx": order, **{f"{what}_factor": on.get(what) for what in _AMOUNTS}})
    elif name == "RandomRotation":
        _drawing(step, drawn["angle"], {"angle": drawn["angle"]})
    elif name == "GaussianBlur":
        _drawing(step, drawn["sigma"], {"sigma": [drawn["sigma"]] * 2})
    elif name == "RandomErasing" and applied:
        import torch
        box = drawn["box"]
        place = [box[k] for k in ("top", "left", "height", "width")]
        fill = torch.tensor(step.value if isinstance(step.value, (list, tuple)) else [step.value],
                            dtype=torch.float32)[:, None, None]
        _drawing(step, (*place, fill), {**dict(zip("ijhw", place)), "v": fill})
    elif "width" in drawn:
        _drawing(step, tuple(drawn[k] for k in ("top", "left", "height", "width")), drawn)
    return step(value)


def _drawing(step: Any, old: Any, new: Dict[str, Any]) -> None:
    """Makes a step draw what is given: as v1's get_params returns it, and as v2's make_params (once _get_params)
    does."""
    for name in ("make_params", "_get_params"):
        draw: Optional[Callable[[Any], Dict[str, Any]]] = getattr(step, name, None)
        if draw is not None:
            setattr(step, name, lambda inputs, draw=draw: {**draw(inputs), **new})
            return
    step.get_params = lambda *_, **__: old


def _automatic(step: Any, name: str, operations: List[Tuple[str, float]], value: Any) -> Any:
    """RandAugment, TrivialAugmentWide and AutoAugment draw by torch.rand and torch.randint."""
    import torch
    v2 = type(step).__module__.startswith("torchvision.transforms.v2")
    answers: List[Any] = []
    if name == "AutoAugment":
        policies = step._policies if v2 else step.policies
        policy, applied = _policy(policies, operations, value.size, v2)
        negative = [applied[i] and operations[sum(applied[:i])][1] < 0 for i in range(2)]
        answers = [policy]
        for (deed, _, _), does, minus in zip(policies[policy], applied, negative):
            answers += [_Chance(0.0 if does else 2.0, 0)] + [_Chance(1.0 - minus, 0)] * (does and deed in SIGNED)
        step.get_params = lambda _: (policy, torch.tensor([0.0 if does else 2.0 for does in applied]),
                                     torch.tensor([int(not n) for n in negative]))
    for deed, m in operations if name != "AutoAugment" else ():
        answers.append(DEEDS.index(deed))
        if name == "TrivialAugmentWide" and deed in GRADED:
            n = step.num_magnitude_bins
            answers.append(next(i for i in range(n) if magnitude(WIDE, deed, n, i, value.size, v2) == abs(m)))
        if deed in SIGNED:
            answers.append(_Chance(0.0 if m < 0 else 1.0, int(m < 0)))
    left = iter(answers)

    def rand(*_: Any, **__: Any) -> Any:
        return torch.tensor(next(left).fraction)

    def randint(*_: Any, **__: Any) -> Any:
        answer = next(left)
        return torch.tensor(answer.number if isinstance(answer, _Chance) else answer)

    with mock.patch("torch.rand", rand), mock.patch("torch.randint", randint):
        return step(value)


def _policy(policies: Any, operations: List[Tuple[str, float]], size: Tuple[int, int], v2: bool) -> Tuple[int,
        Tuple[bool, bool]]:
    """A pair of operations, and which of them were applied, that does these operations."""
    for k, pair in enumerate(policies):
        for applied in itertools.product((False, True), repeat=2):
            does = [(deed, magnitude(USUAL, deed, 10, level, size, v2) if deed in GRADED else 0.0)
                    for (deed, _, level), is_ in zip(pair, applied) if is_]
            if does == [(deed, abs(m)) for deed, m in operations]:
                return k, (applied[0], applied[1])
    raise ValueError(f"this AutoAugment has no policy that does {operations}")
