"""Corners of several ranks, each with what goes wrong without the care that is taken."""

import dataclasses
import itertools

import pytest
import torch

from matrix import corners
from matrix.cases import (
    GPT,
    GPT_LEARNED,
    GPT_MOE,
    GPT_TIED,
    HYBRID_MAMBA_MTP,
    HYBRID_MOE,
    HYBRID_TIED,
    LAYOUTS,
    OPTIMIZERS,
    Case,
)
from matrix.training import PACKED_ENDS, run_cases
from matrix.wrong_bypasses import freeze_without_waiting_for_weights, freeze_without_zero_gradients
from ranks.launch import RankFailedError, run_ranks
from tiny_models import SEQUENCE, differing, same_bytes
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron.checkpointing import find_latest
from torpor.megatron.weights import export_folder

LAYOUT = {layout.name: layout for layout in LAYOUTS}
OPTIMIZER = {choice.name: choice for choice in OPTIMIZERS}

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


class TestAnEmbeddingCopyThatNobodyReads:
    """Untied weights on two stages: MTP's copy of the embedding on the last stage goes on being reduced."""

    def test_neither_stalls_overlapped_reduction_nor_drifts(self):
        """It gets zeros for a gradient, the sum with the first stage's, and so the same step."""
        choices = [OPTIMIZER["plain-overlap"], OPTIMIZER["distributed-overlap"]]
        cases = [Case(GPT, LAYOUT["pp2"], optimizer=choice) for choice in choices]
        assert run_ranks(run_cases, 2, cases) == [{str(case): [] for case in cases}] * 2

    def test_without_a_gradient_overlapped_reduction_is_stuck(self):
        """The bucket is never complete, which Megatron asserts or waits for."""
        case = Case(GPT, LAYOUT["pp2"], optimizer=OPTIMIZER["plain-overlap"])
        with pytest.raises(RankFailedError, match=r"grad_ready_counts|has not been issued|did not finish"):
            run_ranks(run_cases, 2, [case], freeze_without_zero_gradients, timeout=60)


def test_a_tied_last_stage_waits_for_gathered_weights():
    """With overlap_param_gather the embedding's own forward fetches its weights, and MTP alone calls it."""
    cases = [
        Case(model, LAYOUT["pp2-dp2"], optimizer=OPTIMIZER["distributed-overlap-gather"])
        for model in (GPT_TIED, HYBRID_TIED)
    ]
    for found in run_ranks(run_cases, 4, cases):
        assert found == {str(case): [] for case in cases}
    *_, last = run_ranks(run_cases, 4, cases, freeze_without_waiting_for_weights)
    for case in cases:
        assert any(entry.startswith("losses") for entry in last[str(case)])


@pytest.mark.parametrize("layout", ["pp2", "pp4"])
def test_tied_models_on_several_stages_are_saved_and_loaded(tmp_path, layout):
    """An ordinary one has an output weight that nothing reads, beside which Megatron cannot save it."""
    cases = [Case(GPT_TIED, LAYOUT[layout]), Case(HYBRID_TIED, LAYOUT[layout])]
    for ranks in zip(
        *run_ranks(corners.save_and_load_tied, LAYOUT[layout].world, cases, LAYOUT["dp2"], tmp_path),
        strict=True,
    ):
        check_saved_and_loaded(*ranks)


