"""How long the L2 cache should keep what kernels of a layer pass on to each other.

Weights stream through the cache and would push out results before the next kernel reads them, which then are written
to memory and read from it.
"""

import triton.language as tl

#: Eviction policy of results that the next kernel reads: after weights.
KEPT = tl.constexpr("evict_last")
#: Of what is read for the last time: before weights.
DONE = tl.constexpr("evict_first")
#: Of everything else.
USUAL = tl.constexpr("")
