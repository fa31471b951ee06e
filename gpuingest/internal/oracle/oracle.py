"""Answers questions about Pillow, torch and torchvision, one a line of JSON with an optional payload behind it.

Question: {"op": ..., "n": payload bytes, ...}\n payload. Answer: {"n": ..., ...}\n payload; {"error": ...} if it raised.
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
    im = images[q["key"]].crop(q["box"]).resize(q["size"], Image.BILINEAR)
    if q.get("window"):
        im = im.crop(q["window"])
    if q.get("flip"):
        im = im.transpose(Image.FLIP_LEFT_RIGHT)
    return {}, im.tobytes()


def torchvision(q, _):
    from torchvision import transforms as T

    im = images[q["key"]]
    for name, kwargs in q["ops"]:
        im = getattr(T, name)(**kwargs)(im)
    return {"w": im.width, "h": im.height}, im.tobytes()


def tensor(q, _):
    """ToTensor, Normalize and a cast, of every byte value in each channel: 3 x 256."""
    import numpy as np
    import torch
    from torchvision import transforms as T

    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    t = T.ToTensor()(Image.fromarray(ramp, "RGB"))
    if q.get("mean"):
        t = T.Normalize(q["mean"], q["std"])(t)
    t = t[:, 0, :].contiguous()
    if q["dtype"] == "fp32":
        return {}, t.numpy().tobytes()
    return {}, t.to({"fp16": torch.float16, "bf16": torch.bfloat16}[q["dtype"]]).view(torch.int16).numpy().tobytes()


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


ops = {f.__name__: f for f in (photo, save, load, resample, torchvision, tensor, boxes, versions)}
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
