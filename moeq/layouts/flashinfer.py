"""Index maps that FlashInfer's layouts share. Source: FlashInfer 0.7.2 as driven by vLLM 0.33.0.

The TRTLLM kernels read rows shuffled for an epilogue tile of 128: new row 32 a + 8 d + e holds row 32 a + 4 e + d. w13
rows are first paired up 0, gate 0, up 1, gate 1, ..., so there the last bit of d tells gate from up.
"""

from __future__ import annotations

from moeq.layouts.arrangement import Arrangement

#: Row numbers alone, for tiles of 128 and (unused by vLLM) for others.
ROWS_128 = Arrangement("n e8 d4, k -> n d e k")
ROWS_OTHER = Arrangement("n e8 d2, k -> n d e k")

#: Weights, two codes to a byte.
SHUFFLED = Arrangement("n e8 d4, k b2 -> n d e k | b")
SHUFFLED_W13 = Arrangement("h2 n e8 d2, k b2 -> n d ~h e k | b")

#: Weights in blocks of 128 bytes of K.
BLOCK_MAJOR = Arrangement("n e8 d4, k j128 b2 -> k n d e j | b")
BLOCK_MAJOR_W13 = Arrangement("h2 n e8 d2, k j128 b2 -> k n d ~h e j | b")

#: Scales: shuffled rows, then the 128 x 4 tile.
SCALE = Arrangement("n y4 e8 d4, c x4 -> n c d e y x")
SCALE_W13 = Arrangement("h2 n y4 e8 d2, c x4 -> n c d ~h e y x")

#: Biases.
BIAS = ROWS_128
BIAS_W13 = Arrangement("h2 n e8 d2, k -> n d ~h e k")
