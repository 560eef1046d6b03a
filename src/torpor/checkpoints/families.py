"""The model families we know: what is MTP in their folders, how many layers of it, and what copies the trunk.

One entry of `FAMILIES` is all that a family needs to be inspected, verified and grafted; those that can be
trained have a map of Megatron's names besides. docs/adding-a-family.md shows how one is added.
"""

import re
from dataclasses import dataclass

from torpor.checkpoints.config_fields import MAX_MTP_LAYERS, NESTED, Config
from torpor.checkpoints.family import Family, HybridFamily, Role
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.megatron_names import HybridNames, Qwen2Names, hybrid_mtp_pattern, hybrid_pattern
from torpor.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "FAMILIES",
    "Family",
    "MTPLayerCount",
    "check_heads",
    "count_mtp_layers",
    "family_of",
    "find_family",
    "hybrid_mtp_pattern",
    "hybrid_pattern",
]

# Names that look like MTP in a family we do not know.
_MTP_LIKE = re.compile(r"(?:^|[._])(?:mtp|nextn|eh_proj|enorm|hnorm)(?:[._]|$)")

# Names that a message spells out before it only counts.
SHOWN = 3


_NEXTN = ("layers.{layer}.enorm.weight", "layers.{layer}.hnorm.weight", "layers.{layer}.eh_proj.weight")
_NEXTN_NORM = "layers.{layer}.shared_head.norm.weight"
_NEXTN_COPIES: tuple[tuple[str, Role], ...] = (
    ("layers.{layer}.embed_tokens.weight", "embedding"),
    ("layers.{layer}.shared_head.head.weight", "output"),
)
_FC = (
    "mtp.fc.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
        mark=None,
        layer="layers.{layer}.",
        # vLLM and SGLang read these two copies from the MTP layer and from nowhere else.
        parts=(*_NEXTN, _NEXTN_NORM, *(name for name, _ in _NEXTN_COPIES)),
        copies=_NEXTN_COPIES,
        has_transformers_mtp=True,
    ),
    Family(
        ("glm4_moe",),
        mark=None,
        layer="layers.{layer}.",
        parts=(*_NEXTN, _NEXTN_NORM),
        copies=_NEXTN_COPIES,
        has_transformers_mtp=True,
    ),
    Family(
        ("glm4_moe_lite",),
        mark=None,
        layer="layers.{layer}.",
        parts=(*_NEXTN, _NEXTN_NORM),
        copies=_NEXTN_COPIES,
    ),
    Family(
        ("qwen3_next",),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        shared=_FC,
        is_declared=False,
        is_beside_model=True,
    ),
    Family(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        shared=_FC,
        declared_by=("mtp_num_hidden_layers",),
        is_beside_model=True,
        described_by=("mtp_use_dedicated_embeddings",),
    ),
    HybridFamily(
        ("nemotron_h", "nemotron_h_omni"),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        described_by=("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
        is_beside_model=True,
        vllm_layers=1,
        megatron=HybridNames(),
    ),
    Family(
        ("mimo",),
        mark="mtp_layers.",
        layer="mtp_layers.{depth}.",
        parts=(
            "mtp_layers.{depth}.token_layernorm.weight",
            "mtp_layers.{depth}.hidden_layernorm.weight",
            "mtp_layers.{depth}.input_proj.weight",
            "mtp_layers.{depth}.final_layernorm.weight",
        ),
        has_transformers=False,
        megatron=Qwen2Names(),
    ),
    Family(
        ("mimo_v2_flash", "mimo_v2"),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        parts=(
            "mtp.layers.{depth}.enorm.weight",
            "mtp.layers.{depth}.hnorm.weight",
            "mtp.layers.{depth}.eh_proj.weight",
            "mtp.layers.{depth}.final_layernorm.weight",
        ),
        renamed=(("post_attention_layernorm.", "pre_mlp_layernorm."),),
        is_declared=False,
        vllm_layers=1,
    ),
    Family(
        ("ernie4_5_moe",),
        mark="mtp_",
        layer="mtp_block.{depth}.",
        parts=(
            "mtp_emb_norm.{depth}.weight",
            "mtp_hidden_norm.{depth}.weight",
            "mtp_linear_proj.{depth}.weight",
        ),
        vllm_layers=1,
    ),
    Family(
        ("bailing_hybrid", "bailing_moe", "bailing_moe_v2", "bailing_moe_linear"),
        mark=None,
        layer="layers.{layer}.",
        parts=(*_NEXTN, "layers.{layer}.final_layernorm.weight"),
        copies=(*_NEXTN_COPIES, ("layers.{layer}.word_embeddings.weight", "embedding")),
    ),
    Family(
        ("longcat_flash",),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        parts=(
            "mtp.layers.{depth}.enorm.m.weight",
            "mtp.layers.{depth}.hnorm.m.weight",
            "mtp.layers.{depth}.eh_proj.weight",
        ),
        shared=("mtp.norm.weight", "mtp.embed_tokens.weight"),
        block=(
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
            "self_attn.kv_a_layernorm.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_b_proj.weight",
            "self_attn.o_proj.weight",
            "self_attn.q_a_layernorm.weight",
            "self_attn.q_a_proj.weight",
            "self_attn.q_b_proj.weight",
            "transformer_layer.mlp.down_proj.weight",
            "transformer_layer.mlp.gate_proj.weight",
            "transformer_layer.mlp.up_proj.weight",
        ),
        copies=(("mtp.embed_tokens.weight", "embedding"),),
        is_declared=False,
        vllm_layers=1,
    ),
    Family(
        ("step3p5", "step3p7"),
        mark=None,
        layer="layers.{layer}.",
        parts=(
            *_NEXTN,
            "layers.{layer}.transformer.shared_head.norm.weight",
            "layers.{layer}.transformer.shared_head.output.weight",
        ),
        has_transformers=False,
    ),
    Family(
        ("exaone_moe",),
        mark="mtp.",
        layer="mtp.layers.{depth}.",
        shared=_FC,
        repeated_by="mtp_share_layers",
        is_beside_model=True,
        described_by=("mtp_share_layers",),
    ),
    Family(
        ("minimax_m2",),
        mark=None,
        layer="layers.{layer}.",
        declared_by=("num_mtp_modules",),
        described_by=("use_mtp", "mtp_transformer_layers"),
        is_published_without=True,
        vllm_layers=0,
        has_sglang=False,
    ),
)


