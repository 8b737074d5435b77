"""Eviction policies of the L2 cache for the results that the kernels of a layer pass to each other.

Weights stream through the cache. Without a policy they would evict results before the next kernel reads them.
"""

import triton.language as tl

#: Policy for results that the next kernel reads: they are evicted after weights.
EVICT_LAST = tl.constexpr("evict_last")
#: Policy for data that is read for the last time: it is evicted before weights.
EVICT_FIRST = tl.constexpr("evict_first")
#: The default policy.
NO_POLICY = tl.constexpr("")
