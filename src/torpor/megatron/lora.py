"""Low-rank adapters (LoRA) on Megatron-Core's parallel linear layers: add them, train them, merge them.

A layer with weight W [out, in] gets A [r, in] and B [out, r], and computes x W^T + (alpha / r) x A^T B^T. A
starts random and B at zero, so that a run starts with the model as it was. They are split over tensor
parallel ranks as W is: of a ColumnParallelLinear B by rows, of a RowParallelLinear A by columns; the other is
the same on every rank. With sequence parallelism that other one works on a part of the sequence on each rank,
and Megatron sums its gradients over the ranks because it is marked `sequence_parallel`.

PEFT's and Model-Optimizer's adapters for these layers leave that sum out, and PEFT's saves no sharded state.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; initialisation as in PEFT.

To be imported after `torpor.megatron.host.prepare_host`.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from torpor.errors import UnsupportedModelError

_DIM = {"lora_A": 1, "lora_B": 0}  # the one that W's split of the same dim also splits


class _Lora:
    """What both kinds of layer have in common; mixed into an existing layer by `add_lora`.

    Shapes carry a suffix: S sequence, B batch, I input, O output, R rank of the adapter. S, I and O are this
    rank's share where they are split.
    """

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    lora_scale: float
    lora_dropout: float

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer and add what the adapter makes of its input."""
        output_SBO, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        return output_SBO + self.lora_scale * self._adapt(self._drop(input_)), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Shard the adapter beside the layer's own tensors."""
        assert metadata is not None, "Megatron's modules hand it down"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),  # type: ignore[attr-defined]
            prefix,
            self._axes,
            sharded_offsets,
            tp_group=self.tp_group,  # type: ignore[attr-defined]
            dp_cp_group=metadata["dp_cp_group"],
        )

    _axes: dict[str, int]

    def _adapt(self, input_: Tensor) -> Tensor:
        raise NotImplementedError

    def _is_input_split(self) -> bool:
        raise NotImplementedError

    def _drop(self, input_: Tensor) -> Tensor:
        if not self.lora_dropout or not self.training:  # type: ignore[attr-defined]
            return input_
        # Ranks that hold parts of the input drop different elements, ranks that hold all of it the same.
        fork = get_cuda_rng_tracker().fork() if self._is_input_split() else contextlib.nullcontext()
        with fork:
            return torch.nn.functional.dropout(input_, self.lora_dropout)


class LoraColumnParallelLinear(_Lora, ColumnParallelLinear):
    """A ColumnParallelLinear with an adapter whose B is split over the ranks."""

    _axes = {"weight": 0, "bias": 0, "lora_B": 0}  # noqa: RUF012

    def _adapt(self, input_: Tensor) -> Tensor:
        low_SBR = torch.nn.functional.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low_SBR = gather_from_sequence_parallel_region(low_SBR, group=self.tp_group)
        else:
            low_SBR = copy_to_tensor_model_parallel_region(low_SBR, group=self.tp_group)
        return torch.nn.functional.linear(low_SBR, self.lora_B)

    def _is_input_split(self) -> bool:
        return bool(self.sequence_parallel)


class LoraRowParallelLinear(_Lora, RowParallelLinear):
    """A RowParallelLinear with an adapter whose A is split over the ranks."""

    _axes = {"weight": 1, "lora_A": 1}  # noqa: RUF012

    def _adapt(self, input_: Tensor) -> Tensor:
        low_SBR = torch.nn.functional.linear(input_, self.lora_A)
        if self.sequence_parallel:
            low_SBR = reduce_scatter_to_sequence_parallel_region(low_SBR, group=self.tp_group)
        else:
            low_SBR = reduce_from_tensor_model_parallel_region(low_SBR, group=self.tp_group)
        return torch.nn.functional.linear(low_SBR, self.lora_B)

    def _is_input_split(self) -> bool:
        return True


_KINDS: dict[type, type[_Lora]] = {
    ColumnParallelLinear: LoraColumnParallelLinear,
    RowParallelLinear: LoraRowParallelLinear,
}


