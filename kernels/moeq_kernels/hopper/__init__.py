"""Fused MoE for Hopper GPUs (H100, H200) that reads Marlin int4 words as the tensor cores want them.

`fused_moe` uses these kernels where it can; `support.unsupported_reason` says where and why not.
"""
