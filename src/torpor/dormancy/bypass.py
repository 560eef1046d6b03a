"""The bypass: outside inference the MTP block passes its input through and nobody asks for its loss.

GPTModel and HybridModel run MTP at two places: the block, whose output is the decoder's hidden states
[s, b, h] with those of every MTP layer appended along s, and the loss, which splits them again when
`config.mtp_num_layers` says so (megatron/core/models/{gpt/gpt_model,hybrid/hybrid_model}.py). Both must be
passed by, in every forward and on every pipeline stage, and nothing else may notice:

- the block returns its input; neither its forward nor hooks on it run;
- for the duration of one forward the language model reads its config through a copy in which
  `mtp_num_layers` is None. Its decoder, its routers, `finalize_model_grads` and checkpointing keep the
  original. `mtp_process` is left alone: with it off, a tied last stage would project with its own, never
  synchronised `output_layer.weight` instead of the shared embedding. Where forward has the argument
  `compute_mtp_loss` (HybridModel after 0.19) it is given as False too, whatever the caller gave; the copy
  stays, since Model-Optimizer's distillation counts loss calls by that field.

A stage that holds the MTP block but not the first embedding has a duplicate of it that nothing reads while
the heads sleep, unless tied weights make it the output projection. It must go on receiving a gradient: DDP
reduces a bucket when all its gradients are there, and the first stage waits for this stage's share of the
embedding's gradient (finalize_model_grads.py). So it is given zeros, by the block as it passes through:
there `compute_mtp_loss` is given as True, or the block would not be reached. The same place waits for the
copy's weights where overlap_param_gather fetches them, since the embedding's own forward is not called.

Whether heads sleep is decided once a forward, when it begins. InferenceMode and `awake()` hold for the whole
process and the config view for the whole model, so one model cannot be in a sleeping forward and in an
awake or inference one at the same time: the second to begin is refused.

The stand-ins are instances that stand in `module.__dict__["_call_impl"]`, which `torch.nn.Module.__call__`
looks up on the instance. Unlike an instance-level `forward` this survives wrappers that replace `forward`
later (Model-Optimizer's distillation does); unlike forward hooks it restores under BaseException too, so a
KeyboardInterrupt inside forward leaves no trace; and unlike swapping the module the state dict is whole at
every instant, whoever takes it.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor.dormancy.capture import refuse_counting_captures
from torpor.dormancy.distillation_pairs import refuse_mtp_captures
from torpor.errors import MTPExecutedError, TorporError, UnsupportedModelError

_LOCK = threading.Lock()


class Switch:
    """Says whether the MTP layers of one `freeze_mtp` call are asleep, and counts when they ran anyway."""

    def __init__(self) -> None:
        self.executions = 0
        self.num_awake = 0

    def is_asleep(self) -> bool:
        """Whether an MTP forward now would break dormancy: outside inference and outside `awake()`."""
        from megatron.core.inference.utils import InferenceMode

        return self.num_awake == 0 and not InferenceMode.is_active()

    def refuse_execution(self, name: str) -> None:
        """Count an MTP forward that must not happen and stop it.

        Raises:
            MTPExecutedError: always.
        """
        self.executions += 1
        raise MTPExecutedError(
            f"{name} was called outside inference while its MTP layers are asleep\n"
            "  Call the language model itself, `model(...)` and not `model.forward(...)`, so that it passes"
            " MTP by; to run the heads on purpose use `with handle.awake():`."
        )


class DormantLanguageModelCall:
    """Stands in for the `_call_impl` of a language model: every forward reads a config without MTP."""

    def __init__(self, model: torch.nn.Module, name: str, switch: Switch) -> None:
        self.model = model
        self.name = name
        self.switch = switch
        self.num_asleep = 0
        self.num_awake = 0
        self._config: Any = None

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; while asleep, under a config without MTP. What it calls may be compiled.

        Raises:
            TorporError: if another thread is in a forward of this model that began in the other state.
            UnsupportedModelError: if something on the output layer counts MTP's calls of it, or captures the
                output of an MTP module for distillation.
        """
        call = type(self.model)._call_impl
        if not self.switch.is_asleep():
            with self._forward_awake():
                return call(self.model, *args, **kwargs)
        refuse_counting_captures(self.model, self.name)
        mtp = self.model._modules.get("mtp")
        if mtp is not None:
            refuse_mtp_captures(mtp, f"{self.name}.mtp" if self.name else "mtp")
        if _takes_compute_mtp_loss(self.model.forward):
            kwargs["compute_mtp_loss"] = self.has_embedding_copy()
        with self._forward_asleep():
            return call(self.model, *args, **kwargs)

    def has_embedding_copy(self) -> bool:
        """Whether this stage holds MTP, and for it a copy of the first stage's embedding."""
        model: Any = self.model
        return bool(model.mtp_process and not model.pre_process)

    def unread_duplicates(self) -> list[torch.nn.Parameter]:
        """Return this stage's trainable copies of embedding weights that no sleeping forward reads."""
        model: Any = self.model
        if not self.has_embedding_copy():
            return []
        projects = model.post_process and model.share_embeddings_and_output_weights
        word_embedding = model.embedding.word_embeddings.weight
        duplicates = (p for p in model.embedding.parameters() if not (projects and p is word_embedding))
        return [p for p in duplicates if p.requires_grad]

    @contextmanager
    def _forward_asleep(self) -> Iterator[None]:
        # Counted, so that forwards of one model that overlap in several threads restore the config once.
        # The field is set through __dict__ because a config may mirror attribute writes elsewhere
        # (Megatron-Bridge's distillation provider writes them to the teacher's config, for good).
        attributes = vars(self.model)
        with _LOCK:
            self._refuse_beside(self.num_awake, "one that runs its MTP layers, awake or in inference")
            if self.num_asleep == 0:
                self._config = attributes["config"]
                # Not copy.copy: a config that looks attributes up in another one cannot while it is empty.
                view = object.__new__(type(self._config))
                vars(view).update(vars(self._config), mtp_num_layers=None)
                attributes["config"] = view
            self.num_asleep += 1
        try:
            yield
        finally:
            with _LOCK:
                self.num_asleep -= 1
                if self.num_asleep == 0:
                    attributes["config"], self._config = self._config, None

    @contextmanager
    def _forward_awake(self) -> Iterator[None]:
        with _LOCK:
            self._refuse_beside(self.num_asleep, "one with its MTP layers asleep")
            self.num_awake += 1
        try:
            yield
        finally:
            with _LOCK:
                self.num_awake -= 1

    def _refuse_beside(self, num_running: int, which: str) -> None:
        if num_running:
            raise TorporError(
                f"{self.name or type(self.model).__name__} is in another forward, {which}\n"
                "  Sleeping and waking forwards of one model cannot overlap, since awake() and InferenceMode"
                " hold for the whole process: let the other thread finish first, or give it its own model."
            )


