"""MTP layers kept by trainers of Hugging Face models, which drop them from every folder they save.

Transformers builds a model without its MTP layers and writes it without them, so they sleep in the source
folder while the trunk is trained. This module puts them into each folder that `save_pretrained` writes: byte
for byte, with copies of the trunk following the trained one. One line of a Trainer:

    Trainer(..., callbacks=[KeepMTPCallback("/models/source")])

and of a loop of one's own:

    keep_mtp(model, "/models/source")
"""

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from torpor.checkpoints.folder import INDEX_NAME, SINGLE_NAME
from torpor.checkpoints.graft import check_heads_fit, graft_in_place
from torpor.errors import CheckpointError, ConfigError, TorporError

__all__ = ["KeepMTPCallback", "keep_mtp"]

_logger = logging.getLogger(__name__)


def keep_mtp(model: torch.nn.Module, source: str | Path) -> None:
    """Make every later `model.save_pretrained` put the MTP layers of its source into the folder it writes.

    The process that writes the folder writes them, after it and into it; a process killed on the way leaves
    the folder without them or with them. Adapters are saved as ever: they have no trunk to put heads onto.
    Merging them (`merge_and_unload().save_pretrained(...)`) gives a whole folder.

    Args:
        model: A Transformers model, or a PEFT model around one; loaded from `source`, in any precision.
        source: The Hugging Face folder that the model was loaded from, on this machine, with its MTP layers.

    Raises:
        ConfigError: It is no Transformers model.
        CheckpointError: `source` has no whole MTP layers, or the model differs from it in family or sizes.
        UnsupportedModelError: A family, or a way of quantising, that we do not know.
    """
    _install(model, Path(source).absolute())


