"""SHA-256 of the raw bytes of tensors."""

import hashlib

import torch

_CHUNK_BYTES = 64 * 2**20


def sha256_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 (hex) of a tensor's elements in row-major order, as raw bytes.

    Bytes, not values: -0.0 differs from 0.0 and a NaN equals itself only with the same payload. Device
    tensors come over in pieces of 64 MiB.

    Args:
        tensor: Any shape, dtype and device but "meta".
    """
    digest = hashlib.sha256()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        digest.update(flat[start : start + _CHUNK_BYTES].cpu().numpy())
    return digest.hexdigest()
