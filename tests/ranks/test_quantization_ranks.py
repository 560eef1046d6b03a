"""A quantised student over several ranks: the same scales, the same export, the same answer everywhere."""

import yaml

import tiny
from ranks.launch import run_ranks
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.verify import verify_folders
from torpor.megatron import checkpointing, parallel
from torpor.megatron.parallel import Layout


def quantised(source, layout, *, with_mtp=False):
    import torch

    from torpor.megatron.models import build_model
    from torpor.megatron.quantization import fake_quantize
    from torpor.megatron.weights import load_weights

    parallel.initialize(layout, seed=1)
    chunks = build_model(source.config, layout, torch.float32)
    load_weights(chunks, source)
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

    fake_quantize(chunks[0], "fp8", with_mtp=with_mtp, calibrate=calibrate)
    return chunks


def export_at(source, layout, folder):
    import torch

    from torpor.megatron.weights import export_folder

    checkpoint = checkpointing.save_checkpoint(folder / "checkpoints", 1, quantised(source, layout))
    if torch.distributed.get_rank() == 0:
        export_folder(checkpoint, source, folder / "export", quantize="fp8")
    torch.distributed.barrier()
    parallel.shutdown()


def distil(path):
    from torpor.runs.distill import distill
    from torpor.training.config import DistillConfig
    from torpor.training.config_file import read_config

    return distill(read_config(DistillConfig, path))


def check(folder):
    from torpor.modelopt import should_freeze_mtp

    source = open_folder(folder / "student")
    export_at(source, Layout(), folder / "replicated")
    export_at(source, Layout(tensor=2, sequence_parallel=True), folder / "split")
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
