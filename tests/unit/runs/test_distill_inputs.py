"""Every kind of bad input ends a distillation before its first step and leaves nothing behind."""

import errno
import json
import shutil

import pytest
import yaml

import tiny
from raw_folders import write_folder
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, ConfigError, TorporError, UnsupportedModelError
from torpor.megatron import capabilities
from torpor.megatron.parallel import Layout
from torpor.runs import distill as distill_module
from torpor.runs.distill import distill
from torpor.runs.inputs import folder_digest, open_model
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

TEXT = "The dormouse sleeps through the winter. " * 100
VALUES = {
    "teacher": "teacher",
    "student": "student",
    "output": "new/run",
    "data": "text.txt",
    "sequence_length": 16,
    "global_batch_size": 2,
    "steps": 2,
    "dtype": "fp32",
    "eval_batches": 0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.write_nemotron_h(folder / "teacher", seed=1)
    tiny.write_nemotron_h(folder / "student", seed=2)
    return folder


@pytest.fixture
def work(tmp_path, models, no_process_groups):
    for name in ("teacher", "student"):
        shutil.copytree(models / name, tmp_path / name)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def run(work, **changes):
    (work / "run.yaml").write_text(yaml.safe_dump(VALUES | changes))
    return distill(read_config(DistillConfig, work / "run.yaml"))


def edit_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def refuse(work, kind, *parts, **changes):
    (work / "run.yaml").write_text("")
    before = sorted(work.rglob("*"))
    with pytest.raises(kind) as caught:
        run(work, **changes)
    for part in parts:
        assert part in str(caught.value)
    assert sorted(work.rglob("*")) == before


def test_the_inputs_that_the_cases_below_damage_are_fine(work):
    result = run(work)
    assert result.steps == 2
    assert (result.mtp_executions, result.export) == (0, work / "new" / "run" / "export")


def test_a_missing_model_folder(work):
    refuse(work, ConfigError, "`teacher`", "nowhere does not exist", teacher="nowhere")
    refuse(work, ConfigError, "`student`", "text.txt is a file", student="text.txt")


def test_a_folder_without_weights(work):
    for file in (work / "student").glob("*.safetensors*"):
        file.unlink()
    refuse(work, CheckpointError, "student")


def test_a_family_that_is_not_known(work):
    edit_config(work / "student", model_type="walrus")
    refuse(work, UnsupportedModelError, "walrus", "nemotron_h", "mimo")


def test_latent_experts_of_a_student_that_is_to_be_quantised(work, monkeypatch):
    """They are Transformer Engine's, and such a student is built of local layers even where it is."""
    monkeypatch.setattr(capabilities, "has_transformer_engine", lambda: True)
    tiny.write_nemotron_h(work / "latent", moe_latent_size=16)
    refuse(
        work,
        UnsupportedModelError,
        "`student`",
        "moe_latent_size = 16",
        "quantisation",
        student="latent",
        quantize="int8",
    )
    (work / "run.yaml").write_text(yaml.safe_dump(VALUES | {"teacher": "latent", "quantize": "int8"}))
    config = read_config(DistillConfig, work / "run.yaml")
    assert open_model("teacher", config, Layout()).config["moe_latent_size"] == 16


def test_heads_that_are_counted_but_not_there(work):
    edit_config(work / "student", num_nextn_predict_layers=2)
    refuse(work, CheckpointError, "student")


def test_a_tokenizer_that_does_not_match(work):
    content = json.loads((work / "student" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (work / "student" / "tokenizer.json").write_text(json.dumps(content))
    refuse(work, ConfigError, "tokenizer", "differ")


def test_no_tokenizer(work):
    for file in (work / "teacher").glob("tokenizer*"):
        file.unlink()
    refuse(work, ConfigError, "teacher", "the tokenizer cannot be loaded")


def test_empty_missing_and_short_data(work):
    refuse(work, ConfigError, "`data`", "does not exist", data="nowhere.txt")
    (work / "text.txt").write_text("\n")
    refuse(work, ConfigError, "`data`", "there is no text in")
    (work / "text.txt").write_text("too short")
    refuse(work, ConfigError, "`data` has", "windows of sequence_length 16")


def test_a_record_that_is_malformed_far_into_the_data(work):
    lines = [json.dumps({"text": "fine " * 20})] * 600 + ["{broken"]
    (work / "text.jsonl").write_text("\n".join(lines))
    refuse(work, ConfigError, "text.jsonl:601", data="text.jsonl")


def test_a_layout_that_does_not_divide(work, monkeypatch):
    refuse(work, ConfigError, "1 ranks cannot be divided", tensor_parallel=2, sequence_parallel=True)
    monkeypatch.setenv("WORLD_SIZE", "3")
    refuse(
        work,
        ConfigError,
        "`student`",
        "tensor parallel size 3 does not divide",
        tensor_parallel=3,
        sequence_parallel=True,
        sequence_length=18,
    )
    refuse(work, ConfigError, "`global_batch_size` 2 is not a multiple", "3 data-parallel ranks")


def test_windows_longer_than_the_model(work):
    refuse(work, ConfigError, "`sequence_length` is 512", "max_position_embeddings 256", sequence_length=512)


def test_an_output_that_holds_something_else(work):
    (work / "notes").mkdir()
    (work / "notes" / "notes.txt").write_text("not a run")
    refuse(work, ConfigError, "not empty and holds no run of `torpor distill`", output="notes")
    refuse(work, ConfigError, "text.txt is a file", output="text.txt")


def test_a_failure_while_building_removes_the_run_folder(work, monkeypatch):
    def fail(*_, **__):
        raise CheckpointError("damaged in the middle")

    monkeypatch.setattr(distill_module, "load_weights", fail)
    refuse(work, CheckpointError, "damaged in the middle")


def test_an_existing_empty_output_is_used_and_survives_a_refusal(work, monkeypatch):
    (work / "new" / "run").mkdir(parents=True)
    (work / "text.txt").write_text("too short")
    refuse(work, ConfigError, "windows of sequence_length 16")


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    """A complete run of two steps, to be copied."""
    from torpor.megatron import parallel
    from torpor.megatron.host import prepare_host

    prepare_host()
    parallel.shutdown()
    folder = tmp_path_factory.mktemp("finished")
    for name in ("teacher", "student"):
        shutil.copytree(models / name, folder / name)
    (folder / "text.txt").write_text(TEXT)
    run(folder)
    return folder


@pytest.fixture
def complete(tmp_path, finished, no_process_groups):
    return shutil.copytree(finished, tmp_path / "work")


def flip_an_mtp_bit(export):
    entry = next(e for name, e in open_folder(export).tensors.items() if name.startswith("mtp."))
    content = bytearray(entry.file.read_bytes())
    content[entry.offset] ^= 1
    entry.file.write_bytes(content)


def test_a_finished_run_is_reported_again_and_not_extended(complete):
    first = run(complete)
    assert first.steps == 2
    assert run(complete) == first
    with pytest.raises(ConfigError, match="complete run of 2 steps with other settings or inputs: `steps`"):
        run(complete, steps=3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"freeze_mtp": False}, "freeze_mtp"), ({"student": "teacher"}, "student"), ({"lr": 0.5}, "lr")],
)
def test_a_finished_run_does_not_answer_for_another(complete, changes, named):
    with pytest.raises(ConfigError, match=f"other settings or inputs: `{named}`"):
        run(complete, **changes)


