"""What a function's tensors are, and what rounding them would spoil, told from its
operations alone: nothing is run."""
