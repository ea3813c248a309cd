"""A folder of images: its samples, its fingerprint, and what is wrong with a file.

Files are not trusted: their sizes are checked before memory is taken.
"""
import functools
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.data.synthetic import Data
from common.errors import UserError, one_line

MOST_PIXELS = 2**26  # of one image: a larger one is no photograph
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)  # ImageNet's


def imagefolder(opts):
    """DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, ImageNet's layout."""
    from torchvision import datasets
    parts = []
    for folder in (Path(opts.data_dir, opts.train_folder), Path(opts.data_dir, opts.val_folder)):
        try:
            parts.append(datasets.ImageFolder(folder, loader=functools.partial(decode, folder=opts.data_dir)))
        except (OSError, RuntimeError) as error:
            raise UserError(f"dataset imagefolder: {folder}\n{one_line(error)}") from error
    if parts[0].classes != parts[1].classes:
        odd = sorted(set(parts[0].classes) ^ set(parts[1].classes))
        raise UserError(f"dataset imagefolder: {opts.train_folder} and {opts.val_folder} of {opts.data_dir} "
                        "have different classes\n"
                        f"only in one: {', '.join(odd[:5])}{' ...' if odd[5:] else ''}")
    return Data(*parts, known_classes=len(parts[0].classes), fingerprint=lambda: hash_files(parts),
                **squares(opts.image_size))


def squares(size):
    """The transforms of a picture, as torchvision's recipes have them: {"augment": ..., "plain": ...}."""
    from torchvision import transforms
    crop, flip = transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()
    middle = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    return {"augment": transforms.Compose([crop, flip, normalized]),
            "plain": transforms.Compose([*middle, normalized])}


def normalized(image):
    """The numbers of torchvision's ToTensor and Normalize, in fewer passes; floats get three channels."""
    x = torch.from_numpy(np.array(image))
    if deep := x.dim() == 2:
        x = x.unsqueeze(2).expand(-1, -1, 3)
    out = torch.empty(3, *x.shape[:2]).copy_(x.permute(2, 0, 1))
    return (out if deep else out.div_(255)).sub_(MEAN).div_(STD)


def decode(path, folder):
    """The image in a file; a UserError names a file that holds none."""
    try:
        # O_NONBLOCK: a pipe among the pictures would be waited for
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            return decoded(file, path)
    except UserError as error:
        raise UserError(f"{error}\nall such files: python -m common.data {folder} --check\n"
                        "replace or remove it, then resume with --accept-data-change") from error


def decoded(file, name):
    """An open file's image in RGB; as floats from 0 to 1 if it has 16 bits, which convert() would make white.
    """
    from PIL import Image
    try:
        with Image.open(file) as image:
            if image.width * image.height > MOST_PIXELS:
                raise UserError(f"{name} claims {image.width}x{image.height} pixels, over {MOST_PIXELS:,}")
            if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):
                return image.convert("I").convert("F").point(lambda value: value * (1 / 65535) + 0)
            if image.mode in ("I", "F"):
                low, high = image.getextrema()
                if low < 0 or high > 255 or image.mode == "F" and high <= 1:  # which values are black, white?
                    raise UserError(f"{name} holds values of 32 bits from {low:g} to {high:g}, not 0 to 255")
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
    except UserError:
        raise
    except Exception as error:  # PIL raises errors of many kinds for a broken file
        if getattr(error, "errno", None):
            raise  # a failing disk or network: a restart may help
        raise UserError(f"{name} is not an image that can be read: {one_line(error)}") from error


def hash_files(parts):
    """A hash of names and sizes: reading all of ImageNet would take longer than the rest of a restart."""
    digest = hashlib.sha256()
    try:
        for part in parts:
            for path, label in part.samples:
                size = os.path.getsize(path)
                name = os.fsencode(os.path.relpath(path, part.root))  # of any bytes
                digest.update(name + f"\0{label}\0{size}\n".encode())
            digest.update(b"--\n")
    except FileNotFoundError as error:
        raise UserError(f"dataset imagefolder: {error.filename} is a link to no file\nremove it") from error
    return digest.hexdigest()


# ---- augmentation of tensors: x is a copy of the images, u a uniform number in [0, 1) for each ----
def flip(x, u):
    """Mirror half of the images."""
    chosen = (u < 0.5).nonzero().squeeze(1)
    x[chosen] = x.index_select(0, chosen).flip(3)
    return x


def crop_flip(x, u):
    """Move each image by up to 4 pixels in both directions (zeros come in), and mirror half of them."""
    n, channels, height, width = x.shape
    choice = (u * (9 * 9 * 2)).long().view(n, 1)
    mirrored, down, right = choice % 2, choice // 2 % 9, choice // 18
    rows, columns = torch.arange(height), torch.arange(width)
    rows = (rows + down) * (width + 8)
    columns = right + torch.where(mirrored == 1, width - 1 - columns, columns)
    where = (rows.unsqueeze(2) + columns.unsqueeze(1)).view(n, 1, -1).expand(n, channels, -1)
    return F.pad(x, (4, 4, 4, 4)).view(n, channels, -1).gather(2, where).view(x.shape)
