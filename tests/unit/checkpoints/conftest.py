"""Folders that the tests of `torpor.checkpoints` share; copy one before changing it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tiny


@pytest.fixture(scope="session")
def nemotron_h(tmp_path_factory) -> Path:
    """A hybrid with every kind of layer, one MTP layer `*E`, BF16, in two shards."""
    return tiny.write_nemotron_h(tmp_path_factory.mktemp("tiny") / "nemotron_h", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def mimo(tmp_path_factory) -> Path:
    """A dense model of two layers with two MTP layers, FP32, in one file."""
    return tiny.write_mimo(tmp_path_factory.mktemp("tiny") / "mimo", num_mtp=2, shards=1)


@pytest.fixture
def copied(tmp_path) -> Callable[[Path], Path]:
    """A function that copies a folder for one test to spoil."""

    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / f"copy-of-{folder.name}"))

    return copy
