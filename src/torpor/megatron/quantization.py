"""Fake quantisation of a model in training, and its weights as a server reads them: both Model-Optimizer's.

A quantised linear layer has quantisers beside its weight, whose scales (`_amax`) were calibrated once and are
part of every checkpoint. The formats are those in which Model-Optimizer exports Megatron models
(modelopt/torch/export/unified_export_megatron.py, `save_pretrained`).
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from types import MethodType
from typing import Any, Final

import torch

from torpor.checkpoints.folder import Folder
from torpor.checkpoints.inspect import MODELOPT_NAME
from torpor.checkpoints.name_map import Entry
from torpor.errors import CheckpointError, ConfigError
from torpor.megatron import capabilities
from torpor.megatron.parallel import Layout

_PRESETS: Final = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}


def check_format(name: str, layout: Layout, *, has_experts: bool) -> None:
    """Check that a model can be trained in a format here, at a layout.

    Args:
        name: "fp8" or "nvfp4".
        layout: Of the model.
        has_experts: Whether the model has a mixture of experts.

    Raises:
        ConfigError: This machine cannot compute in the format, or the model's experts cannot be quantised at
            this layout or with what is installed.
    """
    if name == "nvfp4" and not capabilities.has_block_quantization():
        raise ConfigError(
            "`quantize` is nvfp4, and Model-Optimizer quantises blocks on CUDA only; there is none here\n"
            "  Use fp8 on this machine, or run it on one with a GPU."
        )
    if has_experts and capabilities.has_transformer_engine():
        raise ConfigError(
            f"`quantize` is {name}, and the student's experts are Transformer Engine's grouped ones, whose"
            " scales cannot be exported yet\n  Uninstall Transformer Engine, or leave `quantize` out."
        )
    if layout.tensor > 1 and layout.expert > 1:
        raise ConfigError(
            f"`quantize` is {name}, `tensor_parallel` {layout.tensor} and `expert_parallel` {layout.expert}:"
            " Model-Optimizer quantises experts with one of the two\n  Set the other to 1."
        )


def fake_quantize(
    chunk: torch.nn.Module, name: str, *, with_mtp: bool, calibrate: Callable[[], None]
) -> None:
    """Give a model's linear layers Model-Optimizer's quantisers, calibrated, in place.

    Its preset of the format decides which: not the output layer, embeddings and convolutions, and the MTP
    layers only if asked. Call it on every rank, before DDP; and before `freeze_mtp`, so that quantisers in
    MTP layers are calibrated and then belong to what must not change.

    Args:
        chunk: Bare, with weights.
        name: "fp8" or "nvfp4".
        with_mtp: Whether MTP layers are quantised too.
        calibrate: Runs forwards of the model; called once.

    Raises:
        ConfigError: A weight's rows do not divide into the format's blocks.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.opt.plugins.megatron import _MegatronMLP
    from modelopt.torch.quantization.plugins.megatron import _MegatronSequentialMLP

    preset = copy.deepcopy(getattr(mtq, _PRESETS[name]))
    if with_mtp:
        rules = preset["quant_cfg"]
        preset["quant_cfg"] = [rule for rule in rules if not rule["quantizer_name"].startswith("mtp")]

    def check_and_calibrate(_: torch.nn.Module) -> None:
        _check_blocks(chunk, name)
        calibrate()

    mtq.quantize(chunk, preset, check_and_calibrate)
    for module in chunk.modules():
        if isinstance(module, _MegatronMLP | _MegatronSequentialMLP):
            # Theirs would rename the weights of experts and of gated MLPs in checkpoints, for the sake of
            # scales that have a row for each of the weight's. In these formats a layer has one scale.
            module.sharded_state_dict = MethodType(module.original_cls.sharded_state_dict, module)


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
                f" {columns} in each row on a rank\n  Use fp8 or, if it is divided, less `tensor_parallel`."
            )


