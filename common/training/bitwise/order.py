r"""One fixed tree of additions over V slices of a global batch, at any number of ranks: integers only.

    slice    0   1   2   3   4   5   6
              \ /     \ /     \ /   /          V = 7: a perfect tree of 8, without the missing slices
               +       +       +   /
                \     /         \ /            A rank adds the subtrees it owns whole, as a binary counter
                   +             +             carries; `merges` lists the other additions in their order.
                    \           /
                          +

Floating-point addition is not associative: only a fixed tree gives the same bits at any number of ranks. If V
and the world are powers of two, each rank's slices are one subtree, so it sends one sum. No tree does that
for all divisors: halves and thirds of six slices overlap, and subtrees of one tree never do.
"""
from common.sampler import hash_seed, share


def carries(v, start):
    """How many additions slice v completes on a rank whose slices begin at `start`, the first with v - 1."""
    count = 0
    while (v + 1) % (2 << count) == 0 and v + 1 - (2 << count) >= start:
        count += 1
    return count


def checked(opts, step, world):
    """(rank, one of its slices, another rank): who computes a slice twice after `step` steps (--cross-check).

    None if nobody does.
    """
    if world == 1 or not opts.cross_check or (step + 1) % opts.cross_check:
        return None
    rank, nth, other = (hash_seed(word, opts.seed, step) for word in ("rank", "slice", "second"))
    mine = share(opts.virtual_ranks, rank % world, world)
    alone = [v for v in mine if not carries(v, mine.start)]  # its gradient is not added to another's at once
    return rank % world, alone[nth % len(alone)], (rank + 1 + other % (world - 1)) % world


def blocks(mine):
    """The subtrees a rank has after its additions, as (first slice, slices): they tile its range."""
    out, first = [], mine.start
    while first < mine.stop:
        size = first & -first if first else 1 << mine.stop.bit_length()
        while first + size > mine.stop:
            size >>= 1
        out.append((first, size))
        first += size
    return out


def merges(rows):
    """[(i, j)]: the additions `row[i] += row[j]` that end the tree in row 0, for `rows` = all blocks."""
    stack, order = [], []  # of [first slice, slices, row]

    def add():
        right = stack.pop()[2]
        order.append((stack[-1][2], right))
        stack[-1][1] *= 2

    for row, (first, size) in enumerate(rows):
        stack.append([first, size, row])
        while len(stack) > 1 and stack[-2][1] == stack[-1][1] and not stack[-2][0] % (2 * stack[-1][1]):
            add()
    while len(stack) > 1:  # V is no power of two: some right halves are missing
        add()
    return order


def blocks_of_ranks(slices, world):
    """The blocks that each rank sends; in rank order they tile all slices."""
    return [blocks(share(slices, rank, world)) for rank in range(world)]
