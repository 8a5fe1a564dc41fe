"""A norm of an array's rows, its statistics and the array's codes, from one pass."""
