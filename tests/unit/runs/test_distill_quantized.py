"""Distilling a quantised student: who sleeps, what is said, what is resumed and what is exported."""

import shutil

import pytest
import yaml

import tiny
from builds import record_impls
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.inspect import inspect_folder
from torpor.checkpoints.verify import verify_folders
from torpor.errors import ConfigError
from torpor.runs.distill import distill
from torpor.training import distillation
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

VALUES = {
    "teacher": "teacher",
    "student": "student",
    "output": "run",
    "data": "text.txt",
    "sequence_length": 16,
    "global_batch_size": 2,
    "steps": 2,
    "lr": 1e-2,
    "schedule": "constant",
    "weight_decay": 0.0,
    "dtype": "fp32",
    "eval_batches": 0,
    "quantize": "fp8",
    "calib_size": 3,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.write_mimo(folder / "teacher", seed=1)
    tiny.write_mimo(folder / "student", seed=2)
    (folder / "text.txt").write_text("The dormouse sleeps through the winter. " * 100)
    return folder


@pytest.fixture
def work(tmp_path, models, no_process_groups):
    for name in ("teacher", "student"):
        shutil.copytree(models / name, tmp_path / name)
    shutil.copy(models / "text.txt", tmp_path)
    return tmp_path


def read(work, **changes):
    values = {name: value for name, value in (VALUES | changes).items() if value is not None}
    (work / "run.yaml").write_text(yaml.safe_dump(values))
    return read_config(DistillConfig, work / "run.yaml")


def payloads(path):
    folder = open_folder(path)
    return {n: (e.dtype, e.shape, bytes(folder.read_bytes(n))) for n, e in folder.tensors.items()}


def mtp_payloads(path):
    folder = open_folder(path)
    family = find_family(folder.config)
    return {n: value for n, value in payloads(path).items() if family.is_mtp(n, folder.config)}


@pytest.mark.parametrize(("quantize", "calib_size", "dtype"), [("fp8", 3, "F8_E4M3"), ("int8", None, "I8")])
def test_heads_left_out_sleep_and_an_interrupted_run_is_the_uninterrupted_one(
    work, capfd, quantize, calib_size, dtype
):
    changes = {"quantize": quantize, "calib_size": calib_size, "steps": 4, "save_every": 2}
    config = read(work, **changes)
    result = distill(config)
    said = capfd.readouterr().err
    assert "left out of quantisation: they sleep" in said
    assert result.frozen
    assert result.mtp_executions == 0
    assert verify_folders(work / "student", work / "run" / "export").ok
    assert inspect_folder(work / "run" / "export").ok
    assert mtp_payloads(work / "run" / "export") == mtp_payloads(work / "student")
    trunk = open_folder(work / "run" / "export").tensors
    assert trunk["model.layers.0.self_attn.q_proj.weight"].dtype == dtype
    assert trunk["lm_head.weight"].dtype == "F32"

    # What a kill after the first checkpoint leaves.
    shutil.copytree(work / "run", work / "parts", ignore=shutil.ignore_patterns("export*", "*mary.json"))
    shutil.rmtree(work / "parts" / "checkpoints" / "step_00000004")
    (work / "parts" / "checkpoints" / "latest").write_text("step_00000002\n")
    resumed = distill(read(work, output="parts", **changes))
    assert resumed.resumed_from == 2
    assert resumed.last_loss == result.last_loss
    assert payloads(work / "parts" / "export") == payloads(work / "run" / "export")


def test_the_student_is_trained_through_its_quantisers(work):
    """Sabotage of the setting: without it the same run has other losses from the first step on."""
    fp8 = distill(read(work, steps=1))
    int8 = distill(read(work, output="int8", steps=1, quantize="int8", calib_size=None))
    plain = distill(read(work, output="plain", steps=1, quantize=None, calib_size=None))
    assert len({fp8.first_loss, int8.first_loss, plain.first_loss}) == 3


def test_quantised_heads_stay_awake_and_are_trained_and_exported_quantised(work, capfd):
    result = distill(read(work, quantize_mtp=True))
    assert "MTP layers are quantised: they stay awake" in capfd.readouterr().err
    assert not result.frozen
    heads = mtp_payloads(work / "run" / "export")
    assert any(dtype == "F8_E4M3" for dtype, _, _ in heads.values())
    norms = [name for name in heads if name.endswith("layernorm.weight")]
    assert all(heads[name] != mtp_payloads(work / "student")[name] for name in norms), "not trained"
    assert inspect_folder(work / "run" / "export").ok


def test_quantised_heads_sleep_if_asked_and_the_cost_is_said(work, capfd):
    result = distill(read(work, quantize_mtp=True, freeze_mtp=True))
    said = capfd.readouterr().err
    assert "nothing recovers their quantisation error" in said
    assert result.frozen
    assert mtp_payloads(work / "run" / "export") == mtp_payloads(work / "student")
    assert verify_folders(work / "student", work / "run" / "export").ok


def test_heads_left_out_are_trained_if_asked(work, capfd):
    """By a loss of their own: without weight decay nothing else moves them."""
    result = distill(read(work, freeze_mtp=False))
    assert "run and are trained" in capfd.readouterr().err
    assert not result.frozen
    before, after = mtp_payloads(work / "student"), mtp_payloads(work / "run" / "export")
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    assert all(before[name][:2] == after[name][:2] for name in before), "in their source's dtype"


def test_sabotage_with_model_optimizers_own_rule_such_heads_get_no_loss(work, monkeypatch):
    """What is overridden: awake, and with a loss of zeros."""
    monkeypatch.setattr(distillation, "_keep_mtp_loss", lambda model: None)
    distill(read(work, freeze_mtp=False, steps=1))
    assert mtp_payloads(work / "run" / "export") == mtp_payloads(work / "student")


@pytest.mark.parametrize(("quantize", "student"), [("int8", "local"), (None, "transformer_engine")])
def test_a_quantised_student_is_built_of_local_layers(work, monkeypatch, quantize, student):
    built = record_impls(monkeypatch)
    distill(read(work, quantize=quantize, calib_size=None, steps=1))
    assert built == [student, "transformer_engine"]


def test_without_quantisation_heads_sleep_as_ever(work):
    config = read(work, quantize=None, calib_size=None)
    assert config.freeze_mtp is True
    assert read(work, quantize=None, calib_size=None, freeze_mtp=False).freeze_mtp is False


def refuse(work, *parts, **changes):
    with pytest.raises(ConfigError) as caught:
        distill(read(work, **changes))
    for part in parts:
        assert part in str(caught.value)
    assert not (work / "run").exists()


def test_what_cannot_be_quantised_is_refused_before_anything_is_written(work):
    refuse(work, "`quantize`", "int4", "int8", quantize="int4")
    refuse(work, "`calib_size`", "int8", quantize="int8", calib_size=128)
    refuse(work, "`quantize_mtp`", "`quantize`", quantize=None, calib_size=None, quantize_mtp=True)
    refuse(work, "`calib_size`", "`quantize`", quantize=None)
    refuse(work, "nvfp4", "CUDA", quantize="nvfp4")
    shutil.rmtree(work / "student")
    tiny.write_mimo(work / "student", num_mtp=0)
    refuse(work, "`quantize_mtp`", "no MTP layers", quantize_mtp=True)
