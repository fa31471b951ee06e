"""Answers questions about Pillow, torch and torchvision, one a line of JSON with an optional payload behind it.

Question: {"op": ..., "n": payload bytes, ...}\n payload. Answer: {"n": ..., ...}\n payload; {"error": ...} if it
raised.
"""
import glob
import io
import json
import sys
import warnings

from PIL import Image

warnings.simplefilter("ignore")
images = {}
photos = []


def photo_paths():
    if not photos:
        for pattern in ("/usr/share/backgrounds/*/*/*.jpg", "/usr/share/wallpapers/*/contents/images/*.jpg"):
            photos.extend(sorted(glob.glob(pattern)))
    return photos


def photo(q, _):
    paths = photo_paths()
    with Image.open(paths[q["i"] % len(paths)]) as im:
        im.draft("RGB", (q["w"], q["h"]))  # decodes a large photo at a fraction of its size: fast
        im = im.convert("RGB")
        s = max(q["w"] / im.width, q["h"] / im.height) * q.get("zoom", 1.0)
        im = im.resize((max(q["w"], round(im.width * s)), max(q["h"], round(im.height * s))), Image.BICUBIC)
        x, y = (im.width - q["w"]) // 2, (im.height - q["h"]) // 2
        return {"photos": len(paths)}, im.crop((x, y, x + q["w"], y + q["h"])).tobytes()


def save(q, b):
    im = Image.frombytes("RGB", (q["w"], q["h"]), b)
    if q.get("mode"):
        im = im.convert(q["mode"])
    f = io.BytesIO()
    im.save(f, q["format"], **q.get("options", {}))
    return {}, f.getvalue()


def load(q, b):
    im = Image.open(io.BytesIO(b))
    im.load()
    images[q["key"]] = im.convert("RGB")
    return {"w": im.width, "h": im.height, "mode": im.mode}, images[q["key"]].tobytes() if q.get("pixels") else b""


def resample(q, _):
    im = images[q["key"]].crop(q["box"]).resize(q["size"], getattr(Image, q.get("filter", "bilinear").upper()))
    if q.get("window"):
        im = im.crop(q["window"])
    if q.get("flip"):
        im = im.transpose(Image.FLIP_LEFT_RIGHT)
    if q.get("turn"):
        im = im.transpose(Image.FLIP_TOP_BOTTOM)
    return {}, im.tobytes()


