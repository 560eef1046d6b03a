"""`freeze_mtp` and the handle it returns: dormancy, its proof, and its end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from torpor.dormancy.bypass import (
    DormantLanguageModelCall,
    ExecutionGuard,
    PassThroughCall,
    RefuseSchedulePlan,
    Switch,
)
from torpor.dormancy.casting import ApplyToRetained
from torpor.dormancy.dead_weight import DeadOutputWeight
from torpor.dormancy.discovery import LanguageModelSite, as_chunks, find_sites, join
from torpor.dormancy.fingerprint import sha256_of
from torpor.dormancy.membership import check_untrained
from torpor.dormancy.moe_metrics import CountLayersThatRan
from torpor.dormancy.routing_replay import ReplayWithoutMTP
from torpor.errors import MTPChangedError, MTPExecutedError, TorporError


@dataclass(frozen=True)
class DormancyReport:
    """What `DormantMTP.check` found in order on this rank.

    Attributes:
        executions: MTP forwards outside inference since the call; 0.
        num_tensors: Retained parameters and buffers on this rank; 0 on ranks that hold no MTP layer.
        num_bytes: Their size.
        fingerprint: SHA-256 of each by name, equal to when they fell asleep (or were last loaded).
        optimizer_checked: Whether an optimizer was given to the check.
    """

    executions: int
    num_tensors: int
    num_bytes: int
    fingerprint: dict[str, str]
    optimizer_checked: bool

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-serialisable data."""
        return asdict(self)


def freeze_mtp(model: torch.nn.Module | Sequence[torch.nn.Module]) -> "DormantMTP":
    """Put the MTP layers of a Megatron-Core model to sleep until `remove()` is called on the handle.

    From the call on, in every forward outside inference, MTP blocks do not run and neither do their
    vocabulary projection and loss; nothing of theirs is saved for or recomputed in backward. Their
    parameters have `requires_grad=False`. Trunk parameters that MTP borrows (embedding, output layer) go on
    training. Names, state-dict keys and sharded-state-dict keys stay as they are; inference and speculative
    decoding are untouched. Everything is validated before anything is changed.

    Call it on every rank, on the bare model, once its weights are there and before DDP and the optimizer. A
    later `load_state_dict` into the model is allowed and becomes the new baseline of the proof.

    Example:
        >>> handle = torpor.freeze_mtp(model)          # doctest: +SKIP
        >>> model = DistributedDataParallel(config, ddp_config, model)  # doctest: +SKIP
        >>> ...                                        # train                  # doctest: +SKIP
        >>> handle.check(optimizer)                    # doctest: +SKIP

    Args:
        model: A GPTModel or HybridModel, a module that holds some (Float16Module, Model-Optimizer's
            DistillationModel with its teacher), or the list of virtual pipeline chunks.

    Returns:
        The handle that counts executions, proves that nothing changed and ends dormancy.

    Raises:
        UnsupportedModelError: if dormancy cannot be honoured; the model is as it was.
    """
    chunks = as_chunks(model)
    return DormantMTP(chunks, find_sites(chunks))