def test_a_finished_run_looks_at_its_export_again(complete):
    flip_an_mtp_bit(complete / "new" / "run" / "export")
    with pytest.raises(TorporError, match="Do not ship this export"):
        run(complete)
    assert json.loads((complete / "new" / "run" / "verify.json").read_text())["ok"] is False


def test_a_finished_run_with_a_damaged_summary_says_so(complete):
    (complete / "new" / "run" / "summary.json").write_text('{"steps": 2}')
    with pytest.raises(CheckpointError, match=r"summary\.json is damaged"):
        run(complete)


def test_an_export_of_fewer_steps_is_made_anew(complete):
    """A run that ended after its export and before its summary may go on to more steps."""
    folder = complete / "new" / "run"
    before = (folder / "export" / "config.json").stat().st_ino
    head = open_folder(folder / "export").sha256("lm_head.weight")
    (folder / "summary.json").unlink()
    assert run(complete).steps == 2
    assert (folder / "export" / "config.json").stat().st_ino == before
    (folder / "summary.json").unlink()
    assert run(complete, steps=4).steps == 4
    assert open_folder(folder / "export").sha256("lm_head.weight") != head
    assert json.loads((folder / "export.json").read_text())["step"] == 4
    assert not (folder / "export.stale").exists()


def test_one_process_a_run_folder(complete):
    import fcntl

    folder = complete / "new" / "run"
    present = sorted(path.name for path in folder.iterdir())
    with (folder / "run.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is running in"):
            run(complete)
    assert sorted(path.name for path in folder.iterdir()) == present
    run(complete)


def test_locks_are_asked_for_as_nfs_grants_them_and_done_without_where_there_are_none(work, monkeypatch):
    import fcntl

    modes = []

    def flock(file, operation):
        if operation & fcntl.LOCK_EX and not isinstance(file, int):
            modes.append(file.mode)
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert run(work, top_k=8, teacher_cache="cache").steps == 2
    assert modes == ["rb+", "ab"]  # the run's folder, the teacher's cache


