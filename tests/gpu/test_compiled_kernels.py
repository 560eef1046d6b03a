"""Kernels that Megatron compiles: other tests run with compilation off, this one in a process with it on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from distill_runs import read, write_models
from torpor.megatron.graphed_projection import GraphedProjection
from torpor.runs.distill import distill
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config


def distil_compiled(path: Path) -> None:
    """Run a distillation; print how many functions were compiled, what was recorded, and the losses."""
    from torch._dynamo.utils import counters

    recorded = []
    record = GraphedProjection._record

    def record_and_tell(self, inputs):
        record(self, inputs)
        recorded.append(self.is_recorded)

    GraphedProjection._record = record_and_tell
    result = distill(read_config(DistillConfig, path))
    print(json.dumps([counters["frames"]["ok"], recorded, result.first_loss, result.last_loss]))


def test_a_distillation_with_compiled_kernels_and_a_recorded_teacher(no_process_groups, tmp_path):
    write_models(tmp_path, tiny.write_mimo)
    eager = distill(read(tmp_path, "eager"))
    read(tmp_path, "compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__, tmp_path / "compiled.yaml"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    frames, recorded, first_loss, last_loss = json.loads(done.stdout.splitlines()[-1])
    assert frames > 0
    assert recorded == [True]
    assert first_loss == pytest.approx(eager.first_loss, rel=1e-3)
    assert last_loss == pytest.approx(eager.last_loss, rel=2e-2)


if __name__ == "__main__":
    distil_compiled(Path(sys.argv[1]))
