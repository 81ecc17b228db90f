"""Rectangles of a row-major 16-bit matrix, which an XPU loads by 2D block loads; zeros outside it.

Triton has changed its way to say so: up to triton-xpu 3.3 only block pointers become block loads,
later versions have tensor descriptors instead. A kernel is written for both:

    block = make_block(x, M, K, row, 0, BM, BK)
    for k in range(0, K, BK):
        a = load_block(block, row, k)
        if POINTERS:
            block = advance_block(block, BK)

Block pointers are advanced in the innermost loop that loads them, and made just outside of it:
otherwise triton-xpu 3.3 fails. ``ops.blocks`` says which matrices the hardware can load so.
"""

import triton
import triton.language as tl

#: Blocks are block pointers, and have to be advanced.
POINTERS = tl.constexpr(not hasattr(tl, "make_tensor_descriptor"))

# Definitions, not branches in them: Triton looks up names in branches that it does not compile.
if POINTERS:

    @triton.jit
    def make_block(x, rows, columns, row, column, BR: tl.constexpr, BC: tl.constexpr):
        """The [BR, BC] rectangle at (row, column) of the [rows, columns] matrix at x."""
        return tl.make_block_ptr(x, (rows, columns), (columns, 1), (row, column), (BR, BC), (1, 0))

    @triton.jit
    def make_transposed_block(x, rows, columns, row, column, BR: tl.constexpr, BC: tl.constexpr):
        """``make_block`` whose values are [BC, BR], as the right operand of a dot wants a weight.

        The loads transpose it; ``tl.trans`` of a block goes through shared memory instead."""
        return tl.make_block_ptr(x, (columns, rows), (1, columns), (column, row), (BC, BR), (0, 1))

    @triton.jit
    def advance_transposed_block(block, by: tl.constexpr):
        """``advance_block`` of a transposed block."""
        return tl.advance(block, (by, 0))

    @triton.jit
    def load_block(block, row, column):
        """[BR, BC] values from (row, column), to where the block has been advanced."""
        return tl.load(block, boundary_check=(0, 1), padding_option="zero")

    @triton.jit
    def advance_block(block, by: tl.constexpr):
        """The block that many columns further on; for ``POINTERS`` only."""
        return tl.advance(block, (0, by))

else:

    @triton.jit
    def make_transposed_block(x, rows, columns, row, column, BR: tl.constexpr, BC: tl.constexpr):
        """Never called: the values of a descriptor are transposed by ``tl.trans``."""
        return make_block(x, rows, columns, row, column, BR, BC)

    @triton.jit
    def advance_transposed_block(block, by: tl.constexpr):
        """Never called: a descriptor does not move."""
        return block

    @triton.jit
    def make_block(x, rows, columns, row, column, BR: tl.constexpr, BC: tl.constexpr):
        """The [rows, columns] matrix at x, to be loaded by rectangles of [BR, BC]."""
        return tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BR, BC])

    @triton.jit
    def load_block(block, row, column):
        """[BR, BC] values from (row, column)."""
        return block.load([row, column])

    @triton.jit
    def advance_block(block, by: tl.constexpr):
        """Never called: a descriptor does not move."""
        return block
