"""A folder of images, and the random changes of pictures in training."""
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.data.splits import Data
from common.errors import UserError, blamed
from common.options import Options

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)  # ImageNet's


def imagefolder(opts: Options) -> Data:
    """DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, ImageNet's layout."""
    from torchvision.datasets import ImageFolder
    augment, plain = squares(opts.image_size)
    if opts.augment == "none":
        augment = plain
    train = ImageFolder(Path(opts.data_dir, "train"), loader=decode, transform=augment)
    val = ImageFolder(Path(opts.data_dir, "val"), loader=decode, transform=plain)
    in_one = sorted(set(train.classes) ^ set(val.classes))
    if in_one:
        raise UserError(f"dataset imagefolder: train and val of {opts.data_dir} have different classes\n"
                        f"only in one: {', '.join(in_one[:5])}")
    return Data(train, val, known_classes=len(train.classes), fingerprint=lambda: hash_files(train, val))


def squares(size):
    """The transforms of a picture, augmented and plain, as torchvision's recipes have them."""
    from torchvision.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize
    augment = Compose([RandomResizedCrop(size), RandomHorizontalFlip(), normalized])
    return augment, Compose([Resize(size * 256 // 224), CenterCrop(size), normalized])


def normalized(image):
    """The numbers of torchvision's ToTensor and Normalize, in fewer passes; floats get three channels."""
    x = torch.from_numpy(np.array(image))
    is_deep = x.dim() == 2
    if is_deep:
        x = x.unsqueeze(2).expand(-1, -1, 3)
    out = torch.empty(3, *x.shape[:2]).copy_(x.permute(2, 0, 1))
    if not is_deep:
        out.div_(255)
    return out.sub_(MEAN).div_(STD)


def decode(path):
    """The image in a file, in RGB; as floats from 0 to 1 if it has 16 bits: convert() would make it white."""
    from PIL import Image
    with blamed(f"{path} is not an image that can be read",
                "replace or remove it, then resume with --accept-data-change; or use --bad-samples skip"):
        with Image.open(path) as image:
            if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):
                return image.convert("I").convert("F").point(lambda value: value * (1 / 65535) + 0)
            return image.convert("RGB")


def hash_files(*folders):
    """A hash of names and sizes: reading all of ImageNet would take longer than the rest of a restart."""
    digest = hashlib.sha256()
    for folder in folders:
        for path, label in folder.samples:
            name = os.fsencode(os.path.relpath(path, folder.root))  # of any bytes
            digest.update(name + f"\0{label}\0{os.path.getsize(path)}\n".encode())
        digest.update(b"--\n")
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
    mirrored = choice % 2
    down = choice // 2 % 9
    right = choice // 18
    rows = (torch.arange(height) + down) * (width + 8)
    columns = torch.arange(width)
    columns = right + torch.where(mirrored == 1, width - 1 - columns, columns)
    where = (rows.unsqueeze(2) + columns.unsqueeze(1)).view(n, 1, -1).expand(n, channels, -1)
    return F.pad(x, (4, 4, 4, 4)).view(n, channels, -1).gather(2, where).view(x.shape)
