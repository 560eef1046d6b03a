"""Runs Megatron-Core on a machine without CUDA, on the CPU with gloo; on a CUDA machine it changes nothing.

Megatron-Core takes CUDA for granted in a few dozen places. `prepare_host` stands in for exactly those, and,
apart from Megatron's own modules, only for callers that live in Megatron: everyone else's
`torch.zeros(device="cuda")` still fails as it should. It is meant for correctness and small work, not for
speed.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from torpor.errors import ConfigError
from torpor.megatron.noise import silence_upstream_notices

CPU: Final = torch.device("cpu")
_CALLERS: Final = ("megatron.", "modelopt.")
_installed = False


def is_cpu_host() -> bool:
    """Say whether this machine has no usable CUDA device, so that Megatron runs on the CPU."""
    return not torch.cuda.is_available()


def current_device() -> torch.device:
    """Return the device that this process builds and runs models on."""
    return CPU if is_cpu_host() else torch.device("cuda", torch.cuda.current_device())


def prepare_host() -> torch.device:
    """Make Megatron-Core usable on this machine; to be called before anything imports `megatron.core`.

    Without CUDA the stand-ins below are installed, once. With CUDA neither torch nor Megatron is touched. On
    both, upstream notices that no user can act on are kept off the screen (`torpor.megatron.noise`).

    Returns:
        The device to build models on.

    Raises:
        ConfigError: `megatron.core` was imported before, on a machine without CUDA.
    """
    global _installed
    silence_upstream_notices()
    if not is_cpu_host():
        return current_device()
    if not _installed:
        if "megatron.core" in sys.modules:
            raise ConfigError(
                "megatron.core is already imported, and this machine has no CUDA device\n"
                "  Megatron-Core binds CUDA functions while it is imported: it is too late to replace them.\n"
                "  Call torpor.megatron.host.prepare_host() first, before any import of megatron.core,\n"
                "  modelopt's Megatron plugins or torpor.megatron.specs."
            )
        _stand_in_for_cuda()
        _stand_in_for_nccl()
        _import_megatron_uncompiled()
        _stand_in_for_cuda_random_state()
        _stand_in_for_split_sizes()
        _installed = True
    return CPU


def _called_from_megatron() -> bool:
    """Say whether the function that called a stand-in belongs to Megatron or to Model-Optimizer."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith(_CALLERS)


