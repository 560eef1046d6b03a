"""What a folder's MTP layers are, whether the folder agrees with itself about them, and who can use them.

Headers and configurations are all that is read, so the answer takes no longer for a large model.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.checkpoints.config_fields import text_config
from torpor.checkpoints.families import MTPLayerCount, count_mtp_layers, family_of
from torpor.checkpoints.family import Family, role_in_layer
from torpor.checkpoints.folder import Folder, open_folder
from torpor.checkpoints.quantization import (
    find_quantization,
    is_quantized,
    not_excluded,
    plain_name,
    unquantized_modules,
)
from torpor.errors import CheckpointError, UnsupportedModelError

# Model-Optimizer's own file, which some servers read and config.json need not repeat.
MODELOPT_NAME = "hf_quant_config.json"
# Where an MTP layer takes a token's embedding and the trunk's hidden state in, in any family's words.
_JOINS = (
    *(f"{norm}.weight" for norm in ("enorm", "hnorm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    *(f"{projection}.weight" for projection in ("eh_proj", "mtp.fc", "input_proj")),
)


@dataclass(frozen=True)
class MTPLayer:
    """One MTP layer as it lies on disk.

    Attributes:
        depth: Its number, from 0.
        tensors: How many tensors it has.
        parameters: Elements in all of them.
        nbytes: Bytes of all of them.
        dtypes: Tensors of each dtype.
        files: The files that hold them.
    """

    depth: int
    tensors: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """Everything that the headers of a folder tell.

    Attributes:
        path: The folder.
        family: Its family.
        count: Its MTP layers, counted in three ways.
        layers: Every MTP layer that has a tensor.
        copies: MTP tensors that, by name, dtype and shape, are copies of a trunk tensor, and of which.
        trunk_tensors: Tensors of the trunk.
        trunk_bytes: Their bytes.
        quantization: The method that config.json names, if any.
        problems: What is wrong, each with what to do about it.
        consumers: What becomes of the MTP layers in each program that loads the folder.
    """

    path: Path
    family: str
    count: MTPLayerCount
    layers: tuple[MTPLayer, ...]
    copies: tuple[tuple[str, str], ...]
    trunk_tensors: int
    trunk_bytes: int
    quantization: str | None
    problems: tuple[str, ...]
    consumers: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether the folder agrees with itself."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for `json.dumps`."""
        return {
            "ok": self.ok,
            "family": self.family,
            "declared": self.count.declared,
            "physical": self.count.physical,
            "written": self.count.written,
            "mtp_tensors": sum(layer.tensors for layer in self.layers),
            "mtp_parameters": sum(layer.parameters for layer in self.layers),
            "mtp_bytes": sum(layer.nbytes for layer in self.layers),
            "layers": [
                {
                    "depth": layer.depth,
                    "tensors": layer.tensors,
                    "parameters": layer.parameters,
                    "bytes": layer.nbytes,
                    "dtypes": dict(layer.dtypes),
                    "files": list(layer.files),
                }
                for layer in self.layers
            ],
            "missing": list(self.count.missing),
            "copies": [name for name, _ in self.copies],
            "trunk_tensors": self.trunk_tensors,
            "trunk_bytes": self.trunk_bytes,
            "quantization": self.quantization,
            "problems": list(self.problems),
            "consumers": dict(self.consumers),
        }


def inspect_folder(path: str | Path) -> Inspection:
    """Inspect a folder.

    Args:
        path: A Hugging Face folder.

    Raises:
        CheckpointError: It cannot be read, or its tensors or configuration are damaged.
        UnsupportedModelError: A family we do not know.
    """
    folder = open_folder(path)
    family, config = family_of(folder), folder.config
    count = count_mtp_layers(folder)
    mtp, trunk = family.sort(folder.tensors, config)
    candidates = family.copy_candidates(folder.tensors, config) if mtp else []
    quantization = find_quantization(config)
    return Inspection(
        path=folder.path,
        family=family.name,
        count=count,
        layers=_describe_layers(folder, family, mtp),
        copies=tuple(pair for pair in candidates if _are_alike(folder, *pair)),
        trunk_tensors=len(trunk),
        trunk_bytes=sum(folder.tensors[name].nbytes for name in trunk),
        quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
        problems=(
            *_count_problems(folder, family, count),
            *_copy_problems(folder, candidates),
            *_shape_problems(folder, mtp, {name for name, _ in candidates}),
            *quantization_problems(folder, family, mtp, trunk),
        ),
        consumers=_describe_consumers(family, count),
    )


