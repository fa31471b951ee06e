"""Prints pillow13.txt: what Pillow 13 makes of generated pictures, as hashes.

Made with: python3 -m venv v && v/bin/pip install pillow==13.0.0 && v/bin/python pillow13.py > pillow13.txt
"""
import hashlib
import sys

import PIL
from PIL import Image

if not PIL.__version__.startswith("13."):
    sys.exit(f"this is Pillow {PIL.__version__}, want 13")


def picture(w, h):
    """A gradient with noise, the same as picture in pillow13_test.go."""
    state, out = w * 65536 + h, bytearray()
    for i in range(w * h * 3):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append((i // 3 % w * 255 // w + i // (3 * w) * 255 // h + (state >> 26)) // 3 & 0xFF)
    return Image.frombytes("RGB", (w, h), bytes(out))


print("# Pillow 13: width height, crop box, resized to, filter, SHA-256 of the pixels. Made by pillow13.py.")
for w, h in ((60, 400), (131, 300), (200, 200), (300, 97), (9, 500), (333, 251)):
    im = picture(w, h)
    boxes = ((0, 0, w, h), (w // 3, h // 5, w, h), (1, 0, w // 2 + 1, h - 3))
    for box in boxes:
        crop = im.crop(box)
        for size in ((24, 24), (64, 20), (w, 40), (40, box[3] - box[1]), (2 * w, h // 3), (w // 2 + 1, h // 2),
                     (7, 150), (100, 1)):
            for name in ("BILINEAR", "BICUBIC", "NEAREST"):
                pix = crop.resize(size, getattr(Image.Resampling, name)).tobytes()
                print(w, h, *box, *size, name.lower(), hashlib.sha256(pix).hexdigest())