class KeepMTPCallback(TrainerCallback):
    """Puts the MTP layers of a model's source into every folder that a Trainer saves.

    Checkpoints, the final `save_model` and what is pushed to the Hub alike. Whether the heads fit the model
    is checked when the Trainer is made and once more before its first step, on every rank. If they cannot be
    put into a checkpoint, every rank raises the same error once the rest of it, optimizer included, is saved.

    Args:
        source: The Hugging Face folder that the model was loaded from, on this machine, with its MTP layers.
    """

    def __init__(self, source: str | Path):
        # Scripts change their working directory before they save.
        self.source = Path(source).absolute()
        self._hook: _SaveWithMTP | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the heads fit the model, and hook its saves.

        Raises:
            ConfigError: as `keep_mtp`.
            CheckpointError: as `keep_mtp`.
            UnsupportedModelError: as `keep_mtp`.
        """
        # A Trainer with `model_init` makes its model later.
        if kwargs.get("model") is not None:
            self._hook = _install(kwargs["model"], self.source)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check once more, because a vocabulary may have grown, and hook a model that was made since.

        Raises:
            ConfigError: as `keep_mtp`.
            CheckpointError: as `keep_mtp`.
            UnsupportedModelError: as `keep_mtp`.
        """
        self._hook = _install(kwargs["model"], self.source)
        self._hook.trainer_state = state

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep a checkpoint without its heads from the Hub.

        Raises:
            CheckpointError: The heads could not be put into it.
        """
        if self._hook and self._hook.failure:
            raise CheckpointError(self._hook.failure)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the ranks that write, and raise on all what went wrong on one.

        Raises:
            CheckpointError: The heads could not be put into the checkpoint.
        """
        failure = self._hook.failure if self._hook else None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            failures: list[str | None] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(failures, failure)
            failure = next((said for said in failures if said), None)
        if failure:
            raise CheckpointError(failure)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let later saves raise where they fail."""
        if self._hook:
            self._hook.trainer_state = None


def _install(model: torch.nn.Module, source: Path) -> "_SaveWithMTP":
    get_base_model = getattr(model, "get_base_model", None)
    if get_base_model is not None:  # PEFT's wrapper
        model = get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"the model is a {type(model).__name__}, needs a Transformers model (PreTrainedModel)\n"
            "  MTP layers are put into folders that `save_pretrained` writes."
        )
    check_heads_fit(source, model.config.to_dict())
    hook = vars(model).get("save_pretrained")
    if isinstance(hook, _SaveWithMTP):
        hook.source = source
        return hook
    if get_base_model is not None:
        _logger.warning("adapters are saved without MTP layers: they have no trunk; merged saves have them")
    hook = _SaveWithMTP(model, source, hook)
    # On the model itself and not on its class: other models are saved as ever.
    model.save_pretrained = hook
    return hook


class _SaveWithMTP:
    """Stands in for a model's `save_pretrained`; copied and pickled along with the model.

    Args:
        model: The model.
        source: The folder with its MTP layers.
        replaced: What stood in for the method before, None for the method itself.

    Attributes:
        trainer_state: Of the Trainer whose loop is running; None outside of it.
        failure: Why the heads could not be put into that Trainer's last checkpoint.
    """

    def __init__(self, model: PreTrainedModel, source: Path, replaced: Any):
        self.source = source
        self.trainer_state: TrainerState | None = None
        self.failure: str | None = None
        self._model = model
        self._replaced = replaced

    def __call__(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
        said = inspect.signature(PreTrainedModel.save_pretrained).bind(
            self._model, save_directory, *args, **kwargs
        )
        said.apply_defaults()
        path = Path(save_directory)
        self._refuse(path, said.arguments)
        self.failure = None
        index_before = _identity(path / INDEX_NAME)
        save = self._replaced or type(self._model).save_pretrained.__get__(self._model)
        returned = save(save_directory, *args, **kwargs)
        if not self._writes(said.arguments["is_main_process"]) or self._has_no_trunk(said.arguments):
            return returned
        _remove_stale_index(path, index_before)
        try:
            graft_in_place(self.source, path)
        except TorporError as error:
            if not self._is_checkpoint(path):
                raise
            self.failure = f"{path} was saved without its MTP layers: {error}"
            # Nobody else says so where training was interrupted and its loop will not get to `on_save`.
            _logger.error("%s", self.failure)
        return returned

    def _refuse(self, path: Path, said: dict[str, Any]) -> None:
        """Refuse what would lose the heads, before anything is written.

        Raises:
            ConfigError: The folder is the source itself, or no whole folder would be written.
        """
        if said["push_to_hub"]:
            raise ConfigError(
                "save_pretrained has push_to_hub=True, which uploads before MTP layers can be put back\n"
                "  Call model.push_to_hub(...), which saves first, or upload the folder after saving it."
            )
        if said["variant"] is not None:
            raise ConfigError(
                f"save_pretrained has variant={said['variant']!r}, whose files only readers that ask for it"
                " find: MTP layers would not be among them\n"
                "  Save without a variant, into a folder of its own."
            )
        if path.exists() and self.source.exists() and path.samefile(self.source):
            raise ConfigError(
                f"{path} is the folder that the MTP layers are taken from, and saving would overwrite them\n"
                "  Save into another folder."
            )

    def _writes(self, is_main_process: bool) -> bool:
        """Whether this process wrote the folder."""
        decide = getattr(self._model, "should_save_on_this_rank", None)
        return bool(decide(is_main_process) if decide else is_main_process)

    def _has_no_trunk(self, said: dict[str, Any]) -> bool:
        """Whether what was saved is no whole model; says so."""
        state_dict = said["state_dict"]
        if getattr(self._model, "_hf_peft_config_loaded", False):
            reason = "it holds adapters, which have no trunk; merge them for a whole folder"
        elif said["distributed_checkpoint"]:
            reason = "it is a distributed checkpoint, for resuming; save without distributed_checkpoint"
        elif state_dict is not None and not state_dict:
            reason = "it holds no tensors, because they were not gathered"
        else:
            return False
        _logger.warning("no MTP layers are put into %s: %s", said["save_directory"], reason)
        return True

    def _is_checkpoint(self, path: Path) -> bool:
        """Whether a running Trainer saves a checkpoint, after which all ranks meet in `on_save`."""
        step = self.trainer_state.global_step if self.trainer_state else None
        return step is not None and path.name == f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _remove_stale_index(path: Path, before: tuple[int, int] | None) -> None:
    """Remove the index of an earlier save that was replaced by one file; Transformers leaves it behind."""
    index = path / INDEX_NAME
    if before and before == _identity(index) and (path / SINGLE_NAME).exists():
        index.unlink()
