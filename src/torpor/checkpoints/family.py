"""What the folders of one family of models have in common, and what can be told from it."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torpor.checkpoints.config_fields import MAX_LAYERS, MAX_MTP_LAYERS, Config, read_count, text_config
from torpor.checkpoints.megatron_names import MegatronNames, hybrid_mtp_pattern
from torpor.checkpoints.name_map import Entry, NameMap
from torpor.checkpoints.quantization import plain_name
from torpor.errors import CheckpointError, UnsupportedModelError

Role = Literal["embedding", "output"]

# What a model's tensors may lie under; entries of the table leave it out, folders are read with any of it.
_WRAPPED = r"(?:(?:model|language_model|text_model|llm|thinker|backbone)\.)*"
_WRAPPERS = re.compile(_WRAPPED)
_WRAPPED_LAYER = re.compile(_WRAPPED + r"layers\.([0-9]{1,9})\.")
_NUMBER = re.compile(r"\.([0-9]{1,9})\.")
_EXPERTS = re.compile(r"((?:.*\.)?experts)\.(?:([0-9]{1,9})\.)?(.+)", re.DOTALL)
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ROLES: dict[Role, tuple[str, ...]] = {
    "embedding": ("embed_tokens.weight", "word_embeddings.weight", "embeddings.weight"),
    "output": ("lm_head.weight",),
}


@dataclass(frozen=True)
class Family:
    """What the folders of one family of models have in common.

    Tensor names stand without what a whole model may be wrapped in (`model.`, `language_model.`), and with
    `{depth}` for the number of an MTP layer, `{layer}` for that number counted on from the trunk's layers.

    Attributes:
        model_types: What config.json may call it; the first is the family's name.
        mark: What the name of every MTP tensor begins with; None where MTP layers are numbered on from the
            trunk's.
        layer: Where the decoder layer inside an MTP layer lies.
        parts: Tensors that every MTP layer has besides its decoder layer.
        shared: Tensors that all MTP layers have in common.
        block: Tensors of the decoder layer, where it is unlike every layer of the trunk.
        renamed: Parts of their names that differ from the trunk's layers.
        copies: Tensors that may be copies of the trunk's, and of which.
        declared_by: Fields of config.json that say how many MTP layers there are, the usual one first.
        is_declared: Whether the family's configurations have such a field at all.
        repeated_by: A field that, when true, says that one physical layer is run that many times.
        is_beside_model: Whether MTP tensors are, in an ordinary folder, not wrapped in what the trunk is.
        described_by: Other fields of config.json that describe the MTP layers.
        is_published_without: Whether the family's folders declare MTP layers and come without them.
        vllm_layers: How many MTP layers vLLM runs; None for all, 0 where it cannot.
        has_sglang: Whether SGLang can run them.
        has_transformers: Whether Transformers has a class of its own for the trunk.
        has_transformers_mtp: Whether `generate(use_mtp=True)` of Transformers can run them.
        megatron: Megatron's names; None for a family that cannot be trained.
    """

    model_types: tuple[str, ...]
    mark: str | None
    layer: str
    parts: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, Role], ...] = ()
    declared_by: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    is_declared: bool = True
    repeated_by: str | None = None
    is_beside_model: bool = False
    described_by: tuple[str, ...] = ()
    is_published_without: bool = False
    vllm_layers: int | None = None
    has_sglang: bool = True
    has_transformers: bool = True
    has_transformers_mtp: bool = False
    megatron: MegatronNames | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The family's name."""
        return self.model_types[0]

    @property
    def declared_field(self) -> str:
        """The field of config.json that usually says how many MTP layers there are."""
        return self.declared_by[0]

    def is_mtp(self, name: str, config: Config) -> bool:
        """Whether a tensor of the folder belongs to an MTP layer."""
        return self.mtp_depth(name, config) is not None

    def mtp_depth(self, name: str, config: Config) -> int | None:
        """Return the depth, from 0, of the MTP layer that a tensor belongs to; None for one of the trunk.

        What all of them share belongs to the first.
        """
        return self.depth_reader(config)(name)

    def depth_reader(self, config: Config) -> Callable[[str], int | None]:
        """Return what `mtp_depth` is for one configuration; quick, for folders of very many tensors."""
        mark = self.mark
        if mark is None:
            first = self.trunk_layers(config)

            def read_layer(name: str) -> int | None:
                match = _WRAPPED_LAYER.match(name)
                depth = int(match[1]) - first if match else -1
                return depth if depth >= 0 else None

            return read_layer

        def read_mark(name: str) -> int | None:
            if mark not in name or not (bare := split_prefix(name)[1]).startswith(mark):
                return None
            match = _NUMBER.search(bare)
            return int(match[1]) if match else 0

        return read_mark

    def sort(self, names: Collection[str], config: Config) -> tuple[list[str], list[str]]:
        """Return the MTP tensors among a folder's, and the others."""
        mtp: list[str] = []
        trunk: list[str] = []
        read_depth = self.depth_reader(config)
        for name in names:
            (trunk if read_depth(name) is None else mtp).append(name)
        return mtp, trunk

    def trunk_layers(self, config: Config) -> int:
        """Return how many decoder layers the trunk has.

        Raises:
            CheckpointError: config.json does not say.
        """
        return read_count(text_config(config), "num_hidden_layers", maximum=MAX_LAYERS)

    def mtp_depths(self, names: Collection[str], config: Config) -> set[int]:
        """Return the depths, from 0, of the MTP layers that have at least one of these tensors."""
        depths = map(self.depth_reader(config), names)
        return {depth for depth in depths if depth is not None}

    def physical_mtp_layers(self, names: Collection[str], config: Config) -> int:
        """Return how many MTP layers have at least one of these tensors."""
        return len(self.mtp_depths(names, config))

    def declared_mtp_layers(self, config: Config) -> int | None:
        """Return how many MTP layers config.json says that the folder holds.

        A layer that is run several times is there once. None where config.json does not say and the family
        has no field for it.

        Raises:
            CheckpointError: It declares something that is no count, or two counts.
        """
        text, said = text_config(config), {}
        for part in (text, config):
            for name in self.declared_by:
                if part.get(name) is not None:
                    said[name] = read_count(part, name, minimum=0, maximum=MAX_MTP_LAYERS)
            if said:
                break
        if len(set(said.values())) > 1:
            raise CheckpointError(
                "config.json contradicts itself: "
                + ", ".join(f"{name} is {count}" for name, count in said.items())
            )
        declared = next(iter(said.values()), 0 if self.is_declared else None)
        if declared and self.repeated_by and text.get(self.repeated_by) is True:
            return 1
        return declared

    def missing_mtp_names(
        self, mtp: Collection[str], trunk: Collection[str], config: Config, depth: int
    ) -> list[str]:
        """Return the tensors that one complete MTP layer would have besides those that are there.

        The decoder layer inside is compared with that layer of the trunk which it is most like, so that
        this holds for every size and for quantised folders.

        Args:
            mtp: The folder's MTP tensors.
            trunk: Its other tensors.
            config: What config.json says.
            depth: The MTP layer.

        Raises:
            CheckpointError: config.json lacks a field or has one of the wrong kind.
        """
        have = {plain for name in mtp if (plain := plain_name(split_prefix(name)[1]))}
        numbers = {"depth": depth, "layer": depth + (self.trunk_layers(config) if self.mark is None else 0)}
        parts = self.parts if depth else (*self.parts, *self.shared)
        wanted = {part.format(**numbers) for part in parts}
        at = self.layer.format(**numbers)
        inside = {name.removeprefix(at) for name in have if name.startswith(at)}
        wanted |= {at + name for name in (self.block or self._nearest_layer(trunk, inside, config))}
        prefix = self.mtp_prefix(mtp, trunk)
        return [prefix + name for name in sorted(wanted - have)]

    def mtp_prefix(self, mtp: Collection[str], trunk: Collection[str]) -> str:
        """Return what the MTP layers are wrapped in, such as `model.`; read from the folder where it can be.

        Args:
            mtp: The folder's MTP tensors.
            trunk: Its other tensors.

        Raises:
            CheckpointError: They are wrapped in two things, so that no reader finds them all.
        """
        found = {split_prefix(name)[0]: name for name in mtp}
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise CheckpointError(
                f"MTP tensors lie in two places, {first} and {second}\n"
                "  No reader looks in both; write the folder again with one prefix."
            )
        if found:
            return next(iter(found))
        return "" if self.is_beside_model else self.trunk_prefix(trunk)

    def mtp_prefixes(self, mtp: Collection[str], trunk: Collection[str], config: Config) -> list[str]:
        """Return what the names of all MTP tensors, and of no others, begin with.

        Args:
            mtp: A folder's MTP tensors.
            trunk: Its others.
            config: Its configuration.
        """
        at = self.mtp_prefix(mtp, trunk)
        if self.mark is not None:
            return [at + self.mark]
        depths = sorted(self.mtp_depths(mtp, config))
        return [f"{at}layers.{self.trunk_layers(config) + depth}." for depth in depths]

    def trunk_prefix(self, names: Collection[str]) -> str:
        """Return what the trunk is wrapped in, such as `model.`; that if it has no layers.

        Args:
            names: Tensors of the trunk.
        """
        layer = next((name for name in names if _WRAPPED_LAYER.match(name)), "model.")
        return split_prefix(layer)[0]

    def find_trunk(self, role: Role, names: Collection[str], config: Config) -> str | None:
        """Return the trunk's tensor in a role; a tied output layer is the embedding.

        None where there is none, or only a packed one.
        """
        wanted = _ROLES[role]
        for name in names:
            if name.endswith(wanted) and split_prefix(name)[1] in wanted and not self.is_mtp(name, config):
                return name
        if role == "embedding" or any(split_prefix(name)[1].startswith("lm_head.") for name in names):
            return None
        return self.find_trunk("embedding", names, config)

    def copy_candidates(self, names: Collection[str], config: Config) -> list[tuple[str, str]]:
        """Return pairs of an MTP tensor and the trunk tensor that it may be a copy of.

        Whether it is one is decided by their bytes in the source. Empty where the family writes none.
        """
        of = {role: self.find_trunk(role, names, config) for role in {role for _, role in self.copies}}
        roles = self.copy_roles(names, config)
        return [(name, trunk) for name, role in roles.items() if (trunk := of[role])]

    def copy_roles(self, names: Collection[str], config: Config) -> dict[str, Role]:
        """Return the MTP tensors that may be copies of a trunk tensor, and in which role that is."""
        if not self.copies:
            return {}
        found: dict[str, Role] = {}
        read_depth = self.depth_reader(config)
        for name in names:
            depth = read_depth(name)
            if depth is None:
                continue
            layer = depth + (self.trunk_layers(config) if self.mark is None else 0)
            bare = split_prefix(name)[1]
            for template, role in self.copies:
                if bare == template.format(depth=depth, layer=layer):
                    found[name] = role
        return found

    def name_map(self, config: Config) -> NameMap:
        """Spell out the whole map between a folder and Megatron.

        Raises:
            CheckpointError: config.json lacks a field or has one of the wrong kind.
            UnsupportedModelError: The family has no such map, or config.json asks for tensors that Megatron's
                models do not have.
        """
        if self.megatron is None or text_config(config) is not config:
            inside = "" if self.megatron is None else " inside another model"
            raise UnsupportedModelError(
                f"{self.name}{inside} can be inspected, verified and grafted, but not trained:"
                " there is no map between its tensors and Megatron's"
            )
        entries = list(self.megatron.trunk_entries(config))
        for depth in range(self.declared_mtp_layers(config) or 0):
            entries += self.megatron.mtp_entries(config, depth)
        return NameMap(entries)

    def _nearest_layer(self, trunk: Collection[str], inside: set[str], config: Config) -> set[str]:
        """Return the tensors of the trunk's layer that has most in common with these, named as these.

        Args:
            trunk: The trunk's tensors.
            inside: Names inside the MTP layer's decoder layer, not quantised.
            config: What config.json says.
        """
        layers: dict[int, set[str]] = {}
        for name in trunk:
            if not (match := _WRAPPED_LAYER.match(name)):
                continue
            # Most of a large model are experts, of which only that they are there counts.
            inner = _without_experts(name[match.end() :])
            if plain := plain_name(inner):
                for old, new in self.renamed:
                    plain = plain.replace(old, new)
                layers.setdefault(int(match[1]), set()).add(plain)
        own = {_without_experts(name) for name in inside}
        # Equal layers come once; of two that have as much in common, the one that lacks less.
        distinct = sorted({frozenset(layer) for layer in layers.values()}, key=sorted)
        nearest = max(distinct, key=lambda layer: (len(layer & own), -len(layer - own)), default=frozenset())
        experts = set(_expert_names(inside, text_config(config)))
        have_experts = {_without_experts(name) for name in experts}
        return {name for name in nearest if name not in have_experts} | experts