class QuantizedExport:
    """Which weights of a distributed checkpoint are quantised, and what they are to a server.

    Args:
        name: The format, "fp8" or "nvfp4".
        entries: The name map's, of what the checkpoint's tensors are exported for and not the source's.
        stored: Names of all tensors in the checkpoint.

    Raises:
        CheckpointError: No weight is quantised, or one lacks a scale.
    """

    def __init__(self, name: str, entries: Iterable[Entry], stored: Set[str]) -> None:
        self._name = name
        self._scales: dict[tuple[str, ...], tuple[str, str]] = {}
        for entry in entries:
            # Mamba's projection is one weight in several parts: `in_proj.weight.z`.
            module = entry.megatron_names[0].partition(".weight")[0]
            scales = f"{module}.weight_quantizer._amax", f"{module}.input_quantizer._amax"
            found = stored.intersection(scales)
            if found and len(found) < len(scales):
                (lost,) = set(scales) - found
                raise CheckpointError(f"the checkpoint lacks {lost}, needed for {entry.hf_names[0]}")
            if found:
                self._scales[entry.hf_names] = scales
        if not self._scales:
            raise CheckpointError("the checkpoint holds no quantiser's state: its weights are not quantised")

    def scale_names(self, entry: Entry) -> tuple[str, str] | None:
        """Return what the checkpoint calls the scales of a weight and its input; None if not quantised."""
        return self._scales.get(entry.hf_names)

    def pack(
        self,
        entry: Entry,
        tensors: Sequence[torch.Tensor],
        weight_amax: torch.Tensor,
        input_amax: torch.Tensor,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight as it is stored: packed, with its scales beside it.

        Args:
            entry: The weight's; several Hugging Face weights of one entry share their scales.
            tensors: Hugging Face's weights [out, in], in the dtype of training.
            weight_amax: The largest absolute value of the weight when it was calibrated, one element; of
                experts one each.
            input_amax: The same of the layer's input.

        Source:
            modelopt/torch/export/unified_export_megatron.py, `_get_quantized_state` and `_name_remapping`.
        """
        from modelopt.torch.export import quant_utils

        weights_per_scale = len(tensors) // weight_amax.numel()
        for index, (hf, weight) in enumerate(zip(entry.hf_names, tensors, strict=True)):
            expert = index // weights_per_scale
            layer = self._layer(weight, weight_amax.view(-1)[expert], input_amax.view(-1)[expert])
            scale = quant_utils.get_weight_scaling_factor(layer)
            scale = scale.squeeze() if scale.numel() == 1 else scale
            scale_2 = quant_utils.get_weight_scaling_factor_2(layer)
            packed = quant_utils.to_quantized_weight(
                weight,
                scale,
                quant_utils.get_quantization_format(layer),
                scale_2,
                quant_utils.get_weight_block_size(layer),
            )
            yield hf, packed
            yield f"{hf}_scale", scale
            if scale_2 is not None:
                yield f"{hf}_scale_2", scale_2
            yield f"{hf.removesuffix('weight')}input_scale", quant_utils.get_activation_scaling_factor(layer)

    def describe(self, source: Folder) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return config.json and, by its name, hf_quant_config.json: both name what is not quantised.

        Args:
            source: The folder that the run started from.
        """
        import modelopt
        from modelopt.torch.export import quant_utils
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

        one = torch.ones(())
        layer = self._layer(torch.ones(1, 16), one, one)
        kind, block = quant_utils.get_quantization_format(layer), quant_utils.get_weight_block_size(layer)
        packed = {hf for hf_names in self._scales for hf in hf_names}
        layers: dict[str, Any] = {}
        for weight, entry in source.tensors.items():
            if weight.endswith(".weight") and len(entry.shape) > 1:
                module = weight.removesuffix(".weight")
                layers[f"{module}.quantization"] = kind if weight in packed else None
                layers[f"{module}.awq_block_size"] = block if weight in packed else 0
        quantization = {
            "producer": {"name": "modelopt", "version": modelopt.__version__},
            "quantization": quant_utils.process_layer_quant_config(layers),
        }
        config = {**source.config, "quantization_config": convert_hf_quant_config_format(quantization)}
        return config, {MODELOPT_NAME: (json.dumps(quantization, indent=4) + "\n").encode()}

    def _layer(
        self, weight: torch.Tensor, weight_amax: torch.Tensor, input_amax: torch.Tensor
    ) -> torch.nn.Module:
        """A layer such as Model-Optimizer's functions look at: a weight, and quantisers with these scales."""
        import modelopt.torch.quantization as mtq
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import TensorQuantizer

        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        for quantizer, amax in (("weight_quantizer", weight_amax), ("input_quantizer", input_amax)):
            rules = getattr(mtq, _PRESETS[self._name])["quant_cfg"]
            (attributes,) = (r["cfg"] for r in rules if r["quantizer_name"] == f"*{quantizer}" and "cfg" in r)
            module = TensorQuantizer(QuantizerAttributeConfig(**attributes))
            module.amax = amax
            setattr(layer, quantizer, module)
        return layer
