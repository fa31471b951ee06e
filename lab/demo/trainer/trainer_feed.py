"""The same training through the feed: batches arrive decoded, cropped and flipped, as uint8."""

import argparse

import torch
from torch.utils.data import DataLoader

from shoal import Feed

from model import Trainer
from record import Recorder, fail


def contact_sheet(images, path, columns=8, side=112):
    """Writes the pictures of one uint8 NCHW batch as a PNG."""
    from PIL import Image

    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (side + 4) + 4, rows * (side + 4) + 4), "white")
    for i, picture in enumerate(images):
        tile = Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).resize((side, side), Image.BILINEAR)
        sheet.paste(tile, (4 + i % columns * (side + 4), 4 + i // columns * (side + 4)))
    sheet.save(path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("address")
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--epoch", type=int, default=0)
    p.add_argument("--steps", type=int, default=None)
    p.add_argument("--sheet", help="write a contact sheet of the first batch")
    args = p.parse_args()

    record = Recorder()
    feed = Feed(args.address, batch_size=args.batch, order=f"torch:seed={args.seed}", seed=args.seed,
                epochs=args.epoch + 1,
                transform="RandomResizedCrop(224)|RandomHorizontalFlip()|uint8|nchw", tail="drop")
    feed.set_epoch(args.epoch)
    loader = DataLoader(feed, batch_size=None)
    trainer = Trainer(len(feed.classes), args.seed)
    mean = torch.tensor([0.485, 0.456, 0.406]).mul(255).view(1, 3, 1, 1)
    inv_std = torch.tensor([0.229, 0.224, 0.225]).mul(255).reciprocal().view(1, 3, 1, 1)

    first = None
    for images, labels in record.steps(loader, args.steps, lambda b: len(b.label),
                                       total=len(feed), classes=len(feed.classes)):
        if first is None:
            first = images.clone()
        record.loss = trainer.step((images.float() - mean) * inv_std, labels)
    if first is None:
        fail(f"{args.address}: the feed delivered no batch")
    if args.sheet:
        contact_sheet(first, args.sheet)
    record.end()


if __name__ == "__main__":
    main()
