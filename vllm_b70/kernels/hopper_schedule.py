"""Who computes what in ``int4_linear_hopper``: plain functions of integers, which the kernel
compiles as they stand and ``tests/kernels`` runs for every program of many launches.

The groups of all shared tiles, one tile after another, are *positions*. Each program has one range
of them, nearly equal to the others'. A *piece* is what has a sum of its own: a tile, or where parts
are side by side one part of a tile. A range may begin or end inside a piece; the part of it that a
program has is a *segment*. No range is shorter than the longest piece, so that

* a piece is cut once at most, and its second half is the next program's;
* a program goes through its range backwards: the piece that it shares with the next program comes
  first and is published; the one that it shares with the program before comes last, and only then
  is that program waited for.

Integers are at least 0 and divisions thus round down, in Triton too. A call may name no other
function: the kernel's compiler could not follow it.
"""


def cut(program, programs, tiles, groups, pieces):
    """First position of a program's range; that of ``programs`` is the end of the last one.

    A segment has two groups at least, because the kernel loads two ahead: a cut nearer than that to
    the border of a piece moves there.

    Args:
        program, programs: Which, and how many there are.
        tiles: Shared tiles.
        groups: Groups of a tile, at least 3 * pieces if any tile is shared.
        pieces: Pieces of a tile.
    """
    at = program * (tiles * groups) // programs
    tile = at // groups
    inside = at - tile * groups
    piece = ((inside + 1) * pieces - 1) // groups
    low = piece * groups // pieces
    high = (piece + 1) * groups // pieces
    inside = low if inside - low < 2 else high if high - inside < 2 else inside
    return tile * groups + inside


def piece_at(at, groups, pieces):
    """The piece that holds a position: the last whose first group is not behind it."""
    tile = at // groups
    return tile * pieces + ((at - tile * groups + 1) * pieces - 1) // groups


def segment(i, program, programs, strided, last_piece, start, stop, groups, pieces):
    """What a program computes, from its i = -n on if n whole tiles are its alone.

    Args:
        i: Below 0: a whole tile, each ``programs`` before the one of the next i. From 0 on: the
            segments of the range, backwards.
        strided: Tiles that are not shared; the shared ones follow.
        last_piece: ``piece_at(stop - 1)``, counted from the first shared tile on.
        start, stop: The range, of positions.

    Returns:
        Tile; first and last + 1 of the groups to compute. Where they begin behind the first group
        of the piece the program before has begun it; where they end sooner the next one ends it.
    """
    piece = last_piece - max(i, 0)
    tile = piece // pieces
    part = piece - tile * pieces
    first = max(start - tile * groups, part * groups // pieces)
    last = min(stop - tile * groups, (part + 1) * groups // pieces)
    alone = i < 0
    return (
        program - (i + 1) * programs if alone else strided + tile,
        0 if alone else first,
        groups if alone else last,
    )


def holders(tile, programs, tiles, groups):
    """First and last program that has a segment of a shared tile, whose pieces have at least three
    groups: cuts next to the tile's borders have moved there."""
    total = tiles * groups
    first = ((tile * groups + 2) * programs - 1) // total
    last = (((tile + 1) * groups - 1) * programs - 1) // total
    return first, last
