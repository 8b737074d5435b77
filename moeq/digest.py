"""Digest of what a matrix means, whatever its packing.

The digest covers codes, scales, zero points, group indices and bias of one logical matrix, so the source and every
layout it is converted to share it. It is stronger than a digest of dequantised values (two code/scale pairs may give
one product) and hashes an eighth of the bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Recorded in manifests; changes whenever the definition below changes.
DIGEST_NAME = "sha256/moeq-logical-1"


def logical_digest(matrix: QuantizedMatrix) -> str:
    """Hex sha256 of a logical matrix.

    The hash runs over a JSON header (sizes and types), then each present tensor as `name`, byte count (8 bytes LE)
    and little-endian contiguous bytes. 4-bit codes are hashed two to a byte, even `k` in the low nibble.
    """
    import torch

    spec = matrix.spec
    header = {
        "n": spec.n,
        "k": spec.k,
        "element": spec.element,
        "group_size": spec.group_size,
        "scale_dtype": spec.scale_dtype,
        "symmetric": spec.symmetric,
        "act_order": spec.act_order,
    }
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    codes = matrix.codes
    if spec.bits == 4 and spec.k % 2 == 0:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    _update(digest, "codes", codes)
    _update(digest, "scales", matrix.scales)
    if matrix.zeros is not None:
        _update(digest, "zeros", matrix.zeros.to(torch.int16))
    if matrix.group_index is not None:
        _update(digest, "group_index", matrix.group_index.to(torch.int32))
    if matrix.global_scale is not None:
        _update(digest, "global_scale", matrix.global_scale.to(torch.float32))
    if matrix.bias is not None:
        _update(digest, "bias", matrix.bias)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    digest.update(name.encode())
    digest.update(data.numel().to_bytes(8, "little"))
    digest.update(data.numpy().data)
