"""Megatron trainers with one line of ours: heads asleep, weights loaded as each of them does it, and proof.

Megatron-LM's builders and `get_model` are the real ones, out of the package `megatron-core`. Megatron-Bridge,
NeMo RL and veRL need CUDA to be imported: for them the order of calls that they document (contracts.py).
"""

import sys

import pytest
import torch

import torpor
from tiny_models import GPT, HYBRID, VOCAB, batch, build, differing, same_bytes
from torpor.errors import MTPChangedError, UnsupportedModelError
from trainers.contracts import (
    BridgeProvider,
    nemo_rl_setup,
    verl_build_megatron_module,
    verl_make_megatron_module,
)

pytestmark = pytest.mark.usefixtures("megatron_rank")

BF16 = {"params_dtype": torch.bfloat16}


def build_bf16(seed=1, kind=GPT):
    """A model as a trainer's provider makes it."""
    return build(kind, seed=seed, **BF16)


def unwrap(model):
    """The language model inside DDP and Float16Module."""
    return model.module.module


def train(ddp, steps=2):
    """Take steps with weight decay, and return the optimizer."""
    from torpor.megatron.optimizer import build_optimizer

    optimizer = build_optimizer(
        [ddp], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0,
        distributed=False, dtype=torch.bfloat16,
    )  # fmt: skip
    for step in range(steps):
        ddp.zero_grad_buffer()
        ddp(**batch(seed=step)).float().mean().backward()
        optimizer.step()
    return optimizer


def assert_slept(ddp, handle, source):
    """After training the heads are the source's, the trunk is not, and the handle says so."""
    optimizer = train(ddp)
    report = handle.check(optimizer)
    assert (report.executions, report.num_tensors) == (0, len(list(source.mtp.parameters())))
    model = unwrap(ddp)
    assert differing(dict(model.mtp.named_parameters()), dict(source.mtp.named_parameters())) == []
    assert not same_bytes(model.output_layer.weight, source.output_layer.weight)


class TestMegatronLM:
    """The real package's own functions."""

    def model_config(self, kind):
        from megatron.training.models.gpt import GPTModelConfig
        from megatron.training.models.hybrid import HybridModelConfig

        from torpor.megatron.specs import gpt_layer_spec, hybrid_stack_spec

        like = build_bf16(kind=kind)
        like.config.transformer_impl = "local"
        fields = {"transformer": like.config, "vocab_size": VOCAB, "seq_length": 32}
        if kind.pattern is None:
            return GPTModelConfig(
                **fields,
                position_embedding_type="rope",
                transformer_layer_spec=lambda config, vp_stage: gpt_layer_spec(config.transformer, vp_stage),
            )
        return HybridModelConfig(
            **fields,
            hybrid_layer_pattern=f"{kind.pattern}/{kind.mtp_pattern}",
            hybrid_stack_spec=hybrid_stack_spec(like.config),
        )

    def build(self, config):
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.process_groups_config import ProcessGroupCollection

        (ddp,) = config.get_builder_cls()(config).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(), DistributedDataParallelConfig()
        )
        return ddp

    @pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
    def test_model_config(self, kind):
        """`model_cfg.pre_wrap_hooks.append(...)` before `pretrain`; a checkpoint is loaded after wrapping."""
        config, source = self.model_config(kind), build_bf16(seed=8, kind=kind)
        hook = torpor.pre_wrap_hook()
        config.pre_wrap_hooks.append(hook)
        ddp = self.build(config)
        unwrap(ddp).load_state_dict(source.state_dict(), strict=True)
        assert_slept(ddp, hook.handles[0], source)

    def test_after_wrapping_it_refuses(self):
        """Among the post-wrap hooks by mistake."""
        config = self.model_config(GPT)
        config.post_wrap_hooks.append(torpor.pre_wrap_hook())
        with pytest.raises(UnsupportedModelError, match="already wrapped in DistributedDataParallel"):
            self.build(config)

    def test_model_provider(self, monkeypatch):
        """A script's own `model_provider`, in the real `get_model` with the arguments' real defaults."""
        from megatron.training import global_vars
        from megatron.training.arguments import parse_args
        from megatron.training.training import get_model

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
        args = parse_args(ignore_unknown_args=True)
        args.bf16, args.use_cpu_initialization = True, True
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
        # It moves every model to the accelerator, without asking whether there is one.
        monkeypatch.setattr(torch.nn.Module, "cuda", lambda module, device: module)
        handles = []

        def model_provider(
            pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
        ):
            model = build_bf16()
            handles.append(torpor.freeze_mtp(model))
            return model

        (ddp,) = get_model(model_provider)
        source = build_bf16(seed=8)
        unwrap(ddp).load_state_dict(source.state_dict(), strict=True)
        assert_slept(ddp, handles[0], source)


