"""A world of one rank for every test of dormancy, with nothing left over from the model before."""

import pytest


@pytest.fixture(autouse=True)
def _empty_mtp_metrics(megatron_rank):
    """Megatron keeps the MTP losses of all models in one place, sized by the first that ran its heads."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