def draft(q, b):
    """Decodes at 1/denom of the size, then resizes a box that may begin between pixels."""
    im = Image.open(io.BytesIO(b))
    d = q["denom"]
    im.draft("RGB", (im.width // d, im.height // d))
    im = im.convert("RGB")
    return {"w": im.width, "h": im.height}, im.resize(q["size"], Image.BILINEAR,
                                                      box=[v / d for v in q["box"]]).tobytes()


def torchvision(q, _):
    from torchvision import transforms as T

    im = images[q["key"]]
    for name, kwargs in q["ops"]:
        if "interpolation" in kwargs:
            kwargs["interpolation"] = T.InterpolationMode(kwargs["interpolation"])
        im = getattr(T, name)(**kwargs)(im)
    return {"w": im.width, "h": im.height}, im.tobytes()


def functional(q, _):
    """Calls functions of torchvision.transforms.functional on a picture, one after the other, or the operation of an
    automatic augmentation ("_apply_op")."""
    from torchvision.transforms import InterpolationMode, autoaugment
    from torchvision.transforms import functional as F

    im = images[q["key"]]
    for name, kwargs in q.get("calls") or [(q["name"], dict(q["kwargs"]))]:
        if "interpolation" in kwargs:
            kwargs["interpolation"] = InterpolationMode(kwargs["interpolation"])
        im = getattr(autoaugment if name == "_apply_op" else F, name)(im, **kwargs)
    return {"w": im.width, "h": im.height}, im.convert("RGB").tobytes()


def magnitudes(q, _):
    """What an automatic augmentation may do: each operation's magnitudes and whether it is signed."""
    from torchvision import transforms as T

    t = getattr(T, q["name"])()
    args = (q["bins"],) if q["name"] == "TrivialAugmentWide" else (q["bins"], (q["h"], q["w"]))
    space = t._augmentation_space(*args)
    return {"space": [[k, [float(v) for v in m.reshape(-1)], bool(s)] for k, (m, s) in space.items()]}, b""


def draws(q, _):
    """Parameters as torchvision or torch draws them, as float64."""
    import numpy as np
    import torch
    from torchvision import transforms as T

    torch.manual_seed(q["seed"])
    if q["name"] == "beta":
        alpha = torch.tensor([q["alpha"]], dtype=torch.float64)
        out = torch.distributions.Beta(alpha, alpha).sample((q["count"],)).numpy()
    elif q["name"] == "erase":
        im = torch.empty(3, q["h"], q["w"])
        out = [T.RandomErasing.get_params(im, q["scale"], q["ratio"], [0.0])[:4] for _ in range(q["count"])]
    else:
        raise ValueError(q["name"])
    return {}, np.array(out, dtype="<f8").tobytes()


def mix(q, b):
    """Blends rows with their predecessors in torch, in float32, and casts back."""
    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[q["dtype"]]
    x = torch.frombuffer(bytearray(b), dtype=dtype).reshape(q["rows"], -1).float()
    y = (x * q["lam"] + x.roll(1, 0) * (1 - q["lam"])).to(dtype)
    return {}, y.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy().tobytes()


def erase(q, b):
    """torchvision's erase of a finished sample in C x H x W."""
    import torch
    from torchvision.transforms import functional as F

    dtype = {"uint8": torch.uint8, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[q["dtype"]]
    x = torch.frombuffer(bytearray(b), dtype=dtype).reshape(3, q["h"], q["w"])
    y = F.erase(x, q["box"][1], q["box"][0], q["box"][3], q["box"][2],
                torch.tensor(q["value"])[:, None, None].to(dtype))
    return {}, y.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[y.element_size()]).numpy().tobytes()


def tensor(q, _):
    """ToTensor (v2's, if asked), Normalize in a type and a cast, of every byte value in each channel: 3 x 256."""
    import numpy as np
    import torch
    from torchvision import transforms as T

    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    t = T.ToTensor()(Image.fromarray(ramp, "RGB"))
    if q.get("v2"):
        t = T.PILToTensor()(Image.fromarray(ramp, "RGB")).to(torch.float32).mul_(1.0 / 255)
    if q.get("mean"):
        t = T.Normalize(q["mean"], q["std"])(t.to(types[q.get("in", "fp32")]))
    t = t[:, 0, :].contiguous()
    if q["dtype"] == "fp32":
        return {}, t.float().numpy().tobytes()
    return {}, t.to(types[q["dtype"]]).view(torch.int16).numpy().tobytes()


def boxes(q, _):
    import numpy as np
    import torch
    from torchvision import transforms as T

    torch.manual_seed(q["seed"])
    im = Image.new("L", (q["w"], q["h"]))
    out = [T.RandomResizedCrop.get_params(im, q["scale"], q["ratio"]) for _ in range(q["count"])]
    return {}, np.array(out, dtype="<i4").tobytes()


def versions(q, _):
    import PIL
    from PIL import features

    return {"pillow": PIL.__version__, "libjpeg_turbo": features.version("libjpeg_turbo")}, b""


def run(q, b):
    """Runs the test's own code on numpy: it sees q and the payload b, and sets answer (a dict) and out (bytes)."""
    import numpy as np

    scope = {"np": np, "io": io, "json": json, "q": q, "b": b, "answer": {}, "out": b""}
    with np.errstate(all="ignore"):
        exec(q["code"], scope)
    return scope["answer"], scope["out"]


ops = {f.__name__: f for f in (photo, save, load, resample, draft, functional, magnitudes, draws, mix, erase,
                               torchvision, tensor, boxes, versions, run)}
out = sys.stdout.buffer
for line in sys.stdin.buffer:
    q = json.loads(line)
    payload = sys.stdin.buffer.read(q.get("n", 0))
    try:
        head, body = ops[q["op"]](q, payload)
    except Exception as e:  # the answer is the error: tests ask what Pillow refuses
        head, body = {"error": f"{type(e).__name__}: {e}"}, b""
    head["n"] = len(body)
    out.write(json.dumps(head).encode() + b"\n" + body)
    out.flush()
