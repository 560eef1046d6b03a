"""The Triton kernels where there is no GPU: interpreted beside the definitions, and compiled for one."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from test_losses import DIVERGENCES, inputs

from torpor.losses import LossSettings
from torpor.training import losses

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")


def test_values_by_the_interpreter():
    """In a process of its own: Triton decides at its import whether to compile or to interpret."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, str(INTERPRETED)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout
    assert "17 passed" in run.stdout, run.stdout


def test_where_the_kernels_are_used(monkeypatch):
    """CPU tensors, FP64 and a top-k take PyTorch's way; so does everything where Triton is missing."""
    student, teacher, *_ = inputs(torch.float32)
    settings = LossSettings()
    assert losses._kernels(student, teacher, settings) is None

    class OnDevice(torch.Tensor):
        is_cuda = True

    def on_device(projection, dtype=torch.float32):
        states = projection.hidden_states_SBH.detach().to(dtype).as_subclass(OnDevice)
        return replace(projection, hidden_states_SBH=states)

    there = on_device(student), on_device(teacher)
    assert losses._kernels(*there, settings).__name__ == "torpor.training.divergence_kernels"
    assert losses._kernels(*there, LossSettings(top_k=2)) is None
    assert losses._kernels(on_device(student, torch.float64), there[1], settings) is None
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda name: None)
    losses._import_kernels.cache_clear()
    try:
        assert losses._kernels(*there, settings) is None
    finally:
        losses._import_kernels.cache_clear()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_they_compile_for_a_gpu_that_is_not_here(dtype):
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torpor.training import divergence_kernels

    def build(kernel, types, constants):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, places)
        return compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

    logits, floats = f"*{dtype}", "*fp32"
    numbers = {"num_columns": "i32", "temperature": "fp32"}
    types = {"logits_ptr": logits, "result_ptr": floats, **numbers}
    assert build(divergence_kernels._log_sum_exp_kernel, types, {"BLOCK": 64})
    types = {
        **dict.fromkeys(("student_ptr", "teacher_ptr"), logits),
        **dict.fromkeys(("log_z_student_ptr", "log_z_teacher_ptr", "log_z_plain_ptr", "sums_ptr"), floats),
        **dict.fromkeys(("beta", "factor", "mix"), "fp32"),
        "columns_ptr": "*i64",
        "num_rows": "i32",
        **numbers,
    }
    for divergence, (is_sum, is_gradient) in itertools.product(
        DIVERGENCES, [(True, False), (False, True), (True, True)]
    ):
        constants = {
            "DIVERGENCE": divergence,
            "IS_SUM": is_sum,
            "IS_GRADIENT": is_gradient,
            "HAS_LABELS": is_gradient,
            "BLOCK": 64,
        }
        assert build(divergence_kernels._compare_kernel, types, constants)
