"""The learning rate at each step."""

import math
from types import SimpleNamespace

import pytest

from torpor.errors import ConfigError
from torpor.megatron.host import prepare_host
from torpor.training.config import OptimizationConfig
from torpor.training.schedule import build_schedule


def rates(steps, start=0, **values):
    prepare_host()
    settings = OptimizationConfig(
        **{"sequence_length": 8, "global_batch_size": 1, "steps": steps, "lr": 1.0, "min_lr": 0.1} | values
    )
    # As Megatron's optimizers leave a group: the minimum is there, and None.
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0, "max_lr": 1.0, "min_lr": None, "wd_mult": 1.0}])
    scheduler = build_schedule(optimizer, settings, steps)
    if start:
        scheduler.step(start)
    seen = []
    for _ in range(start, steps):
        scheduler.step(1)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_the_first_step_of_a_warm_up_already_trains_and_the_last_step_reaches_the_minimum():
    seen = rates(10, warmup_steps=4)
    assert seen[:4] == [0.25, 0.5, 0.75, 1.0]
    assert seen[-1] == pytest.approx(0.1)
    assert seen[6] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 3 / 6)))


def test_line_and_constant():
    assert rates(4, schedule="linear") == pytest.approx([0.775, 0.55, 0.325, 0.1])
    assert rates(3, schedule="constant", warmup_steps=1) == [1.0, 1.0, 1.0]


def test_a_resumed_schedule_goes_on_where_it_would_have_been():
    assert rates(10, start=6, warmup_steps=2) == rates(10, warmup_steps=2)[6:]


def test_a_warm_up_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"`warmup_steps` 5 leaves no step of the run's 5"):
        rates_of_epochs(5)


def rates_of_epochs(steps):
    prepare_host()
    settings = OptimizationConfig(sequence_length=8, global_batch_size=1, epochs=1, warmup_steps=5)
    return build_schedule(SimpleNamespace(param_groups=[]), settings, steps)
