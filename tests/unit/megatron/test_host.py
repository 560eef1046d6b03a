"""The CPU host: Megatron gets its stand-ins, nobody else does, and a CUDA machine is left as it was."""

import subprocess
import sys
import textwrap

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from torpor.megatron.host import prepare_host

CUDA_MACHINE = torch.cuda.is_available()
cpu_only = pytest.mark.skipif(CUDA_MACHINE, reason="there is a CUDA device, so nothing is stood in for")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def call_as(module: str, code: str):
    """Evaluate an expression in a module of that name."""
    return eval(code, {"__name__": module, "torch": torch})


# --- what is left alone -----------------------------------------------------------------------------------

SNAPSHOT = """
    import inspect, sys, torch, torch.cuda.random

    def snapshot():
        import megatron.core
        modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("torch", "megatron")}
        seen = {(n, k): v for n, m in modules.items() if m is not None for k, v in vars(m).items()}
        # Most of Tensor's methods are inherited, and would be replaced by an attribute of its own.
        seen |= {("torch.Tensor", k): inspect.getattr_static(torch.Tensor, k) for k in dir(torch.Tensor)}
        return seen

    def changed(before, after):
        return sorted(
            k for k in before
            if before[k] is not after.get(k) and not k[1].startswith("__")
            # bound methods and properties of modules are made anew on each access; plain values compare
            and not (isinstance(before[k], (int, float, str, bool)) and before[k] == after.get(k))
        )
"""