def _for_megatron(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `stand_in` to callers in Megatron and `original` to everyone else."""

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _called_from_megatron() else original)(*args, **kwargs)

    return dispatch


class _Stream:
    """A stream on a device that has none: work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _called_from_megatron():
            raise RuntimeError("torch.cuda.Stream needs a CUDA device, and this machine has none")

    def wait_stream(self, stream: "_Stream") -> None:
        """Return at once: the other stream's work is done."""

    def wait_event(self, event: object) -> None:
        """Return at once: the event has happened."""

    def record_event(self, event: object = None) -> object:
        """Return the event, or this stream for a new one: what an event is waited for has happened."""
        return self if event is None else event

    def synchronize(self) -> None:
        """Return at once: there is nothing to wait for."""


def _stand_in_for_cuda() -> None:
    """Replace the CUDA calls of torch that Megatron makes without asking whether there is a CUDA device."""
    # `with torch.device(...)` looks factories up in a set that is built on first use: build it of the
    # originals.
    _device_constructors()
    cuda = torch.cuda
    # Everywhere: `device=torch.cuda.current_device()`.
    cuda.current_device = _for_megatron(cuda.current_device, lambda: CPU)
    # pipeline_parallel/p2p_communication.py, parallel_state.py
    cuda.synchronize = _for_megatron(cuda.synchronize, lambda device=None: None)
    # transformer/moe/token_dispatcher.py, transformer/moe/shared_experts.py, pipeline_parallel/utils.py,
    # distributed/param_and_grad_buffer.py
    cuda.Stream = _Stream
    stream = object.__new__(_Stream)
    cuda.current_stream = _for_megatron(cuda.current_stream, lambda device=None: stream)
    cuda.stream = _for_megatron(cuda.stream, lambda stream: contextlib.nullcontext())
    # tensor_parallel/random.py
    cuda.manual_seed = _for_megatron(cuda.manual_seed, torch.manual_seed)
    cuda.get_rng_state = _for_megatron(cuda.get_rng_state, lambda device="cuda": torch.get_rng_state())
    # A literal device="cuda": optimizer/{optimizer,clip_grads,grad_scaler}.py,
    # pipeline_parallel/schedules.py, tensor_parallel/data.py, transformer/utils.py,
    # dist_checkpointing/exchange_utils.py
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        factory = getattr(torch, name)
        setattr(torch, name, _for_megatron(factory, _on_cpu(factory)))
    # tensor.cuda(): schedules and collectives that move counters to the device.
    torch.Tensor.cuda = _for_megatron(torch.Tensor.cuda, lambda self, *args, **kwargs: self)
    # optimizer/{optimizer,distrib_optimizer,clip_grads}.py sort parameters by "torch.cuda.FloatTensor" and
    # its like.
    torch.Tensor.type = _for_megatron(torch.Tensor.type, _cuda_type_name(torch.Tensor.type))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tensor factory that puts on the CPU what it is asked to put on a CUDA device."""

    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # pinning serves copies to a device that is not there
        return factory(*args, **kwargs)

    return build


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Tensor.type` that, asked for a name, gives the CUDA type of the same elements."""

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_of


def _stand_in_for_nccl() -> None:
    """Replace the collectives that gloo has only for parts of equal size.

    tensor_parallel/mappings.py gathers and scatters as many tokens as each rank's experts were sent.
    """
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def gather(
        parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({each.shape for each in parts}) == 1:
            return all_gather(parts, part, group=group, async_op=async_op)
        assert not async_op
        longest = max(len(each) for each in parts)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        gathered = [torch.empty_like(padded) for _ in parts]
        all_gather(gathered, padded, group=group)
        for each, source in zip(parts, gathered, strict=True):
            each.copy_(source[: len(each)])

    def scatter(
        output: torch.Tensor,
        parts: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({each.shape for each in parts}) == 1:
            return reduce_scatter(output, parts, op=op, group=group, async_op=async_op)
        assert not async_op
        whole = torch.cat(parts)
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(each) for each in parts])[dist.get_rank(group)])

    dist.all_gather = _for_megatron(all_gather, gather)
    dist.reduce_scatter = _for_megatron(reduce_scatter, scatter)


def _import_megatron_uncompiled() -> None:
    """Import Megatron-Core with its functions uncompiled: compiling them takes longer than they run."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        import megatron.core.jit
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before
    # For the modules of Megatron that are imported later.
    megatron.core.jit.disable_jit_fuser()


def _stand_in_for_cuda_random_state() -> None:
    """Replace Megatron's access to the CUDA generator, tensor_parallel/random.py, by the CPU's generator."""
    import megatron.core.tensor_parallel.random as megatron_random

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's tracker of random states, over the CPU's generator."""

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Run the body with the named random state.

            Megatron's own also checks that the CPU's generator stood still, and here that one is meant to
            move.
            """
            if name not in self.states_:
                raise KeyError(f"random state {name!r} is not among {sorted(self.states_)}")
            outer_name = self._current_state_name
            outer_state = torch.get_rng_state()
            if outer_name != "default-rng":
                self.states_[outer_name] = outer_state
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                # A body that forks the same name moves the state on, so read it back rather than restore it.
                torch.set_rng_state(outer_state if outer_name == "default-rng" else self.states_[outer_name])
                self._current_state_name = outer_name

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    megatron_random.CudaRNGStatesTracker = CpuRngStatesTracker


def _stand_in_for_split_sizes() -> None:
    """Replace the step that turns split sizes into numbers, transformer/moe/token_dispatcher.py.

    Megatron's skips it for tensors that are on the CPU already, and all-to-all then gets tensors for numbers.
    """
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
