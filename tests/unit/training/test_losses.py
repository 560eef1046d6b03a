"""The chunked losses against their definitions in FP64, which hold all logits; and that chunks never do."""

import itertools

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode

from torpor import ConfigError
from torpor.losses import LossSettings, OutputProjection, TopTokens, distillation_loss

S, B, H, V = 5, 2, 6, 11
DIVERGENCES = ["forward_kl", "reverse_kl", "jensen_shannon"]
OPTIONS = [
    {},
    {"temperature": 2.5},
    {"top_k": 4},
    {"top_k": 1},
    {"cross_entropy_weight": 0.3},
    {"cross_entropy_weight": 1.0},
    {"temperature": 0.7, "top_k": 3, "cross_entropy_weight": 0.5},
]
SETTINGS = [
    LossSettings(divergence=divergence, jensen_shannon_beta=0.3, **options)
    for divergence, options in itertools.product(DIVERGENCES, OPTIONS)
]


def identify(settings):
    return "-".join(
        str(v)
        for v in (
            settings.divergence,
            settings.temperature,
            settings.top_k,
            settings.cross_entropy_weight,
        )
    )


def inputs(dtype=torch.float64, seed=0, width=4):
    """Student and teacher of different widths, labels with ignored ones, a mask with gaps and fractions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student = OutputProjection(draw(S, B, H).requires_grad_(), draw(V, H).requires_grad_())
    teacher = OutputProjection(draw(S, B, width), draw(V, width))
    labels_BS = torch.randint(0, V, (B, S), generator=generator)
    labels_BS[0, 1] = -100
    mask_BS = torch.ones(B, S)
    mask_BS[1, 0], mask_BS[1, 2] = 0.0, 0.5
    return student, teacher, labels_BS, mask_BS


def expected(student, teacher, settings, labels_BS=None, mask_BS=None, *, square=True, count_all=False):
    """The loss written down from its definition, in FP64; `square` and `count_all` make wrong ones."""
    z = (student.hidden_states_SBH.double() @ student.weight_VH.double().t()).transpose(0, 1)
    t = (teacher.hidden_states_SBH.double() @ teacher.weight_VH.double().t()).transpose(0, 1)
    rows = student.vocab_size or z.shape[-1]
    z, t = z[..., :rows], t[..., :rows]
    temperature, mix = settings.temperature, settings.cross_entropy_weight
    zs, ts = z, t
    if settings.top_k:
        ids = t.topk(settings.top_k, dim=-1).indices
        zs, ts = z.gather(-1, ids), t.gather(-1, ids)
    q, p = (zs / temperature).softmax(-1), (ts / temperature).softmax(-1)
    if settings.divergence == "forward_kl":
        divergence = (p * (p / q).log()).sum(-1)
    elif settings.divergence == "reverse_kl":
        divergence = (q * (q / p).log()).sum(-1)
    else:
        beta = settings.jensen_shannon_beta
        m = beta * p + (1 - beta) * q
        divergence = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    loss = (1 - mix) * divergence * (temperature**2 if square else 1)
    weights = torch.ones_like(loss) if mask_BS is None else mask_BS.double()
    if labels_BS is not None:
        weights = weights * (labels_BS != -100)
        entropy = -z.log_softmax(-1).gather(-1, labels_BS.clamp(min=0)[..., None])[..., 0]
        loss = loss + mix * entropy
    return (loss * weights).sum() / (weights.numel() if count_all else weights.sum())


def gradients(loss, student):
    return torch.autograd.grad(loss, [student.hidden_states_SBH, student.weight_VH], retain_graph=True)


def agree(actual, wanted, student, **tolerance):
    try:
        torch.testing.assert_close(actual, wanted.to(actual.dtype), **tolerance)
        for left, right in zip(gradients(actual, student), gradients(wanted, student), strict=True):
            torch.testing.assert_close(left, right, **tolerance)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("chunk_size", [3, 100])
@pytest.mark.parametrize("settings", SETTINGS, ids=identify)
def test_value_and_gradients_are_those_of_the_definition(settings, chunk_size):
    student, teacher, labels_BS, mask_BS = inputs()
    result = distillation_loss(
        student, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS, chunk_size=chunk_size
    )
    wanted = expected(student, teacher, settings, labels_BS, mask_BS)
    assert agree(result.loss, wanted, student, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.mean, result.loss.detach())
    assert float(result.num_tokens) == 7.5


@pytest.mark.parametrize("settings", SETTINGS, ids=identify)
def test_gradcheck(settings):
    student, teacher, labels_BS, mask_BS = inputs()

    def loss(states, weight):
        projection = OutputProjection(states, weight)
        return distillation_loss(
            projection, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS, chunk_size=4
        ).loss

    assert torch.autograd.gradcheck(loss, (student.hidden_states_SBH, student.weight_VH), fast_mode=True)


class TestTheComparisonCanFail:
    """Sabotage: losses that are wrong in one way each do not pass the comparison above."""

    @pytest.mark.parametrize("wrong", [{"square": False}, {"count_all": True}])
    def test_wrong_losses(self, wrong):
        settings = LossSettings(temperature=2.0)
        student, teacher, labels_BS, mask_BS = inputs()
        result = distillation_loss(student, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS)
        wanted = expected(student, teacher, settings, labels_BS, mask_BS, **wrong)
        assert not agree(result.loss, wanted, student, rtol=1e-3, atol=1e-6)

    def test_the_other_direction_and_other_settings(self):
        student, teacher, labels_BS, mask_BS = inputs()
        results = [
            distillation_loss(student, teacher, s, labels_BS=labels_BS, loss_mask_BS=mask_BS).loss.item()
            for s in SETTINGS
            if s.cross_entropy_weight < 1 and s.top_k != 1
        ]
        assert len({round(value, 6) for value in results}) == len(results)

    def test_gradcheck_sees_a_wrong_gradient(self, monkeypatch):
        from torpor.training import losses

        right = losses._DIVERGENCES["forward_kl"]

        def wrong(*arguments):
            value, gradient = right(*arguments)
            return value, gradient * 1.01

        monkeypatch.setitem(losses._DIVERGENCES, "forward_kl", wrong)
        student, teacher, _, _ = inputs()
        with pytest.raises(GradcheckError):
            torch.autograd.gradcheck(
                lambda states: distillation_loss(OutputProjection(states, student.weight_VH), teacher).loss,
                (student.hidden_states_SBH,),
            )


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float32, 1e-4, 1e-6), (torch.bfloat16, 2e-2, 2e-3)], ids=str
)
@pytest.mark.parametrize("settings", SETTINGS[::2], ids=identify)
def test_lower_precision_stays_near(settings, dtype, rtol, atol):
    student, teacher, labels_BS, mask_BS = inputs()
    wanted = expected(student, teacher, settings, labels_BS, mask_BS)
    exact = gradients(wanted, student)
    student, teacher, labels_BS, mask_BS = inputs(dtype)
    result = distillation_loss(student, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS)
    assert result.loss.dtype == torch.float32
    if dtype == torch.float32:
        torch.testing.assert_close(result.loss, wanted.float(), rtol=rtol, atol=atol)
    for left, right in zip(gradients(result.loss, student), exact, strict=True):
        assert left.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(left, right.float(), rtol=rtol, atol=atol)
        elif settings.top_k is None:  # rounded logits have other likeliest tokens
            assert (left - right).norm() < 0.03 * right.norm()


def test_a_bf16_gradient_is_not_scaled_by_a_rounded_factor():
    student, teacher, _, _ = inputs(torch.bfloat16)
    loss = distillation_loss(student, teacher).loss
    whole = gradients(loss * 3.001953125, student)  # between two numbers of BF16
    for left, right in zip(whole, inputs_gradients_fp32(3.001953125), strict=True):
        assert (left.float() - right).norm() < 0.004 * right.norm()


def inputs_gradients_fp32(factor):
    student, teacher, _, _ = inputs(torch.bfloat16)
    return [g.float() * factor for g in gradients(distillation_loss(student, teacher).loss, student)]


def test_rows_of_padding_are_no_tokens():
    """A weight with rows that stand for no token gives what the weight without them gives."""
    student, teacher, labels_BS, mask_BS = inputs()
    labels_BS = labels_BS.clamp(max=8)
    for settings in SETTINGS:
        padded = [
            OutputProjection(p.hidden_states_SBH, p.weight_VH, vocab_size=9) for p in (student, teacher)
        ]
        result = distillation_loss(*padded, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS)
        wanted = expected(*padded, settings, labels_BS, mask_BS)
        assert agree(result.loss, wanted, student, rtol=1e-10, atol=1e-12)
        assert not gradients(result.loss, student)[1][9:].any()


def test_tied_weights_get_both_gradients():
    _, teacher, labels_BS, _ = inputs(width=H)
    weight_VH = torch.randn(V, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(compute):
        tied_VH = weight_VH.clone().requires_grad_()
        hidden_SBH = torch.nn.functional.embedding(labels_BS.clamp(min=0).t(), tied_VH).tanh()
        compute(OutputProjection(hidden_SBH, tied_VH)).backward()
        return tied_VH.grad

    left = gradient(lambda student: distillation_loss(student, teacher).loss)
    right = gradient(lambda student: expected(student, teacher, LossSettings()))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def test_what_needs_no_gradient_gets_none():
    student, teacher, _, _ = inputs()
    frozen = OutputProjection(student.hidden_states_SBH, student.weight_VH.detach())
    distillation_loss(frozen, teacher).loss.backward()
    assert student.weight_VH.grad is None
    wanted = gradients(expected(student, teacher, LossSettings()), student)[0]
    torch.testing.assert_close(student.hidden_states_SBH.grad, wanted)
    with torch.no_grad():
        assert not distillation_loss(student, teacher).loss.requires_grad


def test_a_batch_without_tokens_costs_nothing():
    student, teacher, _, _ = inputs()
    result = distillation_loss(student, teacher, loss_mask_BS=torch.zeros(B, S))
    assert result.loss == 0
    assert not any(gradient.any() for gradient in gradients(result.loss, student))


def test_a_teachers_likeliest_tokens_stand_for_its_hidden_states():
    student, teacher, labels_BS, mask_BS = inputs()
    logits_SBV = teacher.hidden_states_SBH @ teacher.weight_VH.t()
    logits_SBK, ids_SBK = logits_SBV.topk(6, dim=-1)
    stored = TopTokens(ids_SBK.int(), logits_SBK)
    settings = LossSettings(top_k=4, temperature=2.0, cross_entropy_weight=0.2)
    results = [
        distillation_loss(student, given, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS)
        for given in (teacher, stored)
    ]
    assert agree(results[0].loss, results[1].loss, student, rtol=0, atol=0)


@pytest.mark.parametrize("label", [-1, V, V + 5])
def test_labels_outside_the_vocabulary_are_not_trained_on(label):
    """Nothing plausible comes of them: NaN, or what it is without them where the mask leaves them out."""
    student, teacher, labels_BS, mask_BS = inputs()
    settings = LossSettings(cross_entropy_weight=0.3)
    wanted = distillation_loss(student, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS)
    for place, is_left_out in (((1, 0), True), ((1, 1), False)):
        wrong_BS = labels_BS.clone()
        wrong_BS[place] = label
        result = distillation_loss(student, teacher, settings, labels_BS=wrong_BS, loss_mask_BS=mask_BS)
        assert agree(result.loss, wanted.loss, student, rtol=0, atol=0) == is_left_out
        assert result.loss.isnan() != is_left_out


@pytest.mark.parametrize("token", [-1, V])
def test_a_teachers_tokens_outside_the_vocabulary_are_not_trained_on(token):
    """Only among those that are compared, and only where the mask counts them."""
    student, teacher, _, mask_BS = inputs()
    logits_SBK, ids_SBK = (teacher.hidden_states_SBH @ teacher.weight_VH.t()).topk(3, dim=-1)
    for place, is_nan in (((0, 0, 0), True), ((0, 0, 2), False), ((0, 1, 0), False)):
        wrong_SBK = ids_SBK.clone()
        wrong_SBK[place] = token
        stored = TopTokens(wrong_SBK, logits_SBK)
        result = distillation_loss(student, stored, LossSettings(top_k=2), loss_mask_BS=mask_BS)
        assert result.loss.isnan() == is_nan


class _LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("settings", SETTINGS, ids=identify)
def test_full_logits_never_exist(settings):
    tokens, vocab = 64, 50
    student = OutputProjection(
        torch.randn(tokens, 1, 3).requires_grad_(), torch.randn(vocab, 3).requires_grad_()
    )
    teacher = OutputProjection(torch.randn(tokens, 1, 3), torch.randn(vocab, 3))
    labels_BS = torch.randint(0, vocab, (1, tokens))
    for size, is_whole in ((4, False), (tokens, True)):  # one chunk of all tokens: the check can fail
        with _LargestTensor() as largest:
            result = distillation_loss(student, teacher, settings, labels_BS=labels_BS, chunk_size=size)
            result.loss.backward()
        assert (largest.numel >= tokens * vocab) is is_whole
    assert largest.numel == tokens * vocab


def test_the_default_chunk_keeps_to_its_memory():
    from torpor.training import vocabulary

    def size(rows):
        return vocabulary.chunk_size(OutputProjection(torch.empty(1), torch.empty(rows, 1, device="meta")))

    assert size(131072) == 512
    assert size(2**40) == 1


def test_agrees_with_the_loss_of_model_optimizer(megatron_rank):
    from types import SimpleNamespace

    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss, TopKLogitsKLLoss

    student, teacher, _, _ = inputs(torch.float32)
    logits = [(p.hidden_states_SBH @ p.weight_VH.t(), None) for p in (student, teacher)]
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False)
    theirs = [
        (LossSettings(temperature=2.0), LogitsKLLoss(config, temperature=2.0)),
        (LossSettings("reverse_kl"), LogitsKLLoss(config, reverse=True)),
        (LossSettings(top_k=3, temperature=2.0), TopKLogitsKLLoss(config, temperature=2.0, top_k=3)),
    ]
    for settings, criterion in theirs:
        losses_BS, _, _ = criterion(*logits)
        ours = distillation_loss(student, teacher, settings)
        torch.testing.assert_close(ours.divergence, losses_BS.mean().detach())


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"divergence": "kl"}, "known are forward_kl"),
            ({"temperature": 0.0}, "greater than 0"),
            ({"temperature": float("nan")}, "greater than 0"),
            ({"jensen_shannon_beta": 1.0}, "between 0 and 1"),
            ({"top_k": 0}, "at least 1"),
            ({"cross_entropy_weight": 1.1}, "between 0 and 1"),
        ],
    )
    def test_settings(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            LossSettings(**settings)

    def test_a_teacher_of_another_vocabulary(self):
        student, teacher, _, _ = inputs()
        other = OutputProjection(teacher.hidden_states_SBH, teacher.weight_VH[:-1])
        with pytest.raises(ConfigError, match="11 rows on each of 1 ranks"):
            distillation_loss(student, other)

    def test_a_teacher_of_other_tokens(self):
        student, teacher, _, _ = inputs()
        other = OutputProjection(teacher.hidden_states_SBH[1:], teacher.weight_VH)
        with pytest.raises(ConfigError, match="not of the same tokens"):
            distillation_loss(student, other)

    def test_a_teacher_of_more_sequences(self):
        """Its first tokens would be compared with the student's, and they are others."""
        student, teacher, _, _ = inputs()
        states = torch.cat([teacher.hidden_states_SBH, teacher.hidden_states_SBH], dim=1)
        with pytest.raises(ConfigError, match="not of the same tokens"):
            distillation_loss(student, OutputProjection(states, teacher.weight_VH))

    @pytest.mark.parametrize(
        "shapes",
        [((B, S, 2), (B, S, 2)), ((S + 1, B, 2), (S + 1, B, 2)), ((S, B, 3), (S, B, 2))],
        ids=["rows-first", "more-tokens", "different"],
    )
    def test_top_tokens_of_another_shape(self, shapes):
        stored = TopTokens(torch.zeros(shapes[0], dtype=torch.int32), torch.zeros(shapes[1]))
        with pytest.raises(ConfigError, match="of the same tokens"):
            distillation_loss(inputs()[0], stored, LossSettings(top_k=2))

    @pytest.mark.parametrize("chunk_size", [0, -1])
    def test_chunks_without_tokens(self, chunk_size):
        student, teacher, _, _ = inputs()
        with pytest.raises(ConfigError, match="at least 1"):
            distillation_loss(student, teacher, chunk_size=chunk_size)

    def test_labels_and_masks_of_another_shape(self):
        student, teacher, labels_BS, mask_BS = inputs()
        with pytest.raises(ConfigError, match="labels_BS"):
            distillation_loss(student, teacher, labels_BS=labels_BS.t())
        with pytest.raises(ConfigError, match="loss_mask_BS"):
            distillation_loss(student, teacher, loss_mask_BS=mask_BS[:, 1:])

    def test_a_cross_entropy_without_labels(self):
        student, teacher, _, _ = inputs()
        with pytest.raises(ConfigError, match="there are no labels"):
            distillation_loss(student, teacher, LossSettings(cross_entropy_weight=0.5))

    def test_more_top_tokens_than_there_are(self):
        student, teacher, _, _ = inputs()
        with pytest.raises(ConfigError, match="has 11 tokens"):
            distillation_loss(student, teacher, LossSettings(top_k=12))
        stored = TopTokens(torch.zeros(S, B, 2, dtype=torch.int32), torch.zeros(S, B, 2))
        with pytest.raises(ConfigError, match="2 of the teacher's tokens"):
            distillation_loss(student, stored, LossSettings(top_k=3))
        with pytest.raises(ConfigError, match="`top_k` is None"):
            distillation_loss(student, stored)
