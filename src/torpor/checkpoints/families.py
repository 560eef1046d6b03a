"""The model families we know: what is MTP in their folders, how many layers of it, and which tensor is which.

Everything is derived from config.json. To add a family, subclass `Family` and list it in `FAMILIES`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torpor.checkpoints.folder import Folder
from torpor.checkpoints.name_map import (
    Concatenate,
    Entry,
    Identity,
    InterleaveQKV,
    NameMap,
    Op,
    Shape,
    Split,
    StackExperts,
    SwapHalves,
)
from torpor.errors import CheckpointError, UnsupportedModelError

Config = Mapping[str, Any]

DECLARED_FIELD = "num_nextn_predict_layers"
# Far above any model; keeps a damaged configuration from spelling out names without end.
MAX_COUNT = 2**24
MAX_LAYERS = 2**12

MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
# The words that replaced the letters of hybrid patterns, in their two generations.
PATTERN_LETTERS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


class Family(ABC):
    """One family of models, all with the same names on disk."""

    name: ClassVar[str]

    @abstractmethod
    def is_mtp(self, name: str, config: Config) -> bool:
        """Whether a tensor of the folder belongs to an MTP layer."""

    @abstractmethod
    def mtp_depths(self, names: Collection[str], config: Config) -> set[int]:
        """Return the depths, from 0, of the MTP layers that have at least one of these tensors."""

    @abstractmethod
    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""

    @abstractmethod
    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""

    def copy_candidates(self, names: Collection[str], config: Config) -> Collection[tuple[str, str]]:
        """Return pairs of an MTP tensor and the trunk tensor that it may be a copy of.

        Whether it is one is decided by their bytes in the source. Empty where the family writes none.
        """
        return ()

    def declared_mtp_layers(self, config: Config) -> int:
        """Return how many MTP layers config.json declares.

        Raises:
            CheckpointError: It declares something that is no count.
        """
        return _count(config, DECLARED_FIELD, 0, minimum=0, maximum=MAX_LAYERS)

    def physical_mtp_layers(self, names: Collection[str], config: Config) -> int:
        """Return how many MTP layers have at least one of these tensors."""
        return len(self.mtp_depths(names, config))

    def name_map(self, config: Config) -> NameMap:
        """Spell out the whole map of a model.

        Raises:
            CheckpointError: config.json lacks a field or has one of the wrong kind.
            UnsupportedModelError: config.json asks for tensors that Megatron's models do not have.
        """
        entries = list(self.trunk_entries(config))
        for depth in range(self.declared_mtp_layers(config)):
            entries += self.mtp_entries(config, depth)
        return NameMap(entries)


class NemotronH(Family):
    """Hybrids of Mamba-2, attention, MLP and mixture-of-experts layers.

    Each layer is a norm and one mixer. An MTP layer is as many such layers as its pattern has letters,
    numbered through over all depths; its projections lie beside the first of them, its final norm beside the
    last.
    """

    name = "nemotron_h"

    def is_mtp(self, name: str, config: Config) -> bool:
        """Whether a tensor of the folder belongs to an MTP layer."""
        return name.startswith("mtp.")

    def mtp_depths(self, names: Collection[str], config: Config) -> set[int]:
        """Return the depths, from 0, of the MTP layers that have at least one of these tensors."""
        return {i // len(hybrid_mtp_pattern(config)) for i in _indices(names, r"mtp\.layers\.([0-9]{1,9})\.")}

    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""
        hidden, vocab = _count(config, "hidden_size"), _count(config, "vocab_size")
        yield _same("embedding.word_embeddings.weight", "backbone.embeddings.weight", (vocab, hidden))
        for i, kind in enumerate(hybrid_pattern(config)):
            yield from _hybrid_layer(kind, f"decoder.layers.{i}", f"backbone.layers.{i}", config)
        yield _same("decoder.final_norm.weight", "backbone.norm_f.weight", (hidden,))
        yield from _output_layer(config)

    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""
        hidden, pattern = _count(config, "hidden_size"), hybrid_mtp_pattern(config)
        first = depth * len(pattern)
        last = first + len(pattern) - 1
        layer = f"mtp.layers.{depth}"
        yield _same(f"{layer}.enorm.weight", f"mtp.layers.{first}.enorm.weight", (hidden,))
        yield _same(f"{layer}.hnorm.weight", f"mtp.layers.{first}.hnorm.weight", (hidden,))
        yield _same(f"{layer}.eh_proj.weight", f"mtp.layers.{first}.eh_proj.weight", (hidden, 2 * hidden))
        for j, kind in enumerate(pattern):
            yield from _hybrid_layer(
                kind, f"{layer}.mtp_model_layer.layers.{j}", f"mtp.layers.{first + j}", config
            )
        final = "final_layernorm.weight"
        yield _same(f"{layer}.{final}", f"mtp.layers.{last}.{final}", (hidden,))


class MiMo(Family):
    """MiMo-7B: a Qwen2 trunk, and MTP layers that each hold one more such decoder layer."""

    name = "mimo"

    def is_mtp(self, name: str, config: Config) -> bool:
        """Whether a tensor of the folder belongs to an MTP layer."""
        return name.startswith("model.mtp_layers.")

    def mtp_depths(self, names: Collection[str], config: Config) -> set[int]:
        """Return the depths, from 0, of the MTP layers that have at least one of these tensors."""
        return _indices(names, r"model\.mtp_layers\.([0-9]{1,9})\.")

    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""
        hidden, vocab = _count(config, "hidden_size"), _count(config, "vocab_size")
        yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", (vocab, hidden))
        for i in range(_count(config, "num_hidden_layers", maximum=MAX_LAYERS)):
            yield from _dense_layer(f"decoder.layers.{i}", f"model.layers.{i}", config)
        yield _same("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
        yield from _output_layer(config)

    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""
        hidden = _count(config, "hidden_size")
        layer, hf = f"mtp.layers.{depth}", f"model.mtp_layers.{depth}"
        yield _same(f"{layer}.enorm.weight", f"{hf}.token_layernorm.weight", (hidden,))
        yield _same(f"{layer}.hnorm.weight", f"{hf}.hidden_layernorm.weight", (hidden,))
        # MiMo puts the hidden state before the token's embedding, Megatron after it.
        projection = (f"{hf}.input_proj.weight",)
        yield Entry((f"{layer}.eh_proj.weight",), projection, ((hidden, 2 * hidden),), SwapHalves())
        yield from _dense_layer(f"{layer}.transformer_layer", hf, config)
        yield _same(f"{layer}.final_layernorm.weight", f"{hf}.final_layernorm.weight", (hidden,))


FAMILIES: tuple[Family, ...] = (NemotronH(), MiMo())


def find_family(config: Config) -> Family:
    """Return the family of a model.

    Args:
        config: What config.json says.

    Raises:
        UnsupportedModelError: It is none that we know.
    """
    for family in FAMILIES:
        if config.get("model_type") == family.name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise UnsupportedModelError(
        f"config.json has model_type {config.get('model_type')!r}; supported are {known}"
    )


@dataclass(frozen=True)
class MTPLayerCount:
    """How many MTP layers a folder has, counted in the three ways that have to agree.

    Attributes:
        declared: What config.json says.
        physical: Layers of which at least one tensor exists.
        written: Layers of which every tensor exists, numbered from 0 without a gap.
        missing: Tensors that as many layers as are declared, or exist, would have.
    """

    declared: int
    physical: int
    written: int
    missing: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether the three are equal."""
        return self.declared == self.physical == self.written


