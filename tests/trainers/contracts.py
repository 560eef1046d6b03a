"""What trainers that cannot be installed here do with a model, from the building to the optimizer.

Each class carries the order of calls of one public function of the trainer, read in its own sources and named
in its docstring, with Megatron-Core's own wrappers. Only what touches hooks and weights is there.
"""

from collections.abc import Callable, Sequence

import torch

Chunks = list[torch.nn.Module]
Hook = Callable[[Chunks], Chunks]


def wrap(chunks: Chunks) -> Chunks:
    """Wrap in Float16Module and DistributedDataParallel, as all of them do after the pre-wrap hooks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig()
    return [
        DistributedDataParallel(chunk.config, settings, Float16Module(chunk.config, chunk))
        for chunk in chunks
    ]


class BridgeProvider:
    """Megatron-Bridge 0.6.2, src/megatron/bridge/models/model_provider.py.

    `ModelProviderMixin.register_pre_wrap_hook` and `provide_distributed_model`, and its `get_model`: build,
    pre-wrap hooks, Float16Module, DDP, post-wrap hooks. `pre_wrap_hook`, where it is given, overrides every
    registered one. `AutoBridge.to_megatron_provider(load_weights=True)` registers the hook that loads the
    weights, the first of all.
    """

    def __init__(self, build: Callable[[], torch.nn.Module], load: Hook | None = None):
        self.build = build
        self._pre_wrap_hooks: list[Hook] = [load] if load else []
        self._post_wrap_hooks: list[Hook] = []

    def register_pre_wrap_hook(self, hook: Hook, prepend: bool = False) -> None:
        self._pre_wrap_hooks.insert(0 if prepend else len(self._pre_wrap_hooks), hook)

    def register_post_wrap_hook(self, hook: Hook) -> None:
        self._post_wrap_hooks.append(hook)

    def provide_distributed_model(self, pre_wrap_hook: Sequence[Hook] | None = None) -> Chunks:
        model = self.get_model(self._pre_wrap_hooks if pre_wrap_hook is None else pre_wrap_hook)
        for hook in self._post_wrap_hooks:
            model = hook(model)
        return model

    def get_model(self, pre_wrap_hook: Sequence[Hook]) -> Chunks:
        """The module's own `get_model`, which knows of no registered hook."""
        model = [self.build()]
        for hook in pre_wrap_hook:
            changed = hook(model)
            model = model if changed is None else changed
        return wrap(model)


def nemo_rl_setup(
    provider: BridgeProvider,
    checkpoint: dict[str, torch.Tensor],
    additional_pre_wrap_hooks: Sequence[Hook] | None = None,
) -> Chunks:
    """NeMo RL, nemo_rl/models/megatron/setup.py, `setup_model_and_optimizer` (2026-08).

    Builds with Megatron-Bridge's `get_model` and a list of hooks of its own, to whose end
    `additional_pre_wrap_hooks` are put: hooks that are registered on the provider do not run. The checkpoint
    is loaded afterwards, into the wrapped model, by `load_state_dict`.
    """
    pre_wrap_hook: list[Hook] = []
    if additional_pre_wrap_hooks:
        pre_wrap_hook.extend(additional_pre_wrap_hooks)
    model = provider.get_model(pre_wrap_hook)
    model[0].load_state_dict(checkpoint, strict=True)
    return model


def verl_make_megatron_module(provider: BridgeProvider, callbacks: Sequence[Hook] = ()) -> Chunks:
    """veRL 0.9.1, verl/utils/megatron_utils.py, `make_megatron_module` (with Megatron-Bridge, the default).

    Registers its callbacks on the provider and calls `provide_distributed_model`.
    """
    for callback in callbacks:
        provider.register_pre_wrap_hook(callback)
    return provider.provide_distributed_model()


def verl_build_megatron_module(make: Callable[[], Chunks], weights: dict[str, torch.Tensor]) -> Chunks:
    """veRL 0.9.1, verl/workers/engine/megatron/transformer_impl.py, `MegatronEngine._build_megatron_module`.

    Makes the module, then has Megatron-Bridge's `load_hf_weights` copy weights into the parameters of the
    wrapped model, without `load_state_dict`.
    """
    module = make()
    with torch.no_grad():
        for chunk in module:
            for name, parameter in chunk.named_parameters():
                parameter.copy_(weights[name.removeprefix("module.module.")])
    return module