class PassThroughCall:
    """Stands in for the `_call_impl` of an MTP block: returns the hidden states it was given."""

    def __init__(self, mtp: torch.nn.Module, name: str, owner: DormantLanguageModelCall) -> None:
        self.mtp = mtp
        self.name = name
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states [s, b, h] unchanged in a sleeping forward; run the block otherwise."""
        if self.owner.num_asleep == 0:
            if self.owner.switch.is_asleep():
                self.owner.switch.refuse_execution(self.name)
            return type(self.mtp)._call_impl(self.mtp, *args, **kwargs)
        # MultiTokenPredictionBlock.forward(input_ids, position_ids, hidden_states, ...)
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[2]
        if self.owner.has_embedding_copy():
            model: Any = self.owner.model
            _wait_for_gathered_weights(model.embedding)
        unread = self.owner.unread_duplicates()
        if unread and torch.is_grad_enabled() and hidden_states.requires_grad:
            return _WithZeroGradients.apply(hidden_states, *unread)
        return hidden_states


def _wait_for_gathered_weights(module: torch.nn.Module) -> None:
    """Have Megatron's DDP finish gathering a module's weights, as the module's own forward would.

    With overlap_param_gather the distributed optimizer's ranks fetch each other's updated weights by forward
    pre-hooks (distributed/distributed_data_parallel.py). A tied last stage projects with its copy of the
    embedding, whose forward only MTP calls: without this it would project with half the step before.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if getattr(hook, "__module__", None) == "megatron.core.distributed.distributed_data_parallel":
                hook(part)


class _WithZeroGradients(torch.autograd.Function):
    """The identity on hidden states that hands each of the other tensors a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        # The same memory but no view of it: the pipeline schedule frees a stage's output and refuses views
        # (pipeline_parallel/schedules.py, deallocate_output_tensor).
        output = hidden_states.new_empty(0)
        output.data = hidden_states.data
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.others
        ]
        return grads[0], *zeros


@functools.lru_cache(maxsize=64)
def _has_compute_mtp_loss(function: Callable[..., Any]) -> bool:
    return "compute_mtp_loss" in inspect.signature(function).parameters


def _takes_compute_mtp_loss(forward: Callable[..., Any]) -> bool:
    """Whether a bound forward has the argument with which upstream switches MTP off for one forward."""
    return _has_compute_mtp_loss(getattr(forward, "__func__", forward))


class ExecutionGuard:
    """A forward pre-hook for retained modules: outside inference their forward must not be reached."""

    def __init__(self, name: str, switch: Switch) -> None:
        self.name = name
        self.switch = switch

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Raise MTPExecutedError while asleep."""
        if self.switch.is_asleep():
            self.switch.refuse_execution(self.name)


class RefuseSchedulePlan:
    """Stands in for a model's `build_schedule_plan`, which runs MTP layers without the model's forward."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to build a plan.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"{self.name or 'the model'}.build_schedule_plan was called while its MTP layers are asleep: the"
            " plan (overlapped expert communication) runs them without the model's forward\n"
            "  Set overlap_moe_expert_parallel_comm to False, or call the handle's remove() first."
        )
