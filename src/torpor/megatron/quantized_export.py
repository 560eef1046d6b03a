"""Weights that were trained through fake quantisers, as servers read them.

FP8 and NVFP4 are written as Model-Optimizer writes Megatron models in them
(modelopt/torch/export/unified_export_megatron.py, `save_pretrained`). It writes none in INT8, and its own
name for that, W8A8_SQ_PER_CHANNEL, means nothing to vLLM and SGLang; both read INT8 in the format of the
compressed-tensors library.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Final

import torch

from torpor.checkpoints.families import family_of
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.inspect import MODELOPT_NAME
from torpor.checkpoints.name_map import Entry, StackExperts
from torpor.checkpoints.quantization import exclude
from torpor.errors import CheckpointError
from torpor.megatron.quantization import quantizer_attributes, quantizer_config

_OUTPUT_LAYER: Final = "lm_head"  # Transformers' and the servers' name for it, in every family here
_SYMMETRIC_INT8: Final = {"num_bits": 8, "type": "int", "symmetric": True}


def quantized_export(name: str, entries: Iterable[Entry], stored: Set[str]) -> "QuantizedExport":
    """Return which weights of a distributed checkpoint are quantised, and what they are to a server.

    Args:
        name: The format, "fp8", "int8" or "nvfp4".
        entries: The name map's, of what the checkpoint's tensors are exported for and not the source's.
        stored: Names of all tensors in the checkpoint.

    Raises:
        CheckpointError: No weight is quantised, or one lacks a scale or has one of another format.
    """
    kind = _Int8Export if name == "int8" else _ModelOptExport
    return kind(name, entries, stored)


class QuantizedExport(ABC):
    """Which weights of a distributed checkpoint are quantised, and what they are to a server."""

    def __init__(self, name: str, entries: Iterable[Entry], stored: Set[str]) -> None:
        self._name = name
        self._scales: dict[tuple[str, ...], tuple[str, ...]] = {}
        modules: set[str] = set()
        for entry in entries:
            modules.update(name.partition(".weight")[0] for name in entry.megatron_names)
            scales = self._names_of_scales(entry)
            lost = [scale for scale in scales if scale not in stored]
            if lost and len(lost) < len(scales):
                raise CheckpointError(f"the checkpoint lacks {lost[0]}, needed for {entry.hf_names[0]}")
            if not lost:
                self._scales[entry.hf_names] = scales
        if not self._scales:
            raise CheckpointError("the checkpoint holds no quantiser's state: its weights are not quantised")
        used = {scale for scales in self._scales.values() for scale in scales}
        for scale in sorted(stored - used):
            module, quantizer, _ = scale.partition("_quantizer._amax")
            if quantizer and module.rpartition(".")[0] in modules:
                raise CheckpointError(
                    f"the checkpoint holds {scale}, and {name} has no such scale: it is of another format\n"
                    "  Export it in the format that the run was given: `quantize`."
                )

    def scale_names(self, entry: Entry) -> tuple[str, ...] | None:
        """Return what the checkpoint calls the scales that belong to a weight; None if not quantised."""
        return self._scales.get(entry.hf_names)

    @abstractmethod
    def pack(
        self, entry: Entry, tensors: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight as it is stored: packed, with its scales beside it.

        Args:
            entry: The weight's.
            tensors: Hugging Face's weights [out, in], in the dtype of training.
            scales: What the checkpoint holds under `scale_names`, in the same order.

        Raises:
            CheckpointError: The scales are of another format.
        """

    @abstractmethod
    def describe(self, source: Folder) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return config.json and the contents, by name, of other files; both name what is not quantised.

        Args:
            source: The folder that the run started from.
        """

    @abstractmethod
    def _names_of_scales(self, entry: Entry) -> tuple[str, ...]:
        """Return what a checkpoint calls an entry's scales if its weight is quantised."""

    def _modules(self, source: Folder) -> dict[str, bool]:
        """Return of each module of the source whose weight is a matrix, or more, whether it is quantised.

        The output layer of a tied model is among them, though its weight has no tensor of its own.
        """
        packed = {hf for hf_names in self._scales for hf in hf_names}
        modules = {
            weight.removesuffix(".weight"): weight in packed
            for weight, entry in source.tensors.items()
            if weight.endswith(".weight") and len(entry.shape) > 1
        }
        modules.setdefault(_OUTPUT_LAYER, False)
        return modules

    def _layer(
        self, weight: torch.Tensor, weight_amax: torch.Tensor, input_amax: torch.Tensor | None
    ) -> torch.nn.Module:
        """A layer such as Model-Optimizer's functions look at: a weight, and quantisers with these scales."""
        from modelopt.torch.quantization.config import QuantizerAttributeConfig
        from modelopt.torch.quantization.nn import TensorQuantizer

        config = quantizer_config(self._name)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        for quantizer, amax in (("weight_quantizer", weight_amax), ("input_quantizer", input_amax)):
            module = TensorQuantizer(QuantizerAttributeConfig(**quantizer_attributes(config, quantizer)))
            if amax is not None:
                module.amax = amax
            setattr(layer, quantizer, module)
        return layer