def check_saved_and_loaded(*ranks):
    """Judge what the ranks saw of one model."""
    *others, last = ranks
    assert last["ordinary"] == "cannot be saved"
    assert all(seen["ordinary"] == "saves" for seen in others)
    for seen in ranks:
        assert seen["same names asleep"]
        assert seen["same names awake"]
        assert seen["same parameters"]
        assert seen["state differs awake"] == []
        assert seen["differing after load_state_dict"] == []
        assert seen["differing after load_checkpoint"] == []
        # On one stage the same sums are taken in another order.
        for way in ("logits plain", "logits torpor"):
            assert torch.allclose(seen[way], last["logits asleep"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pipeline", [2, 4])
def test_tied_folders_are_loaded_trained_and_exported(tmp_path, megatron_rank, pipeline):
    """From a Hugging Face folder and back: MTP to the byte, the trunk changed, one embedding."""
    source = corners.write_tied_folder(tmp_path / "source")
    retained = run_ranks(corners.distil_tied_folder, pipeline, source, tmp_path / "run", pipeline)
    assert retained[:-1] == [0] * (pipeline - 1)
    assert retained[-1] > 0
    export_folder(find_latest(tmp_path / "run"), open_folder(source), tmp_path / "export")
    result = verify_folders(source, tmp_path / "export").to_json()
    assert result["ok"]
    assert result["mtp"]["identical"] == result["mtp"]["tensors"] > 0
    assert result["trunk"]["changed"] == result["trunk"]["tensors"]


class TestContextParallel:
    """Asleep on two context parallel ranks, a model is the one that it is on one rank."""

    MODELS = (GPT, GPT_TIED, GPT_LEARNED, HYBRID_MOE, HYBRID_MAMBA_MTP)
    RECOMPUTE = ("none", "full", "selective", "full", "none")

    def cases(self, *layouts):
        models = list(zip(self.MODELS, self.RECOMPUTE, strict=True))
        return [Case(model, LAYOUT[layout], recompute) for layout in layouts for model, recompute in models]

    def test_equals_one_rank(self):
        """With one sample a row and with packed ones.

        Sums over tokens are taken in another order, in FP32: 1e-5 relative to the largest value. Losses of
        later steps may be ten times that apart, after Adam has divided small gradients by their own size.
        """
        (whole,) = run_ranks(corners.train_asleep, 1, self.cases("single", "packed"))
        divided = self.cases("cp2", "cp2-packed")
        firsts, seconds = run_ranks(corners.train_asleep_and_in_a_row, 2, divided, Case(GPT, LAYOUT["cp2"]))
        # Ranks that take their chunks in a row look at the wrong keys.
        in_a_row = torch.cat([results.pop()["logits"][0] for results in (firsts, seconds)], 1)
        with pytest.raises(AssertionError):
            self.assert_close(in_a_row, whole[0]["logits"][0], 1e-2)
        for case, expected, first, second in zip(divided, whole, firsts, seconds, strict=True):
            for name in ("logits", "losses"):
                for step, row in enumerate(expected[name]):
                    got = self.in_order(first[name][step], second[name][step], case.layout)
                    later = name == "losses" and step >= case.layout.num_microbatches
                    self.assert_close(got, row, 1e-4 if later else 1e-5)
            assert first["grads"].keys() == expected["grads"].keys()
            for name, gradient in expected["grads"].items():
                self.assert_close(first["grads"][name], gradient, 1e-5)
                assert same_bytes(first["grads"][name], second["grads"][name])
            assert first["grad_norms"] == second["grad_norms"]
            assert first["grad_norms"][0] == pytest.approx(expected["grad_norms"][0], rel=1e-5)
            assert differing(first["weights"], second["weights"]) == []

    def in_order(self, first, second, layout):
        """Put the chunks of two ranks back in order: 0 and 3 on the first, 1 and 2 on the second."""
        ends = PACKED_ENDS if layout.packed else (0, SEQUENCE)
        lengths = [(end - begin) // 2 for begin, end in itertools.pairwise(ends)]
        row = []
        for early, late in zip(first.split(lengths, 1), second.split(lengths, 1), strict=True):
            (a, d), (b, c) = early.chunk(2, 1), late.chunk(2, 1)
            row += [a, b, c, d]
        return torch.cat(row, 1)

    def assert_close(self, got, expected, tolerance):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()


class TestExperts:
    """MoE layers inside MTP."""

    @pytest.mark.parametrize("layout", ["single", "pp2"])
    def test_expert_biases_of_mtp_do_not_move(self, layout):
        """They are buffers, which Megatron moves outside autograd; the trunk's do move."""
        cases = [Case(GPT_MOE, LAYOUT[layout]), Case(HYBRID_MOE, LAYOUT[layout])]
        ranks = run_ranks(corners.move_expert_biases, LAYOUT[layout].world, cases)
        for founds in zip(*ranks, strict=True):
            moved = {name: far for found in founds for name, far in found.items()}
            assert {far > 0 for name, far in moved.items() if name.startswith("decoder.")} == {True}
            assert {far for name, far in moved.items() if name.startswith("mtp.")} == {0.0}

    @pytest.mark.parametrize("layout", ["single", "pp2"])
    def test_the_reported_loss_is_a_mean_over_layers_that_ran(self, layout):
        """The same number as for a model without MTP, on every stage and without a hang."""
        cases = [Case(GPT_MOE, LAYOUT[layout]), Case(HYBRID_MOE, LAYOUT[layout])]
        for found in run_ranks(corners.report_aux_losses, LAYOUT[layout].world, cases):
            for asleep, without in found:
                assert asleep == without > 0

    def test_without_care_the_reported_loss_is_too_small(self):
        """Megatron divides by the MTP layers too."""
        case = Case(GPT_MOE, LAYOUT["single"])
        (((asleep, without),),) = run_ranks(corners.report_aux_losses, 1, [case], True)
        assert asleep == pytest.approx(without * 4 / 5)


def test_batched_interleaving_is_wrong_on_two_stages_whatever_one_does(tmp_path):
    """What freeze_mtp refuses is Megatron's own fault: without MTP too the losses are wrong."""
    even = dataclasses.replace(LAYOUT["pp2"], num_microbatches=LAYOUT["pp2-vpp2"].num_microbatches)
    cases = [Case(GPT, layout) for layout in (even, LAYOUT["pp2-vpp2"], LAYOUT["pp2-vpp2-batched"])]
    *_, (plain, overlapped, batched) = run_ranks(corners.losses_without_mtp, 2, cases, tmp_path)
    assert all(torch.allclose(*pair, rtol=0, atol=1e-5) for pair in zip(plain, overlapped, strict=True))
    assert not all(torch.allclose(*pair, rtol=0, atol=1e-2) for pair in zip(plain, batched, strict=True))
