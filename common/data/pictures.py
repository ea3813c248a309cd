"""A folder of images: its samples, its fingerprint, and all its broken files at once.

Files are strangers: their sizes are checked before memory is taken.
"""
import functools
import hashlib
import os
from pathlib import Path

from common.data.synthetic import Source
from common.errors import UserError, one_line

MOST_PIXELS = 2**26  # of one image: what unpacks to more is no photograph


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
    augment = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *whole])
    plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *whole])
    return Source(*parts, classes=len(parts[0].classes), class_names=tuple(parts[0].classes), augment=augment,
                  plain=plain, fingerprint=lambda: hash_files(parts))


def decode(path, folder):
    from PIL import Image
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise UserError(f"{path} claims {image.width}x{image.height} pixels, more than {MOST_PIXELS:,}\nall "
                                f"that cannot be read: python -m common.data {folder} --check\n"
                                "shrink or remove it, then go on with --accept-data-change")
            if image.mode in ("I", "F") or image.mode.startswith("I;16"):
                low, high = image.getextrema()
                if low < 0 or high > 255:  # as 8 bits: convert() would make white of all that is above 255
                    raise UserError(f"{path} holds values from {low:g} to {high:g}, a picture here 8 bits: 0 to 255\nall such "
                                    f"files: python -m common.data {folder} --check\nconvert it, then go on with "
                                    "--accept-data-change; or --dataset FILE.py:FUNCTION, which returns floats")
            return image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # PIL's decoders raise nearly anything on a broken file
        if getattr(error, "errno", None):
            raise  # a failing disk or network: a restart may mend that, no person has to
        raise UserError(f"{path} is not an image that can be read: {one_line(error)}\nall that cannot: python -m "
                        f"common.data {folder} --check\n"
                        "replace or remove it, then go on with --accept-data-change") from error


def hash_files(parts):
    """Names and sizes: reading every byte of ImageNet at each start would take longer than the restart."""
    digest = hashlib.sha256()
    for part in parts:
        for path, label in part.samples:
            digest.update(f"{os.path.relpath(path, part.root)}\0{label}\0{os.path.getsize(path)}\n".encode())
        digest.update(b"--\n")
    return digest.hexdigest()


def complaint(path):
    try:
        decode(path, "")
    except (UserError, OSError) as error:
        return next(iter(str(error).splitlines()))
