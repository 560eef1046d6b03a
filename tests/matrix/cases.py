"""The table of everything that dormancy is proved on: models, layouts, recomputation, optimizers, outcomes.

docs/supported.md is generated from this table, and every row of it is run by test_matrix.py.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_models import (
    GPT,
    GPT_LEARNED,
    GPT_MOE,
    GPT_REPEATED,
    GPT_TIED,
    GPT_TWO_DEPTHS,
    HYBRID,
    HYBRID_MAMBA_MTP,
    HYBRID_MOE,
    HYBRID_TIED,
    Kind,
)

MODELS = {
    GPT: "GPTModel",
    GPT_TIED: "GPTModel, tied embeddings",
    GPT_MOE: "GPTModel, MoE with expert bias",
    GPT_TWO_DEPTHS: "GPTModel, two MTP layers",
    GPT_REPEATED: "GPTModel, one MTP layer repeated twice",
    GPT_LEARNED: "GPTModel, learned positions",
    HYBRID: "HybridModel, attention and MLP in MTP",
    HYBRID_TIED: "HybridModel, tied embeddings",
    HYBRID_MOE: "HybridModel, MoE in MTP, two depths",
    HYBRID_MAMBA_MTP: "HybridModel, Mamba in MTP",
}


@dataclass(frozen=True)
class Arrangement:
    """How a tiny model of four layers is spread over ranks.

    Attributes:
        name: Short name.
        text: What the table of supported layouts calls it.
        world: Number of ranks.
        tensor: Tensor parallel size.
        pipeline: Pipeline stages.
        virtual: Chunks per stage, None without interleaving.
        expert: Expert parallel size.
        context: Context parallel size.
        sequence_parallel: Whether tensor parallel ranks divide the sequence.
        dispatcher: How MoE layers exchange tokens.
        batched_p2p: Whether an interleaved schedule batches its sends and receives.
        stages: Megatron's pipeline layout, with one `m` for all MTP layers; None for an even division.
        cuts: How many of HybridModel's layers each (virtual) stage holds; None for an even division.
        packed: Whether a row holds several samples (THD).
        mtp_in_embedding_group: Whether the process groups know that the MTP stage has an embedding.
        num_microbatches: Microbatches of a step; with few an interleaved schedule is all warm-up.
    """

    name: str
    text: str
    world: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    expert: int = 1
    context: int = 1
    sequence_parallel: bool = False
    dispatcher: str = "alltoall"
    batched_p2p: bool = False
    stages: str | None = None
    cuts: tuple[int, ...] | None = None
    packed: bool = False
    mtp_in_embedding_group: bool = True
    num_microbatches: int = 2

    def __str__(self) -> str:
        return self.name

    @property
    def data(self) -> int:
        """Data parallel size."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def is_mtp_apart(self) -> bool:
        """Whether MTP sits on another stage than the loss."""
        return self.stages is not None and "m" not in self.stages.split("|")[-1]


LAYOUTS = [
    Arrangement("single", "one rank", 1),
    Arrangement("tp2", "TP 2", 2, tensor=2),
    Arrangement("tp2-sp", "TP 2 with sequence parallel", 2, tensor=2, sequence_parallel=True),
    Arrangement("pp2", "PP 2", 2, pipeline=2),
    Arrangement("pp2-uneven", "PP 2, own layout `Et|tttmL`", 2, pipeline=2, stages="Et|tttmL", cuts=(1, 3)),
    Arrangement(
        "pp2-vpp2",
        "PP 2 interleaved, overlapped p2p",
        2,
        pipeline=2,
        virtual=2,
        cuts=(1, 1, 1, 1),
        num_microbatches=6,
    ),
    Arrangement(
        "pp2-vpp2-batched",
        "PP 2 interleaved, batched p2p",
        2,
        pipeline=2,
        virtual=2,
        batched_p2p=True,
        cuts=(1, 1, 1, 1),
        num_microbatches=6,
    ),
    Arrangement("ep2", "EP 2, all-to-all", 2, expert=2),
    Arrangement("ep2-allgather", "EP 2, all-gather", 2, expert=2, dispatcher="allgather"),
    Arrangement("dp2", "DP 2", 2),
    Arrangement("cp2", "CP 2", 2, context=2),
    Arrangement("packed", "one rank, packed sequences", 1, packed=True),
    Arrangement("cp2-packed", "CP 2, packed sequences", 2, context=2, packed=True),
    Arrangement(
        "tp2-cp2-packed",
        "TP 2 with sequence parallel x CP 2, packed sequences",
        4,
        tensor=2,
        context=2,
        sequence_parallel=True,
        packed=True,
    ),
    Arrangement(
        "pp3-mtp-alone",
        "PP 3, own layout `Ett|ttm|L`: MTP and loss apart",
        3,
        pipeline=3,
        stages="Ett|ttm|L",
        cuts=(2, 1, 1),
    ),
    Arrangement(
        "pp3-mtp-stage",
        "PP 3, own layout `Etttt|m|L`: MTP on its own",
        3,
        pipeline=3,
        stages="Etttt|m|L",
        cuts=(2, 1, 1),
    ),
    Arrangement(
        "pp3-default-groups",
        "the same, MTP rank not in the embedding group",
        3,
        pipeline=3,
        stages="Etttt|m|L",
        cuts=(2, 1, 1),
        mtp_in_embedding_group=False,
    ),
    Arrangement("pp4", "PP 4", 4, pipeline=4),
    Arrangement(
        "tp2-pp2", "TP 2 with sequence parallel x PP 2", 4, tensor=2, pipeline=2, sequence_parallel=True
    ),
    Arrangement("pp2-dp2", "PP 2 x DP 2", 4, pipeline=2),
    Arrangement("pp2-ep2", "PP 2 x EP 2", 4, pipeline=2, expert=2),
]

