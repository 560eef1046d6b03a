"""Packed sequences: where the samples that share a row begin and end.

A packed row holds its samples one after the other, without a batch dimension ("thd"). Megatron describes it
with `PackedSeqParams`, and GPTModel and HybridModel take that as `packed_seq_params`::

    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)  # 3 tokens of one sample, 4 of the next
    PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
                    max_seqlen_q=4, max_seqlen_kv=4)

To be imported after `torpor.megatron.host.prepare_host`.
"""

import itertools

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from torpor.errors import ConfigError


def sample_bounds(packed: PackedSeqParams, num_tokens: int) -> list[tuple[int, int]]:
    """Return where each sample begins and where it ends, in tokens of the whole row.

    What a sample is padded with belongs to it, and tokens after the last sample are a sample of their own.
    With lengths on an accelerator this waits for them.

    Args:
        packed: As the model was given it.
        num_tokens: Tokens of the row, over all context parallel ranks.

    Returns:
        Begin and end of each sample that has tokens, in order and without gaps. Samples of 3 and 4 tokens in
        a row of 8 give [(0, 3), (3, 7), (7, 8)].

    Raises:
        ConfigError: The params do not describe such a row.
    """
    if packed.qkv_format != "thd":
        raise ConfigError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}; supported is 'thd'")
    if packed.cp_group is not None or packed.local_cp_size is not None:
        raise ConfigError(
            "packed_seq_params has a context parallel group of its own (cp_group, local_cp_size)\n"
            "  All rows of a run share one group: leave both fields None."
        )
    queries = _lengths(packed.cu_seqlens_q_padded, packed.cu_seqlens_q, "cu_seqlens_q")
    keys = _lengths(packed.cu_seqlens_kv_padded, packed.cu_seqlens_kv, "cu_seqlens_kv")
    if queries != keys:
        raise ConfigError(
            f"cu_seqlens_q is {queries} and cu_seqlens_kv is {keys}: in self-attention they are the same"
        )
    ends = [*queries, num_tokens]
    if queries[:1] != [0] or any(end < begin for begin, end in itertools.pairwise(ends)):
        raise ConfigError(
            f"cu_seqlens_q is {queries} for a row of {num_tokens} tokens\n"
            "  It begins with 0, never falls, and ends at the number of tokens or before."
        )
    return [(begin, end) for begin, end in itertools.pairwise(ends) if begin < end]


def _lengths(padded: Tensor | None, plain: Tensor | None, name: str) -> list[int]:
    lengths = plain if padded is None else padded
    if lengths is None:
        raise ConfigError(f"packed_seq_params.{name} is None: it says where the samples of the row end")
    return [int(end) for end in lengths.tolist()]
