"""Kernels for 4- and 8-bit weights and 16-bit activations: codes become 16-bit operands in registers."""
