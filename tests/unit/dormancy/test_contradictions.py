"""What contradicts dormancy is refused by name before anything is changed, and later, as soon as it shows."""

import gc
import weakref

import pytest
import torch

from tiny_models import GPT, GPT_TWO_DEPTHS, HYBRID, VOCAB, batch, build
from torpor import UnsupportedModelError, freeze_mtp


def state_of(model):
    """Return everything that freeze_mtp changes on a model."""
    return [
        [p.requires_grad for p in model.parameters()],
        [
            (sorted(vars(m)), list(m._forward_pre_hooks), list(m._load_state_dict_post_hooks))
            for m in model.modules()
        ],
    ]


def assert_refused(model, match):
    """Assert that freeze_mtp refuses the model and leaves it as it was."""
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match=match):
        freeze_mtp(model)
    assert state_of(model) == before


class TestUnknownModels:
    """Anything else that bears MTP: the class, where it sits and what is supported."""

    def test_an_encoder_decoder(self):
        """T5Model reads `mtp_num_layers` like any model, and has no bypass."""
        from megatron.core.models.T5 import T5Model
        from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec as decoder
        from megatron.core.models.T5.t5_spec import get_t5_encoder_with_local_block_spec as encoder
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            mtp_num_layers=1,
        )
        model = T5Model(config, config, encoder(1), decoder(1), VOCAB, 16)
        match = r"body\.t5 \(T5Model\) declares mtp_num_layers=1\n.*GPTModel and HybridModel"
        assert_refused(torch.nn.ModuleDict({"body": torch.nn.ModuleDict({"t5": model})}), match)

    @pytest.mark.parametrize("name", ["mtp", "mtp_heads", "mtp_block"])
    def test_modules_named_for_mtp_that_are_not_megatrons(self, name):
        """Beside a supported model or alone: heads that nobody would pass by."""
        model = build(GPT)
        model.extra = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
        assert_refused(model, rf"extra\.{name} \(Linear\) is not the `mtp` of a GPTModel")
        assert_refused(torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)}), rf"{name} \(Linear\)")

    def test_a_megatron_layer_outside_its_block(self):
        """A trainer that keeps MTP layers elsewhere runs them elsewhere."""
        model = build(GPT)
        model.draft = model.mtp.layers[0]
        del model._modules["mtp"]
        model.config.mtp_num_layers = None
        assert_refused(model, r"draft \(MultiTokenPredictionLayer\)")


class TestOtherPlans:
    """The model is set up to train its heads, or something else already trains them."""

    @pytest.mark.parametrize("field", ["freeze_base_model_for_mtp", "freeze_base_for_mtp"])
    def test_a_setting_that_trains_the_heads_alone(self, field):
        """Freezing the trunk for MTP and MTP for the trunk leaves nothing."""
        model = build(GPT)
        setattr(model.config, field, True)
        assert_refused(model, rf"config\.{field}=True")

    def test_a_frozen_trunk_with_trainable_heads(self):
        """The same done by hand."""
        model = build(HYBRID)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp."))
        assert_refused(model, r"all \d+ trunk parameters are frozen and MTP is not")

    def test_a_teacher_is_frozen_and_may_sleep(self):
        """Where trunk and heads are frozen alike nobody means to train: a teacher, an RL reference."""
        model = build(GPT).requires_grad_(False)
        handle = freeze_mtp(model)
        model(**batch())
        handle.check()
        handle.remove()
        assert not any(p.requires_grad for p in model.parameters())

    def test_adapters_on_the_trunk_alone_are_fine(self):
        """Base and heads frozen, adapters trained: parameter-efficient tuning of the trunk."""
        model = build(GPT).requires_grad_(False)
        layer = model.decoder.layers[0].self_attention.linear_proj
        layer.lora_A = torch.nn.Parameter(torch.zeros(2, 32))
        freeze_mtp(model).check()

    def test_an_adapter_by_its_parameters_name(self):
        """PEFT's suffix targets match linears inside MTP too."""
        model = build(GPT).requires_grad_(False)
        projection = model.mtp.layers[0].eh_proj
        projection.lora_A = torch.nn.ParameterDict({"default": torch.nn.Parameter(torch.zeros(2, 64))})
        assert_refused(
            model,
            r"mtp\.layers\.0\.eh_proj\.lora_A\.default is a trainable adapter inside MTP.*\n.*Exclude MTP",
        )

    def test_an_adapter_by_its_class(self):
        """Megatron-Bridge wraps a linear in a LoRALinear, with plain names inside."""

        class LoRALinear(torch.nn.Module):
            def __init__(self, to_wrap):
                super().__init__()
                self.to_wrap = to_wrap
                self.down = torch.nn.Linear(64, 2)

        model = build(GPT).requires_grad_(False)
        model.mtp.layers[0].eh_proj = LoRALinear(model.mtp.layers[0].eh_proj)
        assert_refused(model, r"mtp\.layers\.0\.eh_proj\.down\.weight is a trainable adapter \(LoRALinear\)")

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_a_torch_optimizer_that_has_the_heads(self, kind):
        """It would go on decaying them: frozen parameters stay in its groups."""
        model = build(GPT)
        optimizer = kind(model.parameters(), lr=0.1)
        assert_refused(model, rf"GPTModel\.mtp\..* already belongs to an optimizer, {kind.__name__}\n")
        del optimizer.param_groups[:]
        freeze_mtp(model)

    def test_an_optimizer_of_other_parameters(self):
        """Of the trunk, or of another model: no obstacle."""
        model, other = build(GPT), build(GPT, seed=2)
        optimizers = [torch.optim.SGD(model.decoder.parameters()), torch.optim.SGD(other.parameters())]
        freeze_mtp(model).check(optimizers[0])

    def test_an_optimizer_that_is_gone(self):
        """One that was dropped in a reference cycle is collected, not refused."""
        model = build(GPT)
        gc.disable()
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.itself = optimizer
            alive = weakref.ref(optimizer)
            del optimizer
            assert alive() is not None
            freeze_mtp(model)
        finally:
            gc.enable()
        assert alive() is None


