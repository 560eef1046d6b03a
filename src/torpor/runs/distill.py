"""A distillation: from a configuration to a verified Hugging Face folder of the student."""

from pathlib import Path
from typing import TYPE_CHECKING

from torpor.checkpoints.families import count_mtp_layers
from torpor.checkpoints.folder import Folder
from torpor.errors import ConfigError
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.quantization import check_format, fake_quantize
from torpor.megatron.weights import export_folder, load_weights
from torpor.runs.inputs import find_layout, folder_digest, model_dtype, open_model
from torpor.runs.result import RunResult
from torpor.runs.training_run import Recipe, run_training, say_tokens
from torpor.training import data
from torpor.training.config import DistillConfig
from torpor.training.sources import check_not_empty, find_sources

if TYPE_CHECKING:
    import torch

    from torpor.dormancy import DormantMTP
    from torpor.training.loop import Job
    from torpor.training.losses import LossSettings
    from torpor.training.teacher_cache import TeacherCache


def distill(config: DistillConfig) -> RunResult:
    """Run a distillation, or the rest of one that was interrupted. Every rank calls it.

    Args:
        config: what to do.

    Returns:
        How it ended, the same on every rank.

    Raises:
        ConfigError: the configuration, the data or the tokenizers cannot be used.
        TorporError: see `run_training`.
    """
    return run_training(config, lambda: _check_inputs(config))


def _check_inputs(config: DistillConfig) -> Recipe:
    """Check whatever can be checked without building a model; nothing is written."""
    layout = find_layout(config)
    student, teacher = (open_model(role, config, layout) for role in config.models)
    sources = find_sources(config.data)
    check_not_empty(sources, config.text_key)
    tokenizer = data.load_tokenizer(student.path)
    data.check_tokenizers(
        data.load_tokenizer(teacher.path),
        tokenizer,
        (teacher.config["vocab_size"], student.config["vocab_size"]),
    )
    if config.top_k is not None and config.top_k > student.config["vocab_size"]:
        raise ConfigError(
            f"`top_k` is {config.top_k}, and vocab_size in config.json is {student.config['vocab_size']}\n"
            "  Use a smaller top_k; a few hundred is usual."
        )
    if config.quantize is not None:
        _check_quantizable(config, student, layout)

    def prepare_data(folder: Path) -> data.PackedWindows:
        return data.prepare_windows(
            sources,
            config.text_key,
            tokenizer,
            vocab_size=student.config["vocab_size"],
            folder=folder,
            settings=config,
            on_progress=say_tokens(),
        )

    recipe = Recipe(
        models={"student": student, "teacher": teacher},
        layout=layout,
        prepare_data=prepare_data,
        build=lambda windows, steps: _build(config, recipe, windows, steps),
        export=lambda checkpoint, out: export_folder(
            checkpoint,
            student,
            out,
            mtp="source" if config.freeze_mtp else "live",
            quantize=config.quantize,
        ),
        notes=_describe_quantization(config, student),
    )
    return recipe


def _check_quantizable(config: DistillConfig, student: Folder, layout: Layout) -> None:
    assert config.quantize is not None
    if config.quantize_mtp and not count_mtp_layers(student).declared:
        raise ConfigError(f"`quantize_mtp` is set, and {student.path} has no MTP layers\n  Leave it out.")
    check_format(config.quantize, layout)


def _describe_quantization(config: DistillConfig, student: Folder) -> list[str]:
    """Tell what becomes of the student's MTP layers when its trunk is quantised, and what that costs."""
    if config.quantize is None or not count_mtp_layers(student).declared:
        return []
    if config.quantize_mtp and config.freeze_mtp:
        return [
            "freeze_mtp: the quantised MTP layers sleep, so that nothing recovers their quantisation error;"
            " the export keeps them as they are in the student's folder, not quantised"
        ]
    if config.quantize_mtp:
        return [
            "the student's MTP layers are quantised: they stay awake, so that training recovers their"
            " quantisation error (freeze_mtp: true puts them to sleep)"
        ]
    if config.freeze_mtp:
        return [
            "the student's MTP layers are left out of quantisation: they sleep, having no quantisation error"
            " to recover (freeze_mtp: false trains them along)"
        ]
    return [
        "freeze_mtp: false: the student's MTP layers, left out of quantisation, run and are trained along,"
        " though they have no quantisation error to recover"
    ]