def count_mtp_layers(folder: Folder) -> MTPLayerCount:
    """Count a folder's MTP layers.

    Raises:
        UnsupportedModelError: A family we do not know.
        CheckpointError: config.json lacks a field or has one of the wrong kind.
    """
    family, config = find_family(folder.config), folder.config
    declared = family.declared_mtp_layers(config)
    physical = family.physical_mtp_layers(folder.tensors, config)
    written, missing = 0, []
    # Layers are numbered from 0: one that exists under a later number is as good as missing.
    for depth in range(max(declared, physical)):
        names = [name for entry in family.mtp_entries(config, depth) for name in entry.hf_names]
        absent = [name for name in names if name not in folder.tensors]
        written += not absent
        missing += absent
    return MTPLayerCount(declared, physical, written, tuple(missing))


def check_heads(folder: Folder) -> None:
    """Refuse a folder whose MTP layers are not the ones that its configuration declares.

    Raises:
        CheckpointError: Declared, existing and complete layers differ in number.
    """
    count = count_mtp_layers(folder)
    if count.agree:
        return
    missing = f"\n  missing: {len(count.missing)} tensors, first {count.missing[0]}" if count.missing else ""
    raise CheckpointError(
        f"{folder.path} declares {count.declared} MTP layers ({DECLARED_FIELD} in config.json),"
        f" {count.physical} exist, {count.written} are complete{missing}\n"
        "  Put the missing tensors back, or make config.json declare what is there."
    )


