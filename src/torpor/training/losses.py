"""Distillation losses from hidden states and output weights, a chunk of tokens at a time.

Neither the student's nor the teacher's logits [s, b, v] ever exist as a whole: each chunk's are made, turned
into the loss and its gradient, and dropped. What is kept for the backward pass is the gradient itself, of the
student's hidden states and, if it is trained, of its output weight. The backward pass only scales it.

With the student's distribution q and the teacher's p, both over logits divided by a temperature T, the loss
of a token is

    (1 - w) T^2 D(p, q) + w CE,    CE = -log softmax(student's logits)[label]

- forward KL: sum p log(p / q); its gradient by the student's logits / T is q - p;
- reverse KL: sum q log(q / p); q (log(q / p) - KL);
- Jensen-Shannon: b KL(p | m) + (1 - b) KL(q | m) with m = b p + (1 - b) q;
  (1 - b) q (log(q / m) - KL(q | m)).

T^2 keeps gradients of the same size at every temperature. With `top_k` both distributions are restricted to
the teacher's k likeliest tokens and sum to 1 over them.

Sources: Hinton, Vinyals, Dean 2015 (arXiv:1503.02531) for the temperature and its square; Agarwal et al. 2023
(arXiv:2306.13649) for the generalised Jensen-Shannon divergence; Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989) for computing gradients in the forward pass by chunks.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist

from torpor.errors import ConfigError
from torpor.megatron.hidden_states import OutputProjection
from torpor.training import vocabulary

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]
IGNORED_LABEL = -100


@dataclass(frozen=True)
class LossSettings:
    """What is minimised.

    Args:
        divergence: "forward_kl" (teacher to student), "reverse_kl" or "jensen_shannon".
        temperature: Divides the logits of both; greater than 0.
        jensen_shannon_beta: Weight of the teacher in the mixture, between 0 and 1. Towards 0 the divergence,
            divided by it, becomes the forward KL; towards 1 likewise the reverse KL.
        top_k: Compare only the teacher's so many likeliest tokens; None for all.
        cross_entropy_weight: Weight w of the cross-entropy of the labels, from 0 (the divergence alone) to 1.

    Raises:
        ConfigError: A value is out of its range.
    """

    divergence: Divergence = "forward_kl"
    temperature: float = 1.0
    jensen_shannon_beta: float = 0.5
    top_k: int | None = None
    cross_entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.divergence not in _DIVERGENCES:
            raise ConfigError(f"`divergence` is {self.divergence!r}; known are {', '.join(_DIVERGENCES)}")
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"`temperature` is {self.temperature}: it has to be greater than 0")
        if not 0 < self.jensen_shannon_beta < 1:
            raise ConfigError(
                f"`jensen_shannon_beta` is {self.jensen_shannon_beta}: it has to lie between 0 and 1\n"
                "  At the ends the divergence is 0; use forward_kl or reverse_kl."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"`top_k` is {self.top_k}: it has to be at least 1")
        if not 0 <= self.cross_entropy_weight <= 1:
            raise ConfigError(
                f"`cross_entropy_weight` is {self.cross_entropy_weight}: it has to lie between 0 and 1"
            )


@dataclass(frozen=True)
class TopTokens:
    """A teacher's likeliest tokens, in place of its hidden states.

    Attributes:
        ids_SBK: Token ids [s, b, k] of the whole sequence.
        logits_SBK: Their logits [s, b, k], before any temperature.
    """

    ids_SBK: torch.Tensor
    logits_SBK: torch.Tensor


@dataclass(frozen=True)
class DistillationLoss:
    """What a batch costs.

    Attributes:
        loss: Scalar to call backward on: the loss of this rank's tokens, divided by the number of tokens of
            all context-parallel ranks. Their sum over those ranks is the mean per token.
        mean: The mean per token over all context-parallel ranks, without gradient.
        divergence: The same of D(p, q), without the square of the temperature.
        cross_entropy: The same of CE; None if it was not asked for.
        num_tokens: Tokens with a loss over all context-parallel ranks; with fractions in the mask their sum.
    """

    loss: torch.Tensor
    mean: torch.Tensor
    divergence: torch.Tensor
    cross_entropy: torch.Tensor | None
    num_tokens: torch.Tensor


def distillation_loss(
    student: OutputProjection,
    teacher: OutputProjection | TopTokens,
    settings: LossSettings | None = None,
    *,
    labels_BS: torch.Tensor | None = None,
    loss_mask_BS: torch.Tensor | None = None,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> DistillationLoss:
    """Compute how far a student is from its teacher, without the logits of either.

    Values and sums are FP32 (FP64 for FP64 hidden states), matrix products are in the type of the hidden
    states. With a vocabulary divided over ranks all of them call this, and the gradient of the
    hidden states is summed over them, as Megatron's output layer does it. Under context parallelism every
    rank passes its own part of each sequence.

    Args:
        student: Hidden states and output weight; either may require a gradient.
        teacher: The same of the teacher, or its likeliest tokens. The hidden size may be another, the
            vocabulary is the student's and divided over the same ranks in the same way.
        settings: What is minimised; None for the forward KL.
        labels_BS: Next tokens int64 [b, s]. With them the cross-entropy is computed; -100 leaves a token out.
            Another id outside the vocabulary, among `TopTokens` too, makes the loss NaN unless its token is
            left out: an error would have to read it back from the accelerator.
        loss_mask_BS: Weight of each token [b, s], 0 to leave it out; None for 1 everywhere.
        cp_group: Context-parallel ranks that hold the rest of each sequence, or None.
        chunk_size: Tokens to compute at once; None for as many as fit a quarter of a GiB per buffer.

    Returns:
        The loss and what it is made of.

    Raises:
        ConfigError: Student, teacher, labels and settings do not fit each other.
    """
    settings = settings or LossSettings()
    vocab_rows = _check(student, teacher, settings, labels_BS)
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"`chunk_size` is {chunk_size}: it has to be at least 1")
    tokens = _Tokens.of(student, labels_BS, loss_mask_BS).without_sense_where(
        _ids_outside(teacher, settings, vocab_rows), vocab_rows
    )
    kernels = _kernels(student, teacher, settings)
    with torch.no_grad():
        make_chunk = _chunk_maker(student, teacher, settings, tokens.labels_N, vocab_rows, kernels)
    buffers = torch.float32 if kernels is None else student.weight_VH.dtype
    size = chunk_size or vocabulary.chunk_size(student, buffers)
    total, sums = _SummedLoss.apply(
        student.hidden_states_SBH,
        student.weight_VH,
        student,
        make_chunk,
        tokens.weights_N,
        size,
        torch.is_grad_enabled(),
    )
    num_tokens = vocabulary.sum_over(tokens.weights_N.sum(), cp_group)
    # A batch without a token has loss 0 and not 0 / 0; fractions are allowed.
    divisor = torch.where(num_tokens > 0, num_tokens, torch.ones_like(num_tokens))
    means = vocabulary.sum_over(sums, cp_group) / divisor
    return DistillationLoss(
        loss=total / divisor,
        mean=means[0],
        divergence=means[1],
        cross_entropy=means[2] if labels_BS is not None else None,
        num_tokens=num_tokens,
    )


# --- what is compared -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """Labels and weights in the order of the flattened hidden states."""

    labels_N: torch.Tensor | None
    weights_N: torch.Tensor

    @classmethod
    def of(
        cls, student: OutputProjection, labels_BS: torch.Tensor | None, loss_mask_BS: torch.Tensor | None
    ) -> "_Tokens":
        states = student.hidden_states_SBH
        dtype = vocabulary.accumulation_dtype(states.dtype)
        shape_BS = (states.shape[1], states.shape[0] * _sequence_parts(student))
        for name, values in (("labels_BS", labels_BS), ("loss_mask_BS", loss_mask_BS)):
            if values is not None and values.shape != shape_BS:
                raise ConfigError(
                    f"`{name}` has the shape {tuple(values.shape)}, and the hidden states are those of"
                    f" {shape_BS[0]} sequences of {shape_BS[1]} tokens"
                )
        mask_BS = loss_mask_BS if loss_mask_BS is not None else states.new_ones(shape_BS, dtype=dtype)
        weights_N = mask_BS.to(dtype).t().flatten()
        if labels_BS is None:
            return cls(None, weights_N)
        labels_N = labels_BS.t().flatten()
        return cls(labels_N, weights_N * (labels_N != IGNORED_LABEL))

    def without_sense_where(self, is_outside_N: torch.Tensor | None, vocab_rows: int) -> "_Tokens":
        """Give tokens a weight of NaN, unless it is 0, whose label or whose teacher's ids are no tokens."""
        labels_N, weights_N = self.labels_N, self.weights_N
        if labels_N is not None:
            is_no_token_N = (labels_N < 0) | (labels_N >= vocab_rows)
            is_outside_N = is_no_token_N if is_outside_N is None else is_outside_N | is_no_token_N
        if is_outside_N is None:
            return self
        return _Tokens(labels_N, weights_N.masked_fill(is_outside_N & (weights_N != 0), math.nan))


