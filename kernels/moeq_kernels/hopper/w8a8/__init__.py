"""Kernels for int8 or e4m3 weights and activations of the same type."""