@pytest.mark.parametrize("output", ["/proc/nowhere/run", "/dev/null/run", "text.txt/run"])
def test_an_output_that_cannot_be_written(work, output):
    with pytest.raises(ConfigError, match=r"`output`: .* (cannot be written|is a file)"):
        run(work, output=output)


@pytest.mark.parametrize("headless", [["teacher"], ["teacher", "student"]])
def test_a_model_without_heads_has_nothing_to_put_to_sleep(work, capsys, headless):
    for name in headless:
        shutil.rmtree(work / name)
        tiny.write_nemotron_h(work / name, seed=3, num_mtp=0)
    result = run(work)
    assert (result.mtp_executions, result.frozen) == (0, True)
    assert (result.mtp_tensors is None) is ("student" in headless)
    shown = capsys.readouterr().err
    for name in ("teacher", "student"):
        assert (f"the {name} has no MTP layers" in shown) is (name in headless)


def test_heads_that_changed_during_the_run_are_not_exported(work, monkeypatch):
    import torch

    from torpor.training import loop

    real = loop.run_step

    def damage(job, step):
        record = real(job, step)
        with torch.no_grad():
            parameters = dict(job.chunks[0].module.named_parameters())
            next(p for name, p in parameters.items() if name.startswith("mtp.")).view(-1)[0] += 1
        return record

    monkeypatch.setattr(loop, "run_step", damage)
    with pytest.raises(TorporError, match="changed while asleep"):
        run(work)
    assert not (work / "new" / "run" / "export").exists()


def test_an_export_that_differs_from_its_source_fails(work, monkeypatch):
    real = distill_module.export_folder

    def damage(checkpoint, source, out, **options):
        real(checkpoint, source, out, **options)
        file = next(iter(sorted(out.glob("*.safetensors"))))
        entry = next(
            entry
            for name, entry in open_folder(out).tensors.items()
            if name.startswith("mtp.") and entry.file == file
        )
        content = bytearray(file.read_bytes())
        content[entry.offset] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(distill_module, "export_folder", damage)
    with pytest.raises(TorporError, match="Do not ship this export"):
        run(work)
    assert json.loads((work / "new" / "run" / "verify.json").read_text())["ok"] is False
    assert not (work / "new" / "run" / "summary.json").exists()


def test_a_run_folder_of_another_command(complete):
    record = complete / "new" / "run" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"command": "sleepwalk"}))
    with pytest.raises(ConfigError, match="holds a run of `torpor sleepwalk`, and this is `torpor distill`"):
        run(complete)
    record.write_text("[")
    with pytest.raises(ConfigError, match=r"run\.json does not say of which command the run is"):
        run(complete)


def test_more_top_tokens_than_the_vocabulary_has(work):
    refuse(work, ConfigError, "`top_k` is 321", "vocab_size in config.json is 320", top_k=321)


def test_models_that_differ_in_large_tensors_alone_are_told_apart(tmp_path):
    # As a model and the same with merged adapters do: configuration, norms and biases are equal.
    norm = {"norm": ("U8", [4], b"same")}
    digests = set()
    for name, byte in (("base", b"\0"), ("tuned", b"\1"), ("base-again", b"\0")):
        tensors = norm | {"large": ("U8", [2**20], byte * 2**20)}
        digests.add(folder_digest(open_folder(write_folder(tmp_path / name, {"model.safetensors": tensors}))))
    assert len(digests) == 2


def test_a_teacher_cache_is_made_once_and_refused_when_stale(work, monkeypatch):
    settings = {"teacher_cache": "cache", "top_k": 8}
    first = run(work, **settings)
    build = distill_module._build_teacher
    monkeypatch.setattr(distill_module, "_build_teacher", lambda *_: pytest.fail("the teacher was built"))
    again = run(work, output="again", **settings)
    assert (again.first_loss, again.last_loss, again.held_out) == (
        first.first_loss,
        first.last_loss,
        first.held_out,
    )
    assert list((work / "cache").iterdir()) == [work / "cache" / "teacher.topk"]
    monkeypatch.setattr(distill_module, "_build_teacher", build)

    larger = settings | {"top_k": 9}
    refuse(work, ConfigError, "teacher.topk", "top_k: 8 there, 9 here", **larger, output="o")
    (work / "text.txt").write_text(TEXT.upper())
    refuse(work, ConfigError, "teacher.topk", "data: ", **settings, output="o")
    (work / "text.txt").write_text(TEXT)
    shutil.rmtree(work / "teacher")
    tiny.write_nemotron_h(work / "teacher", seed=3)
    refuse(work, ConfigError, "teacher.topk", "teacher: ", **settings, output="o")
