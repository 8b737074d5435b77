"""A whole Mixture-of-Experts layer in plain torch, from a converted checkpoint: `torch_moe_layer.py DST [LAYER]`.

The router is read as the checkpoint stores it; the experts run in moeq's fused kernels, on a GPU or, slowly, without.
"""

import sys

import torch

import moeq
from moeq_kernels import fused_moe, interpreter

if not torch.cuda.is_available():
    interpreter.enable()  # Triton's interpreter: for looking, not for serving


class MoeLayer(torch.nn.Module):
    def __init__(self, checkpoint: moeq.Checkpoint, layer: int, device: str, **rank: int) -> None:
        super().__init__()
        self.experts = moeq.load_experts(checkpoint, layer, device=device, **rank)
        router = checkpoint.expert_prefix(layer).replace(".experts", ".gate.weight")
        self.router = checkpoint.source.read(router).to(device)
        self.top_k = checkpoint.info.top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x.float() @ self.router.float().T, dim=-1)
        weights, ids = scores.topk(self.top_k)
        return fused_moe(x, self.experts, weights / weights.sum(-1, keepdim=True), ids)


if __name__ == "__main__":
    checkpoint = moeq.open(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moe = MoeLayer(checkpoint, int(sys.argv[2]) if len(sys.argv) > 2 else 0, device)
    x = torch.randn(4, checkpoint.info.hidden_size, dtype=torch.bfloat16, device=device)
    print(moe(x))
