"""What `test_divergence_kernels` runs in a process of its own: the kernels, interpreted."""

import importlib

import pytest
import torch
from test_losses import SETTINGS, agree, expected, identify, inputs

from torpor.losses import LossSettings, distillation_loss
from torpor.training import losses

WHOLE = [settings for settings in SETTINGS if settings.top_k is None]


@pytest.fixture
def by_kernels(monkeypatch):
    """Have CPU tensors go through the kernels, four columns at a time."""
    kernels = importlib.import_module("torpor.training.divergence_kernels")
    monkeypatch.setattr(kernels, "_BLOCK", 4)
    monkeypatch.setattr(losses, "_kernels", lambda *_: kernels)
    return kernels


@pytest.mark.parametrize("settings", WHOLE, ids=identify)
def test_value_and_gradients_are_those_of_the_definition(by_kernels, settings):
    student, teacher, labels_BS, mask_BS = inputs(torch.float32)
    result = distillation_loss(
        student, teacher, settings, labels_BS=labels_BS, loss_mask_BS=mask_BS, chunk_size=3
    )
    wanted = expected(student, teacher, settings, labels_BS, mask_BS)
    assert agree(result.loss, wanted, student, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", ["factor", "log_z", "labels"])
def test_the_comparison_sees_wrong_kernels(by_kernels, monkeypatch, wrong):
    if wrong == "factor":
        gradient = by_kernels.Gradient
        monkeypatch.setattr(by_kernels, "Gradient", lambda factor, labels: gradient(1.01 * factor, labels))
    elif wrong == "log_z":
        log_sum_exp = by_kernels.log_sum_exp
        monkeypatch.setattr(by_kernels, "log_sum_exp", lambda *args: log_sum_exp(*args) + 0.01)
    else:
        labels = by_kernels.Labels
        monkeypatch.setattr(by_kernels, "Labels", lambda columns_N, *args: labels(columns_N + 1, *args))
    student, teacher, labels_BS, _ = inputs(torch.float32)
    settings = LossSettings(cross_entropy_weight=0.3)
    result = distillation_loss(student, teacher, settings, labels_BS=labels_BS)
    wanted = expected(student, teacher, settings, labels_BS)
    assert not agree(result.loss, wanted, student, rtol=2e-5, atol=1e-6)


def test_a_row_of_large_logits_and_one_of_masked_ones(by_kernels):
    """The normaliser does not overflow, and columns of -inf that come first spoil nothing."""
    logits = torch.tensor([[200.0, 199, -300, 5, 201, 0], [-torch.inf] * 4 + [1.0, 2.0]])
    torch.testing.assert_close(by_kernels.log_sum_exp(logits), logits.logsumexp(-1))


def test_ranks_that_hold_padding_alone_have_no_columns(by_kernels):
    assert by_kernels.log_sum_exp(torch.empty(2, 0)).tolist() == [-torch.inf] * 2
