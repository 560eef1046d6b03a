"""Megatron's core attention on PyTorch's scaled_dot_product_attention, where Transformer Engine is missing.

Megatron's own local attention writes out the scores of every pair of positions; PyTorch's kernels do not.

Shapes carry a suffix, one letter an axis:
    S query positions of this rank   T key positions   B batch   H query heads of this rank
    G key/value heads of this rank (query groups)   D head size   E value head size

To be imported after `torpor.megatron.host.prepare_host`.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.packing import sample_bounds
from torpor.megatron.zigzag import chunk_length

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)

# Fields of TransformerConfig that ask for what the kernels do not do: name, value that means "off", why not.
_OFF: tuple[tuple[str, Any, str], ...] = (
    ("softmax_type", "vanilla", "the kernels add no offset (attention sink) to the softmax"),
    ("qk_clip", False, "the kernels do not return the largest score"),
    ("log_max_attention_logit", False, "the kernels do not return the largest score"),
    ("fp8_dot_product_attention", False, "the kernels compute in 16 or 32 bits"),
    ("fp8_multi_head_attention", False, "the kernels compute in 16 or 32 bits"),
    ("use_kitchen_attention", False, "another implementation is asked for"),
    ("attention_backend", AttnBackend.auto, "another implementation is asked for"),
)


class TorchDotProductAttention(MegatronModule):
    """Drop-in for Megatron's DotProductAttention (transformer/dot_product_attention.py), without its scores.

    Beyond it: packed sequences, whose samples never see one another; queries that are the last of more keys
    (`T > S`), as after a cached prompt; and context parallelism in Megatron's zig-zag layout, for which each
    rank gathers the keys and values of all and reduce-scatters their gradients.

    The softmax is computed in FP32 or wider. `apply_query_key_layer_scaling` needs nothing: it divides the
    scores by the layer's number and multiplies them again, for the sake of FP16 scores, and here are none.
    On the CPU the results are the same to the bit from run to run, whatever the number of threads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the core attention of one layer.

        Args:
            config: Sizes, dropout, and what must be off (see Raises).
            layer_number: Number of the layer in the model, from 1.
            attn_mask_type: Causal or not; a mask that `forward` is given counts alone, as in Megatron's.
            attention_type: "self" or "cross".
            attention_dropout: Instead of the configuration's.
            softmax_scale: Instead of 1 / sqrt(head size).
            cp_comm_type: None or "all_gather", the one way in which keys and values travel here.
            pg_collection: Process groups of the model, Megatron's global ones by default.

        Raises:
            UnsupportedModelError: The configuration asks for a sliding window in this layer, an attention
                sink, QK clipping, FP8 attention, a softmax in 16 bits, or another implementation; or for
                context parallelism of cross-attention, or by other means than gathering.
        """
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.cp_group = pg_collection.cp
        self._check(config, cp_comm_type)

        self.is_causal = attn_mask_type in _CAUSAL
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Under context parallelism each rank has its part of every sample, see `torpor.megatron.zigzag`.

        Args:
            query: [S, B, H, D], any floating-point dtype; packed [S, H, D].
            key: [T, B, G, D], where G divides H; packed [T, G, D].
            value: [T, B, G, E]; packed [T, G, E].
            attention_mask: Bool, broadcastable to [B, H, S, T], True where a query must not see a key; T are
                the keys of all context parallel ranks. None leaves it to the type of the layer. A query that
                sees no key gets zeros.
            attn_mask_type: Not used, as in Megatron's; for one new token of inference "no_mask" is passed.
            attention_bias: Refused unless None.
            packed_seq_params: Which samples the row is made of, see `torpor.megatron.packing`.

        Returns:
            [S, B, H * E] in the dtype of the query, with B = 1 if packed.

        Raises:
            ConfigError: A bias, a mask that is no bool or for packed sequences, one of padding alone in a
                causal layer, causal attention with more queries than keys, or samples that context
                parallelism does not divide.
        """
        self._check_inputs(query, key, attention_mask, attention_bias, packed_seq_params)
        if packed_seq_params is not None:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        num_tokens = key.size(0) * self.cp_group.size()
        bounds = sample_bounds(packed_seq_params, num_tokens) if packed_seq_params else [(0, num_tokens)]
        attend = self._attend if self.cp_group.size() == 1 else self._attend_divided
        context_SBHE = attend(query, key, value, attention_mask, bounds)
        return context_SBHE.flatten(2)

    def _attend(
        self,
        query_SBHD: Tensor,
        key_TBGD: Tensor,
        value_TBGE: Tensor,
        mask: Tensor | None,
        bounds: list[tuple[int, int]],
    ) -> Tensor:
        """Attend within each sample; all of it is here."""
        if len(bounds) == 1:
            return self._attend_to(query_SBHD, key_TBGD, value_TBGE, mask)
        samples = [
            self._attend_to(*(t[begin:end] for t in (query_SBHD, key_TBGD, value_TBGE)))
            for begin, end in bounds
        ]
        return torch.cat(samples)

    def _attend_divided(
        self,
        query_SBHD: Tensor,
        key_SBGD: Tensor,
        value_SBGE: Tensor,
        mask: Tensor | None,
        bounds: list[tuple[int, int]],
    ) -> Tensor:
        """Attend within each sample; the context parallel ranks hold two chunks of it each."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key_SBGD, value_SBGE], dim=-1), group=self.cp_group
        ).unflatten(0, (size, -1))
        parts = []
        for begin, end in bounds:
            chunk = chunk_length(end - begin, size)
            here = slice(begin // size, end // size)
            # [rank, first or second chunk, chunk, ...] -> the first ones ascend, the second ones descend.
            chunks = gathered[:, here].unflatten(1, (2, chunk))
            sample = torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)
            key, value = sample.split([key_SBGD.size(-1), value_SBGE.size(-1)], dim=-1)
            query = query_SBHD[here]
            if self.is_causal and mask is None:
                for queries, index in zip(query.chunk(2), (rank, 2 * size - 1 - rank), strict=True):
                    seen = (index + 1) * chunk
                    parts.append(self._attend_to(queries, key[:seen], value[:seen]))
            else:
                parts.append(self._attend_to(query, key, value, mask))
        return torch.cat(parts)

    def _attend_to(
        self, query_SBHD: Tensor, key_TBGD: Tensor, value_TBGE: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend, causally if the layer is and there is no mask; the last query stands at the last key."""
        num_queries, num_keys = query_SBHD.size(0), key_TBGD.size(0)
        is_causal = self.is_causal and mask is None and num_queries > 1
        allowed = None if mask is None else ~mask
        if is_causal and num_queries < num_keys:
            # PyTorch's is_causal would put the first query at the first key.
            is_causal, allowed = False, causal_lower_right(num_queries, num_keys)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_SBHD, key_TBGD, value_TBGE))
        is_grouped = query.size(1) != key.size(1)
        if is_grouped and query.is_cuda and (mask is not None or query.dtype == torch.float32):
            # The kernels that take a mask or FP32 know no groups; the one for 16 bits and the CPU's do.
            key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
            is_grouped = False
        with self._dropout_generator():
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=is_grouped,
            )
        return context.permute(2, 0, 1, 3)

    def _dropout_generator(self) -> contextlib.AbstractContextManager[None]:
        """Draw as Megatron's does: differently on each tensor parallel rank, which holds heads of its own."""
        if self.dropout == 0.0 or not self.training or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return get_cuda_rng_tracker().fork()

    def _check(self, config: TransformerConfig, cp_comm_type: str | None) -> None:
        # Absent fields are ones that this Megatron does not have, so that nobody can have set them.
        wrong = [(n, getattr(config, n), off, why) for n, off, why in _OFF if getattr(config, n, off) != off]
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            wrong.append(("window_size", config.window_size, None, "the kernels know no sliding window"))
        if not config.attention_softmax_in_fp32 and config.params_dtype != torch.float32:
            wrong.append(("attention_softmax_in_fp32", False, True, "the kernels compute it in FP32"))
        if self.cp_group.size() > 1:
            if cp_comm_type not in (None, "all_gather"):
                wrong.append(("cp_comm_type", cp_comm_type, "all_gather", "keys and values are gathered"))
            if self.attention_type != "self":
                wrong.append(("context_parallel_size", self.cp_group.size(), 1, "this is cross-attention"))
        if wrong:
            lines = [f"{name} is {value!r}; supported is {off!r}: {why}" for name, value, off, why in wrong]
            raise UnsupportedModelError(
                f"attention of layer {self.layer_number}: {'; '.join(lines)}\n"
                "  Change the configuration, or install transformer-engine on a CUDA machine: then its "
                "attention is used."
            )

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        packed: PackedSeqParams | None,
    ) -> None:
        where = f"attention of layer {self.layer_number}"
        if bias is not None:
            raise ConfigError(f"{where}: an attention_bias was passed; supported is None")
        if mask is not None and mask.dtype != torch.bool:
            raise ConfigError(f"{where}: attention_mask is of {mask.dtype}; supported is torch.bool")
        # One row for all queries says what is padding and not who comes before whom.
        if self.is_causal and mask is not None and query.size(0) > 1 and mask.shape[-2:-1] in ((), (1,)):
            raise ConfigError(
                f"{where}: attention_mask has the shape {tuple(mask.shape)}, one row for all {query.size(0)}"
                " queries, and a mask counts alone: each of them would see the tokens after it\n"
                "  Pass None, which is causal and right for padding on the right, or a row for each query,"
                " True where it must not look."
            )
        if packed is not None and mask is not None:
            raise ConfigError(
                f"{where}: an attention_mask was passed beside packed_seq_params, which already say who sees "
                "whom\n  Pass attention_mask=None."
            )
        if packed is not None and not self.is_causal and packed.cu_seqlens_q_padded is not None:
            raise ConfigError(
                f"{where}: padding between packed samples (cu_seqlens_q_padded) would be seen, since this "
                "attention is not causal\n  Pack without padding."
            )
        if self.is_causal and mask is None and query.size(0) > key.size(0):
            raise ConfigError(f"{where}: {query.size(0)} queries for {key.size(0)} keys in causal order")
