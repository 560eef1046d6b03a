"""Divergence, cross-entropy and their gradient from two models' logits, as Triton kernels.

A chunk's logits stay in the type that they were multiplied in; everything between a load and a store is FP32
in registers, and the gradient overwrites the student's logits. The same in PyTorch (`losses`) writes about
ten FP32 tensors of the logits' size.

One program a row. A distribution over the whole vocabulary needs its normaliser first, so a row is read
twice, and a third time where the gradient needs the divergence; between the passes ranks that divide the
vocabulary add up what they have, a few numbers a token.

Shapes: N tokens, V this rank's share of the vocabulary. To be imported where Triton is installed.

Sources: Milakov, Gimelshein 2018 (arXiv:1805.02867) for the normaliser in one pass; the formulas are those of
`losses`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _log_sum_exp_kernel(logits_ptr, result_ptr, num_columns, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * num_columns
    offsets = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0
    for begin in range(0, num_columns, BLOCK):
        columns = begin + offsets
        values = tl.load(logits_ptr + columns, mask=columns < num_columns, other=-float("inf"))
        values = values.to(tl.float32) / temperature
        previous = largest
        largest = tl.maximum(largest, tl.max(values, 0))
        # Where all so far is -inf there is nothing to scale, and -inf - -inf is no number.
        shift = tl.where(largest == -float("inf"), 0.0, largest)
        total = total * tl.exp(previous - shift) + tl.sum(tl.exp(values - shift), 0)
    tl.store(result_ptr + row, largest + tl.log(total))


@triton.jit
def _compare_kernel(
    student_ptr,  # [N, V]; with IS_GRADIENT overwritten with the gradient
    teacher_ptr,  # [N, V]
    log_z_student_ptr,  # [N], at the temperature
    log_z_teacher_ptr,  # [N]
    log_z_plain_ptr,  # [N], of the student at temperature 1
    columns_ptr,  # [N], the label's column, or one outside
    sums_ptr,  # [2, N]; what this rank's columns add without IS_GRADIENT, of all columns with it
    num_rows,
    num_columns,
    temperature,
    beta,
    factor,  # of the divergence's gradient
    mix,  # of the cross-entropy's
    DIVERGENCE: tl.constexpr,
    IS_SUM: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    student_ptr += row.to(tl.int64) * num_columns
    teacher_ptr += row.to(tl.int64) * num_columns
    log_z_student = tl.load(log_z_student_ptr + row)
    log_z_teacher = tl.load(log_z_teacher_ptr + row)
    offsets = tl.arange(0, BLOCK)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    if IS_GRADIENT and DIVERGENCE != "forward_kl":
        whole = tl.load(sums_ptr + (num_rows if DIVERGENCE == "jensen_shannon" else 0) + row)
    if HAS_LABELS:
        log_z_plain = tl.load(log_z_plain_ptr + row)
        label = tl.load(columns_ptr + row)

    for begin in range(0, num_columns, BLOCK):
        columns = begin + offsets
        is_here = columns < num_columns
        z = tl.load(student_ptr + columns, mask=is_here, other=0.0).to(tl.float32)
        log_p = tl.load(teacher_ptr + columns, mask=is_here, other=0.0).to(tl.float32)
        log_q = z / temperature - log_z_student
        log_p = log_p / temperature - log_z_teacher
        q = tl.exp(log_q)
        p = tl.exp(log_p)
        if DIVERGENCE == "forward_kl":
            terms = p * (log_p - log_q)
            gradient = q - p
        elif DIVERGENCE == "reverse_kl":
            terms = q * (log_q - log_p)
            if IS_GRADIENT:
                gradient = terms - q * whole
        else:
            # Of the larger share, so that neither logarithm loses the other: log(b p + (1 - b) q).
            a = log_p + tl.log(beta)
            b = log_q + tl.log(1 - beta)
            larger = tl.maximum(a, b)
            log_m = larger + tl.log(1 + tl.exp(tl.minimum(a, b) - larger))
            terms = p * (log_p - log_m)
            student_terms = q * (log_q - log_m)
            if IS_SUM:
                second += tl.where(is_here, student_terms, 0.0)
            if IS_GRADIENT:
                gradient = (1 - beta) * (student_terms - q * whole)
        if IS_SUM:
            first += tl.where(is_here, terms, 0.0)
        if IS_GRADIENT:
            gradient *= factor
            if HAS_LABELS:
                gradient += mix * (tl.exp(z - log_z_plain) - tl.where(columns == label, 1.0, 0.0))
            tl.store(student_ptr + columns, gradient.to(student_ptr.dtype.element_ty), mask=is_here)

    if IS_SUM:
        tl.store(sums_ptr + row, tl.sum(first, 0))
        if DIVERGENCE == "jensen_shannon":
            tl.store(sums_ptr + num_rows + row, tl.sum(second, 0))


def log_sum_exp(logits_NV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Return log(sum(exp(logits / temperature))) of each row.

    Args:
        logits_NV: This rank's logits [n, v], contiguous, FP16, BF16 or FP32.
        temperature: Divides the logits.

    Returns:
        FP32 [n]; -inf for rows without columns.
    """
    rows, columns = logits_NV.shape
    result_N = logits_NV.new_empty(rows, dtype=torch.float32)
    with torch.cuda.device_of(logits_NV):  # Triton launches on the current device
        _log_sum_exp_kernel[(rows,)](
            logits_NV, result_N, columns, temperature, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return result_N


@dataclass(frozen=True)
class Labels:
    """What the cross-entropy adds to a gradient.

    Attributes:
        columns_N: int64 [n], each label's column among this rank's, or -1.
        log_z_N: FP32 [n], the student's `log_sum_exp` over all ranks at temperature 1.
        weight: Of the cross-entropy in the loss.
    """

    columns_N: torch.Tensor
    log_z_N: torch.Tensor
    weight: float


@dataclass(frozen=True)
class Gradient:
    """What the gradient by the student's logits is made of.

    Attributes:
        factor: Of the divergence in the loss, divided by the temperature.
        labels: The cross-entropy's part, if any.
    """

    factor: float
    labels: Labels | None = None


def compare(
    student_NV: torch.Tensor,
    teacher_NV: torch.Tensor,
    log_z_student_N: torch.Tensor,
    log_z_teacher_N: torch.Tensor,
    sums_2N: torch.Tensor,
    *,
    divergence: str,
    temperature: float,
    beta: float,
    is_sum: bool,
    gradient: Gradient | None,
) -> None:
    """Compare the distributions of each row.

    Args:
        student_NV: This rank's logits [n, v], contiguous, FP16, BF16 or FP32. With `gradient` its loss's
            gradient by them takes their place.
        teacher_NV: The teacher's of the same columns, likewise.
        log_z_student_N: FP32 [n], see `log_sum_exp`, over the columns of all ranks and at the temperature.
        log_z_teacher_N: The same of the teacher.
        sums_2N: FP32 [2, n]. With `is_sum` this rank's columns' share of D is written to the first row, and
            of the Jensen-Shannon divergence KL(p | m) to the first and KL(q | m) to the second. A gradient
            of another divergence than the forward KL reads from here the sum over all ranks.
        divergence: See `losses.LossSettings`; so are `temperature` and `beta`.
        is_sum: Whether to write sums.
        gradient: What to write over the student's logits, if anything.
    """
    rows, columns = student_NV.shape
    labels = gradient.labels if gradient is not None else None
    with torch.cuda.device_of(student_NV):
        _compare_kernel[(rows,)](
            student_NV,
            teacher_NV,
            log_z_student_N,
            log_z_teacher_N,
            labels.log_z_N if labels is not None else log_z_student_N,
            labels.columns_N if labels is not None else log_z_student_N,
            sums_2N,
            rows,
            columns,
            temperature,
            beta,
            gradient.factor if gradient is not None else 0.0,
            labels.weight if labels is not None else 0.0,
            DIVERGENCE=divergence,
            IS_SUM=is_sum,
            IS_GRADIENT=gradient is not None,
            HAS_LABELS=labels is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
