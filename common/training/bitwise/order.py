r"""One fixed tree of additions over V slices of a global batch, whoever computes them: integers only.

    slice    0   1   2   3   4   5   6
              \ /     \ /     \ /   /          V = 7: a perfect tree of 8, missing slices left out
               +       +       +   /
                \     /         \ /            A rank adds what it owns whole of the tree, as a binary counter carries;
                   +             +             the rest of the additions are those of `merges`, in the order of the tree.
                    \           /
                          +

Floating-point addition is not associative: only a fixed tree gives the same bits at any number of ranks. When
V and the world are powers of two, each rank's slices are one subtree and one sum is sent. No tree could do
that for all divisors: the halves of six slices and the thirds of them overlap, and the subtrees of one tree
never do.
"""
from common.sampler import share


def carries(v, start):
    """How many additions slice v completes for a rank whose slices begin at `start`: the first with its
    sibling v - 1.
    """
    count = 0
    while (v + 1) % (2 << count) == 0 and v + 1 - (2 << count) >= start:
        count += 1
    return count


def blocks(mine):
    """The subtrees a rank is left with after its additions, as (first slice, slices): they tile its range,
    largest first fit.
    """
    out, first = [], mine.start
    while first < mine.stop:
        size = first & -first if first else 1 << mine.stop.bit_length()
        while first + size > mine.stop:
            size >>= 1
        out.append((first, size))
        first += size
    return out


def merges(rows):
    """The additions `row[i] += row[j]`, in order, that end the tree in row 0; `rows` are blocks that tile all
    the slices.
    """
    stack, order = [], []  # of [first slice, slices, row]

    def add():
        right = stack.pop()[2]
        order.append((stack[-1][2], right))
        stack[-1][1] *= 2

    for row, (first, size) in enumerate(rows):
        stack.append([first, size, row])
        while len(stack) > 1 and stack[-2][1] == stack[-1][1] and not stack[-2][0] % (2 * stack[-1][1]):
            add()
    while len(stack) > 1:  # no power of two: what would be added is missing
        add()
    return order


def held(slices, world):
    """For every rank the blocks it sends; in rank order they tile all the slices."""
    return [blocks(share(slices, rank, world)) for rank in range(world)]
