"""Which of Megatron's tensors is which of a folder's, for the families that can be trained.

Everything is spelled out from config.json, in the global space of Megatron's distributed checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torpor.checkpoints.config_fields import MAX_LAYERS, Config, read_count
from torpor.checkpoints.name_map import (
    Concatenate,
    Entry,
    Identity,
    InterleaveQKV,
    Op,
    Shape,
    Split,
    StackExperts,
    SwapHalves,
)
from torpor.errors import CheckpointError, UnsupportedModelError

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


class MegatronNames(ABC):
    """The two parts of a family's name map."""

    @abstractmethod
    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""

    @abstractmethod
    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""


class HybridNames(MegatronNames):
    """Hybrids of Mamba-2, attention, MLP and mixture-of-experts layers.

    Each layer is a norm and one mixer. An MTP layer is as many such layers as its pattern has letters,
    numbered through over all depths; its projections lie beside the first of them, its final norm beside the
    last.
    """

    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""
        hidden, vocab = read_count(config, "hidden_size"), read_count(config, "vocab_size")
        yield _same("embedding.word_embeddings.weight", "backbone.embeddings.weight", (vocab, hidden))
        for i, kind in enumerate(hybrid_pattern(config)):
            yield from _hybrid_layer(kind, f"decoder.layers.{i}", f"backbone.layers.{i}", config)
        yield _same("decoder.final_norm.weight", "backbone.norm_f.weight", (hidden,))
        yield from _output_layer(config)

    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""
        hidden, pattern = read_count(config, "hidden_size"), hybrid_mtp_pattern(config)
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


class Qwen2Names(MegatronNames):
    """A Qwen2 trunk, and MTP layers that each hold one more such decoder layer, as MiMo-7B has them."""

    def trunk_entries(self, config: Config) -> Iterator[Entry]:
        """Yield the trunk's part of the name map."""
        hidden, vocab = read_count(config, "hidden_size"), read_count(config, "vocab_size")
        yield _same("embedding.word_embeddings.weight", "model.embed_tokens.weight", (vocab, hidden))
        for i in range(read_count(config, "num_hidden_layers", maximum=MAX_LAYERS)):
            yield from _dense_layer(f"decoder.layers.{i}", f"model.layers.{i}", config)
        yield _same("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
        yield from _output_layer(config)

    def mtp_entries(self, config: Config, depth: int) -> Iterator[Entry]:
        """Yield one MTP layer's part of the name map."""
        hidden = read_count(config, "hidden_size")
        layer, hf = f"mtp.layers.{depth}", f"model.mtp_layers.{depth}"
        yield _same(f"{layer}.enorm.weight", f"{hf}.token_layernorm.weight", (hidden,))
        yield _same(f"{layer}.hnorm.weight", f"{hf}.hidden_layernorm.weight", (hidden,))
        # MiMo puts the hidden state before the token's embedding, Megatron after it.
        projection = (f"{hf}.input_proj.weight",)
        yield Entry((f"{layer}.eh_proj.weight",), projection, ((hidden, 2 * hidden),), SwapHalves())
        yield from _dense_layer(f"{layer}.transformer_layer", hf, config)
        yield _same(f"{layer}.final_layernorm.weight", f"{hf}.final_layernorm.weight", (hidden,))


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
    hidden = read_count(config, "hidden_size")
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
    hidden, heads = read_count(config, "hidden_size"), read_count(config, "mamba_num_heads")
    inner = heads * read_count(config, "mamba_head_dim")
    state = read_count(config, "n_groups") * read_count(config, "ssm_state_size")
    megatron = f"{megatron}.mixer"

    def split(name: str, parts: str, sizes: tuple[int, ...], rest: Shape) -> Entry:
        names = tuple(f"{megatron}.{name}.{part}" for part in parts.split())
        return Entry(names, (f"{hf}.{name}",), ((sum(sizes), *rest),), Split(sizes))

    yield split("in_proj.weight", "z x B C dt", (inner, inner, state, state, heads), (hidden,))
    yield split("conv1d.weight", "x B C", (inner, state, state), (1, read_count(config, "conv_kernel", 4)))
    yield split("conv1d.bias", "x B C", (inner, state, state), ())
    for name in ("A_log", "D", "dt_bias"):
        yield _same(f"{megatron}.{name}", f"{hf}.{name}", (heads,))
    yield _same(f"{megatron}.norm.weight", f"{hf}.norm.weight", (inner,))
    yield _same(f"{megatron}.out_proj.weight", f"{hf}.out_proj.weight", (hidden, inner))


def _hybrid_attention(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    return _attention(megatron, hf, config, head_dim=read_count(config, "head_dim", 128), bias=False)


def _attention(megatron: str, hf: str, config: Config, head_dim: int, bias: bool) -> Iterator[Entry]:
    hidden, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    groups = read_count(config, "num_key_value_heads", heads)
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
    hidden, inner = read_count(config, "hidden_size"), read_count(config, "intermediate_size")
    yield _same(f"{megatron}.mlp.linear_fc1.weight", f"{hf}.up_proj.weight", (inner, hidden))
    yield _same(f"{megatron}.mlp.linear_fc2.weight", f"{hf}.down_proj.weight", (hidden, inner))


def _hybrid_moe(megatron: str, hf: str, config: Config) -> Iterator[Entry]:
    hidden = read_count(config, "hidden_size")
    experts = read_count(config, "n_routed_experts", maximum=MAX_LAYERS)
    inner, shared = (
        read_count(config, "moe_intermediate_size"),
        read_count(config, "moe_shared_expert_intermediate_size"),
    )
    mlp = f"{megatron}.mlp"
    yield _same(f"{mlp}.router.weight", f"{hf}.gate.weight", (experts, hidden))
    yield _same(f"{mlp}.router.expert_bias", f"{hf}.gate.e_score_correction_bias", (experts,))

    width = hidden
    if config.get("moe_latent_size") is not None:
        # The routed experts, and only they, work in a smaller space.
        width = read_count(config, "moe_latent_size")
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
    hidden, inner = read_count(config, "hidden_size"), read_count(config, "intermediate_size")
    norm = f"{megatron}.self_attention.linear_qkv.layer_norm_weight"
    yield _same(norm, f"{hf}.input_layernorm.weight", (hidden,))
    head_dim = read_count(config, "head_dim", hidden // read_count(config, "num_attention_heads"))
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
        shape = (read_count(config, "vocab_size"), read_count(config, "hidden_size"))
        yield _same("output_layer.weight", "lm_head.weight", shape)


def _same(megatron_name: str, hf_name: str, shape: Shape) -> Entry:
    op: Op = Identity()
    return Entry((megatron_name,), (hf_name,), (shape,), op)