def hybrid_pattern(config: Config) -> str:
    """Return a hybrid trunk's layers, one letter each: M Mamba, * attention, - MLP, E mixture of experts.

    Raises:
        CheckpointError: config.json gives none, or gives two that differ.
    """
    pattern = _pattern(config, "hybrid_override_pattern", "layers_block_type")
    if not pattern:
        raise CheckpointError(
            "config.json names no layers: hybrid_override_pattern and layers_block_type are both missing"
        )
    return pattern


def hybrid_mtp_pattern(config: Config) -> str:
    """Return the layers inside one MTP layer of a hybrid, in the letters of `hybrid_pattern`.

    Where config.json gives none it is attention and experts, as it is to Transformers.

    Raises:
        CheckpointError: config.json gives two that differ.
    """
    return _pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type") or ATTENTION + MOE


def _pattern(config: Config, letters_field: str, words_field: str) -> str:
    """Return the pattern that either field gives, or nothing where neither is there."""
    letters, words = config.get(letters_field), config.get(words_field)
    if words is not None:
        known = list(PATTERN_LETTERS)  # a list, since a word may be anything that JSON can say
        unknown = [w for w in words if w not in known] if isinstance(words, list) else [words]
        if unknown:
            raise CheckpointError(
                f"config.json has {unknown[0]!r} in {words_field}; known are {', '.join(known)}"
            )
        from_words = "".join(PATTERN_LETTERS[w] for w in words)
        if letters is not None and letters != from_words:
            raise CheckpointError(
                f"config.json contradicts itself: {letters_field} is {letters!r},"
                f" {words_field} says {from_words!r}"
            )
        letters = from_words
    if letters is None:
        return ""
    if not isinstance(letters, str) or not letters or set(letters) - set(PATTERN_LETTERS.values()):
        raise CheckpointError(
            f"config.json has {letters_field} {letters!r};"
            " needs letters M (Mamba), * (attention), - (MLP), E (mixture of experts)"
        )
    return letters