class DormantMTP:
    """The dormancy of one model's MTP layers. Made by `freeze_mtp`; not to be constructed otherwise."""

    def __init__(self, chunks: Sequence[torch.nn.Module], sites: Sequence[LanguageModelSite]) -> None:
        self._sites = list(sites)
        self._switch = Switch()
        self._removed = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._shared = _names_shared_with_the_trunk(chunks, sites)
        # Read before anything is changed: a tensor without readable bytes ends the call here.
        self._baseline = self.fingerprint()
        self._loading: set[str] = set()
        self._was_trainable = {name: p.requires_grad for name, p in self._parameters()}
        for _, parameter in self._parameters():
            parameter.requires_grad_(False)
        self._dead_weights = [DeadOutputWeight(s.model) for s in sites if DeadOutputWeight.is_in(s.model)]
        self._replay = ReplayWithoutMTP(m for s in sites if s.mtp is not None for m in s.mtp.modules())
        for site in self._sites:
            self._install(site)
        self._counts_moe_layers = any(site.model.config.num_moe_experts for site in sites)
        if self._counts_moe_layers:
            CountLayersThatRan.install()

    @property
    def executions(self) -> int:
        """MTP forwards outside inference since the call, on this rank; stays 0."""
        return self._switch.executions

    def fingerprint(self) -> dict[str, str]:
        """Return the SHA-256 of the raw bytes of every retained parameter and buffer on this rank."""
        return {name: sha256_of(tensor, name) for name, tensor in self._tensors()}

    def check(self, optimizer: Any = None) -> DormancyReport:
        """Prove that the MTP layers slept: not executed, not trained, not changed.

        It looks at this rank only and makes no collective call.

        Args:
            optimizer: The torch or Megatron-Core optimizer whose membership is checked too.

        Returns:
            What was found, for a log or a receipt.

        Raises:
            MTPExecutedError: if an MTP forward was attempted outside inference.
            MTPTrainedError: if a retained parameter has a gradient, a DDP buffer or optimizer state.
            MTPChangedError: if the bytes of a retained tensor differ from when it fell asleep.
            TorporError: if dormancy has ended.
        """
        if self._removed:
            raise TorporError(
                "this handle's dormancy has ended: remove() was called\n  Call freeze_mtp again."
            )
        if self.executions:
            raise MTPExecutedError(
                f"MTP layers were called {self.executions} times outside inference while asleep; 0 is right"
                "\n  The traceback of the first call named the module; find what swallowed it."
            )
        self._check_still_there()
        check_untrained(self._parameters(), optimizer)
        fingerprint = self.fingerprint()
        for name in sorted(self._baseline.keys() ^ fingerprint.keys()):
            raise MTPChangedError(
                f"{name} {'appeared' if name in fingerprint else 'disappeared'} while asleep\n"
                "  Do not save or export this model: its MTP layers are not those that fell asleep."
            )
        for name, digest in fingerprint.items():
            if digest != self._baseline[name]:
                raise MTPChangedError(
                    f"{name} changed while asleep\n"
                    f"  asleep since sha256 {self._baseline[name]}   now {digest}\n"
                    "  Do not export this model: something wrote to it behind autograd and the optimizer."
                )
        return DormancyReport(
            executions=self.executions,
            num_tensors=len(fingerprint),
            num_bytes=sum(tensor.nbytes for _, tensor in self._tensors()),
            fingerprint=fingerprint,
            optimizer_checked=optimizer is not None,
        )

    def renew_baseline_at_first_forward(self) -> None:
        """Let the proof begin with the next forward: what the retained tensors hold then is the baseline.

        For trainers that wrap the model first and then copy weights into its parameters, past
        `load_state_dict`. Nothing can have trained before the first forward.
        """
        hooks: list[torch.utils.hooks.RemovableHandle] = []

        def renew(*_: Any) -> None:
            for hook in hooks:
                hook.remove()
            self._baseline = self.fingerprint()

        hooks += [site.model.register_forward_pre_hook(renew) for site in self._sites]
        self._hooks += hooks

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run the MTP layers normally inside the block, for instance to measure their acceptance.

        Their parameters stay frozen; in training mode their loss reaches the trunk as upstream has it.
        """
        self._switch.num_awake += 1
        try:
            yield
        finally:
            self._switch.num_awake -= 1

    def remove(self) -> None:
        """End dormancy: everything is as before the call. A second call does nothing."""
        if self._removed:
            return
        self._removed = True
        for site in self._sites:
            del vars(site.model)["_call_impl"]
            vars(site.model).pop("build_schedule_plan", None)
            if site.mtp is not None:
                del vars(site.mtp)["_call_impl"], vars(site.mtp)["_apply"]
        for hook in self._hooks:
            hook.remove()
        for dead_weight in self._dead_weights:
            dead_weight.put_back()
        self._replay.put_back()
        for name, parameter in self._parameters():
            parameter.requires_grad_(self._was_trainable[name])
        if self._counts_moe_layers:
            CountLayersThatRan.uninstall()

    def _install(self, site: LanguageModelSite) -> None:
        call = DormantLanguageModelCall(site.model, site.name, self._switch)
        vars(site.model)["_call_impl"] = call
        if hasattr(site.model, "build_schedule_plan"):
            vars(site.model)["build_schedule_plan"] = RefuseSchedulePlan(site.name)
        if site.mtp is None:
            return
        mtp_name = join(site.name, "mtp")
        vars(site.mtp)["_call_impl"] = PassThroughCall(site.mtp, mtp_name, call)
        for name, module in site.mtp.named_modules():
            guard = ExecutionGuard(join(mtp_name, name), self._switch)
            self._hooks.append(module.register_forward_pre_hook(guard))
        self._hooks.append(site.mtp.register_load_state_dict_pre_hook(self._before_loading))
        self._hooks.append(site.mtp.register_load_state_dict_post_hook(self._after_loading))
        vars(site.mtp)["_apply"] = ApplyToRetained(site.mtp, partial(self._follow_cast, mtp_name))

    def _follow_cast(self, mtp_name: str, name: str, before: torch.Tensor, after: torch.Tensor) -> None:
        """Take a parameter that was cast without loss as the baseline, if it was as it should be before."""
        name = join(mtp_name, name)
        if self._baseline.get(name) == sha256_of(before, name):
            self._baseline[name] = sha256_of(after, name)

    def _check_still_there(self) -> None:
        for site in self._sites:
            if site.model._modules.get("mtp") is not site.mtp:
                raise MTPChangedError(
                    f"{join(site.name, 'mtp')} is no longer the block that fell asleep: it was removed or"
                    " replaced\n  Do not save or export this model: its heads would be lost."
                )

    def _before_loading(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """Note what a state dict brings for the block: the rest keeps its baseline."""
        (site,) = (site for site in self._sites if site.mtp is module)
        self._loading = {join(site.name, "mtp", key.removeprefix(prefix)) for key in state}

    def _after_loading(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        """Take what was just loaded as the baseline: the usual order is freeze, wrap, load a checkpoint."""
        for name, tensor in self._tensors():
            if name in self._loading:
                self._baseline[name] = sha256_of(tensor, name)
        self._loading = set()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the retained parameters and buffers as the modules hold them now."""
        yield from self._parameters()
        for site in self._sites:
            if site.mtp is not None:
                for name, buffer in site.mtp.named_buffers():
                    yield join(site.name, "mtp", name), buffer

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in _mtp_parameters(self._sites):
            if name not in self._shared:
                yield name, parameter


def _mtp_parameters(sites: Sequence[LanguageModelSite]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for site in sites:
        if site.mtp is not None:
            for name, parameter in site.mtp.named_parameters():
                yield join(site.name, "mtp", name), parameter


def _names_shared_with_the_trunk(
    chunks: Sequence[torch.nn.Module], sites: Sequence[LanguageModelSite]
) -> frozenset[str]:
    """Return the names of parameters in MTP blocks that belong to modules outside them as well."""
    mtp_modules = {m for site in sites if site.mtp is not None for m in site.mtp.modules()}
    outside = (m for chunk in chunks for m in chunk.modules() if m not in mtp_modules)
    trunk = {id(p) for module in outside for p in module.parameters(recurse=False)}
    return frozenset(name for name, p in _mtp_parameters(sites) if id(p) in trunk)
