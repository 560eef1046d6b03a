"""The end of a training run: its last checkpoint as a Hugging Face folder, compared with where it began."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torpor.checkpoints.families import count_mtp_layers
from torpor.checkpoints.folder import Folder
from torpor.checkpoints.verify import VerifyResult, verify_folders
from torpor.errors import CheckpointError, ConfigError, MTPChangedError
from torpor.runs.result import RunResult
from torpor.runs.run_folder import write_json
from torpor.training.config import RunConfig


def export_run(
    config: RunConfig,
    source: Folder,
    write: Callable[[Path], None],
    *,
    steps: int,
    fingerprint: dict[str, Any],
) -> VerifyResult | None:
    """Export a trained model and compare it with the model that the run started from. On one rank.

    An export of these steps and settings that is there already is compared and not written again.

    Args:
        config: what was asked for.
        source: the model that the run started from.
        write: writes the trained model as a new folder.
        steps: optimizer steps of the run, all of them done.
        fingerprint: what is the same in all parts of the run.

    Returns:
        The comparison, None for a model without MTP layers.
    """
    out, stale = config.output / "export", config.output / "export.stale"
    # An earlier part of the run may have got as far, or may have ended with fewer steps.
    if not is_exported(config, steps, fingerprint):
        shutil.rmtree(stale, ignore_errors=True)
        if out.exists():
            out.rename(stale)
        write(out)
        write_json(config.output / "export.json", _record(steps, fingerprint))
        shutil.rmtree(stale, ignore_errors=True)
    return _verify(config, source)


def is_exported(config: RunConfig, steps: int, fingerprint: dict[str, Any]) -> bool:
    """Say whether the run folder holds an export of these steps and settings."""
    return _read_record(config) == _record(steps, fingerprint)


def check_verified(config: RunConfig, source: Folder, verified: VerifyResult | None) -> None:
    """Check that an export differs from its source only where a run with sleeping heads may change it.

    Raises:
        MTPChangedError: it differs elsewhere.
    """
    if config.freeze_mtp and verified is not None and not verified.ok:
        raise MTPChangedError(
            f"{config.output / 'export'} differs from {source.path} where it must not; see "
            f"{config.output / 'verify.json'}\n"
            f"  Do not ship this export. `torpor verify {config.models[0].upper()} EXPORT` lists every "
            "difference."
        )


def read_finished(
    config: RunConfig, source: Folder, steps: int, fingerprint: dict[str, Any]
) -> RunResult | None:
    """What a complete run reported, if it is the run that is asked for and its export is in order.

    Args:
        config: what is asked for.
        source: the model that the run starts from.
        steps: optimizer steps asked for.
        fingerprint: what has to be the same in all parts of the run.

    Returns:
        Its result, None if there is no complete run.

    Raises:
        ConfigError: the folder holds another run.
        CheckpointError: its summary is damaged.
        MTPChangedError: its export is not in order any more.
    """
    summary, record = config.output / "summary.json", _read_record(config)
    if record is None or not summary.exists():
        return None
    differing = [name for name, value in fingerprint.items() if record["fingerprint"].get(name) != value]
    differing += ["steps"] if record["step"] != steps else []
    if differing:
        raise ConfigError(
            f"`output`: {config.output} holds a complete run of {record['step']} steps with other settings"
            f" or inputs: {', '.join(f'`{name}`' for name in differing)}\n  Give a new folder."
        )
    try:
        values = json.loads(summary.read_text(encoding="utf-8"))
        values.pop("ok")
        values |= {"output": config.output, "export": config.output / "export"}
        result = RunResult(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{summary} is damaged: {error}\n  Remove it and give the same command again."
        ) from error
    check_verified(config, source, _verify(config, source))
    return result


def _record(steps: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
    return {"step": steps, "fingerprint": fingerprint}


def _read_record(config: RunConfig) -> dict[str, Any] | None:
    """Which step and settings the export is of; None if there is no export, or none that is known of."""
    record = config.output / "export.json"
    if not record.exists() or not (config.output / "export").exists():
        return None
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return _record(values["step"], dict(values["fingerprint"]))
    except (ValueError, KeyError, TypeError):
        return None


def _verify(config: RunConfig, source: Folder) -> VerifyResult | None:
    """Compare the export with its source and write down what was found."""
    if not count_mtp_layers(source).declared:
        return None
    verified = verify_folders(source.path, config.output / "export")
    write_json(config.output / "verify.json", verified.to_json())
    return verified
