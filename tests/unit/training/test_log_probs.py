"""Chunked log-probabilities and entropies against plain log_softmax, and without ever holding all logits."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torpor.megatron.hidden_states import OutputProjection
from torpor.training import vocabulary
from torpor.training.log_probs import log_probs_and_entropy

N, H, V = 13, 6, 17
CHUNKS = pytest.mark.parametrize("chunk_size", [1, 5, 13, 100])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Tokens in a chunk; a function that says how many."""

    def compute_at_once(num_tokens):
        monkeypatch.setattr(vocabulary, "chunk_size", lambda projection: num_tokens)

    compute_at_once(5)
    return compute_at_once


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, 1, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def chunked(hidden, weight, targets, temperature=1.0):
    return log_probs_and_entropy(OutputProjection(hidden, weight), targets, temperature=temperature)


def plain(hidden, weight, targets, temperature=1.0):
    """What is computed, from whole logits."""
    logits = hidden[:, 0] @ weight.t()
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def results(function, dtype):
    """Values and gradients, with a different incoming gradient for each."""
    hidden, weight, targets = inputs(dtype)
    values = function(hidden, weight, targets, temperature=0.7)
    factors = torch.linspace(-1, 2, N).to(values[0].dtype)
    sum((value * factors.roll(i)).sum() for i, value in enumerate(values)).backward()
    return [*(value.detach() for value in values), hidden.grad, weight.grad]


@CHUNKS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_values_and_gradients_are_those_of_log_softmax(dtype, tolerance, chunk_size, small_chunks):
    """Whatever the chunk: in FP64 to 13 digits; BF16 differs by the rounding of logits' gradients only."""
    small_chunks(chunk_size)
    found, expected = results(chunked, dtype), results(plain, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_gradcheck(wanted):
    """Numerical derivatives agree, of log-probabilities, of entropies and of both."""
    hidden, weight, targets = inputs()

    def function(hidden, weight):
        values = chunked(hidden, weight, targets, temperature=0.7)
        return tuple(value for value, is_wanted in zip(values, wanted, strict=True) if is_wanted)

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_gradcheck_notices_a_wrong_derivative(monkeypatch):
    """A backward that computes other logits than forward did is caught."""
    hidden, weight, targets = inputs()
    correct = vocabulary.log_softmax

    def wrong_in_backward(logits, group, temperature):
        is_backward = sys._getframe(1).f_code.co_name == "backward"
        return correct(logits * (1.01 if is_backward else 1), group, temperature)

    def function(hidden, weight):
        return chunked(hidden, weight, targets)

    assert torch.autograd.gradcheck(function, (hidden, weight), raise_exception=False)
    monkeypatch.setattr(vocabulary, "log_softmax", wrong_in_backward)
    assert not torch.autograd.gradcheck(function, (hidden, weight), raise_exception=False)


@pytest.mark.parametrize("frozen", [0, 1], ids=["hidden-states", "output-weight"])
def test_what_is_frozen_gets_no_gradient(frozen):
    """An output layer outside the trained adapters, or a first stage without trainable weights."""
    hidden, weight, targets = inputs()
    (hidden, weight)[frozen].requires_grad_(False)
    chunked(hidden, weight, targets)[0].sum().backward()
    assert [hidden.grad is None, weight.grad is None] == [frozen == 0, frozen == 1]


@pytest.mark.parametrize(("vocab_size", "token"), [(None, -1), (None, V), (V - 2, V - 2)])
def test_ids_outside_the_vocabulary_have_no_log_probability(vocab_size, token):
    """Not one that looks likely, as a divided embedding takes any id; the others have theirs."""
    hidden, weight, targets = inputs()
    projection = OutputProjection(hidden, weight, vocab_size=vocab_size)
    targets = targets.clamp(max=V - 3)
    before, _ = log_probs_and_entropy(projection, targets)
    targets[4] = token
    found, entropy = log_probs_and_entropy(projection, targets)
    assert found.isnan().nonzero().flatten().tolist() == [4]
    assert torch.equal(found.nan_to_num(before[4].item()), before)
    assert entropy.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_all_logits_never_exist(small_chunks):
    """The largest tensor of forward and backward is a chunk's logits, and none of them is kept between."""
    small_chunks(8)
    hidden = torch.randn(64, 1, 4, requires_grad=True)
    weight, targets = torch.randn(100, 4, requires_grad=True), torch.arange(64)
    saved = []
    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            log_probs, entropy = chunked(hidden, weight, targets)
        (log_probs + entropy).sum().backward()
    assert largest.elements == 8 * 100
    assert sum(saved) == hidden.numel() + weight.numel() + 2 * 64
    with LargestTensor() as largest:
        plain(hidden, weight, targets)
    assert largest.elements == 64 * 100