@dataclass(frozen=True)
class HybridFamily(Family):
    """A family whose MTP layers are several numbered layers each, as a pattern in config.json says."""

    def depth_reader(self, config: Config) -> Callable[[str], int | None]:
        """Return what `mtp_depth` is for one configuration."""
        read_number, length = super().depth_reader(config), len(hybrid_mtp_pattern(text_config(config)))

        def read_depth(name: str) -> int | None:
            number = read_number(name)
            return None if number is None else number // length

        return read_depth

    def missing_mtp_names(
        self, mtp: Collection[str], trunk: Collection[str], config: Config, depth: int
    ) -> list[str]:
        """Return the tensors that one complete MTP layer would have besides these, as the pattern says."""
        assert self.megatron is not None
        have = {plain_name(split_prefix(name)[1]) for name in mtp}
        entries: Iterator[Entry] = self.megatron.mtp_entries(text_config(config), depth)
        wanted = [name for entry in entries for name in entry.hf_names]
        prefix = self.mtp_prefix(mtp, trunk)
        return [prefix + name for name in wanted if name not in have]


def split_prefix(name: str) -> tuple[str, str]:
    """Split a tensor's name into what the model is wrapped in and the rest.

    `model.language_model.layers.3.x` becomes `model.language_model.` and `layers.3.x`.
    """
    match = _WRAPPERS.match(name)
    assert match is not None
    return name[: match.end()], name[match.end() :]


