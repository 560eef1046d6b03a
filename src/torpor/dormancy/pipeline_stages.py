"""Pipeline layouts under which sleeping MTP layers would change a stage's output, or Megatron goes wrong."""

from typing import Any

import torch

from torpor.errors import UnsupportedModelError


def refuse_stages(model: Any, name: str) -> None:
    """Refuse a model whose MTP layers sit where dormancy, or Megatron itself, is not exact.

    MTP on another stage than the loss is exact for GPTModel: the stages tell each other the shapes that they
    send (pipeline_parallel/p2p_communication.py), so no hidden states of MTP are waited for.

    Args:
        model: The language model, on any of its pipeline ranks.
        name: What to call the model in messages.

    Raises:
        UnsupportedModelError: naming the setting and what it needs to be.
    """
    num_stages = model.pp_group.size()
    if num_stages == 1:
        return
    config = model.config
    if config.virtual_pipeline_model_parallel_size and num_stages == 2 and config.batch_p2p_comm:
        raise UnsupportedModelError(
            f"{name} has an interleaved schedule on 2 pipeline stages with batch_p2p_comm=True: both"
            " neighbours of a stage are the same rank, and batched sends silently meet the wrong receives"
            "\n  Set overlap_p2p_comm=True and batch_p2p_comm=False, or use more stages."
        )
    if getattr(model, "position_embedding_type", None) == "learned_absolute":
        raise UnsupportedModelError(
            f"{name} has learned positions on {num_stages} pipeline stages: Megatron never brings the copy on"
            " the MTP stage in line with the first stage's, and finds two owners when it saves them\n"
            "  Use one pipeline stage, or rotary positions."
        )
    if not getattr(config, "mtp_standalone", False):
        return
    _refuse_hybrid(model, name)
    _refuse_embedding_groups(model, name)


def _refuse_hybrid(model: Any, name: str) -> None:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    if isinstance(model, HybridModel):
        raise UnsupportedModelError(
            f"{name} has a pipeline layout that puts MTP on another stage than the loss:"
            f" {model.config.pipeline_model_parallel_layout}, and HybridModel computes its MTP loss only on"
            " the stage that holds MTP\n  Put the `m` and the `L` of the layout on one stage."
        )


def _refuse_embedding_groups(model: Any, name: str) -> None:
    """Refuse process groups that do not know where MTP's copy of the embedding is.

    A rank outside the embedding group that holds neither MTP nor the loss cannot tell, and refuses nothing.
    """
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    stages = torch.distributed.get_process_group_ranks(model.pp_group)
    (mtp_rank,) = get_mtp_ranks(stages, model.config)
    if mtp_rank == stages[0]:
        raise UnsupportedModelError(
            f"{name} has its MTP layers on the rank of the first pipeline stage, in a later chunk: Megatron"
            " reduces the gradient of the first chunk's embedding alone, and MTP's copy would drift from it"
            f"\n  Move the `m` of the layout {model.config.pipeline_model_parallel_layout} to a later rank."
        )
    wanted = {stages[0], mtp_rank} | ({stages[-1]} if model.share_embeddings_and_output_weights else set())
    rank = torch.distributed.get_rank()
    group = model.embd_group
    members = set() if group is None else set(torch.distributed.get_process_group_ranks(group))
    if rank not in members | wanted:
        return
    if members != wanted:
        raise UnsupportedModelError(
            f"{name} has MTP on rank {mtp_rank} and its embedding group holds ranks {sorted(members)}, not"
            f" {sorted(wanted)}: copies of the embedding would start or drift apart\n"
            "  Give initialize_model_parallel a get_embedding_ranks that returns the first stage, those of"
            " megatron.core.transformer.multi_token_prediction.get_mtp_ranks and, with tied weights, the"
            " last."
        )
