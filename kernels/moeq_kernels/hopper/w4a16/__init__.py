"""Weights of 4 or 8 bits, MXFP4 among them, and activations of 16: codes become 16-bit operands in registers."""
