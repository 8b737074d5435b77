"""Kernels for Hopper GPUs (H100, H200). `support.unsupported_reason` says which layers they cannot run."""
