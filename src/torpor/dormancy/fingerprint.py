"""SHA-256 of the raw bytes of tensors."""

import hashlib

import torch

from torpor.errors import UnsupportedModelError

_CHUNK_BYTES = 64 * 2**20
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def sha256_of(tensor: torch.Tensor, name: str = "tensor") -> str:
    """Return the SHA-256 (hex) of a tensor's elements in row-major order, as raw bytes.

    Bytes, not values: -0.0 differs from 0.0 and a NaN equals itself only with the same payload. Device
    tensors come over in pieces of 64 MiB.

    Args:
        tensor: Any shape, dtype and device but "meta". A plain dense tensor: what a subclass shows as its
            elements need not be what it stores (Transformer Engine's quantised tensors show values they
            compute, a DTensor is one shard of what it says it is).
        name: What to call it in the message.

    Raises:
        UnsupportedModelError: if its stored bytes are not its elements, naming its class or layout.
    """
    kind = type(tensor)
    if kind not in _PLAIN_CLASSES:
        raise UnsupportedModelError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}: its elements are not the bytes it stores, so"
            " nothing can be proved about them\n"
            "  Keep MTP layers in plain tensors: exclude them from quantisation and from FSDP."
        )
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        form = "on the meta device" if tensor.is_meta else f"a {tensor.layout} {tensor.dtype} tensor"
        raise UnsupportedModelError(f"{name} is {form}: it has no plain bytes to retain")
    digest = hashlib.sha256()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        digest.update(flat[start : start + _CHUNK_BYTES].cpu().numpy())
    return digest.hexdigest()
