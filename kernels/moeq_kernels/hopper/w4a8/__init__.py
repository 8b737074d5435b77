"""Kernels for 4-bit weights and e4m3 activations on e4m3 tensor cores."""
