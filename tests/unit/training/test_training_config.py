"""Reading a distillation configuration: what is accepted and how each mistake is answered."""

from pathlib import Path

import pytest

from torpor.errors import ConfigError
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

VALID = """
teacher: models/teacher
student: models/student
output: run
data: text.txt
sequence_length: 128
global_batch_size: 8
steps: 10
"""


def read(tmp_path, text, **overrides):
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "text.txt").write_text("text")
    return read_config(DistillConfig, tmp_path / "run.yaml", overrides)


def refusal(tmp_path, text, **overrides):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **overrides)
    return str(caught.value)


def test_paths_are_relative_to_the_file_and_not_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    config = read(tmp_path, VALID)
    assert config.teacher == tmp_path / "models/teacher"
    assert config.output == tmp_path / "run"
    assert config.data == [tmp_path / "text.txt"]


def test_absolute_and_home_paths_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    text = VALID.replace("models/teacher", "/models/t").replace("models/student", "~/s")
    config = read(tmp_path, text)
    assert (config.teacher, config.student) == (Path("/models/t"), Path("/home/someone/s"))


def test_heads_sleep_unless_told_otherwise(tmp_path):
    assert read(tmp_path, VALID).freeze_mtp is True
    assert read(tmp_path, VALID + "freeze_mtp: false").freeze_mtp is False


def test_an_override_goes_before_the_file_and_none_is_no_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = read(tmp_path, VALID + "freeze_mtp: false", freeze_mtp=True, steps=None, output=Path("other"))
    assert config.freeze_mtp is True
    assert config.steps == 10
    assert config.output == tmp_path.parent / "other"


def test_numbers_in_yaml_11_spelling_are_read(tmp_path):
    assert read(tmp_path, VALID + "lr: 1e-3").lr == 1e-3  # PyYAML takes 1e-3 for a string


def test_a_glob_is_expanded_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (tmp_path / name).write_text("{}")
    config = read(tmp_path, VALID.replace("text.txt", "'*.jsonl'"))
    assert config.data == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_a_file_whose_name_has_a_wildcard_in_it_is_that_file(tmp_path):
    (tmp_path / "part[1].txt").write_text("x")
    assert read(tmp_path, VALID.replace("text.txt", "'part[1].txt'")).data == [tmp_path / "part[1].txt"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("global_batch_sise: 3", ["`global_batch_sise`", "3", "did you mean `global_batch_size`?"]),
        ("zzz: 1", ["`zzz`", "is not a setting", "the settings are: ", "sequence_length"]),
        ("micro_batch_size: 0", ["`micro_batch_size` is 0", "greater than or equal to 1"]),
        ("micro_batch_size: 3", ["`global_batch_size` 8", "`micro_batch_size` 3", "not a multiple"]),
        ("micro_batch_size: yes", ["`micro_batch_size` is True", "needs a number"]),
        ("lr: fast", ["`lr` is 'fast'", "valid number"]),
        ("lr: .nan", ["`lr` is nan"]),
        ("lr: 0.1\nmin_lr: 0.2", ["`min_lr` 0.2", "`lr` 0.1"]),
        ("dtype: fp16", ["`dtype` is 'fp16'", "'fp32' or 'bf16'"]),
        ("warmup_steps: 10", ["`warmup_steps` 10", "`steps` 10"]),
        ("epochs: 1", ["`steps` and `epochs`", "exactly one"]),
        ("sequence_parallel: true", ["`sequence_parallel`", "`tensor_parallel`"]),
        ("tensor_parallel: 3\nsequence_parallel: true", ["`sequence_length` 128", "`tensor_parallel` 3"]),
        ("context_parallel: 3", ["`sequence_length` 128", "twice `context_parallel` 3"]),
        (
            "tensor_parallel: 64\nsequence_parallel: true\ncontext_parallel: 4",
            ["`sequence_length` 128 / `context_parallel` 4", "`tensor_parallel` 64"],
        ),
        ("recompute: some", ["`recompute` is 'some'", "'selective'", "'full'"]),
        ("betas: [0.9, 1.0]", ["`betas.1` is 1.0", "less than 1"]),
        ("held_out: 1", ["`held_out` is 1", "less than 1"]),
        ("steps: 11\nsteps: 12", ["run.yaml:", "`steps` appears twice"]),
        ("lr: [", ["run.yaml:"]),
        ("seed: 2147483648", ["`seed` is 2147483648", "less than 2147483648"]),
        ("seed: 4294967296", ["`seed` is 4294967296", "less than 2147483648"]),
        ("seed: -1", ["`seed` is -1", "greater than or equal to 0"]),
        ("? [a]\n: 1", ["run.yaml:9:3: ", "a key is a sequence, not a word"]),
        ("? {a: b}\n: 1", ["run.yaml:9:3: ", "a key is a mapping, not a word"]),
        ("lr: 2026-13-45", ["run.yaml:9:5: ", "'2026-13-45' cannot be read: month"]),
        ("lr: !!bool x", ["run.yaml:9:5: ", "'x' cannot be read"]),
        ("lr: !!map [a]", ["run.yaml:9:5: ", "expected a mapping node"]),
        pytest.param("lr: " + "[" * 3000, ["nested too deep", "`key: value`"], id="3000 brackets"),
    ],
)
def test_a_mistake_is_answered_with_file_key_value_and_what_it_should_be(tmp_path, change, expected):
    text = VALID.replace("steps: 10", "") if change.startswith("steps") else VALID
    message = refusal(tmp_path, text + change)
    assert str(tmp_path / "run.yaml") in message
    for part in expected:
        assert part in message