def add_lora(
    chunks: Sequence[MegatronModule],
    targets: Sequence[str],
    *,
    r: int,
    alpha: float,
    dropout: float,
    seed: int,
) -> list[str]:
    """Freeze a model and give layers of its trunk adapters, which alone are trained from then on.

    MTP layers get none, nor do routed experts, whose paths end otherwise. The balancing biases of routers,
    which move without gradients, are frozen too.

    Args:
        chunks: This rank's chunks with their weights, before DDP, their MTP layers asleep already.
        targets: Paths of the layers within a decoder layer, such as "self_attention.linear_qkv"; see
            `lora_targets`.
        r: Rank of the adapters.
        alpha: Their output is scaled by alpha / r.
        dropout: Share of their input that is dropped in training.
        seed: Of the random values of A, which do not depend on the layout.

    Returns:
        Names of the adapted layers of this rank.

    Raises:
        UnsupportedModelError: A layer is of another kind; nothing has been changed.
    """
    found = list(_find(chunks, targets))
    for name, _, layer in found:
        if type(layer) not in _KINDS:
            raise UnsupportedModelError(
                f"{name} is a {type(layer).__name__}; adapters fit Megatron-Core's own"
                " ColumnParallelLinear and RowParallelLinear\n  Build the model with transformer_impl"
                ' "local", or train it whole.'
            )
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "expert_bias"):
                module.frozen_expert_bias = True  # asked for in distributed/finalize_model_grads.py
        if getattr(chunk, "embedding", None) is not None:
            chunk.embedding.register_forward_hook(_require_grad)
    for _, key, layer in found:
        _adapt(layer, key, r=r, scale=alpha / r, dropout=dropout, seed=seed)
    return [name for name, _, _ in found]


def merge_lora(chunks: Sequence[MegatronModule]) -> None:
    """Add every adapter's product to its layer's weight, in FP32, and set the adapter to zero.

    Args:
        chunks: This rank's chunks, wrapped or not.
    """
    with torch.no_grad():
        for chunk in chunks:
            for layer in chunk.modules():
                if isinstance(layer, _Lora):
                    delta_OI = layer.lora_scale * (layer.lora_B.float() @ layer.lora_A.float())
                    layer.weight.copy_(layer.weight.float() + delta_OI)
                    layer.lora_B.zero_()


def _find(
    chunks: Sequence[MegatronModule], targets: Sequence[str]
) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """Yield name, layout-independent key and module of each layer to be adapted."""
    for chunk in chunks:
        for index, layer in enumerate(chunk.decoder.layers):
            for target in targets:
                try:
                    module = layer.get_submodule(target)
                except AttributeError:  # a layer of another kind
                    continue
                yield f"decoder.layers.{index}.{target}", f"{layer.layer_number} {target}", module


def _adapt(layer: Any, key: str, *, r: int, scale: float, dropout: float, seed: int) -> None:
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    # The whole of A on every rank, so that the values do not depend on how it is split.
    full_RI = torch.empty(r, layer.input_size)
    torch.nn.init.kaiming_uniform_(full_RI, a=math.sqrt(5), generator=generator)
    split = "lora_B" if isinstance(layer, ColumnParallelLinear) else "lora_A"
    rank, weight = layer.tp_group.rank(), layer.weight
    share_RI = full_RI.chunk(layer.tp_group.size(), dim=1)[rank] if split == "lora_A" else full_RI
    layer.__class__ = _KINDS[type(layer)]
    layer.lora_scale, layer.lora_dropout = scale, dropout
    zeros_OR = torch.zeros(weight.shape[0], r)
    for name, value in (("lora_A", share_RI), ("lora_B", zeros_OR)):
        parameter = torch.nn.Parameter(value.to(weight.device, weight.dtype).contiguous())
        if name == split:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=_DIM[name], stride=1)
        else:
            parameter.sequence_parallel = layer.sequence_parallel  # type: ignore[attr-defined]
        layer.register_parameter(name, parameter)


def _require_grad(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
    """Let gradients flow from the first layer on, though the embedding is frozen.

    Megatron's recomputation (tensor_parallel/random.py) gives none to the parameters of a layer whose input
    needs none, and a pipeline stage cannot begin its backward at an output that needs none.
    """
    if torch.is_grad_enabled():
        output.requires_grad_()
