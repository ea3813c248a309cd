"""Every world performs the additions of one tree: proven symbolically, without arithmetic or ranks."""

from common.extras.bits import carries, tree_of
from common.sampler import share


def whole(first, size, slices):
    """The reference: a perfect tree over `size` leaves from `first`, the missing ones left out."""
    if first >= slices:
        return None
    if size == 1:
        return first
    left, right = (whole(start, size // 2, slices) for start in (first, first + size // 2))
    return left if right is None else (left, right)


def local(mine):
    """What a rank does with its own slices: the expressions of the rows it is left with."""
    rows = []
    for v in mine:
        rows.append(v)
        for _ in range(carries(v, mine.start)):
            right = rows.pop()
            left = rows.pop()
            rows.append((left, right))
    return rows


def sum_of(slices, world):
    """The expression that ends up in row 0."""
    rows_of, order = tree_of(slices, world)
    rows = []
    for rank, count in enumerate(rows_of):
        own = local(share(slices, rank, world))
        assert len(own) == count
        rows += own
    for i, j in order:
        rows[i] = (rows[i], rows[j])
    return rows[0]


def test_every_world_adds_along_the_same_tree():
    for slices in range(1, 34):
        tree = whole(0, 64, slices)
        for world in range(1, slices + 1):
            assert sum_of(slices, world) == tree, (slices, world)


def test_a_thousand_ranks_add_along_the_same_tree():
    assert sum_of(4096, 999) == sum_of(4096, 1024) == whole(0, 4096, 4096)


def test_slices_hold_the_same_samples_at_any_world_and_a_rank_owns_neighbours():
    for size in (1, 7, 8, 9, 64, 10_000):
        for slices, worlds in ((1, (1,)), (8, range(1, 9)), (4096, (999, 1024))):
            cuts = [share(size, v, slices) for v in range(slices)]
            for world in worlds:
                for rank in range(world):
                    mine = [i for v in share(slices, rank, world) for i in cuts[v]]
                    assert list(share(size, rank, world, slices)) == mine
            assert cuts[-1], "the last slice has a sample, however short the batch"
