"""What every test shares: one thread, no accelerator unless a test asks for it, fixtures for Megatron."""

import os

# Before anything imports torch: tests are small and run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# gloo resolves the host's own name otherwise, which not every machine can.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices from all runs but those of `tests/gpu` alone.

    The other tests compare bits that a CPU gives, and many work on it with tensors of their own.
    """
    gpu_tests = Path(__file__).parent / "gpu"
    chosen = [config.invocation_params.dir / argument.split("::")[0] for argument in config.args]
    if not all(path.resolve().is_relative_to(gpu_tests) for path in chosen):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and mark what starts several processes."""
    for item in items:
        folders = item.path.parts
        if "gpu" in folders:
            item.add_marker(pytest.mark.gpu)
        if "ranks" in folders:
            item.add_marker(pytest.mark.ranks)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            skip = pytest.mark.skip(reason="needs a CUDA device, which only `make test-gpu` looks for")
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_state_of_other_models() -> None:
    """Forget what Megatron keeps per process, not per model, from tests that ran before.

    Metrics of MoE and MTP are sized by the first model that ran. The scale of the auxiliary loss gets its
    shape from whatever ran first, a bare backward or a schedule, and the other then fails to write into it.
    """
    moe = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe:
        moe.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    metrics = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if metrics:
        metrics.destroy_moe_metrics_tracker()
    mtp = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if mtp:
        mtp.MTPLossLoggingHelper.tracker.clear()


@pytest.fixture
def megatron_rank() -> None:
    """A world of one rank with Megatron's process groups, generators seeded with 1234.

    The groups stay for the next test: each group's gloo threads live on after it is destroyed, and a few
    hundred tests with groups of their own would leave thousands that wake up all the time.
    """
    from torpor.megatron import parallel
    from torpor.megatron.host import prepare_host

    prepare_host()
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel.initialize(parallel.Layout(), seed=1234)
        return
    import numpy
    import torch

    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


@pytest.fixture
def no_process_groups() -> Iterator[None]:
    """No process group, neither torch's nor Megatron's, before and after."""
    from torpor.megatron import parallel
    from torpor.megatron.host import prepare_host

    prepare_host()
    parallel.shutdown()
    try:
        yield
    finally:
        parallel.shutdown()
