"""A quantised student over several ranks: the same scales, the same export, the same answer everywhere."""

import yaml

import tiny
from ranks.launch import run_ranks
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron import checkpointing, parallel
from torpor.megatron.parallel import Layout


def quantised(source, layout, name="fp8", *, with_mtp=False, times=1.0):
    import torch

    from torpor.megatron.models import build_model
    from torpor.megatron.quantization import fake_quantize
    from torpor.megatron.weights import load_weights

    parallel.initialize(layout, seed=1)
    chunks = build_model(source.config, layout, torch.float32)
    load_weights(chunks, source)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.mul_(times)
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))

    def calibrate():
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(_, model):
            return model(ids, torch.arange(16).expand(2, -1), None), lambda output, non_loss_data: None

        with torch.no_grad():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=None,
                model=chunks,
                num_microbatches=1,
                seq_length=16,
                micro_batch_size=2,
                forward_only=True,
                collect_non_loss_data=True,
            )

    fake_quantize(chunks[0], name, with_mtp=with_mtp, calibrate=calibrate)
    return chunks


def export_at(source, layout, folder, name="fp8"):
    import torch

    from torpor.megatron.weights import export_folder

    checkpoint = checkpointing.save_checkpoint(folder / "checkpoints", 1, quantised(source, layout, name))
    if torch.distributed.get_rank() == 0:
        export_folder(checkpoint, source, folder / "export", quantize=name)
    torch.distributed.barrier()
    parallel.shutdown()
    return checkpoint


def scales_at(source, layout, *, times=1.0, checkpoint=None):
    """Scales of this rank's part of an INT8 model, in bytes: calibrated, or calibrated and then loaded."""
    chunks = quantised(source, layout, "int8", times=times)
    if checkpoint is not None:
        checkpointing.load_checkpoint(checkpoint, chunks)
    state = chunks[0].state_dict()
    parallel.shutdown()
    return {name: scale.numpy().tobytes() for name, scale in state.items() if name.endswith("_amax")}


def check_int8(folder):
    """Export at every layout, and load what each of them saved at every other."""
    lost = []
    for family, layouts in INT8_LAYOUTS.items():
        source = open_folder(folder / family)
        saved = {
            name: export_at(source, at, folder / f"{family}-{name}", "int8") for name, at in layouts.items()
        }
        for name, at in layouts.items():
            calibrated = scales_at(source, at)
            assert calibrated != scales_at(source, at, times=2.0), (
                "scales that load are those that were there"
            )
            for other, checkpoint in saved.items():
                if scales_at(source, at, times=2.0, checkpoint=checkpoint) != calibrated:
                    lost.append((family, other, name))
    return lost


def undivided(folder):
    """Export at two ranks twice, the second time with scales as Model-Optimizer leaves them, rank by rank."""
    from torpor.megatron import quantization

    source = open_folder(folder / "mimo")
    export_at(source, SPLIT, folder / "divided", "int8")
    quantization._divide_scales = lambda chunk: None
    export_at(source, SPLIT, folder / "undivided", "int8")


def distil(path):
    from torpor.runs.distill import distill
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    return distill(read_config(DistillConfig, path))


SPLIT = Layout(tensor=2, sequence_parallel=True)
INT8_LAYOUTS = {
    "mimo": {"replicated": Layout(), "split": SPLIT, "stages": Layout(pipeline=2)},
    "nemotron_h": {"replicated": Layout(), "split": SPLIT, "experts": Layout(expert=2)},
}


def check(folder):
    from torpor.modelopt import should_freeze_mtp

    source = open_folder(folder / "student")
    export_at(source, Layout(), folder / "replicated")
    export_at(source, SPLIT, folder / "split")
    answers = []
    for with_mtp in (False, True):
        answers.append(should_freeze_mtp(quantised(source, Layout(pipeline=2), with_mtp=with_mtp)))
        parallel.shutdown()
    return answers, distil(folder / "stages.yaml"), distil(folder / "context.yaml")


def test_two_ranks(tmp_path):
    """One start: TP2 exports what replicas do, both stages know of quantised heads, whole runs."""
    import torch

    tiny.write_mimo(tmp_path / "student", seed=2)
    tiny.write_mimo(tmp_path / "teacher", seed=1)
    (tmp_path / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    settings = {"teacher": "teacher", "student": "student", "data": "text.txt"}
    settings |= {"sequence_length": 16, "global_batch_size": 2, "steps": 2, "dtype": "fp32"}
    settings |= {"eval_batches": 0, "quantize": "fp8", "calib_size": 2}
    for name, layout in (("stages", "pipeline_parallel"), ("context", "context_parallel")):
        values = settings | {"output": name, layout: 2}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    first, last = run_ranks(check, 2, tmp_path)
    assert first == last
    # Only the last stage holds the MTP layer.
    assert first[0] == [True, False]
    for result in first[1:]:
        assert result.mtp_executions == 0
        assert verify_folders(tmp_path / "student", result.export).ok
    torch.testing.assert_close(first[1].first_loss, first[2].first_loss, rtol=1e-3, atol=0)

    split, whole = (open_folder(tmp_path / name / "export") for name in ("split", "replicated"))
    assert split.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        if name.endswith("input_scale"):  # sums of split layers round in another order
            torch.testing.assert_close(split.read_tensor(name), whole.read_tensor(name))
        else:
            assert split.sha256(name) == whole.sha256(name), name


def test_int8_scales_follow_their_rows_to_any_layout(tmp_path):
    """Gated MLPs, attention, Mamba's parts, experts: divided, joined, and exported as the same bytes."""
    tiny.write_mimo(tmp_path / "mimo")
    tiny.write_nemotron_h(tmp_path / "nemotron_h")
    for lost in run_ranks(check_int8, 2, tmp_path):
        assert not lost
    for family, layouts in INT8_LAYOUTS.items():
        whole, *others = (open_folder(tmp_path / f"{family}-{name}" / "export") for name in layouts)
        assert any(entry.dtype == "I8" for entry in whole.tensors.values())
        for other in others:
            assert other.tensors.keys() == whole.tensors.keys()
            assert [n for n in whole.tensors if other.sha256(n) != whole.sha256(n)] == []


def test_sabotage_int8_scales_that_stay_with_their_rank_end_at_other_rows(tmp_path):
    tiny.write_mimo(tmp_path / "mimo")
    run_ranks(undivided, 2, tmp_path)
    right, wrong = (open_folder(tmp_path / name / "export") for name in ("divided", "undivided"))
    assert right.tensors.keys() == wrong.tensors.keys()
    differing = {name for name in right.tensors if right.sha256(name) != wrong.sha256(name)}
    assert {name.split(".")[-2] for name in differing} == {"gate_proj", "up_proj"}
