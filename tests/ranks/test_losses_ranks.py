"""The losses over a divided vocabulary, sequence and context: two ranks do what one does."""

import itertools

import pytest
import torch

from ranks.launch import run_ranks

S, B, H, V = 8, 2, 6, 20
SETTINGS = [
    {"divergence": divergence, "jensen_shannon_beta": 0.3, **options}
    for divergence, options in itertools.product(
        ("forward_kl", "reverse_kl", "jensen_shannon"),
        ({}, {"temperature": 2.0, "cross_entropy_weight": 0.4}, {"top_k": 7}),
    )
]


def whole():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = {
        "states": draw(S, B, H),
        "weight": draw(V, H),
        "teacher_states": draw(S, B, 4),
        "teacher_weight": draw(V, 4),
        "labels": torch.randint(0, 11, (B, S), generator=generator),
        "mask": (torch.rand(B, S, generator=generator) > 0.4).double(),
    }
    values["labels"][0, 2] = -100
    return values


def compute(values, settings, *, vocab_size=None, group=None, sequence_parallel=False, cp_group=None):
    from torpor.losses import LossSettings, OutputProjection, distillation_loss

    options = {"tp_group": group, "is_sequence_parallel": sequence_parallel, "vocab_size": vocab_size}
    student = OutputProjection(
        values["states"].clone().requires_grad_(), values["weight"].clone().requires_grad_(), **options
    )
    teacher = OutputProjection(values["teacher_states"], values["teacher_weight"], **options)
    result = distillation_loss(
        student,
        teacher,
        LossSettings(**settings),
        labels_BS=values["labels"],
        loss_mask_BS=values["mask"],
        cp_group=cp_group,
        chunk_size=3,
    )
    result.loss.backward()
    values = [result.mean, result.divergence, result.cross_entropy, result.num_tokens]
    return student.hidden_states_SBH.grad, student.weight_VH.grad, torch.stack(values), result.loss.detach()


def divided(whole_values, rank, *, vocabulary=False, sequence=False, context=False):
    values = dict(whole_values)
    if vocabulary:
        for name in ("weight", "teacher_weight"):
            values[name] = values[name].chunk(2)[rank]
    if sequence or context:
        for name in ("states", "teacher_states"):
            values[name] = values[name].chunk(2)[rank]
    if context:
        for name in ("labels", "mask"):
            values[name] = values[name].chunk(2, dim=1)[rank]
    return values


def every_division():
    """On this rank: gradients and values of each division and each setting, to be put together."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    values, results = whole(), {}
    for index, settings in enumerate(SETTINGS):
        # 20 rows with 11 tokens: the second rank holds one of them.
        for vocab_size in (None, 11):
            for sequence in (False, True):
                part = divided(values, rank, vocabulary=True, sequence=sequence)
                results[index, vocab_size, "sequence" if sequence else "vocabulary"] = compute(
                    part, settings, vocab_size=vocab_size, group=group, sequence_parallel=sequence
                )
            part = divided(values, rank, context=True)
            results[index, vocab_size, "context"] = compute(
                part, settings, vocab_size=vocab_size, cp_group=group
            )
    few = {**values, "labels": values["labels"].clamp(max=7)}
    part = divided(few, rank, vocabulary=True)
    results["empty"] = compute(part, SETTINGS[1], vocab_size=8, group=group)
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(every_division, 2)


@pytest.mark.parametrize("vocab_size", [None, 11])
@pytest.mark.parametrize("division", ["vocabulary", "sequence", "context"])
def test_two_ranks_do_what_one_does(results, division, vocab_size):
    for index, settings in enumerate(SETTINGS):
        states, weight, values, loss = compute(whole(), settings, vocab_size=vocab_size)
        parts = [result[index, vocab_size, division] for result in results]
        for part in parts:
            torch.testing.assert_close(part[2], values, rtol=1e-9, atol=1e-12)
        if division == "context":
            torch.testing.assert_close(torch.cat([part[0] for part in parts]), states)
            torch.testing.assert_close(parts[0][1] + parts[1][1], weight)
            # Unequal shares of the tokens: neither rank's own mean is half of the whole.
            torch.testing.assert_close(parts[0][3] + parts[1][3], loss)
            continue
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), weight)
        if division == "sequence":
            torch.testing.assert_close(torch.cat([part[0] for part in parts]), states)
        else:
            for part in parts:
                torch.testing.assert_close(part[0], states)


def test_a_rank_may_hold_nothing_but_padding(results):
    few = whole()
    few["labels"] = few["labels"].clamp(max=7)
    states, weight, values, _ = compute(few, SETTINGS[1], vocab_size=8)
    parts = [result["empty"] for result in results]
    torch.testing.assert_close(parts[0][2], values)
    torch.testing.assert_close(parts[1][0], states)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), weight)


def test_the_comparison_can_fail(results):
    """Sabotage: half of a vocabulary of tokens on its own, or a mean of each context rank's own tokens."""
    halves = [divided(whole(), rank, context=True) for rank in (0, 1)]
    own = [compute(half, SETTINGS[0])[2][0] for half in halves]
    mean = compute(whole(), SETTINGS[0])[2][0]
    assert abs(float(sum(own) / 2 - mean)) > 1e-3
    half = compute(divided(whole(), 0, vocabulary=True), SETTINGS[0])
    assert not torch.allclose(half[2][0], mean, rtol=1e-3)
