"""Quantised tensors and the configuration that says which modules are not: read, asked and mended.

A quantised weight is stored under another name or dtype, with scales beside it. A server decides from
`quantization_config` which modules to read that way: those left in plain weights have to be excluded there.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torpor.checkpoints.header import TensorEntry
from torpor.errors import UnsupportedModelError

# What a quantised weight is called instead of `weight`.
_PACKED = re.compile(r"\.(?:weight_packed|qweight|weight_blocks)$")
# What lies beside it.
_BESIDE = re.compile(
    r"(?:\.|_)(?:weight_scale|weight_scale_inv|weight_scale_2|scale_inv|input_scale|scales|qzeros|g_idx"
    r"|weight_g_idx|weight_shape|weight_zero_point|weight_global_scale|input_global_scale|input_zero_point"
    r"|output_scale|[qkv]_scale|absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_scales)$"
    r"|\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$"
)
NARROW_DTYPES = frozenset(("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E5M2", "I8", "U8"))
PLAIN_DTYPES = frozenset(("BF16", "F16", "F32", "F64"))

# Where a configuration keeps it: config.json, config.json of old, hf_quant_config.json.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config", "quantization")

# Under which key a method lists the modules that it leaves alone; where it knows several, the first that a
# configuration has, or the first.
EXCLUSION_KEYS = {
    "compressed-tensors": ("ignore",),
    "modelopt": ("ignore", "exclude_modules"),
    "modelopt_fp4": ("ignore", "exclude_modules"),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "awq": ("modules_to_not_convert",),
    "gptq": ("modules_to_not_convert",),
    "mxfp4": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "finegrained_fp8": ("modules_to_not_convert",),
    "quark": ("exclude",),
}


def plain_name(name: str) -> str | None:
    """Return what a tensor would be called if nothing were quantised; None for what lies beside a weight."""
    if _BESIDE.search(name):
        return None
    return _PACKED.sub(".weight", name)


def unquantized_modules(tensors: Mapping[str, TensorEntry], names: Iterable[str]) -> list[str]:
    """Return the modules among these tensors whose weights are matrices and plain.

    Args:
        tensors: All tensors of a folder.
        names: Those to look at.

    Returns:
        Module names, such as `mtp.layers.0.self_attn.q_proj`.
    """
    modules = []
    for name in names:
        entry, module = tensors[name], name.removesuffix(".weight")
        is_matrix = module != name and len(entry.shape) >= 2
        if is_matrix and entry.dtype in PLAIN_DTYPES and not has_scale(tensors, module):
            modules.append(module)
    return modules


def has_scale(tensors: Collection[str], module: str) -> bool:
    """Whether a module's weight has a scale beside it."""
    return any(f"{module}.{scale}" in tensors for scale in ("weight_scale", "weight_scale_inv", "scales"))


def is_quantized(tensors: Mapping[str, TensorEntry], name: str) -> bool:
    """Whether a tensor is a quantised weight, or what lies beside one."""
    if plain_name(name) != name or has_scale(tensors, name.removesuffix(".weight")):
        return True
    return name.endswith(".weight") and tensors[name].dtype in NARROW_DTYPES


def find_quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation part of a configuration, of config.json or of hf_quant_config.json.

    Args:
        config: What the file says.
    """
    for field in QUANTIZATION_FIELDS:
        if isinstance(config.get(field), Mapping):
            part: Mapping[str, Any] = config[field]
            return part
    return None


def not_excluded(quantization: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    """Return the modules that a server would read as quantised.

    Args:
        quantization: What `find_quantization` returned.
        modules: Names of modules with plain weights.

    Raises:
        UnsupportedModelError: The method is none whose exclusions we can read.
    """
    key = _exclusion_key(quantization)
    patterns = quantization.get(key) or []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UnsupportedModelError(f"quantization_config has {key} {patterns!r}, needs a list of names")
    matches = [_matcher(pattern) for pattern in patterns]
    return [module for module in modules if not any(match(module) for match in matches)]


def exclude(
    quantization: Mapping[str, Any], modules: Iterable[str], prefixes: Iterable[str]
) -> dict[str, Any]:
    """Return a quantisation configuration that leaves these modules alone too.

    Args:
        quantization: What `find_quantization` returned.
        modules: Modules with plain weights.
        prefixes: What the names of all of them begin with, where a method takes patterns.

    Raises:
        UnsupportedModelError: The method is none whose exclusions we can write.
    """
    key = _exclusion_key(quantization)
    method = _method(quantization)
    if method == "compressed-tensors":
        added = [f"re:^{re.escape(prefix)}.*" for prefix in prefixes]
    elif method.startswith("modelopt"):
        added = [f"{prefix}*" for prefix in prefixes]
    else:
        added = list(modules)
    present = list(quantization.get(key) or [])
    return {**quantization, key: present + [name for name in added if name not in present]}


def _method(quantization: Mapping[str, Any]) -> str:
    # hf_quant_config.json has no quant_method; it is Model-Optimizer's own file.
    default = "modelopt" if "quant_algo" in quantization else ""
    return str(quantization.get("quant_method", default)).lower()


def _exclusion_key(quantization: Mapping[str, Any]) -> str:
    method = _method(quantization)
    if method not in EXCLUSION_KEYS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method {quantization.get('quant_method')!r}; known are"
            f" {', '.join(EXCLUSION_KEYS)}\n"
            "  How it leaves modules unquantised is not known; what becomes of plain ones cannot be told."
        )
    keys = EXCLUSION_KEYS[method]
    return next((key for key in keys if key in quantization), keys[0])


def _matcher(pattern: str) -> Any:
    """A pattern is a regular expression (`re:`), has wildcards, or names a module and all that is in it."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]).match
        except re.error:
            return pattern.__eq__
    if any(letter in pattern for letter in "*?["):
        return lambda module: fnmatchcase(module, pattern)
    return lambda module: module == pattern or module.startswith(f"{pattern}.")
