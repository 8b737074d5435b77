"""A trainer that sends bf16 experts to a server, step by step: `update_weights.py DST [STEPS]`.

Both keep the digest of the layer. A step that gets lost is noticed at the next one, and the server's tensors keep
their addresses, so that CUDA graphs captured before stay valid.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

import moeq
from moeq.update.layers import WritableLayer

LAYER = 0


def trainer(layer: WritableLayer, steps: int) -> Iterator[tuple[int, str, Any]]:
    """Yield new bf16 weights of one projection at a time, as an optimiser step leaves them."""
    torch.manual_seed(0)
    for step in range(steps):
        expert = step % layer.num_experts
        w13, w2 = layer.specs["w13"], layer.specs["w2"]
        yield expert, "down", torch.randn(w2.n, w2.k).to(torch.bfloat16)
        half = torch.randn(2, w13.n // 2, w13.k).to(torch.bfloat16)
        yield expert, "w13", {"gate": half[0], "up": half[1]}


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    served = moeq.load_tensors(sys.argv[1], LAYER, device=device)  # what the kernels of the server read
    layer = moeq.writable_layer(sys.argv[1], LAYER, tensors={"w13": served.w13, "w2": served.w2})
    writer = moeq.Writer([layer])
    digest = writer.digest(LAYER)
    for expert, projection, weights in trainer(layer, int(sys.argv[2]) if len(sys.argv) > 2 else 2):
        done = writer.update(LAYER, expert, projection, weights, expected=digest)
        digest = done.digest or writer.digest(LAYER)
        loss = {name: round(one.new_scales, 4) for name, one in done.loss.items()}
        print(f"expert {expert} {projection}: {done.written_bytes:,} bytes, loss {loss}, layer {digest[:16]}")
    assert moeq.snapshot(layer) == digest, "the tensors hold what was sent"
