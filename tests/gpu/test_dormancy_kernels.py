"""On the device a dormant step launches the kernels of a step without MTP, and waits no more often."""

import pytest

from parity import FULL_RECOMPUTE
from profiles import kernels_and_synchronisations
from tiny_models import GPT, GPT_MOE, GPT_TIED, HYBRID, HYBRID_MOE, build_pair
from torpor import freeze_mtp

pytestmark = pytest.mark.usefixtures("megatron_rank")


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
@pytest.mark.parametrize("kind", [GPT, GPT_TIED, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
def test_the_same_kernels_and_no_more_waiting(kind, recompute):
    """Kernels, copies and synchronising calls of the host by name and number."""
    dormant, reference = build_pair(kind, **recompute)
    awake, _ = kernels_and_synchronisations(dormant)
    freeze_mtp(dormant)
    kernels, waits = kernels_and_synchronisations(dormant)
    expected, expected_waits = kernels_and_synchronisations(reference)
    assert kernels == expected
    assert waits == expected_waits
    assert len(awake) > len(expected) > 50
