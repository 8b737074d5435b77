"""Kernels with `mma.sync` for 4- and 8-bit weights and 16-bit activations, on NVIDIA GPUs from sm_80 on.

They read the words of `hopper.w4a16` with the same recipes and epilogues, but without the copy engine and wgmma.
"""
