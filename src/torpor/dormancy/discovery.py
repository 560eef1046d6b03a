"""Finds the language models that bear MTP layers inside whatever the user holds, and refuses the rest."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor.dormancy.capture import refuse_counting_captures
from torpor.dormancy.contradictions import NEXT_STEP, refuse_contradictions
from torpor.dormancy.distillation_pairs import refuse_mtp_pairs
from torpor.dormancy.pipeline_stages import refuse_stages
from torpor.errors import UnsupportedModelError

_SUPPORTED = "Supported: Megatron-Core's GPTModel and HybridModel, bare or in a wrapper."
# What the last part of a module's name looks like that says it is for multi-token prediction.
_MTP_NAME = re.compile(r"mtp(_|$)")


@dataclass(frozen=True)
class LanguageModelSite:
    """A Megatron language model that was built with MTP layers, and this rank's MTP block if it holds one.

    Attributes:
        name: Qualified name of the language model from the root the user passed; "" for the root itself.
        model: The GPTModel or HybridModel (a subclass counts).
        mtp: Its MultiTokenPredictionBlock, None on pipeline ranks that hold none.
    """

    name: str
    model: Any
    mtp: torch.nn.Module | None


def as_chunks(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the model as a list of (virtual pipeline) chunks.

    Raises:
        UnsupportedModelError: if it is neither a module nor a non-empty list of modules.
    """
    if not isinstance(model, torch.nn.Module | Sequence):
        raise UnsupportedModelError(
            f"freeze_mtp takes a torch.nn.Module or a list of them, and got {type(model).__name__}"
        )
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise UnsupportedModelError(
                f"freeze_mtp takes a torch.nn.Module or a list of them, and got {type(chunk).__name__}"
            )
    if not chunks:
        raise UnsupportedModelError("freeze_mtp got an empty list of model chunks")
    return chunks


def find_sites(chunks: Sequence[torch.nn.Module]) -> list[LanguageModelSite]:
    """Find every language model with MTP in the chunks, having refused what dormancy cannot honour.

    Nothing is changed. The order is that of `named_modules`, chunk by chunk.

    Raises:
        UnsupportedModelError: if MTP sits in something else than a GPTModel or HybridModel, if the model
            is already wrapped or asleep, if the output of an MTP module is to be distilled, if nothing in it
            declares MTP layers, or if it declares layers that it does not have.
    """
    sites: list[LanguageModelSite] = []
    for name, chunk in name_chunks(chunks):
        _refuse_wrapped(chunk)
        refuse_mtp_pairs(chunk)
        sites.extend(_sites_in(chunk, name))
    if not sites:
        kinds = ", ".join(sorted({type(chunk).__name__ for chunk in chunks}))
        raise UnsupportedModelError(
            f"{kinds} has no MTP layers to put to sleep: no GPTModel or HybridModel in it has a config with"
            " mtp_num_layers > 0\n  Leave freeze_mtp out, or build the model with its MTP layers."
        )
    return sites


def name_chunks(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each chunk with the prefix of its names: none for a single chunk, its index for several."""
    for index, chunk in enumerate(chunks):
        yield ("" if len(chunks) == 1 else str(index)), chunk


def join(*parts: str) -> str:
    """Join the non-empty parts of a qualified name."""
    return ".".join(part for part in parts if part)


def _sites_in(chunk: torch.nn.Module, chunk_name: str) -> Iterator[LanguageModelSite]:
    # Imported here: on a machine without CUDA the host must be prepared before Megatron-Core is imported,
    # and by the time there is a model to look at, it has been.
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionLayer,
    )

    claimed: set[torch.nn.Module] = set()
    modules = dict(chunk.named_modules())
    for name, module in modules.items():
        if not isinstance(module, GPTModel | HybridModel):
            if isinstance(module, LanguageModule) and module.config.mtp_num_layers:
                raise UnsupportedModelError(
                    f"{join(chunk_name, name) or 'the model'} ({type(module).__name__}) declares"
                    f" mtp_num_layers={module.config.mtp_num_layers}\n  {_SUPPORTED}"
                )
            continue
        mtp = module._modules.get("mtp")
        if mtp is not None:
            if not isinstance(mtp, MultiTokenPredictionBlock):
                raise UnsupportedModelError(
                    f"{join(chunk_name, name, 'mtp')} is a {type(mtp).__name__}, and only Megatron-Core's"
                    " MultiTokenPredictionBlock can be put to sleep"
                )
            claimed.update(mtp.modules())
        if module.config.mtp_num_layers:
            _refuse_site(module, join(chunk_name, name) or type(module).__name__, mtp)
            yield LanguageModelSite(join(chunk_name, name), module, mtp)
        elif mtp is not None:
            raise UnsupportedModelError(
                f"{join(chunk_name, name) or type(module).__name__} has an MTP block, but its config says"
                f" mtp_num_layers={module.config.mtp_num_layers}\n  Set it to the number of MTP layers."
            )
    for name, module in modules.items():
        is_mtp = isinstance(module, MultiTokenPredictionBlock | MultiTokenPredictionLayer)
        if (is_mtp or _MTP_NAME.match(name.split(".")[-1])) and module not in claimed:
            raise UnsupportedModelError(
                f"{join(chunk_name, name) or 'the model'} ({type(module).__name__}) is not the `mtp` of a"
                f" GPTModel or HybridModel\n  {_SUPPORTED}"
            )


def _refuse_wrapped(chunk: torch.nn.Module) -> None:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    for name, module in chunk.named_modules():
        if isinstance(module, _BaseDataParallel | torch.nn.parallel.DistributedDataParallel):
            where = name or "the model"
            raise UnsupportedModelError(
                f"{where} is already wrapped in {type(module).__name__}: its buffers hold the MTP"
                f" parameters\n  {NEXT_STEP}"
            )


def _refuse_site(model: torch.nn.Module, name: str, mtp: torch.nn.Module | None) -> None:
    config: Any = model.config
    if "_call_impl" in vars(model):
        raise UnsupportedModelError(
            f"{name} is already asleep: freeze_mtp was called on it before\n"
            "  Keep the first handle, or call its remove() first."
        )
    if model._compiled_call_impl is not None:
        raise UnsupportedModelError(
            f"{name} was compiled before freeze_mtp\n  Call freeze_mtp first, model.compile() afterwards."
        )
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise UnsupportedModelError(
            f"{name} has config.overlap_moe_expert_parallel_comm=True: its schedule plan runs MTP layers"
            " without the model's forward\n  Set it to False."
        )
    refuse_stages(model, name)
    refuse_counting_captures(model, name)
    if mtp is None:
        _refuse_missing_block(model, name)
    else:
        refuse_contradictions(model, mtp, name)


def _refuse_missing_block(model: Any, name: str) -> None:
    """Refuse a model whose config counts MTP layers that its spec did not build: they would be lost."""
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    expected = mtp_on_this_rank(
        layout=model.config.pipeline_model_parallel_layout,
        mtp_num_layers=model.config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=model.vp_stage,
    )
    if expected:
        raise UnsupportedModelError(
            f"{name} declares mtp_num_layers={model.config.mtp_num_layers} but was built without an MTP"
            " block on the pipeline stage that should hold it: its heads would be lost in every checkpoint\n"
            "  Give the model an mtp_block_spec (GPTModel) or an MTP part in its layer pattern (HybridModel)."
        )