@pytest.mark.parametrize("key", ["teacher", "student", "output", "data", "sequence_length"])
def test_a_missing_key_is_named_with_its_purpose(tmp_path, key):
    text = "\n".join(line for line in VALID.splitlines() if not line.startswith(key))
    message = refusal(tmp_path, text)
    assert f"`{key}` is missing" in message
    assert str(DistillConfig.model_fields[key].description) in message


def test_all_mistakes_are_told_at_once(tmp_path):
    message = refusal(tmp_path, VALID + "zzz: 1\ndtype: fp16\n")
    assert "`zzz`" in message
    assert "`dtype`" in message


def test_the_output_is_neither_of_the_models(tmp_path):
    assert "`output` is the same folder as `teacher`" in refusal(
        tmp_path, VALID.replace("output: run", "output: models/teacher")
    )


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("models/student/run", r"`output` .*models/student/run lies within `student` .*models/student\n"),
        ("models", r"`student` .*models/student lies within `output` .*models\n"),
        ("link/run", r"`output` .*link/run lies within `student`"),
    ],
)
def test_neither_the_output_nor_a_model_lies_within_the_other(tmp_path, output, expected):
    (tmp_path / "models" / "student").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "models" / "student")
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, VALID.replace("output: run", f"output: {output}"))


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    assert "not a mapping" in refusal(tmp_path, text)


def test_a_missing_file_and_a_glob_without_matches_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        read_config(DistillConfig, tmp_path / "nowhere.yaml")
    assert "matches no file" in refusal(tmp_path, VALID.replace("text.txt", "'*.nothing'"))


def test_a_global_batch_that_does_not_divide_over_the_ranks_is_refused(tmp_path):
    config = read(tmp_path, VALID + "micro_batch_size: 2")
    config.check_batch(4)
    with pytest.raises(ConfigError, match=r"`global_batch_size` 8 .* 2 x 3 data-parallel ranks\n  .* 6"):
        config.check_batch(3)


def test_every_setting_that_has_to_be_given_says_what_it_is():
    for name, field in DistillConfig.model_fields.items():
        assert not field.is_required() or field.description, name


def test_the_loss_has_settings(tmp_path):
    text = VALID + "divergence: jensen_shannon\njensen_shannon_beta: 0.2\ntemperature: 2\n"
    config = read(tmp_path, text + "top_k: 64\ncross_entropy_weight: 1\nteacher_cache: cache")
    assert (config.divergence, config.jensen_shannon_beta, config.temperature) == ("jensen_shannon", 0.2, 2)
    assert (config.top_k, config.cross_entropy_weight) == (64, 1)
    assert config.teacher_cache == tmp_path / "cache"
    config = read(tmp_path, VALID)
    assert (config.divergence, config.temperature, config.top_k) == ("forward_kl", 1, None)
    assert (config.cross_entropy_weight, config.teacher_cache) == (0, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("divergence: kl", "'forward_kl', 'reverse_kl' or 'jensen_shannon'"),
        ("temperature: 0", "greater than 0"),
        ("top_k: 1", "greater than or equal to 2"),  # of one token every distribution is the same
        ("cross_entropy_weight: 1.5", "less than or equal to 1"),
        ("cross_entropy_weight: -0.1", "greater than or equal to 0"),
        ("divergence: jensen_shannon\njensen_shannon_beta: 0", "greater than 0"),
        ("divergence: jensen_shannon\njensen_shannon_beta: 1", "less than 1"),
        ("jensen_shannon_beta: 0.2", "`divergence` is forward_kl"),
        ("teacher_cache: cache", "needs `top_k`"),
        ("top_k: 8\nteacher_cache: models/student", "within `student`"),
        ("top_k: 8\nteacher_cache: models/teacher/x", "within `teacher`"),
        ("top_k: 8\nteacher_cache: run/cache", "within `output`"),
    ],
)
def test_losses_that_do_not_exist(tmp_path, line, message):
    assert message in refusal(tmp_path, VALID + line)