def find_family(config: Config) -> Family:
    """Return the family of a model, or of the language model inside it.

    Args:
        config: What config.json says.

    Raises:
        UnsupportedModelError: It is none that we know.
    """
    for part in (config, *(config[name] for name in NESTED if isinstance(config.get(name), dict))):
        for family in FAMILIES:
            if part.get("model_type") in family.model_types:
                return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(f"config.json has model_type {config.get('model_type')!r}; known are {known}")


def family_of(folder: Folder) -> Family:
    """Return the family of a folder's model.

    Raises:
        UnsupportedModelError: It is none that we know; tensors that look like MTP are named.
    """
    try:
        return find_family(folder.config)
    except UnsupportedModelError as error:
        suspects = [name for name in folder.tensors if _MTP_LIKE.search(name)]
        if not suspects:
            raise UnsupportedModelError(f"{folder.path}: {error}") from None
        raise UnsupportedModelError(
            f"{folder.path}: {error}\n"
            f"  {len(suspects)} of its tensors look like MTP, first {', '.join(suspects[:SHOWN])};"
            " what they are is not guessed.\n"
            "  A family is one entry of torpor.checkpoints.families: see docs/adding-a-family.md."
        ) from None


@dataclass(frozen=True)
class MTPLayerCount:
    """How many MTP layers a folder has, counted in the three ways that have to agree.

    Attributes:
        declared: What config.json says; None where it does not and need not.
        physical: Layers of which at least one tensor exists.
        written: Layers of which every tensor exists, numbered from 0 without a gap.
        missing: Tensors that as many layers as are declared, or exist, would have.
        field: The field of config.json that declares them.
    """

    declared: int | None
    physical: int
    written: int
    missing: tuple[str, ...]
    field: str

    @property
    def agree(self) -> bool:
        """Whether they are equal."""
        return self.declared in (None, self.physical) and self.physical == self.written


def count_mtp_layers(folder: Folder) -> MTPLayerCount:
    """Count a folder's MTP layers.

    Raises:
        UnsupportedModelError: A family we do not know.
        CheckpointError: config.json lacks a field or has one of the wrong kind.
    """
    family, config = family_of(folder), folder.config
    declared = family.declared_mtp_layers(config)
    mtp, trunk = family.sort(folder.tensors, config)
    physical = family.physical_mtp_layers(mtp, config)
    if physical > MAX_MTP_LAYERS:
        raise CheckpointError(
            f"{folder.path} has tensors of {physical} MTP layers, first {mtp[0]};"
            f" no model has more than {MAX_MTP_LAYERS}\n"
            "  The folder is damaged, or its config.json is another model's."
        )
    if family.is_published_without and not physical:
        declared = None
    written = 0
    missing: list[str] = []
    # Layers are numbered from 0: one that exists under a later number is as good as missing.
    for depth in range(max(declared or 0, physical)):
        absent = family.missing_mtp_names(mtp, trunk, config, depth)
        written += not absent
        missing += absent
    return MTPLayerCount(declared, physical, written, tuple(missing), family.declared_field)


def check_heads(folder: Folder) -> None:
    """Refuse a folder whose MTP layers are not the ones that its configuration declares.

    Raises:
        CheckpointError: Declared, existing and complete layers differ in number.
    """
    count = count_mtp_layers(folder)
    if count.agree:
        return
    missing = f"\n  missing: {len(count.missing)} tensors, first {count.missing[0]}" if count.missing else ""
    declared = "does not say how many" if count.declared is None else f"declares {count.declared}"
    raise CheckpointError(
        f"{folder.path} {declared} MTP layers ({count.field} in config.json),"
        f" {count.physical} exist, {count.written} are complete{missing}\n"
        "  Put the missing tensors back (torpor graft), or make config.json declare what is there."
    )
