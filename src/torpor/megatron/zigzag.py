"""Megatron's zig-zag layout: which tokens of a row each context parallel rank works on.

With n ranks every sample of a row is cut into 2 n equal chunks, and rank r takes chunks r and 2 n - 1 - r:
under a causal mask late tokens cost more than early ones, and so all ranks have as much to do.
"""

from collections.abc import Sequence

import torch

from torpor.errors import ConfigError


def chunk_length(length: int, num_ranks: int) -> int:
    """Return how long the chunks of a sample are.

    Args:
        length: Tokens of the sample.
        num_ranks: Context parallel size.

    Raises:
        ConfigError: The sample cannot be cut into equal chunks.
    """
    if length % (2 * num_ranks):
        raise ConfigError(
            f"a sample of {length} tokens cannot be cut into {2 * num_ranks} equal chunks, which context "
            f"parallel size {num_ranks} needs\n"
            f"  Pad samples to a multiple of {2 * num_ranks} tokens, or use context parallel size 1."
        )
    return length // (2 * num_ranks)


def zigzag_places(bounds: Sequence[tuple[int, int]], num_ranks: int) -> torch.Tensor:
    """Return the places in the whole row that each rank's tokens have, in the rank's own order.

    One sample of 8 tokens on 2 ranks gives [[0, 1, 6, 7], [2, 3, 4, 5]].

    Args:
        bounds: Begin and end of each sample, without gaps, see `torpor.megatron.packing.sample_bounds`; for a
            row that is not packed [(0, number of tokens)].
        num_ranks: Context parallel size.

    Returns:
        int64 [num_ranks, tokens / num_ranks], on the CPU.

    Raises:
        ConfigError: A sample cannot be cut into equal chunks.

    Source:
        Megatron-Core, `get_batch_on_this_cp_rank` in utils.py.
    """
    parts = []
    for begin, end in bounds:
        chunk_length(end - begin, num_ranks)
        chunks = torch.arange(begin, end).view(2 * num_ranks, -1)
        # Chunk r beside chunk 2 n - 1 - r.
        parts.append(torch.cat([chunks[:num_ranks], chunks[num_ranks:].flip(0)], dim=1))
    return torch.cat(parts, dim=1)
