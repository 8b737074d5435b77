"""Weights of 4 or 8 bits beside 16-bit activations with `mma.sync`: for NVIDIA GPUs from sm_80 on other than Hopper.

The same words, recipes and ends as in `hopper.w4a16`, without the copy engine and wgmma.
"""