def role_in_layer(name: str) -> str:
    """Return what a tensor or module is within its layer: `self_attn.q_proj`, `mlp.experts`."""
    layer = re.match(r".*?layers\.[0-9]{1,9}\.", name)
    return _without_experts(name[layer.end() :] if layer else split_prefix(name)[1])


def _without_experts(name: str) -> str:
    """Return a name with all experts of a layer under one, stacked or not."""
    match = _EXPERTS.match(name)
    return match[1] if match else name


def _expert_names(inside: Collection[str], config: Config) -> Iterator[str]:
    """Yield the tensors that a layer's experts have, if any is there; what one of them has, each has."""
    tensors: dict[str, set[str]] = {}
    num_experts: dict[str, int] = {}
    said = next((config[name] for name in _EXPERT_COUNTS if type(config.get(name)) is int), 0)
    for name in inside:
        match = _EXPERTS.match(name)
        if match and match[2] is None:  # all experts in one tensor
            yield name
        elif match:
            tensors.setdefault(match[1], set()).add(match[3])
            num_experts[match[1]] = max(num_experts.get(match[1], said), int(match[2]) + 1)
    for at, names in tensors.items():
        for number in range(min(num_experts[at], MAX_LAYERS)):
            yield from (f"{at}.{number}.{name}" for name in names)
