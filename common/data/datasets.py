"""The dataset of a first run; more by name in extras/datasets.py.

To add one: write a function of the options that returns a Data, and add a line to DATASETS in
common/options/registry.py, with its flags; each of these is a field of Options. Code that lives elsewhere
needs no edit here: use `--dataset path/to/file.py:function`.
"""

import torch
import torch.nn.functional as F

from common.data.samples import data_of

GLYPHS = """
.###.  ..#..  .###.  #####  ...#.  #####  ..##.  #####  .###.  .###.
#...#  .##..  #...#  ...#.  ..##.  #....  .#...  ....#  #...#  #...#
#..##  ..#..  ....#  ..#..  .#.#.  ####.  #....  ...#.  #...#  #...#
#.#.#  ..#..  ...#.  ...#.  #..#.  ....#  ####.  ..#..  .###.  .####
##..#  ..#..  ..#..  ....#  #####  ....#  #...#  .#...  #...#  ....#
#...#  ..#..  .#...  #...#  ...#.  #...#  #...#  .#...  #...#  ...#.
.###.  .###.  #####  .###.  ...#.  .###.  .###.  .#...  .###.  .##..
"""
SEED = 20240711  # of the data, not of a run: every run trains on the same pictures


def digits(opts):
    """Draw 28x28 pictures of digits, moved, in noise: 12,000 to train, 2,000 to test.

    In whole numbers, from one seed: no CPU and no version of torch can change them.
    """
    rng = torch.Generator().manual_seed(SEED)
    count = 14000

    def draw(low, high, side=1):
        return torch.randint(low, high + 1, (count, side, side), generator=rng, dtype=torch.int32)

    cells = torch.tensor([[cell == "#" for cell in row] for row in GLYPHS.split()])
    glyphs = cells.view(7, 10, 5).transpose(0, 1)
    glyphs = glyphs.repeat_interleave(3, 1).repeat_interleave(3, 2)
    glyphs = F.pad(glyphs, (6, 7, 3, 4))  # 21 x 15 pixels of 28 x 28
    pixel = torch.arange(28)
    row = (pixel.view(28, 1) + draw(-3, 3)) % 28
    column = (pixel + draw(-6, 6)) % 28
    y = torch.arange(count) % 10
    ink = glyphs[y.view(count, 1, 1), row, column] * draw(100, 255)
    noise = draw(0, 255, side=28) * draw(10, 150) >> 8
    x = (ink + noise).clamp(max=255).to(torch.uint8).unsqueeze(1)
    return data_of(opts, (x[:12000], y[:12000]), (x[12000:], y[12000:]), 10, mean=0.27, std=0.28)