def _ids_outside(
    teacher: OutputProjection | TopTokens, settings: LossSettings, vocab_rows: int
) -> torch.Tensor | None:
    """Say [n] which tokens have an id outside the vocabulary among the teacher's likeliest; None for none."""
    if isinstance(teacher, OutputProjection):
        return None
    ids_NK = teacher.ids_SBK.flatten(0, 1)[:, : settings.top_k]
    return ((ids_NK < 0) | (ids_NK >= vocab_rows)).any(dim=1)


def _sequence_parts(projection: OutputProjection) -> int:
    if projection.tp_group is None or not projection.is_sequence_parallel:
        return 1
    return dist.get_world_size(projection.tp_group)


def _check(
    student: OutputProjection,
    teacher: OutputProjection | TopTokens,
    settings: LossSettings,
    labels_BS: torch.Tensor | None,
) -> int:
    """Check that the parts fit; return how many rows of the whole weight stand for tokens."""
    if settings.cross_entropy_weight and labels_BS is None:
        raise ConfigError(
            f"`cross_entropy_weight` is {settings.cross_entropy_weight} and there are no labels\n"
            "  Give `labels_BS`, or a weight of 0."
        )
    parts = 1 if student.tp_group is None else dist.get_world_size(student.tp_group)
    rows = student.vocab_size or parts * student.weight_VH.shape[0]
    if settings.top_k is not None and settings.top_k > rows:
        raise ConfigError(f"`top_k` is {settings.top_k}, and the vocabulary has {rows} tokens")
    first, *others = student.hidden_states_SBH.shape[:-1]
    tokens = (_sequence_parts(student) * first, *others)
    if isinstance(teacher, TopTokens):
        shapes = tuple(teacher.ids_SBK.shape), tuple(teacher.logits_SBK.shape)
        if shapes[0] != shapes[1] or shapes[0][:-1] != tokens:
            raise ConfigError(
                f"the teacher's tokens have ids of shape {shapes[0]} and logits of shape {shapes[1]}, and the"
                f" student's tokens are {tokens}: both have to be [s, b, k] of the same tokens"
            )
        available = teacher.ids_SBK.shape[-1]
        if settings.top_k is None or settings.top_k > available:
            raise ConfigError(
                f"`top_k` is {settings.top_k}, and {available} of the teacher's tokens are given\n"
                f"  Use a top_k of at most {available}."
            )
        return rows
    if teacher.tp_group is not student.tp_group or (teacher.weight_VH.shape[0], teacher.vocab_size) != (
        student.weight_VH.shape[0],
        student.vocab_size,
    ):
        raise ConfigError(
            f"the student's vocabulary is {student.weight_VH.shape[0]} rows on each of {parts} ranks, of"
            f" which {student.vocab_size or 'all'} are tokens; the teacher's is"
            f" {teacher.weight_VH.shape[0]} rows, of which {teacher.vocab_size or 'all'} are tokens, or lies"
            " on other ranks\n"
            "  Logits are compared one by one: both need the same vocabulary, divided in the same way."
        )
    first, *others = teacher.hidden_states_SBH.shape[:-1]
    if (_sequence_parts(teacher) * first, *others) != tokens:
        raise ConfigError(
            f"the hidden states are {tuple(student.hidden_states_SBH.shape)} of the student and"
            f" {tuple(teacher.hidden_states_SBH.shape)} of the teacher: not of the same tokens"
        )
    return rows


