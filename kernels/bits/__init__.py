"""Pack small unsigned integers into bytes."""
