"""Keeping padding out of what mixture-of-experts routers count.

Routers balance their experts by how many tokens each gets. Padding would count too, and all of it goes to the
same experts. Megatron takes a mask for that, `padding_mask` [batch, sequence], True at padding.

To be imported after `torpor.megatron.host.prepare_host`.
"""

import types
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config, unwrap_model


def leave_padding_uncounted(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the routers of a model apply the mask to each token's row of experts.

    Megatron-Core 0.19 lays the mask [tokens] over the columns of the routing map [tokens, experts]
    (transformer/moe/router.py, `_apply_expert_bias`), which raises, or with as many tokens as experts counts
    the wrong ones.

    Args:
        chunks: This rank's chunks, before DDP.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._apply_expert_bias = types.MethodType(_count_tokens, module)


def _count_tokens(
    router: TopKRouter, routing_map_NE: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map_NE = routing_map_NE & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += routing_map_NE.sum(dim=0)


def router_padding_mask(model: torch.nn.Module, padding_mask_BS: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as a chunk's forward takes it: for this rank's part of the sequence.

    GPTModel cuts the mask to that part on its first stage and nowhere else, HybridModel nowhere
    (models/gpt/gpt_model.py, models/hybrid/hybrid_model.py).

    Args:
        model: A chunk, wrapped or not, that `leave_padding_uncounted` has seen.
        padding_mask_BS: bool, True where there is no sample.

    Returns:
        The mask [B, S] or [B, S / tensor parallel size]; None for a model without experts.
    """
    config = get_model_config(model)
    if config.num_moe_experts is None:
        return None
    bare = unwrap_model(model)
    if not config.sequence_parallel or (isinstance(bare, GPTModel) and bare.pre_process):
        return padding_mask_BS
    size = parallel_state.get_tensor_model_parallel_world_size()
    return padding_mask_BS.chunk(size, dim=1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