@dataclass
class _Chunk:
    """What a chunk of tokens costs.

    Args:
        loss_N: The loss of each token.
        divergence_N: D(p, q) of each token.
        cross_entropy_N: CE of each token, 0 if it is not computed.
        grad_NV: Gradient of each token's loss by its logits, this rank's part; None if it is not wanted.
    """

    loss_N: torch.Tensor
    divergence_N: torch.Tensor
    cross_entropy_N: torch.Tensor
    grad_NV: torch.Tensor | None


ChunkMaker = Callable[[torch.Tensor, slice, bool], _Chunk]


def _chunk_maker(
    student: OutputProjection,
    teacher: OutputProjection | TopTokens,
    settings: LossSettings,
    labels_N: torch.Tensor | None,
    vocab_rows: int,
    kernels: ModuleType | None,
) -> ChunkMaker:
    """Return what turns the student's logits [n, v] of some tokens into their loss; it may overwrite them."""
    if kernels is not None and isinstance(teacher, OutputProjection):
        return _fused_chunk_maker(student, teacher, settings, labels_N, kernels)
    group = student.tp_group
    _, start = vocabulary.local_rows(student)
    compare = _comparison(teacher, settings, group, start, vocab_rows)
    mix = settings.cross_entropy_weight

    def make(logits_NV: torch.Tensor, tokens: slice, wants_gradient: bool) -> _Chunk:
        divergence_N, grad_NV = compare(logits_NV, tokens, wants_gradient and mix < 1)
        loss_N = divergence_N * ((1 - mix) * settings.temperature**2)
        factor = (1 - mix) * settings.temperature  # T^2 by the loss, 1/T by the logits
        if grad_NV is not None and factor != 1:
            grad_NV.mul_(factor)
        if labels_N is None:
            return _Chunk(loss_N, divergence_N, torch.zeros_like(loss_N), grad_NV)
        wants_gradient = wants_gradient and mix > 0
        entropy_N, entropy_grad_NV = _cross_entropy(logits_NV, labels_N[tokens], start, group, wants_gradient)
        if entropy_grad_NV is not None:
            entropy_grad_NV.mul_(mix)
            grad_NV = entropy_grad_NV if grad_NV is None else grad_NV.add_(entropy_grad_NV)
        return _Chunk(loss_N.add_(entropy_N, alpha=mix), divergence_N, entropy_N, grad_NV)

    return make


