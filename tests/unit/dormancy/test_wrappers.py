"""Dormancy inside what trainers wrap around a language model, and through the hook that they take."""

from types import SimpleNamespace

import pytest
import torch

import torpor
from parity import assert_same, run
from tiny_models import (
    GPT,
    GPT_MOE,
    GPT_TIED,
    HYBRID,
    HYBRID_MOE,
    batch,
    build,
    build_pair,
    differing,
    same_bytes,
)
from torpor import MTPChangedError, UnsupportedModelError, freeze_mtp

BF16 = {"params_dtype": torch.bfloat16}


def in_float16_module(model):
    """Wrap as Megatron-LM and Megatron-Bridge do: every floating tensor becomes BF16."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(model.config, model)


class TestFloat16Module:
    """It casts the model it wraps, usually after freeze_mtp and before DDP."""

    @pytest.mark.parametrize("order", ["freeze-first", "wrap-first"])
    @pytest.mark.parametrize("kind", [GPT_TIED, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
    def test_parity(self, kind, order):
        """Whichever comes first, outputs and gradients are those of a wrapped model without MTP."""
        dormant, reference = build_pair(kind, **BF16)
        if order == "freeze-first":
            freeze_mtp(dormant)
        wrapped = in_float16_module(dormant)
        if order == "wrap-first":
            freeze_mtp(wrapped)
        assert_same(wrapped, in_float16_module(reference))

    def test_names_in_the_proof(self):
        """They are those from the root that was given."""
        names = freeze_mtp(in_float16_module(build(GPT, **BF16))).fingerprint()
        assert "module.mtp.layers.0.eh_proj.weight" in names

    def test_a_cast_without_loss_leaves_the_proof_valid(self):
        """Weights that came from a BF16 checkpoint may be held in FP32 first."""
        model = build(GPT_MOE, bf16=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        handle = freeze_mtp(model)
        before = handle.fingerprint()
        in_float16_module(model)
        assert model.mtp.layers[0].eh_proj.weight.dtype == torch.bfloat16
        assert handle.fingerprint() != before
        handle.check()

    def test_a_cast_that_loses_bits_is_a_change(self):
        """FP32 weights of which BF16 keeps half: what is exported is not what was there."""
        model = build(GPT, bf16=True)
        handle = freeze_mtp(model)
        in_float16_module(model)
        with pytest.raises(MTPChangedError, match=r"mtp\.layers\.0\..* changed while asleep"):
            handle.check()

    def test_a_change_before_a_cast_is_not_forgotten(self):
        """Following a cast does not hide what was already wrong."""
        model = build(GPT, bf16=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        handle = freeze_mtp(model)
        with torch.no_grad():
            model.mtp.layers[0].enorm.weight[0] = 2.0
        in_float16_module(model)
        with pytest.raises(MTPChangedError, match="enorm"):
            handle.check()

    @pytest.mark.parametrize("kind", [GPT_MOE, HYBRID_MOE], ids=str)
    def test_a_routers_bias_is_not_rounded(self, kind):
        """Megatron keeps it in FP32; rounded to BF16 and saved as FP32 it would be another bias."""
        model = build(kind, **BF16)
        biases = {n: b for n, b in model.mtp.named_buffers() if n.endswith("expert_bias")}
        for bias in biases.values():
            bias.copy_(torch.tensor([0.1, -0.2, 0.3, 1e-9]))
        handle = freeze_mtp(model)
        wrapped = in_float16_module(model)
        run(wrapped)
        handle.check()
        assert biases
        state = wrapped.state_dict()
        for name, bias in biases.items():
            assert same_bytes(state[f"mtp.{name}"], bias)

    def test_moving_the_model_is_no_change(self):
        """`to` and its like keep every byte, and `double().float()` loses none."""
        model = build(GPT_MOE)
        handle = freeze_mtp(model)
        model.cpu()
        handle.check()
        model.double().float()
        handle.check()


class VisionLanguageModel(torch.nn.Module):
    """Puts projected image patches in front of the text and runs the language model on embeddings."""

    def __init__(self, language_model):
        super().__init__()
        self.config = language_model.config
        torch.manual_seed(6)
        self.vision_model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.GELU())
        self.vision_projection = torch.nn.Linear(24, 32)
        self.language_model = language_model
        self.to(next(language_model.parameters()).device)

    def forward(self, images, input_ids, position_ids, attention_mask, labels):
        text = self.language_model.embedding(input_ids, position_ids)
        patches = self.vision_projection(self.vision_model(images)).transpose(0, 1)
        return self.language_model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            decoder_input=torch.cat([patches, text[patches.shape[0] :]]),
            labels=labels,
        )


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_a_vision_language_wrapper(kind):
    """The vision tower and the projection train as without MTP, and names carry the wrapper's prefix."""
    dormant, reference = (VisionLanguageModel(model) for model in build_pair(kind))
    images = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(7))
    images = images.to(next(dormant.parameters()).device)
    handle = freeze_mtp(dormant)
    assert_same(dormant, reference, images=images)
    assert all(name.startswith("language_model.mtp.") for name in handle.check().fingerprint)


def test_chunks_are_told_apart():
    """A list of virtual pipeline chunks: names carry the chunk's index."""
    pairs = [build_pair(GPT), build_pair(HYBRID, seed=2)]
    handle = freeze_mtp([dormant for dormant, _ in pairs])
    assert {name.split(".")[0] for name in handle.fingerprint()} == {"0", "1"}
    for dormant, reference in pairs:
        assert_same(dormant, reference)
    with handle.awake():
        run(pairs[1][0])
    handle.check()


