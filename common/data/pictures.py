"""A folder of images: its samples, its fingerprint, and what is wrong with a file.

Files are not trusted: their sizes are checked before memory is taken.
"""
import functools
import hashlib
import os
from pathlib import Path

from common.data.synthetic import Source
from common.errors import UserError, one_line

MOST_PIXELS = 2**26  # of one image: a larger one is no photograph


def imagefolder(opts):
    """DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, ImageNet's layout: crops of 224x224 pixels."""
    from torchvision import datasets, transforms
    parts = []
    for folder in (Path(opts.data_dir) / "train", Path(opts.data_dir) / "val"):
        try:
            parts.append(datasets.ImageFolder(folder, loader=functools.partial(decode, folder=opts.data_dir)))
        except (OSError, RuntimeError) as error:
            raise UserError(f"dataset imagefolder: {folder}\n{one_line(error)}") from error
    if parts[0].classes != parts[1].classes:
        odd = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise UserError(f"dataset imagefolder: train and val of {opts.data_dir} have different classes\n"
                        f"in one alone: {', '.join(odd[:5])}{' ...' if odd[5:] else ''}")
    whole = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop, flip = transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()
    augment = transforms.Compose([crop, flip, *whole])
    plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *whole])
    return Source(*parts, classes=len(parts[0].classes), class_names=tuple(parts[0].classes), augment=augment,
                  plain=plain, fingerprint=lambda: hash_files(parts))


def decode(path, folder):
    from PIL import Image
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise UserError(f"{path} claims {image.width}x{image.height} pixels, over {MOST_PIXELS:,}\n"
                                f"all such files: python -m common.data {folder} --check\n"
                                "shrink or remove it, then resume with --accept-data-change")
            if image.mode in ("I", "F") or image.mode.startswith("I;16"):
                low, high = image.getextrema()
                if low < 0 or high > 255:  # convert() would turn all values above 255 into white
                    raise UserError(f"{path} holds values from {low:g} to {high:g}, not from 0 to 255\n"
                                    f"all such files: python -m common.data {folder} --check\n"
                                    "convert it, then resume with --accept-data-change; or write a "
                                    "--dataset FILE.py:FUNCTION that returns floats")
            return image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # PIL raises errors of many kinds for a broken file
        if getattr(error, "errno", None):
            raise  # a failing disk or network: a restart may help
        raise UserError(f"{path} is not an image that can be read: {one_line(error)}\n"
                        f"all such files: python -m common.data {folder} --check\n"
                        "replace or remove it, then resume with --accept-data-change") from error


def hash_files(parts):
    """A hash of names and sizes: reading all of ImageNet would take longer than the rest of a restart."""
    digest = hashlib.sha256()
    for part in parts:
        for path, label in part.samples:
            digest.update(f"{os.path.relpath(path, part.root)}\0{label}\0{os.path.getsize(path)}\n".encode())
        digest.update(b"--\n")
    return digest.hexdigest()


def complaint(path):
    """The first line of what is wrong with an image, or None."""
    try:
        decode(path, "")
    except (UserError, OSError) as error:
        return next(iter(str(error).splitlines()))
