"""The map between Hugging Face's tensors and Megatron's, in global space: nothing in it is sharded.

A map is a list of entries, fully spelled out from a model's configuration. Each says which Megatron tensors
(keys of its distributed checkpoint) hold which Hugging Face tensors, and how one becomes the other: by moving
elements about, never by arithmetic, so that both directions are exact. Both come from the same entries.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from torpor.checkpoints.header import TensorEntry
from torpor.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# Names that a message spells out before it only counts.
SHOWN = 5

Shape = tuple[int, ...]


class Op(Protocol):
    """How an entry's tensors become each other; `unpack(pack(tensors))` gives `tensors`, bit for bit."""

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Make Megatron's tensors from Hugging Face's."""
        ...

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Make Hugging Face's tensors from Megatron's."""
        ...


@dataclass(frozen=True)
class Identity:
    """The same tensor under another name."""

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Return the tensor."""
        return tensors

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Return the tensor."""
        return tensors


@dataclass(frozen=True)
class Concatenate:
    """Several equal Hugging Face tensors, one under the other: a gated MLP's gate and up projection.

    Args:
        num_parts: How many.
    """

    num_parts: int = 2

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Stack the rows: `num_parts` times [R, ...] -> [num_parts * R, ...]."""
        import torch

        return [torch.cat(tensors)]

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Cut the rows into equal parts."""
        (packed,) = tensors
        return [part.contiguous() for part in packed.chunk(self.num_parts)]


@dataclass(frozen=True)
class Split:
    """One Hugging Face tensor that Megatron keeps as several: Mamba's input projection and convolution.

    Args:
        sizes: Rows of each part.
    """

    sizes: tuple[int, ...]

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Cut the rows: [sum(sizes), ...] -> [size, ...] for each."""
        import torch

        return [part.contiguous() for part in torch.split(tensors[0], list(self.sizes))]

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Put the rows together again."""
        import torch

        return [torch.cat(tensors)]


@dataclass(frozen=True)
class InterleaveQKV:
    """Query, key and value projections, which Megatron keeps together by query group.

    Each group's rows are those of its query heads, of its key head and of its value head, so that a rank that
    holds some groups holds all it needs. For two groups of two query heads each, the heads of the packed
    tensor are q0 q1 k0 v0 q2 q3 k1 v1.

    Args:
        num_groups: Key (and value) heads.
        heads_per_group: Query heads for each.
        head_dim: Rows of a head.
    """

    num_groups: int
    heads_per_group: int
    head_dim: int

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Interleave q [heads * head_dim, ...], k and v [groups * head_dim, ...], weights or biases."""
        import torch

        rest = tensors[0].shape[1:]
        grouped = [
            tensor.reshape(self.num_groups, size, *rest)
            for tensor, size in zip(tensors, self._sizes, strict=True)
        ]
        return [torch.cat(grouped, dim=1).flatten(0, 1)]

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Take the groups apart into q, k and v."""
        import torch

        (packed,) = tensors
        rest = packed.shape[1:]
        grouped = packed.reshape(self.num_groups, sum(self._sizes), *rest)
        return [part.flatten(0, 1).contiguous() for part in torch.split(grouped, list(self._sizes), dim=1)]

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows that a group has of q, of k and of v."""
        return self.heads_per_group * self.head_dim, self.head_dim, self.head_dim


@dataclass(frozen=True)
class SwapHalves:
    """A projection of two concatenated inputs, which the two sides concatenate in opposite orders."""

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Exchange the left and right half of the columns: [R, 2 * C]."""
        import torch

        (whole,) = tensors
        left, right = whole.chunk(2, dim=1)
        return [torch.cat((right, left), dim=1)]

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Exchange them back."""
        return self.pack(tensors)


@dataclass(frozen=True)
class StackExperts:
    """The experts of a layer, which Megatron keeps in one tensor with an expert dimension in front.

    Hugging Face's tensors come expert by expert, each expert's as `each` wants them.

    Args:
        num_experts: How many experts.
        each: How one expert's tensors are packed: as they are, or a gate and an up projection into one.
    """

    num_experts: int
    each: Identity | Concatenate = Identity()

    def pack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Stack [R, C] of each expert to [experts, R, C]."""
        import torch

        size = len(tensors) // self.num_experts
        packed = [self.each.pack(tensors[i : i + size]) for i in range(0, len(tensors), size)]
        return [torch.stack([tensor for (tensor,) in packed])]

    def unpack(self, tensors: "list[torch.Tensor]") -> "list[torch.Tensor]":
        """Take the experts apart."""
        (stacked,) = tensors
        return [part.contiguous() for expert in stacked.unbind() for part in self.each.unpack([expert])]


@dataclass(frozen=True)
class Entry:
    """One row of a map.

    Attributes:
        megatron_names: Keys of Megatron's distributed checkpoint.
        hf_names: Tensors of the Hugging Face folder.
        hf_shapes: The shape that the configuration gives each of these.
        op: How the one side becomes the other.
    """

    megatron_names: tuple[str, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    op: Op = Identity()


class NameMap:
    """A model's whole map.

    Attributes:
        entries: All entries.
        by_megatron: The entry of every Megatron name.
        by_hf: The entry of every Hugging Face name.
    """

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(entries)
        self.by_megatron = {name: entry for entry in self.entries for name in entry.megatron_names}
        self.by_hf = {name: entry for entry in self.entries for name in entry.hf_names}
        assert len(self.by_megatron) == sum(len(entry.megatron_names) for entry in self.entries)
        assert len(self.by_hf) == sum(len(entry.hf_names) for entry in self.entries)

    @cached_property
    def hf_shapes(self) -> dict[str, Shape]:
        """The shape that the configuration gives every Hugging Face tensor."""
        return {
            name: shape
            for entry in self.entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
        }

    def check(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Refuse a folder that has other tensors than the map, or other shapes.

        Args:
            tensors: The folder's.

        Raises:
            CheckpointError: Tensors that nothing claims, that are missing, or that have another shape than
                the configuration gives them.
        """
        unclaimed = [name for name in tensors if name not in self.by_hf]
        missing = [name for name in self.by_hf if name not in tensors]
        if unclaimed or missing:
            parts = []
            if unclaimed:
                parts.append(
                    f"{len(unclaimed)} that the configuration does not account for ({_some(unclaimed)})"
                )
            if missing:
                parts.append(f"{len(missing)} missing ({_some(missing)})")
            raise CheckpointError(
                f"the folder's tensors are not those of its config.json: {'; '.join(parts)}\n"
                "  Nothing is dropped or invented in silence: mend the folder, or the configuration."
            )
        misshapen = [name for name, shape in self.hf_shapes.items() if tensors[name].shape != shape]
        if misshapen:
            first = misshapen[0]
            raise CheckpointError(
                f"{first} in {tensors[first].file} has shape {list(tensors[first].shape)},"
                f" config.json gives it {list(self.hf_shapes[first])}"
                f" ({len(misshapen)} tensors disagree)\n"
                "  The configuration belongs to another model; use the config.json these weights came with."
            )


def _some(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
