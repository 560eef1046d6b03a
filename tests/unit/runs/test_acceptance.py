"""Drafts are compared with what the trunk itself chooses, at the right distance."""

import pytest
import torch

import tiny_models
from torpor.dormancy import freeze_mtp
from torpor.errors import UnsupportedModelError
from torpor.runs.acceptance import DraftCounts, count_accepted

pytestmark = pytest.mark.usefixtures("megatron_rank")

KINDS = [tiny_models.GPT, tiny_models.GPT_TIED, tiny_models.GPT_TWO_DEPTHS, tiny_models.HYBRID]


def greedy_choices(model, tokens):
    """The trunk's choice and each depth's draft at every position, [batch, sequence], the long way round."""
    hidden = []
    hook = model.mtp.register_forward_hook(lambda module, inputs, output: hidden.append(output))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=None)
        hook.remove()
        weight = (
            model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        )
        parts = hidden[0].chunk(1 + model.config.mtp_num_layers)
        drafts = [model.output_layer(part, weight=weight)[0].argmax(-1).t() for part in parts[1:]]
    return logits.argmax(-1), drafts


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_counts_equal_those_made_one_by_one(kind):
    model = tiny_models.build(kind).eval()
    batches = [tiny_models.batch(seed=seed)["input_ids"] for seed in (3, 4)]
    expected = {depth: [0, 0] for depth in range(1, kind.depths + 1)}
    for tokens in batches:
        trunk, drafts = greedy_choices(model, tokens)
        for depth, draft in enumerate(drafts, 1):
            for row in range(tokens.shape[0]):
                for position in range(tokens.shape[1] - depth):
                    expected[depth][0] += int(draft[row, position] == trunk[row, position + depth])
                    expected[depth][1] += 1
    counts = count_accepted(model, batches)
    assert {c.depth: [c.accepted, c.drafted] for c in counts} == expected


def test_head_that_copies_the_trunk_is_accepted_always():
    """A head that drafted, at position t, what the trunk chooses at t + 1 is right every time."""
    model = tiny_models.build(tiny_models.GPT)
    tokens = tiny_models.batch()["input_ids"]
    original = model.mtp.forward

    def perfect(*args, **kwargs):
        trunk, _ = original(*args, **kwargs).chunk(2)
        return torch.cat([trunk, trunk.roll(-1, dims=0)])

    model.mtp.forward = perfect
    (counts,) = count_accepted(model, [tokens])
    assert counts.accepted == counts.drafted == tokens.shape[0] * (tokens.shape[1] - 1)


def test_chance_is_the_best_constant_draft():
    model = tiny_models.build(tiny_models.GPT).eval()
    tokens = tiny_models.batch()["input_ids"]
    trunk, _ = greedy_choices(model, tokens)
    (counts,) = count_accepted(model, [tokens])
    assert counts.constant == max((trunk[:, 1:] == token).sum().item() for token in range(tiny_models.VOCAB))
    assert counts.chance == counts.constant / counts.drafted


def test_sleeping_heads_are_refused_and_awake_ones_counted():
    model = tiny_models.build(tiny_models.HYBRID)
    tokens = tiny_models.batch()["input_ids"]
    expected = count_accepted(model, [tokens])
    handle = freeze_mtp(model)
    with pytest.raises(UnsupportedModelError, match="asleep"):
        count_accepted(model, [tokens])
    with handle.awake():
        assert count_accepted(model, [tokens]) == expected
    assert handle.executions == 0


def test_model_is_left_as_it_was():
    model = tiny_models.build(tiny_models.GPT).train()
    count_accepted(model, [tiny_models.batch()["input_ids"]])
    assert model.training
    assert not model.output_layer._forward_hooks


def test_rates():
    counts = DraftCounts(depth=1, accepted=3, drafted=12, constant=1)
    assert (counts.rate, counts.chance) == (0.25, 1 / 12)