def test_a_chunk_without_mtp_is_left_alone():
    """Only the chunk that holds the heads has any."""
    first, second = build(GPT, mtp=False), build(GPT)
    attributes = dict(vars(first))
    handle = freeze_mtp([first, second])
    assert vars(first) == attributes
    assert all(name.startswith("1.mtp.") for name in handle.check().fingerprint)


class Provider:
    """Builds, wraps and calls hooks in the order in which Megatron-Bridge's model providers do."""

    def __init__(self, build_chunks, ddp=True):
        self.build_chunks = build_chunks
        self.ddp = ddp
        self.pre_wrap_hooks = []

    def register_pre_wrap_hook(self, hook, prepend=False):
        self.pre_wrap_hooks.insert(0 if prepend else len(self.pre_wrap_hooks), hook)

    def provide_distributed_model(self):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        chunks = self.build_chunks()
        for hook in self.pre_wrap_hooks:
            chunks = hook(chunks)
        chunks = [in_float16_module(chunk) for chunk in chunks]
        settings = DistributedDataParallelConfig()
        return [DistributedDataParallel(c.config, settings, c) for c in chunks] if self.ddp else chunks


class TestPreWrapHook:
    """`torpor.pre_wrap_hook()` in a trainer that builds and wraps the model itself."""

    def test_between_the_weights_and_ddp(self):
        """The hook freezes what another hook loaded, and its handle can prove it after training."""
        from torpor.megatron.optimizer import build_optimizer

        def load(chunks):
            chunks[0].load_state_dict(build(GPT, seed=8, **BF16).state_dict())
            return chunks

        loaded = build(GPT, seed=8, **BF16)
        hook = torpor.pre_wrap_hook()
        provider = Provider(lambda: [build(GPT, **BF16)])
        provider.register_pre_wrap_hook(hook)
        provider.register_pre_wrap_hook(load, prepend=True)
        (ddp,) = provider.provide_distributed_model()
        optimizer = build_optimizer(
            [ddp], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0,
            distributed=False, dtype=torch.bfloat16,
        )  # fmt: skip
        for _ in range(2):
            ddp.zero_grad_buffer()
            ddp(**batch()).float().mean().backward()
            optimizer.step()
        (handle,) = hook.handles
        assert handle.check(optimizer).executions == 0
        model = ddp.module.module
        assert differing(dict(model.mtp.named_parameters()), dict(loaded.mtp.named_parameters())) == []
        assert not same_bytes(model.output_layer.weight, loaded.output_layer.weight)

    def test_each_model_has_its_handle(self):
        """A student and a teacher built with one hook."""
        hook = torpor.pre_wrap_hook()
        student, teacher = build(GPT), build(GPT, seed=2)
        assert hook([student]) == [student]
        assert hook((teacher,)) == [teacher]
        hook.handles[0].remove()
        hook.handles[1].check()
        assert "_call_impl" not in vars(student)
        assert "_call_impl" in vars(teacher)

    def test_after_ddp_it_refuses(self):
        """Registered as a post-wrap hook by mistake."""
        chunks = Provider(lambda: [build(GPT, **BF16)]).provide_distributed_model()
        with pytest.raises(UnsupportedModelError, match="already wrapped in DistributedDataParallel"):
            torpor.pre_wrap_hook()(chunks)

    @pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
    def test_a_provider_that_is_the_config_and_mirrors_writes(self, kind):
        """A distillation provider copies attribute writes to the teacher's: nothing is ever written."""
        teacher_provider = SimpleNamespace(mtp_num_layers=1, hidden_size=0)
        writes = []

        def build_with_mirror():
            student, teacher = build(kind, **BF16), build(kind, seed=2, **BF16)

            class MirroringProvider(type(student.config)):
                def __setattr__(self, name, value):
                    super().__setattr__(name, value)
                    writes.append(name)
                    setattr(teacher_provider, name, value)

            student.config.__class__ = MirroringProvider
            return [torch.nn.ModuleDict({"student": student, "teacher": teacher})]

        hook = torpor.pre_wrap_hook()
        (models,) = hook(build_with_mirror())
        for model in models.values():
            run(model)
        assert writes == []
        assert vars(teacher_provider) == {"mtp_num_layers": 1, "hidden_size": 0}
        hook.handles[0].check()
        hook.handles[0].remove()
        assert writes == []


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_a_config_that_looks_attributes_up_in_another(kind):
    """Builders hand models a proxy of their configuration: empty, it answers nothing."""
    dormant, reference = build_pair(kind)

    class ProxyConfig(type(dormant.config)):
        def __getattr__(self, name):
            return getattr(vars(self)["inner"], name)

        def __deepcopy__(self, memo):
            raise AssertionError("a step must not copy the configuration")

        __copy__ = __deepcopy__

    vars(dormant.config)["inner"] = SimpleNamespace(builders_own=7)
    dormant.config.__class__ = ProxyConfig
    handle = freeze_mtp(dormant)
    seen = []
    dormant.decoder.register_forward_hook(
        lambda *_: seen.append((dormant.config.mtp_num_layers, dormant.config.builders_own))
    )
    assert_same(dormant, reference)
    assert seen == [(None, 7)]
    assert dormant.config.mtp_num_layers == 1
    handle.check()
