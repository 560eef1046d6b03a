"""torch.compile around, inside and instead of the trunk's forward: the bytes of the model without MTP.

The other tests run with compilation switched off, so this one starts a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_every_way_to_compile():
    """The decoder after the call, `torch.compile(model)` before it."""
    environment = {n: v for n, v in os.environ.items() if n != "TORCHDYNAMO_DISABLE"}
    environment["PYTHONPATH"] = str(TESTS)
    script = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["decoder", "torch.compile"]


def compile_and_compare():
    """Compile a dormant model in each way and compare a step with its reference, which is not compiled."""
    import torch
    from torch._dynamo.utils import counters

    from torpor.megatron import parallel
    from torpor.megatron.host import prepare_host

    if prepare_host().type == "cpu":
        # Compiled code cannot ask who calls it, as the CPU host's stand-in does.
        torch.cuda.current_device = lambda: torch.device("cpu")
    parallel.initialize(parallel.Layout(), seed=1234)

    from parity import assert_same
    from tiny_models import GPT, build_pair
    from torpor import freeze_mtp

    for name in ("decoder", "torch.compile"):
        torch._dynamo.reset()
        counters.clear()
        dormant, reference = build_pair(GPT, num_layers=1)
        compiled = torch.compile(dormant, backend="eager") if name == "torch.compile" else dormant
        handle = freeze_mtp(dormant)
        if name == "decoder":
            dormant.decoder.compile(backend="eager")
        assert_same(Named(compiled, dormant), reference)
        assert counters["frames"]["ok"] > 0, name
        handle.check()
        print(name)


class Named:
    """A compiled model under the parameter names of what was compiled."""

    def __init__(self, compiled, model):
        self.compiled = compiled
        self.named_parameters = model.named_parameters

    def __call__(self, **inputs):
        return self.compiled(**inputs)


if __name__ == "__main__":
    compile_and_compare()