def _build(
    config: DistillConfig, recipe: Recipe, windows: data.PackedWindows, steps: int
) -> "tuple[Job, dict[str, DormantMTP]]":
    from torpor.training.distillation import (
        build_distillation_model,
        cached_distillation_objective,
        distillation_objective,
        shapes_between_stages,
    )
    from torpor.training.loop import prepare_job
    from torpor.training.teacher_cache import WindowsWithTeacher

    settings = _loss_settings(config)
    if config.teacher_cache is not None:
        assert config.top_k is not None, "the configuration has both"
        cache = _teacher_cache(config, recipe, windows)
        student, asleep = _build_student(config, recipe, windows)
        job = prepare_job(
            student,
            config,
            WindowsWithTeacher(windows, cache, config.top_k),
            cached_distillation_objective(settings),
            steps=steps,
        )
        return job, asleep
    student, asleep = _build_student(config, recipe, windows)
    teacher, handle = _build_teacher(config, recipe)
    if handle is not None:
        asleep["teacher"] = handle
    model = build_distillation_model(student[0], teacher)
    job = prepare_job(
        [model],
        config,
        windows,
        distillation_objective(settings),
        steps=steps,
        adjust_tensor_shapes=shapes_between_stages(
            model, sequence_length=config.sequence_length, micro_batch_size=config.micro_batch_size
        ),
    )
    return job, asleep


def _build_student(
    config: DistillConfig, recipe: Recipe, windows: data.PackedWindows
) -> "tuple[list[torch.nn.Module], dict[str, DormantMTP]]":
    from torpor.dormancy import freeze_mtp
    from torpor.training.calibration import run_forwards

    dtype = model_dtype(config)
    student = build_model(
        recipe.source.config,
        recipe.layout,
        dtype,
        recompute=config.recompute,
        transformer_impl=config.transformer_impl("student"),
    )
    load_weights(student, recipe.source)
    if config.quantize is not None:
        fake_quantize(
            student[0],
            config.quantize,
            with_mtp=config.quantize_mtp,
            calibrate=lambda: run_forwards(student, config, windows, config.calib_size),
        )
    if not config.freeze_mtp or not student[0].config.mtp_num_layers:
        return student, {}
    return student, {"student": freeze_mtp(student)}


def _build_teacher(config: DistillConfig, recipe: Recipe) -> "tuple[torch.nn.Module, DormantMTP | None]":
    from torpor.dormancy import freeze_mtp

    # Nothing of the teacher is kept for backward, so there is nothing to recompute.
    teacher = build_model(
        recipe.models["teacher"].config,
        recipe.layout,
        model_dtype(config),
        transformer_impl=config.transformer_impl("teacher"),
    )
    load_weights(teacher, recipe.models["teacher"])
    # Nobody asks for what the teacher's MTP layers would predict.
    return teacher[0], freeze_mtp(teacher) if teacher[0].config.mtp_num_layers else None


def _teacher_cache(config: DistillConfig, recipe: Recipe, windows: data.PackedWindows) -> "TeacherCache":
    """Open the teacher's likeliest tokens, having computed them if they are not there yet."""
    from torpor.training.teacher_cache import CacheContent, open_teacher_cache, write_teacher_cache

    assert config.teacher_cache is not None
    assert config.top_k is not None
    teacher = recipe.models["teacher"]
    content = CacheContent(
        teacher=folder_digest(teacher),
        data=windows.digest(),
        num_windows=len(windows.training) + len(windows.held_out),
        sequence_length=config.sequence_length,
        top_k=config.top_k,
        vocab_size=teacher.config["vocab_size"],
        dtype=config.dtype,
    )
    cache = open_teacher_cache(config.teacher_cache, content)
    if cache is not None:
        return cache
    model, _ = _build_teacher(config, recipe)
    write_teacher_cache(config.teacher_cache, content, model, windows, config)
    cache = open_teacher_cache(config.teacher_cache, content)
    assert cache is not None, "it was written"
    return cache


def _loss_settings(config: DistillConfig) -> "LossSettings":
    from torpor.training.losses import LossSettings

    return LossSettings(
        divergence=config.divergence,
        temperature=config.temperature,
        jensen_shannon_beta=config.jensen_shannon_beta,
        top_k=config.top_k,
        cross_entropy_weight=config.cross_entropy_weight,
    )
