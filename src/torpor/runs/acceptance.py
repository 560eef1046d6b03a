"""How often the trunk accepts what its MTP layers draft: the rate that speculative decoding lives on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torpor.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class DraftCounts:
    """Greedy drafts of one MTP depth, counted over some text.

    Args:
        depth: 1 for the first MTP layer, which drafts one token beyond the trunk's.
        accepted: Drafts equal to the trunk's own greedy choice.
        drafted: Drafts made.
        constant: Drafts that would have been accepted if every draft were the trunk's most frequent choice.
    """

    depth: int
    accepted: int
    drafted: int
    constant: int

    @property
    def rate(self) -> float:
        """Accepted drafts as a fraction of all."""
        return self.accepted / self.drafted

    @property
    def chance(self) -> float:
        """What the best constant draft reaches on the same text."""
        return self.constant / self.drafted


def count_accepted(model: "MegatronModule", batches: Iterable["torch.Tensor"]) -> list[DraftCounts]:
    """Compare every depth's greedy drafts with the trunk's greedy choices on given text.

    Position t of the trunk chooses token t+1. Depth d at position t has read the tokens up to t+d and
    drafts token t+d+1, which the trunk chooses at position t+d:

        tokens   a  b  c  d          trunk at 1 (having read a b) chooses the token after b
        depth 1  at 0, having read a and b, drafts the token after b: compared with the trunk at 1

    Args:
        model: A whole GPTModel or HybridModel on one rank, its MTP layers awake.
        batches: Token ids, [batch, sequence], int64.

    Returns:
        One entry for each depth.

    Raises:
        UnsupportedModelError: The MTP layers did not run: there are none, or they are asleep.
    """
    import torch

    captured: list[torch.Tensor] = []

    def capture(_module: object, _inputs: object, outputs: tuple["torch.Tensor", ...]) -> None:
        # At once, before the FP32 vocabulary-parallel cross-entropy overwrites the logits.
        captured.append(outputs[0].argmax(dim=-1).t())

    accepted: dict[int, int] = {}
    drafted: dict[int, int] = {}
    choices: dict[int, list[torch.Tensor]] = {}
    was_training = model.training
    hook = model.output_layer.register_forward_hook(capture)
    model.eval()
    try:
        with torch.no_grad():
            for tokens in batches:
                captured.clear()
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
                model(input_ids=tokens, position_ids=positions, attention_mask=None)
                # Megatron projects the MTP layers first, in order of depth, and the trunk last.
                *drafts, trunk = captured
                for depth, draft in enumerate(drafts, 1):
                    choice = trunk[:, depth:]
                    accepted[depth] = accepted.get(depth, 0) + int((draft[:, :-depth] == choice).sum())
                    drafted[depth] = drafted.get(depth, 0) + choice.numel()
                    choices.setdefault(depth, []).append(choice.flatten())
    finally:
        hook.remove()
        model.train(was_training)
    if not drafted:
        raise UnsupportedModelError(
            "the model's MTP layers made no draft: it has none, or they are asleep\n"
            "  Build it with its MTP layers and measure inside `handle.awake()`."
        )
    return [
        DraftCounts(depth, accepted[depth], drafted[depth], int(torch.cat(choices[depth]).bincount().max()))
        for depth in drafted
    ]