def quantization_problems(
    folder: Folder,
    family: Family,
    mtp: Collection[str],
    trunk: Collection[str],
    configs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Return what is wrong with how a folder says that its MTP tensors are quantised.

    Args:
        folder: The folder.
        family: Its family.
        mtp: Its MTP tensors.
        trunk: Its other tensors.
        configs: What `quantization_configs` would return; read where None.
    """
    problems = []
    if configs is None:
        configs = quantization_configs(folder)
    quantized = sorted(name for name in mtp if is_quantized(folder.tensors, name))
    if quantized and not configs:
        problems.append(
            f"{quantized[0]} is quantised ({len(quantized)} MTP tensors), and config.json has no"
            " quantization_config: servers would read the packed bytes as weights"
        )
    modules = modules_to_exclude(folder, family, mtp, trunk) if configs else []
    packed = [name.removesuffix(".weight") for name in quantized if name.endswith(".weight")]
    for file, quantization in configs.items():
        try:
            included = not_excluded(quantization, modules)
            excluded = set(packed) - set(not_excluded(quantization, packed))
        except UnsupportedModelError as error:
            if modules:
                problems.append(f"{file}: {error}")
            continue
        if included:
            problems.append(
                f"{len(included)} MTP modules are not quantised and {file} does not exclude them, first"
                f" {included[0]}: servers would look for scales that are not there"
            )
        if excluded:
            problems.append(
                f"{len(excluded)} MTP modules are quantised and {file} excludes them, first"
                f" {min(excluded)}: servers would read the packed bytes as weights"
            )
    return problems


def modules_to_exclude(
    folder: Folder, family: Family, mtp: Collection[str], trunk: Collection[str]
) -> list[str]:
    """Return the plain modules inside MTP layers that a server would take for quantised ones.

    Routers, embeddings and the like are plain in the trunk too, and servers know. What is plain only in
    an MTP layer they cannot know; nor what only an MTP layer has, unless the rest of that layer is quantised,
    as its publisher left it.

    Args:
        folder: The folder.
        family: Its family.
        mtp: Its MTP tensors.
        trunk: Its other tensors.
    """
    copies = {
        name.removesuffix(".weight") for name, _ in family.copy_candidates(folder.tensors, folder.config)
    }
    plain = [name for name in unquantized_modules(folder.tensors, mtp) if name not in copies]
    known = {role_in_layer(name): False for name in unquantized_modules(folder.tensors, trunk)}
    known |= {
        role_in_layer(plain_weight.removesuffix(".weight")): True
        for name in trunk
        if (plain_weight := plain_name(name)) and is_quantized(folder.tensors, name)
    }
    published = any(is_quantized(folder.tensors, name) for name in mtp)
    return [name for name in plain if known.get(role_in_layer(name), not published)]


def quantization_configs(folder: Folder) -> dict[str, Mapping[str, Any]]:
    """Return the quantisation configuration that each file of a folder holds, by the file's name.

    Raises:
        CheckpointError: Model-Optimizer's file is damaged.
    """
    found: dict[str, Mapping[str, Any]] = {}
    # A model inside another keeps it at either place.
    for config in (folder.config, text_config(folder.config)):
        quantization = find_quantization(config)
        if quantization is not None:
            found.setdefault("config.json", quantization)
    for companion in folder.companions:
        if companion.name == MODELOPT_NAME:
            try:
                quantization = find_quantization(json.loads(companion.read_bytes()))
            except (ValueError, AttributeError) as error:
                raise CheckpointError(f"{companion} is not valid JSON: {error}") from None
            if quantization is not None:
                found[MODELOPT_NAME] = quantization
    return found


def graft_command(trunk: Path) -> str:
    """Return the command that puts lost heads back onto a folder."""
    return f"torpor graft --heads SOURCE --trunk {trunk} --out {trunk}-with-heads"


def _describe_layers(folder: Folder, family: Family, mtp: Collection[str]) -> tuple[MTPLayer, ...]:
    by_depth: dict[int, list[str]] = {}
    for name in mtp:
        depth = family.mtp_depth(name, folder.config)
        assert depth is not None
        by_depth.setdefault(depth, []).append(name)
    layers = []
    for depth, names in sorted(by_depth.items()):
        entries = [folder.tensors[name] for name in names]
        layers.append(
            MTPLayer(
                depth=depth,
                tensors=len(entries),
                parameters=sum(math.prod(entry.shape) for entry in entries),
                nbytes=sum(entry.nbytes for entry in entries),
                dtypes=dict(Counter(entry.dtype for entry in entries).most_common()),
                files=tuple(sorted({entry.file.name for entry in entries})),
            )
        )
    return tuple(layers)


def _count_problems(folder: Folder, family: Family, count: MTPLayerCount) -> list[str]:
    if not count.agree:
        declared = "does not declare" if count.declared is None else f"declares {count.declared}"
        missing = (
            f"; {len(count.missing)} tensors are missing, first {count.missing[0]}" if count.missing else ""
        )
        remedy = (
            f"Put them back from the model's source: {graft_command(folder.path)}"
            if count.missing
            else f"Make {count.field} say what is there."
        )
        return [
            f"config.json {declared} MTP layers ({count.field}), {count.physical} exist,"
            f" {count.written} are complete{missing}. {remedy}"
        ]
    if not count.physical and not family.is_declared:
        return [
            f"no MTP tensors are there. {family.name} models come with them and config.json has no field that"
            f" says otherwise, so servers expect them. Put them back: {graft_command(folder.path)}"
        ]
    return []


def _copy_problems(folder: Folder, candidates: Collection[tuple[str, str]]) -> list[str]:
    problems = []
    for name, trunk in candidates:
        copy, original = folder.tensors[name], folder.tensors[trunk]
        if copy.shape != original.shape:
            problems.append(
                f"{name} has shape {list(copy.shape)}, and {trunk}, which it copies in this family, has"
                f" {list(original.shape)}: one of the two was left behind"
            )
    return problems


def _shape_problems(folder: Folder, mtp: Collection[str], copies: Collection[str]) -> list[str]:
    """Return what is wrong if the MTP layers are those of a model with another hidden size.

    Each has norms of the hidden size and a projection of two hidden states to one; the layer inside may be
    unlike every layer of the trunk and is not judged.
    """
    hidden = text_config(folder.config).get("hidden_size")
    if type(hidden) is not int:
        return []
    wrong = []
    for name in mtp:
        if name in copies or is_quantized(folder.tensors, name) or not name.endswith(_JOINS):
            continue
        shape = folder.tensors[name].shape
        wanted = (hidden,) if len(shape) == 1 else (hidden, 2 * hidden)
        if shape != wanted:
            wrong.append(f"{name} has shape {list(shape)}, and hidden_size {hidden} needs {list(wanted)}")
    if not wrong:
        return []
    return [
        f"{wrong[0]} ({len(wrong)} such MTP tensors): the heads are another model's, or config.json is."
        " Take both from one model."
    ]


def _are_alike(folder: Folder, name: str, trunk: str) -> bool:
    a, b = folder.tensors[name], folder.tensors[trunk]
    return (a.dtype, a.shape) == (b.dtype, b.shape)


def _describe_consumers(family: Family, count: MTPLayerCount) -> dict[str, str]:
    """Say what becomes of the MTP layers in each program; facts from their public code."""
    transformers = "has no class for this family and runs the folder's own code"
    if family.has_transformers:
        transformers = "loads the trunk; save_pretrained drops the MTP tensors without a word"
        if family.has_transformers_mtp and count.written:
            transformers += "; generate(use_mtp=True) drafts with them"
    expected = count.declared or (1 if not family.is_declared else 0)
    if not count.written and not expected:
        nothing = "no MTP layers: plain decoding"
        return {"vLLM": nothing, "SGLang": nothing, "Transformers": transformers}
    if not count.agree or not count.written:
        broken = "fails to start, or drafts from weights that were never loaded"
        vllm = f"plain decoding works; with method mtp it {broken}"
        sglang = f"plain decoding works; with NEXTN it {broken}"
    else:
        layers = count.written if family.vllm_layers is None else min(family.vllm_layers, count.written)
        option = json.dumps({"method": "mtp", "num_speculative_tokens": max(layers, 1)})
        vllm = f"--speculative-config '{option}' drafts with {layers} of {count.written} MTP layers"
        sglang = "--speculative-algorithm NEXTN drafts with them"
    if family.vllm_layers == 0:
        vllm = "cannot run MTP for this family: plain decoding"
    if not family.has_sglang:
        sglang = "cannot run MTP for this family: plain decoding"
    return {"vLLM": vllm, "SGLang": sglang, "Transformers": transformers}