def test_nothing_of_torch_or_megatron_changes_on_a_cuda_machine() -> None:
    """Every attribute of every loaded torch and Megatron module, and of Tensor, is the object that it was."""
    result = run_python(
        SNAPSHOT
        + """
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    before = snapshot()
    import torpor.megatron.host, torpor.megatron.parallel, torpor.megatron.specs, torpor.megatron.optimizer
    device = torpor.megatron.host.prepare_host()
    torpor.megatron.host.prepare_host()
    assert device == torch.device("cuda", 0), device
    assert len(before) > 10000, len(before)
    print(changed(before, snapshot()))
    """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@cpu_only
def test_the_same_snapshot_sees_the_stand_ins_of_a_cpu_machine() -> None:
    """The test above can fail: on this machine the same comparison names what was stood in for."""
    result = run_python(
        SNAPSHOT
        + """
    from torpor.megatron import host
    import torpor.megatron.noise
    before = snapshot()
    # The snapshot has imported Megatron, and the host would refuse to come second.
    for name in [n for n in sys.modules if n.startswith("megatron")]:
        del sys.modules[name]
    host.prepare_host()
    after = snapshot()
    names = {f"{m}.{k}" for m, k in changed(before, after) if not m.startswith("megatron")}
    wanted = {"torch.zeros", "torch.tensor", "torch.cuda.current_device", "torch.cuda.Stream",
              "torch.Tensor.cuda", "torch.Tensor.type"}
    print(sorted(wanted - names))
    """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_importing_torpor_imports_neither_torch_nor_megatron() -> None:
    result = run_python("import sys, torpor; print('torch' in sys.modules, 'megatron' in sys.modules)")
    assert result.stdout.strip() == "False False"


@cpu_only
def test_importing_torpors_megatron_modules_patches_nothing() -> None:
    result = run_python(
        """
        import torch
        before = torch.zeros, torch.cuda.current_device, torch.Tensor.type, torch.cuda.Stream
        import torpor.megatron.host, torpor.megatron.parallel, torpor.megatron.capabilities
        print(before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type, torch.cuda.Stream))
        """
    )
    assert result.stdout.strip() == "True", result.stderr


@cpu_only
def test_refuses_when_megatron_was_imported_before() -> None:
    result = run_python(
        """
        import megatron.core, torch
        zeros = torch.zeros
        from torpor import ConfigError
        from torpor.megatron.host import prepare_host
        try:
            prepare_host()
        except ConfigError as error:
            print(zeros is torch.zeros, "prepare_host() first" in str(error))
        """
    )
    assert result.stdout.strip() == "True True", result.stderr


# --- what Megatron sees -----------------------------------------------------------------------------------


@cpu_only
def test_prepare_host_is_idempotent() -> None:
    before = torch.zeros, torch.cuda.current_device, megatron_random.CudaRNGStatesTracker
    assert prepare_host() == torch.device("cpu")
    assert before == (torch.zeros, torch.cuda.current_device, megatron_random.CudaRNGStatesTracker)


@cpu_only
@pytest.mark.parametrize("caller", ["megatron.core.optimizer.optimizer", "modelopt.torch.distill"])
def test_megatron_gets_cpu_tensors_for_cuda(caller: str) -> None:
    for code in (
        "torch.zeros(2, device='cuda')",
        "torch.ones(2, device=torch.device('cuda:0'))",
        "torch.empty(2, device='cuda', pin_memory=True)",
        "torch.tensor([1.0], device='cuda')",
        "torch.empty_like(torch.ones(2), device='cuda')",
        "torch.ones(2).cuda()",
        "torch.zeros(2, device=torch.cuda.current_device())",
    ):
        assert call_as(caller, code).device.type == "cpu", code
    assert call_as(caller, "torch.ones(1, dtype=torch.bfloat16).type()") == "torch.cuda.BFloat16Tensor"
    assert call_as(caller, "torch.ones(1).type(torch.float64).dtype") == torch.float64
    assert call_as(caller, "torch.zeros(2, device='meta')").device.type == "meta"
    call_as(caller, "torch.cuda.synchronize()")
    assert call_as(caller, "torch.cuda.current_stream() != torch.cuda.Stream()")
    assert call_as(caller, "torch.cuda.current_stream().record_event().synchronize()") is None
    with call_as(caller, "torch.cuda.stream(torch.cuda.Stream())"):
        pass


@cpu_only
def test_everyone_else_still_gets_torchs_own_answers() -> None:
    for code in (
        "torch.zeros(2, device='cuda')",
        "torch.ones(2).cuda()",
        "torch.cuda.current_device()",
        "torch.cuda.synchronize()",
        "torch.cuda.Stream()",
    ):
        with pytest.raises((AssertionError, RuntimeError)):
            call_as("somebody.else", code)
    assert call_as("somebody.else", "torch.ones(1).type()") == "torch.FloatTensor"
    assert call_as("megatronics", "torch.ones(1).type()") == "torch.FloatTensor"


@cpu_only
def test_a_default_device_still_reaches_the_factories() -> None:
    """`with torch.device(...)` finds factories by identity, and has to find the wrapped ones too."""
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.zeros(2).device.type == "meta"
        assert torch.tensor([1.0]).device.type == "meta"
        assert torch.randn(2).device.type == "meta"


@cpu_only
def test_later_imports_of_megatron_are_left_uncompiled() -> None:
    import megatron.core.jit

    assert megatron.core.jit.jit_fuser is megatron.core.jit.noop_decorator


# --- random states ----------------------------------------------------------------------------------------


@cpu_only
@pytest.mark.usefixtures("megatron_rank")
class TestRandomStates:
    def test_a_fork_draws_from_its_own_state_and_leaves_the_outer_one(self) -> None:
        tracker = megatron_random.get_cuda_rng_tracker()
        torch.manual_seed(5)
        wanted = torch.randn(4)
        torch.manual_seed(5)
        first = torch.randn(2)
        with tracker.fork():
            inside = torch.randn(2)
            with tracker.fork("expert-parallel-rng"):
                nested = torch.randn(2)
            inside_again = torch.randn(2)
        assert torch.equal(torch.cat([first, torch.randn(2)]), wanted)
        drawn = torch.cat([inside, nested, inside_again])
        assert len(set(drawn.tolist())) == 6

    def test_a_state_moves_on_from_fork_to_fork_and_starts_anew_with_the_seed(self) -> None:
        def draw() -> torch.Tensor:
            with megatron_random.get_cuda_rng_tracker().fork():
                return torch.randn(3)

        first, second = draw(), draw()
        megatron_random.model_parallel_cuda_manual_seed(1234)
        assert torch.equal(first, draw())
        assert torch.equal(second, draw())
        assert not torch.equal(first, second)

    def test_the_outer_state_returns_after_an_exception(self) -> None:
        before = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError), megatron_random.get_cuda_rng_tracker().fork():
            int(torch.randn(3).numel()) / 0
        assert torch.equal(torch.get_rng_state(), before)

    def test_recomputed_dropout_drops_the_same_elements(self) -> None:
        from megatron.core.tensor_parallel import checkpoint

        def f(x: torch.Tensor) -> torch.Tensor:
            with megatron_random.get_cuda_rng_tracker().fork():
                return torch.dropout(x, 0.5, True)

        x = torch.ones(1000, requires_grad=True)
        y = checkpoint(f, False, x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        assert 300 < int((y == 0).sum()) < 700