class _ModelOptExport(QuantizedExport):
    """FP8 and NVFP4, in Model-Optimizer's own format.

    Source:
        modelopt/torch/export/unified_export_megatron.py, `_get_quantized_state` and `_name_remapping`.
    """

    def _names_of_scales(self, entry: Entry) -> tuple[str, ...]:
        # Mamba's projection is one weight in several parts: `in_proj.weight.z`.
        module = entry.megatron_names[0].partition(".weight")[0]
        return f"{module}.weight_quantizer._amax", f"{module}.input_quantizer._amax"

    def pack(
        self, entry: Entry, tensors: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight, its scales and its inputs'; several weights of one entry share theirs.

        Of `scales`, the largest absolute value of the weight when it was calibrated and that of the inputs,
        one element each; of experts one for each.
        """
        from modelopt.torch.export import quant_utils

        weight_amax, input_amax = scales
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
        """Return config.json and, by its name, hf_quant_config.json: both name what is not quantised."""
        import modelopt
        from modelopt.torch.export import quant_utils
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

        one = torch.ones(())
        layer = self._layer(torch.ones(1, 16), one, one)
        kind, block = quant_utils.get_quantization_format(layer), quant_utils.get_weight_block_size(layer)
        layers: dict[str, Any] = {}
        for module, is_packed in self._modules(source).items():
            layers[f"{module}.quantization"] = kind if is_packed else None
            layers[f"{module}.awq_block_size"] = block if is_packed else 0
        quantization = {
            "producer": {"name": "modelopt", "version": modelopt.__version__},
            "quantization": quant_utils.process_layer_quant_config(layers),
        }
        config = {**source.config, "quantization_config": convert_hf_quant_config_format(quantization)}
        return config, {MODELOPT_NAME: (json.dumps(quantization, indent=4) + "\n").encode()}


class _Int8Export(QuantizedExport):
    """INT8, in the format `int-quantized` of the compressed-tensors library.

    Weights are symmetric with a scale for each row, and the scale of each token's inputs is computed as they
    pass.

    Source:
        compressed_tensors/quantization/quant_scheme.py, `INT8_W8A8`; the tensors are those of
        compressed_tensors/compressors.
    """

    def _names_of_scales(self, entry: Entry) -> tuple[str, ...]:
        # Of a weight in several parts, `in_proj.weight.z`, each part has its own.
        parts = [name.partition(".weight") for name in entry.megatron_names]
        return tuple(f"{module}.weight_quantizer._amax{part}" for module, _, part in parts)

    def pack(
        self, entry: Entry, tensors: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight and its scales: INT8 [out, in] and FP32 [out, 1].

        Of `scales`, the largest absolute value of each row of a Megatron weight when it was calibrated.
        """
        from modelopt.torch.export import quant_utils

        rows, found = sum(len(weight) for weight in tensors), sum(amax.numel() for amax in scales)
        if rows != found:
            raise CheckpointError(
                f"{self._scales[entry.hf_names][0]} holds {found} scales, and int8 needs {rows}: one for each"
                f" row of {', '.join(entry.hf_names)}\n"
                "  The checkpoint is damaged, or its quantisers are not those of `quantize: int8`."
            )
        # Scales move as the rows do that they belong to. Each has two columns meanwhile, for what exchanges
        # the left and right half of a weight.
        experts = (entry.op.num_experts,) if isinstance(entry.op, StackExperts) else ()
        amax_of_rows = entry.op.unpack(
            [amax.reshape(*experts, -1, 1).expand(*experts, -1, 2) for amax in scales]
        )
        for hf, weight, amax in zip(entry.hf_names, tensors, amax_of_rows, strict=True):
            layer = self._layer(weight.float(), amax[:, :1], None)
            scale = quant_utils.get_weight_scaling_factor(layer).reshape(-1)
            # Packing divides by the scale where the quantiser multiplied by its inverse. What has been
            # through the quantiser is a whole number of scales, up to rounding, and comes out as that number.
            trained = layer.weight_quantizer(layer.weight)
            kind = quant_utils.get_quantization_format(layer)
            yield hf, quant_utils.to_quantized_weight(trained, scale, kind)
            yield f"{hf}_scale", scale[:, None]

    def describe(self, source: Folder) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Return config.json, in which all that is not quantised is named, and no other file."""
        family, modules = family_of(source), self._modules(source)
        mtp, trunk = family.sort(list(modules), source.config)
        # Servers call what is in an MTP layer by other names than the folder does, which begin alike.
        is_mtp_plain = bool(mtp) and not any(modules[module] for module in mtp)
        named = trunk if is_mtp_plain else modules
        quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**_SYMMETRIC_INT8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**_SYMMETRIC_INT8, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": [module for module in named if not modules[module]],
        }
        if is_mtp_plain:
            quantization = exclude(quantization, [], family.mtp_prefixes(mtp, trunk, source.config))
        return {**source.config, "quantization_config": quantization}, {}