class TestMegatronBridge:
    """The contract of its model providers."""

    def test_registered_after_the_weights(self):
        """The hook freezes what the bridge's own hook has loaded."""
        source = build_bf16(seed=8)

        def load(chunks):
            with torch.no_grad():
                for name, parameter in chunks[0].named_parameters():
                    parameter.copy_(source.get_parameter(name))
            return chunks

        provider = BridgeProvider(build_bf16, load)
        hook = torpor.pre_wrap_hook()
        provider.register_pre_wrap_hook(hook)
        (ddp,) = provider.provide_distributed_model()
        assert_slept(ddp, hook.handles[0], source)

    def test_after_wrapping_it_refuses(self):
        """Registered as a post-wrap hook by mistake."""
        provider = BridgeProvider(build_bf16)
        provider.register_post_wrap_hook(torpor.pre_wrap_hook())
        with pytest.raises(UnsupportedModelError, match="already wrapped in DistributedDataParallel"):
            provider.provide_distributed_model()

    def test_distillation(self):
        """Its distillation provider converts in a hook of its own; ours comes after, and both heads sleep."""
        from distilling import convert

        provider = BridgeProvider(lambda: build(GPT))
        provider.register_pre_wrap_hook(lambda chunks: [convert(chunks[0], build(GPT, seed=2))])
        hook = torpor.pre_wrap_hook()
        provider.register_pre_wrap_hook(hook)
        chunks = [build(GPT)]
        for registered in provider._pre_wrap_hooks:
            chunks = registered(chunks)
        chunks[0](**batch())
        assert hook.handles[0].check().num_tensors == 2 * len(list(chunks[0].mtp.parameters()))


class TestNemoRL:
    """The contract of its Megatron policy worker."""

    def test_additional_hook(self):
        """Given to the worker's `setup_model_and_optimizer`."""
        source = build_bf16(seed=8)
        checkpoint = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
        hook = torpor.pre_wrap_hook()
        (ddp,) = nemo_rl_setup(BridgeProvider(build_bf16), wrapped(checkpoint), [hook])
        assert_slept(ddp, hook.handles[0], source)

    def test_hooks_on_the_provider_do_not_run(self):
        """Why the page does not say to register it there."""
        provider, hook = BridgeProvider(build_bf16), torpor.pre_wrap_hook()
        provider.register_pre_wrap_hook(hook)
        nemo_rl_setup(provider, wrapped(build_bf16(seed=8).state_dict()))
        assert hook.handles == []

    def test_weights_of_the_reference_policy(self):
        """The worker swaps the reference's weights in and out: heads and proof stay."""
        source = build_bf16(seed=8)
        state = wrapped(source.state_dict())
        hook = torpor.pre_wrap_hook()
        (ddp,) = nemo_rl_setup(BridgeProvider(build_bf16), state, [hook])
        reference = {
            name: tensor.detach().clone() for name, tensor in ddp.state_dict().items() if tensor is not None
        }
        train(ddp, steps=1)
        policy = {
            name: tensor.detach().clone() for name, tensor in ddp.state_dict().items() if tensor is not None
        }
        ddp.load_state_dict(reference, strict=True)
        with torch.no_grad():
            ddp(**batch())
        ddp.load_state_dict(policy, strict=True)
        assert_slept(ddp, hook.handles[0], source)


class TestVeRL:
    """The contract of its Megatron engine."""

    def make(self, hook):
        """The module, with one line more in it than the engine's."""
        provider = BridgeProvider(build_bf16)
        provider.register_pre_wrap_hook(hook)
        return verl_make_megatron_module(provider)

    def test_weights_copied_after_wrapping(self):
        """Copied into parameters past `load_state_dict`: the proof begins with the first forward."""
        source, hook = build_bf16(seed=8), torpor.pre_wrap_hook()
        (ddp,) = verl_build_megatron_module(lambda: self.make(hook), dict(source.named_parameters()))
        assert_slept(ddp, hook.handles[0], source)

    def test_changed_after_the_first_forward(self):
        """From then on a copy into a head is what it looks like."""
        source, hook = build_bf16(seed=8), torpor.pre_wrap_hook()
        (ddp,) = verl_build_megatron_module(lambda: self.make(hook), dict(source.named_parameters()))
        train(ddp)
        hook.handles[0].check()
        with torch.no_grad():
            next(unwrap(ddp).mtp.parameters()).add_(1)
        with pytest.raises(MTPChangedError, match="changed while asleep"):
            hook.handles[0].check()


def wrapped(state):
    """A state dict as the wrapped model's own: DDP and Float16Module hide themselves in it."""
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}
