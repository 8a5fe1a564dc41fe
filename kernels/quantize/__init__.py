"""Quantize an array in groups and pack the codes into bytes."""
