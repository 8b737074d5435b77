"""Index maps that AITER's layouts share. Source: AITER e4048607 (`aiter/ops/shuffle.py`), as driven by vLLM 0.33.0."""

from __future__ import annotations

from moeq.layouts.arrangement import Arrangement

#: (16, 16): rows in 16s, bytes of K in 32s of two 16s.
SHUFFLED = Arrangement("n r16, k u2 x16 b2 -> n k u r x | b")

#: a16w4: rows in 16s, bytes of K in 64s of four 16s; with gate and up, their tiles of 16 rows alternate.
A16W4 = Arrangement("n r16, k m4 x16 b2 -> n k m r x | b")
A16W4_GATE_UP = Arrangement("h2 n r16, k m4 x16 b2 -> n h k m r x | b")

#: `e8m0_shuffle`: 32 rows by 8 groups; with gate and up, 16 rows of each.
E8M0 = Arrangement("n o2 r16, g u2 q4 -> n g q r u o")
E8M0_GATE_UP = Arrangement("h2 n r16, g u2 q4 -> n g q r u h")