RECOMPUTE = ["none", "full", "selective"]


@dataclass(frozen=True)
class OptimizerChoice:
    """Megatron's plain or distributed optimizer, and what overlaps with computing."""

    name: str
    distributed: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    def __str__(self) -> str:
        return self.name


OPTIMIZERS = [
    OptimizerChoice("plain"),
    OptimizerChoice("plain-overlap", overlap_grad_reduce=True),
    OptimizerChoice("distributed", distributed=True),
    OptimizerChoice("distributed-overlap", distributed=True, overlap_grad_reduce=True),
    OptimizerChoice(
        "distributed-overlap-gather", distributed=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
]


@dataclass(frozen=True)
class Case:
    """One cell: a model at a layout, with a kind of recomputation and an optimizer."""

    model: Kind
    layout: Arrangement
    recompute: str = "none"
    optimizer: OptimizerChoice = OPTIMIZERS[0]

    def __str__(self) -> str:
        return f"{self.layout}/{self.model}/{self.recompute}/{self.optimizer}"

    @property
    def outcome(self) -> "Outcome":
        """What has to happen."""
        return outcome(self.model, self.layout)

    @property
    def has_exact_norm(self) -> bool:
        """Whether the gradient norm is summed in the same order as in the model built without MTP.

        It is not where the final norm sits on another stage (Megatron puts it behind the last decoder layer
        when there is MTP, before the loss when there is none), nor where the distributed optimizer cuts its
        buffers elsewhere because the MTP stage's buffer holds an embedding copy as well.
        """
        has_unread_copy = self.layout.pipeline > 1 and not self.model.tied
        is_shared = self.layout.data * self.layout.context > 1
        is_cut_elsewhere = self.optimizer.distributed and is_shared and has_unread_copy
        return not self.layout.is_mtp_apart and not is_cut_elsewhere


@dataclass(frozen=True)
class Outcome:
    """What a case comes to: supported, refused by `freeze_mtp`, or nothing that exists.

    Attributes:
        kind: "supported", "refused" or "n/a".
        text: Why, in the table of supported layouts.
        message: What a refusal's message has to contain.
    """

    kind: str
    text: str = ""
    message: str = ""


SUPPORTED = Outcome("supported")
NO_EXPERTS = Outcome("n/a", "the model has no experts to spread.")
MOE_NEEDS_SEQUENCE_PARALLEL = Outcome("n/a", "Megatron refuses MoE under TP without sequence parallel.")
BATCHED_INTERLEAVING = Outcome(
    "refused",
    "both neighbours of a stage are the same rank, and batched sends meet the wrong receives; with overlapped"
    " p2p it is right.",
    "both neighbours of a stage are the same rank",
)
HYBRID_APART = Outcome(
    "refused",
    "Megatron's HybridModel computes its MTP loss only on the stage that holds MTP.",
    "HybridModel computes its MTP loss only on the stage that holds MTP",
)
LEARNED_POSITIONS = Outcome(
    "refused",
    "Megatron never brings the MTP stage's copy of the learned positions in line with the first stage's, and"
    " cannot save the two.",
    "learned positions",
)
EMBEDDING_GROUP = Outcome(
    "refused",
    "`initialize_model_parallel` needs a `get_embedding_ranks` that knows the MTP stage, or its copy of the"
    " embedding starts at zero and drifts.",
    "get_embedding_ranks",
)


def outcome(model: Kind, layout: Arrangement) -> Outcome:
    """Return what a model at a layout has to come to."""
    if layout.expert > 1 and not model.moe:
        return NO_EXPERTS
    if model.moe and layout.tensor > 1 and not layout.sequence_parallel:
        return MOE_NEEDS_SEQUENCE_PARALLEL
    if layout.batched_p2p:
        return BATCHED_INTERLEAVING
    if layout.is_mtp_apart and model.pattern is not None:
        return HYBRID_APART
    if layout.pipeline > 1 and model.positions == "learned_absolute":
        return LEARNED_POSITIONS
    if not layout.mtp_in_embedding_group:
        return EMBEDDING_GROUP
    return SUPPORTED


def all_cases() -> Iterator[Case]:
    """Yield every case that exists and is not refused, and one case for each refusal."""
    for layout, model in itertools.product(LAYOUTS, MODELS):
        kind = outcome(model, layout).kind
        if kind == "refused":
            yield Case(model, layout)
        elif kind == "supported":
            for recompute, optimizer in itertools.product(RECOMPUTE, OPTIMIZERS):
                yield Case(model, layout, recompute, optimizer)
