"""torch custom ops, opaque to torch.compile: check shapes, allocate, choose the implementation.

Every branch on the number of rows is in here or below, so that a compiled graph never holds one.
"""