class CountsMtpCalls:
    """Takes the first calls of the output layer for MTP's, as a logits saver does."""

    def __init__(self, mtp_num_layers):
        self._mtp_num_layers = mtp_num_layers
        self.num_passes, self.captured = 0, []

    def hook(self, module, inputs, output):
        if self.num_passes == self._mtp_num_layers:
            self.captured.append(output[0])
            self.num_passes = 0
        else:
            self.num_passes += 1


class TestCaptures:
    """Hooks on the output layer that wait for MTP's calls would drop main logits while it sleeps."""

    @pytest.mark.parametrize("kind", [GPT, GPT_TWO_DEPTHS, HYBRID], ids=str)
    def test_before_the_call(self, kind):
        """Refused with the hook's name and its count."""
        model = build(kind)
        model.output_layer.register_forward_hook(CountsMtpCalls(kind.depths).hook)
        match = (
            rf"output_layer has the forward hook CountsMtpCalls\.hook.*_mtp_num_layers={kind.depths} calls"
        )
        assert_refused(model, match)

    def test_after_the_call(self):
        """Attached later, it is refused by the first forward; awake it may count."""
        model = build(GPT)
        handle = freeze_mtp(model)
        saver = CountsMtpCalls(1)
        hook = model.output_layer.register_forward_hook(saver.hook)
        with pytest.raises(UnsupportedModelError, match="Set _mtp_num_layers of CountsMtpCalls to 0"):
            model(**batch())
        with handle.awake():
            model(**batch())
        assert len(saver.captured) == 1
        hook.remove()
        model(**batch())
        handle.check()

    def test_with_a_count_of_zero_it_captures_the_main_logits(self):
        """As for a model without heads."""
        model = build(GPT)
        saver = CountsMtpCalls(0)
        model.output_layer.register_forward_hook(saver.hook)
        freeze_mtp(model)
        logits = model(**batch() | {"labels": None})
        assert torch.equal(saver.captured[0].transpose(0, 1), logits)

    def test_what_it_would_lose(self):
        """Without the refusal a capture keeps every other main call and takes it for the one before."""
        model = build(GPT)
        freeze_mtp(model)
        saver = CountsMtpCalls(1)
        model.output_layer.register_forward_hook(lambda *args: saver.hook(*args))
        for _ in range(2):
            model(**batch())
        assert len(saver.captured) == 1


class TestSchedulePlans:
    """The fine-grained schedule plan runs MTP layers without the model's forward."""

    def test_building_one_is_refused(self):
        """Whatever the config says: a trainer may call it by itself."""
        model = build(GPT)
        handle = freeze_mtp(model)
        inputs = batch()
        arguments = (inputs["input_ids"], inputs["position_ids"], inputs["attention_mask"])
        with pytest.raises(UnsupportedModelError, match=r"build_schedule_plan was called while .* asleep"):
            model.build_schedule_plan(*arguments)
        handle.check()
        handle.remove()
        assert "build_schedule_plan" not in vars(model)
        assert model.build_schedule_plan.__func__ is type(model).build_schedule_plan

    def test_a_model_that_has_none(self):
        """HybridModel builds no plans, and is not given the method."""
        model = build(HYBRID)
        freeze_mtp(model)
        assert not hasattr(model, "build_schedule_plan")
