"""Log-probabilities and entropies of given tokens, for reinforcement learning with MTP layers asleep.

The policy that is trained, the same policy when it made the rollout, and a frozen reference are all asked
the same: how likely was each token, given those before it. Logits never exist as a whole, neither here nor
for the backward pass, and nobody has to make up labels.

Conventions: tokens [b, s] hold prompt and response. Everything returned is [b, s] and FP32, aligned with the
tokens: entry t is about token t and the distribution it was drawn from, given tokens before t. The first
token of a sequence was drawn from none: its entries are 0. For the sequence `p q x y` with prompt `p q`:

    tokens           p    q            x              y
    log_probs        0    log P(q|p)   log P(x|pq)    log P(y|pqx)
    response mask    0    0            1              1

Shape suffixes: B sequences, S tokens of each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.hidden_states import find_language_model, hand_over_projection
from torpor.training.log_probs import log_probs_and_entropy

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

__all__ = ["compute_log_probs", "forward"]


def forward(
    model: torch.nn.Module,
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    position_ids: torch.Tensor | None = None,
    packed_seq_params: "PackedSeqParams | None" = None,
    **inputs: Any,
) -> dict[str, torch.Tensor] | torch.Tensor:
    """Run a chunk of a policy and return how likely its tokens are.

    To train, call it in the forward step of Megatron's schedules: on the last pipeline stage it returns what
    a loss function needs, on the others what the schedule passes on to the next.

        def forward_step(batches, model):
            batch = next(batches)
            return policy.forward(model, batch["tokens"]), partial(loss_function, batch)

    Under context parallelism every rank passes whole sequences, gets all entries and computes the same loss
    of them; Megatron's schedules then add up the gradients of all ranks' parts.

    Rows are one sequence each, padded on the right (attention is causal: nothing before the padding sees it,
    and its own entries are to be masked), or one row holds several sequences, one after the other, described
    by `packed_seq_params`.

    Args:
        model: This rank's chunk of a GPTModel or HybridModel after `freeze_mtp`, wrapped or not.
        tokens: Token ids [b, s], int64, the same on all ranks but data-parallel ones.
        temperature: Divides the logits; the one that the rollout was drawn with.
        vocab_size: Rows of the whole output weight that stand for a token, where rows were appended so that
            they divide over the ranks; those have no part in a rollout's distribution. None for all.
        position_ids: Positions [b, s]; from 0 in each sequence by default.
        packed_seq_params: Where the sequences of one packed row [1, s] begin, in the "thd" format.
        inputs: What else the model's forward takes, `attention_mask` or `padding_mask` for instance, as it
            takes it: under context parallelism this rank's part.

    Returns:
        On the last stage `log_probs` and `entropy` (in nats), FP32 [b, s], both differentiable, once; on
        other stages the stage's output.

    Raises:
        UnsupportedModelError: If MTP layers of the model are awake: without labels Megatron trains them on
            the tokens, and their loss enters the policy's gradient.
        ConfigError: If tokens, temperature, vocabulary or packing do not fit.
    """
    language_model = find_language_model(model)
    _refuse_awake(language_model)
    is_first_BS = _first_tokens(tokens, packed_seq_params)
    context = _Context.of(language_model.pg_collection.cp, tokens, packed_seq_params)
    _check_inputs(language_model.config, tokens.shape[1], context.size, temperature, vocab_size)
    if position_ids is None:
        position_ids = _positions(is_first_BS)
    inputs = {"attention_mask": None, "packed_seq_params": packed_seq_params} | inputs
    with hand_over_projection(model) as handover:
        output: torch.Tensor = model(
            input_ids=context.take(tokens), position_ids=context.take(position_ids), **inputs
        )
    projection = handover.take()
    if projection is None:
        return output
    projection = replace(projection, vocab_size=vocab_size)
    # What follows each token: after the last one whatever it is, for nobody looks at it.
    targets_SB = context.take(tokens.roll(-1, dims=1)).t()
    values = log_probs_and_entropy(projection, targets_SB.flatten(), temperature=temperature)
    log_probs_BS, entropy_BS = (context.gather(value_N.view(targets_SB.shape).t()) for value_N in values)
    return {"log_probs": _aligned(log_probs_BS, is_first_BS), "entropy": _aligned(entropy_BS, is_first_BS)}


def compute_log_probs(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    tokens: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    micro_batch_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return how likely tokens are, without gradients: for `old_log_probs` and for a reference.

    Runs through Megatron's schedule at whatever layout the model is in, in evaluation mode, and leaves the
    mode as it was. Every rank calls it.

    Args:
        model: This rank's chunk or chunks, after `freeze_mtp`, wrapped or not.
        tokens: Token ids [b, s], int64, padded on the right; the same on all ranks but data-parallel ones.
        temperature: Divides the logits.
        vocab_size: Rows of the output weight that stand for a token, as in `forward`.
        micro_batch_size: Sequences to run at once; all by default.

    Returns:
        `log_probs` and `entropy`, FP32 [b, s], on every pipeline stage.

    Raises:
        UnsupportedModelError: If MTP layers of the model are awake.
        ConfigError: If tokens, temperature, vocabulary or the size of a micro-batch do not fit.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    size = len(tokens) if micro_batch_size is None else micro_batch_size
    if size < 1 or len(tokens) % size:
        raise ConfigError(
            f"{len(tokens)} sequences do not divide into micro-batches of {size}\n"
            "  Choose a micro_batch_size that divides the number of sequences."
        )
    batches = tokens.split(size)

    def forward_step(batches: Iterator[torch.Tensor], chunk: torch.nn.Module) -> Any:
        output = forward(chunk, next(batches), temperature=temperature, vocab_size=vocab_size)
        return output, lambda output, non_loss_data: output

    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    try:
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            outputs = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches) if len(chunks) == 1 else [iter(batches) for _ in chunks],
                model=chunks,
                num_microbatches=len(batches),
                seq_length=tokens.shape[1],
                micro_batch_size=size,
                forward_only=True,
                collect_non_loss_data=True,
            )
    finally:
        for module, was_training in modes:
            module.training = was_training
    dtype = torch.promote_types(find_language_model(chunks[0]).config.params_dtype, torch.float32)
    return {
        name: _from_last_stage(
            torch.cat([output[name] for output in outputs])
            if outputs
            else torch.empty(tokens.shape, dtype=dtype, device=tokens.device)
        )
        for name in ("log_probs", "entropy")
    }


def _refuse_awake(language_model: Any) -> None:
    from torpor.dormancy.bypass import DormantLanguageModelCall

    num_layers = language_model.config.mtp_num_layers
    if num_layers and not isinstance(vars(language_model).get("_call_impl"), DormantLanguageModelCall):
        raise UnsupportedModelError(
            f"{type(language_model).__name__} has mtp_num_layers={num_layers}, and its MTP layers are awake:"
            " without labels Megatron trains them on the tokens, and that loss enters the policy's gradient\n"
            "  Call torpor.freeze_mtp(model) before DDP and the optimizer; to run them on purpose use"
            " `with handle.awake():`."
        )


def _check_inputs(
    config: Any, num_tokens: int, context_size: int, temperature: float, vocab_size: int | None
) -> None:
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}: it has to be greater than 0")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"vocab_size is {vocab_size}: it has to be at least 1, or None for all rows")
    parts = context_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if num_tokens % parts:
        raise ConfigError(
            f"sequences have {num_tokens} tokens, which context and sequence parallelism divide over {parts}"
            f" ranks\n  Pad them on the right to a multiple of {parts}."
        )


class _Context:
    """Which tokens each context-parallel rank works on, see `torpor.megatron.zigzag`."""

    def __init__(self, group: Any, held_RS: torch.Tensor | None) -> None:
        """Take the places [r, s / r] that each rank holds, in its own order; None for all on one rank."""
        self.group = group
        self.size = 1 if held_RS is None else len(held_RS)
        self.held_RS = held_RS

    @classmethod
    def of(cls, group: Any, tokens: torch.Tensor, packed: "PackedSeqParams | None") -> "_Context":
        num_ranks, num_tokens = group.size(), tokens.shape[1]
        if num_ranks == 1:
            return cls(group, None)
        from torpor.megatron.packing import sample_bounds
        from torpor.megatron.zigzag import zigzag_places

        bounds = sample_bounds(packed, num_tokens) if packed else [(0, num_tokens)]
        return cls(group, zigzag_places(bounds, num_ranks).to(tokens.device))

    def take(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Return what this rank works on [b, s / r]."""
        return values_BS if self.held_RS is None else values_BS[:, self.held_RS[self.group.rank()]]

    def gather(self, values_BS: torch.Tensor) -> torch.Tensor:
        """Return what all ranks computed [b, s]; backward gives each rank the gradient of its own part."""
        if self.held_RS is None:
            return values_BS
        gathered: torch.Tensor = _GatherContext.apply(values_BS, self.held_RS, self.group)
        return gathered


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_BS: torch.Tensor, held_RS: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.own_S = held_RS[group.rank()]
        parts = [torch.empty_like(values_BS, memory_format=torch.contiguous_format) for _ in held_RS]
        torch.distributed.all_gather(parts, values_BS.contiguous(), group=group)
        gathered_BS = torch.cat(parts, dim=1)
        return torch.empty_like(gathered_BS).index_copy_(1, held_RS.flatten(), gathered_BS)

    @staticmethod
    def backward(ctx: Any, grad_BS: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Every rank computes the same loss of all entries. What it owes its own part is in its own gradient
        # already; Megatron's schedules and DDP then add up the parts of all ranks.
        return grad_BS[:, ctx.own_S], None, None


def _first_tokens(tokens: torch.Tensor, packed: "PackedSeqParams | None") -> torch.Tensor:
    """Say [b, s] which tokens begin a sequence. Nothing is read back from an accelerator for it.

    Raises:
        ConfigError: The tokens are no rows of ids, or not one row where they are packed.
    """
    if tokens.dim() != 2 or tokens.is_floating_point() or 0 in tokens.shape:
        raise ConfigError(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: they have to be ids [b, s], int64"
        )
    is_first_BS = torch.zeros_like(tokens, dtype=torch.bool)
    if packed is None:
        is_first_BS[:, 0] = True
        return is_first_BS
    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    if packed.qkv_format != "thd" or starts is None or len(tokens) != 1:
        raise ConfigError(
            f"packed tokens have the shape {tuple(tokens.shape)} and packed_seq_params the format"
            f" {packed.qkv_format!r} with cu_seqlens_q {'missing' if starts is None else 'given'}\n"
            "  Packing puts all sequences into one row [1, s], in the format 'thd' with cu_seqlens_q."
        )
    # The last of them is the number of tokens, or where padding begins.
    is_first = is_first_BS.new_zeros(tokens.shape[1] + 1)
    is_first[starts.long()] = True
    is_first_BS[0] = is_first[:-1]
    return is_first_BS


def _positions(is_first_BS: torch.Tensor) -> torch.Tensor:
    """Count [b, s] from 0 in each sequence."""
    places_S = torch.arange(is_first_BS.shape[1], device=is_first_BS.device)
    return places_S - torch.where(is_first_BS, places_S, 0).cummax(dim=1).values


def _aligned(values_BS: torch.Tensor, is_first_BS: torch.Tensor) -> torch.Tensor:
    """Move what each token says about the next one to that one, and put 0 where there is none before."""
    return values_BS.roll(1, dims=1).masked_fill(is_first_BS, 0.0)


def _from_last_stage(values_BS: torch.Tensor) -> torch.Tensor:
    """Return the last stage's values on every stage; those of the others are overwritten."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            values_BS,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return values_BS