def _kernels(
    student: OutputProjection, teacher: OutputProjection | TopTokens, settings: LossSettings
) -> ModuleType | None:
    """Return `divergence_kernels` where they can run and compute this loss, None where PyTorch has to."""
    if settings.top_k is not None or not isinstance(teacher, OutputProjection):
        return None
    tensors = (student.hidden_states_SBH, teacher.hidden_states_SBH)
    if any(not tensor.is_cuda or tensor.dtype == torch.float64 for tensor in tensors):
        return None
    return _import_kernels()


@functools.cache
def _import_kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from torpor.training import divergence_kernels

    return divergence_kernels


def _fused_chunk_maker(
    student: OutputProjection,
    teacher: OutputProjection,
    settings: LossSettings,
    labels_N: torch.Tensor | None,
    kernels: Any,
) -> ChunkMaker:
    group, temperature, mix = student.tp_group, settings.temperature, settings.cross_entropy_weight
    _, start = vocabulary.local_rows(student)
    teacher_logits = _logits_of(teacher)
    options = {
        "divergence": settings.divergence,
        "temperature": temperature,
        "beta": settings.jensen_shannon_beta,
    }

    def log_z(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
        return vocabulary.log_sum_exp_over(kernels.log_sum_exp(logits_NV, temperature), group)

    def make(logits_NV: torch.Tensor, tokens: slice, wants_gradient: bool) -> _Chunk:
        teacher_NV = teacher_logits(tokens)
        log_z_N = log_z(logits_NV, temperature)
        entropy_N, labels = torch.zeros_like(log_z_N), None
        if labels_N is not None:
            ids_N = labels_N[tokens]
            plain_N = log_z_N if temperature == 1 else log_z(logits_NV, 1.0)
            entropy_N = plain_N - vocabulary.pick(logits_NV, ids_N, start, group)
            columns_N, is_here_N = vocabulary.local_columns(ids_N, start, logits_NV.shape[-1])
            labels = kernels.Labels(columns_N.masked_fill(~is_here_N, -1), plain_N, mix)
        sums_2N = torch.zeros(2, len(log_z_N), device=logits_NV.device)
        arguments = (logits_NV, teacher_NV, log_z_N, log_z(teacher_NV, temperature), sums_2N)
        # T^2 by the loss, 1/T by the logits.
        gradient = kernels.Gradient((1 - mix) * temperature, labels) if wants_gradient else None
        # Only the gradient of the forward KL does without the divergence of all ranks.
        is_at_once = gradient is None or settings.divergence == "forward_kl"
        kernels.compare(*arguments, **options, is_sum=True, gradient=gradient if is_at_once else None)
        vocabulary.sum_over(sums_2N, group)
        if not is_at_once:
            kernels.compare(*arguments, **options, is_sum=False, gradient=gradient)
        divergence_N = sums_2N[0]
        if settings.divergence == "jensen_shannon":
            beta = settings.jensen_shannon_beta
            divergence_N = beta * sums_2N[0] + (1 - beta) * sums_2N[1]
        loss_N = divergence_N * ((1 - mix) * temperature**2) + mix * entropy_N
        return _Chunk(loss_N, divergence_N, entropy_N, logits_NV if wants_gradient else None)

    return make


def _logits_of(projection: OutputProjection) -> Callable[[slice], torch.Tensor]:
    """Return what makes this rank's logits [n, v] of some tokens."""
    tokens_NH = vocabulary.gather_tokens(projection)
    rows_VH, _ = vocabulary.local_rows(projection)
    return lambda tokens: tokens_NH[tokens] @ rows_VH.t()


Comparison = Callable[[torch.Tensor, slice, bool], tuple[torch.Tensor, torch.Tensor | None]]


def _comparison(
    teacher: OutputProjection | TopTokens,
    settings: LossSettings,
    group: dist.ProcessGroup | None,
    start: int,
    vocab_rows: int,
) -> Comparison:
    """Return what compares the student's logits of some tokens with the teacher's.

    Its result: D [n], and its gradient by the student's logits / T [n, v] or None.
    """
    diverge = _DIVERGENCES[settings.divergence]
    temperature, beta, k = settings.temperature, settings.jensen_shannon_beta, settings.top_k

    if isinstance(teacher, OutputProjection):
        teacher_logits = _logits_of(teacher)

    def compare_all(
        logits_NV: torch.Tensor, tokens: slice, wants_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_p_NV = vocabulary.log_softmax(teacher_logits(tokens), group, temperature)
        log_q_NV = vocabulary.log_softmax(logits_NV, group, temperature)
        return diverge(log_p_NV, log_q_NV, group, beta, wants_gradient)

    def likeliest(tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        assert k is not None
        if isinstance(teacher, TopTokens):
            # Stored in falling order: the first k of more are the k likeliest.
            return teacher.logits_SBK.flatten(0, 1)[tokens, :k], teacher.ids_SBK.flatten(0, 1)[tokens, :k]
        return vocabulary.top_k(teacher_logits(tokens), k, start, group)

    def compare_top(
        logits_NV: torch.Tensor, tokens: slice, wants_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        teacher_NK, ids_NK = likeliest(tokens)
        ids_NK = ids_NK.long()
        student_NK = vocabulary.pick(logits_NV, ids_NK, start, group)
        dtype = vocabulary.accumulation_dtype(logits_NV.dtype)
        # Every rank has all k: from here on nothing is divided.
        log_p_NK = vocabulary.log_softmax(teacher_NK.to(dtype), None, temperature)
        log_q_NK = vocabulary.log_softmax(student_NK.to(dtype), None, temperature)
        divergence_N, grad_NK = diverge(log_p_NK, log_q_NK, None, beta, wants_gradient)
        if grad_NK is None:
            return divergence_N, None
        columns, is_here = vocabulary.local_columns(ids_NK, start, logits_NV.shape[-1])
        grad_NV = torch.zeros_like(logits_NV, dtype=dtype)
        if grad_NV.shape[-1]:
            grad_NV.scatter_add_(-1, columns, grad_NK.masked_fill_(~is_here, 0.0))
        return divergence_N, grad_NV

    return compare_all if k is None else compare_top


# --- divergences: they overwrite their arguments, which are as large as a chunk's logits ----------------


def _forward_kl(
    log_p_NV: torch.Tensor,
    log_q_NV: torch.Tensor,
    group: dist.ProcessGroup | None,
    beta: float,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    p_NV = log_p_NV.exp()
    divergence_N = vocabulary.sum_over(log_p_NV.sub_(log_q_NV).mul_(p_NV).sum(-1), group)
    return divergence_N, log_q_NV.exp_().sub_(p_NV) if wants_gradient else None


def _reverse_kl(
    log_p_NV: torch.Tensor,
    log_q_NV: torch.Tensor,
    group: dist.ProcessGroup | None,
    beta: float,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q_NV = log_q_NV.exp()
    terms_NV = log_q_NV.sub_(log_p_NV).mul_(q_NV)
    divergence_N = vocabulary.sum_over(terms_NV.sum(-1), group)
    if not wants_gradient:
        return divergence_N, None
    return divergence_N, terms_NV.addcmul_(q_NV, divergence_N[:, None], value=-1)


def _jensen_shannon(
    log_p_NV: torch.Tensor,
    log_q_NV: torch.Tensor,
    group: dist.ProcessGroup | None,
    beta: float,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_m_NV = torch.logaddexp(log_p_NV + math.log(beta), log_q_NV + math.log1p(-beta))
    p_NV = log_p_NV.exp()
    teacher_N = log_p_NV.sub_(log_m_NV).mul_(p_NV).sum(-1)
    q_NV = torch.exp(log_q_NV, out=p_NV)
    terms_NV = log_q_NV.sub_(log_m_NV).mul_(q_NV)
    student_N = terms_NV.sum(-1)
    teacher_N, student_N = vocabulary.sum_over(torch.stack([teacher_N, student_N]), group)
    divergence_N = beta * teacher_N + (1 - beta) * student_N
    if not wants_gradient:
        return divergence_N, None
    return divergence_N, terms_NV.addcmul_(q_NV, student_N[:, None], value=-1).mul_(1 - beta)


_DIVERGENCES = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jensen_shannon": _jensen_shannon}


def _cross_entropy(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    start: int,
    group: dist.ProcessGroup | None,
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_q_NV = vocabulary.log_softmax(logits_NV, group)
    entropy_N = -vocabulary.pick(log_q_NV, labels_N, start, group)
    if not wants_gradient:
        return entropy_N, None
    grad_NV = log_q_NV.exp_()
    columns_N, is_here_N = vocabulary.local_columns(labels_N, start, grad_NV.shape[-1])
    if grad_NV.shape[-1]:
        grad_NV.scatter_add_(-1, columns_N[:, None], -is_here_N[:, None].to(grad_NV.dtype))
    return entropy_N, grad_NV


# --- autograd -------------------------------------------------------------------------------------------


class _SummedLoss(torch.autograd.Function):
    """The weighted sum over tokens, whose gradient is known when its value is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states_SBH: torch.Tensor,
        weight_VH: torch.Tensor,
        student: OutputProjection,
        make_chunk: ChunkMaker,
        weights_N: torch.Tensor,
        chunk_size: int,
        is_grad_enabled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the loss, and the sums of loss, divergence and cross-entropy [3]."""
        needs_states, needs_weight = (is_grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        tokens_NH = vocabulary.gather_tokens(student)
        rows_VH, _ = vocabulary.local_rows(student)
        grad_tokens_NH = torch.empty_like(tokens_NH) if needs_states else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=weights_N.dtype) if needs_weight else None
        sums = weights_N.new_zeros(3)
        for chunk in vocabulary.chunks(len(tokens_NH), chunk_size):
            states_NH, scale_N = tokens_NH[chunk], weights_N[chunk]
            made = make_chunk(states_NH @ rows_VH.t(), chunk, needs_states or needs_weight)
            sums += torch.stack(
                [
                    (scale_N * values_N).sum()
                    for values_N in (made.loss_N, made.divergence_N, made.cross_entropy_N)
                ]
            )
            if made.grad_NV is None:
                continue
            grad_NV = made.grad_NV.to(tokens_NH.dtype)
            del made
            # Rows are scaled where they are short.
            if grad_tokens_NH is not None:
                grad_tokens_NH[chunk] = (grad_NV @ rows_VH) * scale_N[:, None]
            if grad_weight_VH is not None:
                scaled_NH = (states_NH * scale_N[:, None]).to(grad_NV.dtype)
                _add_product(grad_weight_VH[: len(rows_VH)], grad_NV.t(), scaled_NH)
            del grad_NV  # before the next chunk's are made
        ctx.grad_states = (
            grad_tokens_NH
            if grad_tokens_NH is None
            else (vocabulary.reduce_token_gradients(grad_tokens_NH, student))
        )
        ctx.grad_weight = grad_weight_VH if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """Scale what is known."""
        return _scaled(ctx.grad_states, grad), _scaled(ctx.grad_weight, grad), None, None, None, None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right, in a narrower type than the total's or in the same."""
    if total.is_cuda and total.dtype != left.dtype and hasattr(torch.ops.aten.addmm, "dtype_out"):
        # The product is never rounded to the narrow type, nor written on its own.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _scaled(tensor: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor | None:
    """Multiply by a scalar that is not rounded to the tensor's type, which would change a whole gradient."""
    if tensor is None or tensor.dtype == factor.dtype:
        return None if tensor is None else tensor * factor
    scaled = torch.empty_like(tensor)
    rows = max(1, 2**24 // max(1, tensor[0].numel()))
    wide = factor.view([1] * tensor.dim())  # a scalar would take the tensor's type
    for source, target in zip(tensor.split(rows), scaled.split(rows), strict=True):
        torch.mul(source, wide, out=target)
    return scaled