def _hybrid_layer(kind: str, megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    """Yield the entries of one layer of a hybrid; Megatron names its norm after what follows it."""
    for field in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        if config.get(field):
            raise UnsupportedModelError(
                f"config.json has {field}: true; Megatron's hybrid layers have no such biases"
            )
    hidden = _count(config, "hidden_size")
    norm, layer = {
        MAMBA: ("mixer.in_proj.layer_norm_weight", _mamba),
        ATTENTION: ("self_attention.linear_qkv.layer_norm_weight", _hybrid_attention),
        MLP: ("mlp.linear_fc1.layer_norm_weight", _hybrid_mlp),
        MOE: ("pre_mlp_layernorm.weight", _hybrid_moe),
    }[kind]
    yield _same(f"{megatron}.{norm}", f"{hf}.norm.weight", (hidden,))
    yield from layer(megatron, f"{hf}.mixer", config)


def _mamba(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    if config.get("use_conv_bias", True) is not True:
        raise UnsupportedModelError(
            f"config.json has use_conv_bias {config['use_conv_bias']!r};"
            " Megatron's Mamba layers have that bias"
        )
    hidden, heads = _count(config, "hidden_size"), _count(config, "mamba_num_heads")
    inner = heads * _count(config, "mamba_head_dim")
    state = _count(config, "n_groups") * _count(config, "ssm_state_size")
    megatron = f"{megatron}.mixer"

    def split(name: str, parts: str, sizes: tuple[int, ...], rest: Shape) -> Entry:
        names = tuple(f"{megatron}.{name}.{part}" for part in parts.split())
        return Entry(names, (f"{hf}.{name}",), ((sum(sizes), *rest),), Split(sizes))

    yield split("in_proj.weight", "z x B C dt", (inner, inner, state, state, heads), (hidden,))
    yield split("conv1d.weight", "x B C", (inner, state, state), (1, _count(config, "conv_kernel", 4)))
    yield split("conv1d.bias", "x B C", (inner, state, state), ())
    for name in ("A_log", "D", "dt_bias"):
        yield _same(f"{megatron}.{name}", f"{hf}.{name}", (heads,))
    yield _same(f"{megatron}.norm.weight", f"{hf}.norm.weight", (inner,))
    yield _same(f"{megatron}.out_proj.weight", f"{hf}.out_proj.weight", (hidden, inner))


def _hybrid_attention(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    return _attention(megatron, hf, config, head_dim=_count(config, "head_dim", 128), bias=False)


def _attention(megatron: str, hf: str, config: Config, head_dim: int, bias: bool) -> Iterator[Entry]:
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    groups = _count(config, "num_key_value_heads", heads)
    if heads % groups:
        raise CheckpointError(
            f"config.json has num_attention_heads {heads}, not a multiple of num_key_value_heads {groups}"
        )
    op = InterleaveQKV(groups, heads // groups, head_dim)
    rows = (heads * head_dim, groups * head_dim, groups * head_dim)
    for kind, rest in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or bias:
            names = tuple(f"{hf}.{letter}_proj.{kind}" for letter in "qkv")
            shapes = tuple((n, *rest) for n in rows)
            yield Entry((f"{megatron}.self_attention.linear_qkv.{kind}",), names, shapes, op)
    shape = (hidden, heads * head_dim)
    yield _same(f"{megatron}.self_attention.linear_proj.weight", f"{hf}.o_proj.weight", shape)


def _hybrid_mlp(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    yield _same(f"{megatron}.mlp.linear_fc1.weight", f"{hf}.up_proj.weight", (inner, hidden))
    yield _same(f"{megatron}.mlp.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, inner))


def _hybrid_moe(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    hidden = _count(config, "hidden_size")
    experts = _count(config, "n_routed_experts", maximum=MAX_LAYERS)
    inner, shared = (
        _count(config, "moe_intermediate_size"),
        _count(config, "moe_shared_expert_intermediate_size"),
    )
    mlp = f"{megatron}.mlp"
    yield _same(f"{mlp}.router.weight", f"{hf}.gate.weight", (experts, hidden))
    yield _same(f"{mlp}.router.expert_bias", f"{hf}.gate.e_score_correction_bias", (experts,))

    width = hidden
    if config.get("moe_latent_size") is not None:
        # The routed experts, and only they, work in a smaller space.
        width = _count(config, "moe_latent_size")
        yield _same(f"{mlp}.fc1_latent_proj.weight", f"{hf}.fc1_latent_proj.weight", (width, hidden))
        yield _same(f"{mlp}.fc2_latent_proj.weight", f"{hf}.fc2_latent_proj.weight", (hidden, width))
    for fc, projection, shape in (("fc1", "up_proj", (inner, width)), ("fc2", "down_proj", (width, inner))):
        names = tuple(f"{hf}.experts.{i}.{projection}.weight" for i in range(experts))
        stacked = f"{mlp}.experts.experts.linear_{fc}.weight"
        yield Entry((stacked,), names, (shape,) * experts, StackExperts(experts))
    for fc, projection, shape in (
        ("fc1", "up_proj", (shared, hidden)),
        ("fc2", "down_proj", (hidden, shared)),
    ):
        name = f"{mlp}.shared_experts.linear_{fc}.weight"
        yield _same(name, f"{hf}.shared_experts.{projection}.weight", shape)


def _dense_layer(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    """Yield the entries of one Qwen2 decoder layer: attention with biases on q, k and v, and a gated MLP."""
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    norm = f"{megatron}.self_attention.linear_qkv.layer_norm_weight"
    yield _same(norm, f"{hf}.input_layernorm.weight", (hidden,))
    head_dim = _count(config, "head_dim", hidden // _count(config, "num_attention_heads"))
    bias = bool(config.get("attention_bias", True))
    yield from _attention(megatron, f"{hf}.self_attn", config, head_dim, bias)
    norm = f"{megatron}.mlp.linear_fc1.layer_norm_weight"
    yield _same(norm, f"{hf}.post_attention_layernorm.weight", (hidden,))
    gated = (f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight")
    yield Entry((f"{megatron}.mlp.linear_fc1.weight",), gated, ((inner, hidden),) * 2, Concatenate())
    yield _same(f"{megatron}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", (hidden, inner))


def _output_layer(config: Config) -> Iterator[Entry]:
    """Yield the output layer, which is on neither side where it is the embedding."""
    if not config.get("tie_word_embeddings", False):
        shape = (_count(config, "vocab_size"), _count(config, "hidden_size"))
        yield _same("output_layer.weight", "lm_head.weight", shape)


def _same(megatron_name: str, hf_name: str, shape: Shape) -> Entry:
    op: Op = Identity()
    return Entry((megatron_name,), (hf_name,), (shape,), op)


def _indices(names: Collection[str], pattern: str) -> set[int]:
    matches = (re.match(pattern, name) for name in names)
    return {int(match[1]) for match in matches if match}


def _count(
    config: Config, field: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT
) -> int:
    value = config.get(field)
    if value is None:
        value = default
    # `type` and not isinstance: True is an int to Python.
    if type(value) is not int or not minimum <= value <= maximum:
        raise CheckpointError(
            f"config.json has {field} {value!r}, needs a whole number from {minimum} to {maximum}"
        )
    return value
