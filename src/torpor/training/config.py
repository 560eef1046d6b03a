"""What a training run is told: every setting, its default, and the checks that need no other file."""

import glob
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from torpor.errors import ConfigError

TransformerImpl = Literal["local", "transformer_engine"]


def _no_bool(value: Any) -> Any:
    # YAML's `yes` and `on` are booleans, and Python counts a boolean as a number.
    if isinstance(value, bool):
        raise ValueError("needs a number, not a truth value")
    return value


def _resolve(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str | Path):
        return value
    if not str(value):
        raise ValueError("is empty")
    base = Path(info.context["base"]) if info.context else Path.cwd()
    # Not Path.resolve(): a folder that is a link keeps the name that its owner gave it.
    return base / Path(value).expanduser()


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
CountOrNone = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
# NumPy takes seeds of 32 bits; the rest is room for the offsets that stages add.
Seed = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**31)]
Rate = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
PositiveRate = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, lt=1)]
Folder = Annotated[Path, BeforeValidator(_resolve)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizationConfig(_Settings):
    """Settings of any training loop: batches, schedule, optimizer, precision, layout, bookkeeping."""

    sequence_length: Count = Field(description="tokens per window")
    micro_batch_size: Count = 1
    global_batch_size: Count = Field(description="windows per optimizer step, over all ranks")
    steps: Count | None = Field(default=None, description="optimizer steps; or give `epochs`")
    epochs: PositiveRate | None = Field(default=None, description="passes over the data; or give `steps`")

    lr: PositiveRate = 1e-4
    min_lr: Rate = 0.0
    warmup_steps: CountOrNone = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: Rate = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveRate = 1e-8
    clip_grad: Rate = Field(default=1.0, description="largest gradient norm; 0 switches clipping off")
    distributed_optimizer: bool = Field(default=False, description="shard optimizer state over data ranks")

    dtype: Literal["fp32", "bf16"] = "bf16"
    recompute: Literal["selective", "full"] | None = None
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    context_parallel: Count = Field(default=1, description="ranks that each sequence is divided over")
    sequence_parallel: bool = False

    save_every: Count = 100
    keep: Count = Field(default=2, description="checkpoints kept")
    eval_every: Count = 100
    eval_batches: CountOrNone = Field(default=8, description="held-out global batches per evaluation")
    held_out: Fraction = Field(default=0.01, description="share of the windows that is never trained on")
    log_every: Count = 1
    seed: Seed = 1234

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("`steps` and `epochs`: give exactly one of the two")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"`global_batch_size` {self.global_batch_size} is not a multiple of "
                f"`micro_batch_size` {self.micro_batch_size}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"`min_lr` {self.min_lr:g} is larger than `lr` {self.lr:g}")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"`warmup_steps` {self.warmup_steps} leaves no step of `steps` {self.steps}")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("`sequence_parallel` needs `tensor_parallel` of 2 or more; it is 1")
        if self.context_parallel > 1 and self.sequence_length % (2 * self.context_parallel):
            raise ValueError(
                f"`sequence_length` {self.sequence_length} is not a multiple of twice `context_parallel` "
                f"{self.context_parallel}, whose ranks take two equal chunks each"
            )
        own_length = self.sequence_length // self.context_parallel
        if own_length % self.tensor_parallel and self.sequence_parallel:
            context = f" / `context_parallel` {self.context_parallel}" if self.context_parallel > 1 else ""
            raise ValueError(
                f"`sequence_length` {self.sequence_length}{context} is not a multiple of "
                f"`tensor_parallel` {self.tensor_parallel}, which `sequence_parallel` needs"
            )
        return self

    def check_batch(self, data_parallel: int) -> None:
        """Check that the global batch divides over the data-parallel ranks.

        Args:
            data_parallel: number of data-parallel ranks.

        Raises:
            ConfigError: it does not.
        """
        share = self.micro_batch_size * data_parallel
        if self.global_batch_size % share:
            raise ConfigError(
                f"`global_batch_size` {self.global_batch_size} is not a multiple of `micro_batch_size` "
                f"{self.micro_batch_size} x {data_parallel} data-parallel ranks\n"
                f"  Use a multiple of {share}."
            )


class RunConfig(OptimizationConfig):
    """Settings of a training command: how to train, on which data, and where to."""

    command: ClassVar[str]
    """Name of the command on the command line."""
    models: ClassVar[tuple[str, ...]]
    """The settings that name the folders of models, the one whose weights are trained first."""

    output: Folder = Field(description="run folder: checkpoints, metrics, export")
    data: list[Path] = Field(description="data: .txt, .jsonl, .parquet, saved datasets, folders, globs")
    freeze_mtp: bool | None = Field(
        default=None, description="keep MTP layers asleep, or run and train them; asleep unless quantised"
    )

    @field_validator("data", mode="before")
    @classmethod
    def _resolve_data(cls, value: Any, info: ValidationInfo) -> Any:
        items = [value] if isinstance(value, str | Path) else value
        if not isinstance(items, list) or not items:
            raise ValueError("needs a path or a list of paths")
        paths: list[Path] = []
        for item in items:
            path = _resolve(item, info)
            if not isinstance(path, Path):
                raise ValueError(f"needs paths, not {item!r}")
            # A name that exists is taken as it is, even where it contains a wildcard's characters.
            if path.exists() or not glob.has_magic(str(path)):
                paths.append(path)
                continue
            found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not found:
                raise ValueError(f"matches no file: {path}")
            paths.extend(found)
        return paths

    @model_validator(mode="after")
    def _decide_freeze_mtp(self) -> Self:
        if self.freeze_mtp is None:
            # Past the model's being frozen, and without counting as set by the user.
            self.__dict__["freeze_mtp"] = self._should_freeze_mtp()
        return self

    def _should_freeze_mtp(self) -> bool:
        """Whether MTP layers sleep where the user says nothing."""
        return True

    def transformer_impl(self, role: str) -> TransformerImpl:
        """Say whose layers a model is built of, as Megatron-Core's `transformer_impl` does.

        Args:
            role: The setting that names the model's folder.
        """
        return "transformer_engine"

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        output = self.output.resolve()
        for name in self.models:
            model = getattr(self, name).resolve()
            if output == model:
                raise ValueError(f"`output` is the same folder as `{name}`: {self.output}")
            if output.is_relative_to(model) or model.is_relative_to(output):
                inner, outer = ("output", name) if output.is_relative_to(model) else (name, "output")
                raise ValueError(
                    f"`{inner}` {getattr(self, inner)} lies within `{outer}` {getattr(self, outer)}"
                )
        return self


class DistillConfig(RunConfig):
    """Settings of `torpor distill`: from which teacher into which student."""

    command = "distill"
    models = ("student", "teacher")

    teacher: Folder = Field(description="Hugging Face folder of the teacher")
    student: Folder = Field(description="Hugging Face folder of the student")
    text_key: str = Field(default="text", min_length=1, description="field of a record that holds its text")
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "forward_kl"
    jensen_shannon_beta: Annotated[Fraction, Field(gt=0)] = Field(
        default=0.5, description="the teacher's share of the Jensen-Shannon mixture"
    )
    temperature: PositiveRate = 1.0
    top_k: Annotated[Count, Field(ge=2)] | None = Field(
        default=None, description="compare only the teacher's k likeliest tokens; 2 or more"
    )
    cross_entropy_weight: Annotated[Rate, Field(le=1)] = Field(
        default=0.0, description="share of the next token's cross-entropy in the loss"
    )
    teacher_cache: Folder | None = Field(
        default=None, description="folder for the teacher's top_k logits, computed once and read from then on"
    )

    quantize: Literal["fp8", "int8", "nvfp4"] | None = Field(
        default=None, description="train the student's trunk through quantisers, and export it quantised"
    )
    quantize_mtp: bool = Field(default=False, description="quantise the student's MTP layers too")
    calib_size: Count = Field(default=128, description="training windows that quantisers are calibrated on")

    def _should_freeze_mtp(self) -> bool:
        # Training should recover what quantisation lost; layers that were left out have lost nothing.
        return not self.quantize_mtp

    def transformer_impl(self, role: str) -> TransformerImpl:
        """Say whose layers a model is built of: a quantised student of Megatron-Core's own.

        Their experts have a quantiser each, whose scales an export can name.
        """
        return "local" if role == "student" and self.quantize else super().transformer_impl(role)

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantize is None:
            for name in ("quantize_mtp", "calib_size"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"`{name}` is set and `quantize` is not")
        elif self.quantize == "int8" and "calib_size" in self.model_fields_set:
            raise ValueError("`calib_size` is set and `quantize` is int8, which calibrates weights alone")
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if "jensen_shannon_beta" in self.model_fields_set and self.divergence != "jensen_shannon":
            raise ValueError(f"`jensen_shannon_beta` is set and `divergence` is {self.divergence}")
        if self.teacher_cache is not None and self.top_k is None:
            raise ValueError("`teacher_cache` needs `top_k`: all logits of all tokens fit on no disk")
        return self

    @model_validator(mode="after")
    def _check_cache_folder(self) -> Self:
        if self.teacher_cache is None:
            return self
        # An export copies what lies beside the weights; an output is removed if its run fails early.
        for name in (*self.models, "output"):
            other = getattr(self, name)
            if self.teacher_cache.resolve().is_relative_to(other.resolve()):
                raise ValueError(
                    f"`teacher_cache` {self.teacher_cache} lies within `{name}` {other}, and needs a folder"
                    " of its own"
                )
        return self


class LoraSettings(_Settings):
    """Low-rank adapters, in PEFT's words."""

    r: Count = Field(default=8, description="rank of the adapters")
    lora_alpha: PositiveRate = Field(
        default=8.0, description="the adapters' output is scaled by lora_alpha / r"
    )
    lora_dropout: Fraction = 0.0
    target_modules: list[str] | Literal["all-linear"] = Field(
        description="names of linear layers, the checkpoint's or Megatron-Core's; or all-linear"
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _check_targets(cls, value: Any) -> Any:
        is_list = isinstance(value, list) and value and all(isinstance(name, str) for name in value)
        if not is_list and value != "all-linear":
            raise ValueError("needs a list of names, or all-linear")
        return value


class SftConfig(RunConfig):
    """Settings of `torpor sft`: which model, which conversations, what is trained of it."""

    command = "sft"
    models = ("model",)

    model: Folder = Field(description="Hugging Face folder of the model")
    packing: bool = Field(default=True, description="several samples a row, which do not see each other")
    excess_length_strategy: Literal["raise", "drop", "truncate"] = Field(
        default="raise", description="what becomes of samples longer than sequence_length"
    )
    lora: LoraSettings | None = Field(default=None, description="train adapters instead of the whole model")

    def transformer_impl(self, role: str) -> TransformerImpl:
        """Say whose layers a model is built of: one with adapters of Megatron-Core's own, which take them."""
        return "local" if self.lora else super().transformer_impl(role)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is not None and not self.freeze_mtp:
            raise ValueError("`freeze_mtp` is False, and `lora` trains adapters of the trunk alone")
        return self

    @model_validator(mode="after")
    def _check_packing(self) -> Self:
        if self.packing and self.micro_batch_size > 1:
            raise ValueError(
                f"`micro_batch_size` is {self.micro_batch_size}, and `packing` lays many samples into one row"
                ": use 1 and a longer `sequence_length`"
            )
        return self
