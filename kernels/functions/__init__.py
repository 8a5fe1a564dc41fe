"""Functions that a kernel evaluates on a block, beside what it encodes of it."""
