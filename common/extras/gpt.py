"""A small GPT over bytes: an nn.Sequential of embedding, blocks and head, to be cut between any two."""

from collections import OrderedDict

from torch import nn
from torch.nn import functional as F

SIZES = {"tiny": "4x4x128", "small": "6x6x384", "medium": "12x12x768"}  # layers, heads, width


class Embedding(nn.Module):
    """Tokens and their positions, as vectors."""

    def __init__(self, vocab, length, width):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Causal attention, then two linear layers, each added to what came in."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build_gpt(data, size="tiny"):
    """Build `gpt`, `gpt:tiny|small|medium` or `gpt:LxHxD`: layers, heads, width.

    Head and embedding do not share a weight, because they may be on different devices.
    """
    layers, heads, width = (int(number) for number in SIZES.get(size, size).split("x"))
    net = nn.Sequential(
        OrderedDict(
            embedding=Embedding(data.vocab, data.sample_shape[0], width),
            **{f"block{i}": Block(heads, width) for i in range(layers)},
            head=nn.Sequential(
                OrderedDict(norm=nn.LayerNorm(width), linear=nn.Linear(width, data.classes, bias=False))
            ),
        )
    )
    for name, p in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith(("mix.weight", "down.weight")):  # the deeper the net, the less a block adds
            nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5)
        elif p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    return net
