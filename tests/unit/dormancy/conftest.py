"""A world of one rank for every test of dormancy, with nothing left over from the model before."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def _world() -> Iterator[None]:
    """Process groups for all tests of a file: making them takes longer than most of the tests."""
    from torpor.megatron import parallel

    parallel.initialize(parallel.Layout(), seed=1234)
    # freeze_mtp looks for optimizers among all objects there are: not among those of imported modules here.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        parallel.shutdown()


@pytest.fixture(autouse=True)
def megatron_rank(_world) -> None:
    """The generators as they are in a new world, and no metrics: tiny models seed themselves besides."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    # Megatron keeps the metrics of all models in one place, sized by the first that ran.
    MTPLossLoggingHelper.tracker.clear()
    get_moe_metrics_tracker().clear()
