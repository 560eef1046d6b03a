"""Fake quantisation of a model in training, by Model-Optimizer.

A quantised linear layer has quantisers beside its weight, whose scales (`_amax`) were calibrated once and are
part of every checkpoint. In FP8 and NVFP4 a weight has one, and its inputs have one; in INT8 each row of a
weight has one, and inputs have none: each token's is computed as it passes.
"""

import copy
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from torpor.errors import ConfigError
from torpor.megatron import capabilities
from torpor.megatron.parallel import Layout

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import (
        ShardedStateDict,
        ShardedTensor,
        ShardedTensorFactory,
    )

_PRESETS: Final = {"fp8": "FP8_DEFAULT_CFG", "int8": "INT8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
# Model-Optimizer's INT8 preset has one fixed scale for all inputs of a layer. vLLM refuses that for experts,
# and SGLang ignores it everywhere: they compute one for each token.
_INT8_INPUTS: Final = {"num_bits": 8, "type": "dynamic", "block_sizes": {-1: None}}
# What Megatron calls the parts of Mamba's input projection in checkpoints.
_MAMBA_PARTS: Final = ("z", "x", "B", "C", "dt")


def check_format(name: str, layout: Layout) -> None:
    """Check that a model can be trained in a format here, at a layout.

    Args:
        name: "fp8", "int8" or "nvfp4".
        layout: Of the model.

    Raises:
        ConfigError: This machine cannot compute in the format, or experts cannot be quantised at this layout.
    """
    if name == "nvfp4" and not capabilities.has_block_quantization():
        raise ConfigError(
            "`quantize` is nvfp4, and Model-Optimizer quantises blocks on CUDA only; there is none here\n"
            "  Use fp8 or int8 on this machine, or run it on one with a GPU."
        )
    if layout.tensor > 1 and layout.expert > 1:
        raise ConfigError(
            f"`quantize` is {name}, `tensor_parallel` {layout.tensor} and `expert_parallel` {layout.expert}:"
            " Model-Optimizer quantises experts with one of the two\n  Set the other to 1."
        )


def quantizer_config(name: str) -> dict[str, Any]:
    """Return what Model-Optimizer is told of a format: which quantisers a model gets, and of what kind.

    Args:
        name: "fp8", "int8" or "nvfp4".
    """
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, _PRESETS[name]))
    if name == "int8":
        quantizer_attributes(config, "input_quantizer").clear()
        quantizer_attributes(config, "input_quantizer").update(copy.deepcopy(_INT8_INPUTS))
    return config


def quantizer_attributes(config: dict[str, Any], quantizer: str) -> dict[str, Any]:
    """Return what a configuration says of the quantisers of one kind, not those that it disables.

    Args:
        config: What `quantizer_config` returned.
        quantizer: "weight_quantizer" or "input_quantizer".
    """
    rules = config["quant_cfg"]
    (attributes,) = (r["cfg"] for r in rules if r["quantizer_name"] == f"*{quantizer}" and "cfg" in r)
    found: dict[str, Any] = attributes
    return found


def fake_quantize(
    chunk: torch.nn.Module, name: str, *, with_mtp: bool, calibrate: Callable[[], None]
) -> None:
    """Give a model's linear layers Model-Optimizer's quantisers, calibrated, in place.

    Its preset of the format decides which: not the output layer, embeddings and convolutions, and the MTP
    layers only if asked. Call it on every rank, before DDP; and before `freeze_mtp`, so that quantisers in
    MTP layers are calibrated and then belong to what must not change.

    Args:
        chunk: Bare, with weights.
        name: "fp8", "int8" or "nvfp4".
        with_mtp: Whether MTP layers are quantised too.
        calibrate: Runs forwards of the model; called once, and not for "int8", where inputs have no scales to
            be found.

    Raises:
        ConfigError: A weight's rows do not divide into the format's blocks.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.opt.plugins.megatron import _MegatronMLP
    from modelopt.torch.quantization.plugins.megatron import _MegatronSequentialMLP

    config = quantizer_config(name)
    if with_mtp:
        rules = config["quant_cfg"]
        config["quant_cfg"] = [rule for rule in rules if not rule["quantizer_name"].startswith("mtp")]

    def check_and_calibrate(_: torch.nn.Module) -> None:
        _check_blocks(chunk, name)
        if name != "int8":
            calibrate()

    mtq.quantize(chunk, config, check_and_calibrate)
    for module in chunk.modules():
        if isinstance(module, _MegatronMLP | _MegatronSequentialMLP):
            # Theirs would rename the weights of experts and of gated MLPs in checkpoints, for the sake of
            # scales that have a row for each of the weight's; `_divide_scales` needs no such thing.
            module.sharded_state_dict = MethodType(module.original_cls.sharded_state_dict, module)
    if name == "int8":
        _divide_scales(chunk)


def _divide_scales(chunk: torch.nn.Module) -> None:
    """Let the scales of packed weights, one for each row, be divided in checkpoints as the rows are.

    A gated MLP's first weight is its gate and its up projection, Mamba's first has five parts. Each rank
    holds a share of each part, and checkpoints hold the parts, so that another number of ranks can divide
    them.
    """
    from megatron.core.ssm.utils import _split_tensor_factory
    from megatron.core.transformer.mlp import MLP, apply_swiglu_sharded_factory

    for module in chunk.modules():
        if isinstance(module, MLP) and module.config.gated_linear_unit:
            _divide_scale(module.linear_fc1, apply_swiglu_sharded_factory)
        sizes = getattr(getattr(module, "weight", None), "partition_sizes", None)
        if sizes is not None and hasattr(module, "weight_quantizer"):

            def split(scale: "ShardedTensor", _: tuple, sizes: Any = sizes) -> "ShardedTensorFactory":
                return _split_tensor_factory(scale, list(sizes), list(_MAMBA_PARTS), 0)

            _divide_scale(module, split)


def _divide_scale(layer: Any, divide: "Callable[[ShardedTensor, tuple], ShardedTensorFactory]") -> None:
    if not layer.weight_quantizer.is_enabled:
        return

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> "ShardedStateDict":
        state = type(self).sharded_state_dict(self, prefix, sharded_offsets, metadata)
        scale = f"{prefix}weight_quantizer._amax"
        state[scale] = divide(state[scale], sharded_offsets)
        return state

    layer.sharded_state_dict = MethodType(sharded_state_dict, layer)


def _check_blocks(chunk: torch.nn.Module, name: str) -> None:
    """Check what packing will need, before a model is trained that cannot be packed."""
    layers: dict[str, Any] = dict(chunk.named_modules())
    for layer_name, layer in layers.items():
        quantizer = getattr(layer, "weight_quantizer", None)
        if quantizer is None or not quantizer.is_enabled or not quantizer.block_sizes:
            continue
        block, columns = quantizer.block_sizes[-1], layer.weight.shape[-1]
        if columns % block:
            raise ConfigError(
                f"`quantize` is {name}, whose blocks are {block} values of a row: {layer_name}.weight has"
                f" {columns} in each row on a rank\n"
                "  Use fp8 or int8 or, if it is divided, less `tensor_parallel`."
            )
