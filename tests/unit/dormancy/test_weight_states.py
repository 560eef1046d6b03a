"""The states that weights can be in: covered bit by bit, or refused by the name of what holds them."""

import pytest
import torch

from parity import assert_same, run
from tiny_models import GPT, GPT_MOE, HYBRID, HYBRID_MOE, batch, build, build_pair, differing, same_bytes
from torpor import MTPChangedError, MTPTrainedError, UnsupportedModelError, freeze_mtp
from torpor.dormancy.fingerprint import sha256_of

FP8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


class Float8Tensor(torch.Tensor):
    """A stand-in for Transformer Engine's: it shows values that it computes from bytes and a scale."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

    def __init__(self, data, scale):
        self.data_bytes, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [a.data_bytes.bfloat16() * a.scale if isinstance(a, cls) else a for a in args]
        return function(*args, **(kwargs or {}))


def set_parameter(model, tensor):
    """Hold another tensor as the weight of the first MTP layer's projection."""
    projection = model.mtp.layers[0].eh_proj
    del projection._parameters["weight"]
    projection._parameters["weight"] = tensor
    return projection


class TestFloat8:
    """Torch's own FP8 tensors are plain bytes; quantised subclasses are not."""

    @pytest.mark.parametrize("dtype", FP8, ids=str)
    def test_torchs_dtypes_are_proved_bit_by_bit(self, dtype):
        """Dormant weights in FP8 keep every bit, and a flipped one is found."""
        model = build(GPT)
        weight = model.mtp.layers[0].eh_proj.weight
        raw = torch.arange(weight.numel(), device=weight.device).remainder(251).to(torch.uint8)
        parameter = torch.nn.Parameter(raw.view(weight.shape).view(dtype), requires_grad=False)
        model.mtp.requires_grad_(False)
        set_parameter(model, parameter)
        handle = freeze_mtp(model)
        model(**batch()).mean().backward()
        handle.check()
        parameter.data.view(torch.uint8)[3, 5] ^= 1
        with pytest.raises(MTPChangedError, match=r"eh_proj\.weight changed"):
            handle.check()

    def test_quantised_subclasses_are_refused_by_name(self):
        """Two of them can show equal values and store different bytes: their hash would prove nothing."""
        data = torch.full((32, 64), 2.0).to(torch.float8_e4m3fn)
        one = Float8Tensor(data, 1.0)
        other = Float8Tensor((data.float() / 2).to(torch.float8_e4m3fn), 2.0)
        assert torch.equal(one + 0, other + 0)
        with pytest.raises(UnsupportedModelError, match=r"tensor is a test_weight_states\.Float8Tensor"):
            sha256_of(one)
        model = build(GPT)
        model.mtp.requires_grad_(False)
        set_parameter(model, one)
        with pytest.raises(
            UnsupportedModelError, match=r"mtp\.layers\.0\.eh_proj\.weight is a .*Float8Tensor"
        ):
            freeze_mtp(model)
        assert "_call_impl" not in vars(model)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.eye(3).to_sparse(),
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            torch.ones(2, device="meta"),
        ],
        ids=["sparse", "quantised", "meta"],
    )
    def test_tensors_without_plain_bytes_are_refused(self, tensor):
        """Sparse, quantised and absent."""
        with pytest.raises(UnsupportedModelError, match=r"head\.weight is .* no plain bytes"):
            sha256_of(tensor, "head.weight")


def test_strides_and_views_do_not_matter_but_order_does():
    """The hash is of the elements in row-major order."""
    matrix = torch.arange(12.0).view(3, 4)
    assert sha256_of(matrix.t().contiguous().t()) == sha256_of(matrix)
    assert sha256_of(matrix.t()) != sha256_of(matrix)
    assert sha256_of(torch.tensor(1.5)) == sha256_of(torch.tensor([1.5]))


class TestMetaDevice:
    """Deferred initialisation: nothing to retain until weights are there."""

    @pytest.mark.parametrize("kind", [GPT_MOE, HYBRID], ids=str)
    def test_a_whole_model(self, kind):
        """Refused, with what to do; once materialised and loaded it is fine."""
        model, source = build(kind).to("meta"), build(kind, seed=2)
        with pytest.raises(
            UnsupportedModelError, match=r"mtp\..* is on the meta device.*\n.*weights are loaded"
        ):
            freeze_mtp(model)
        model.to_empty(device=next(source.parameters()).device)
        model.load_state_dict(source.state_dict())
        handle = freeze_mtp(model)
        handle.check()
        assert differing(dict(model.mtp.named_parameters()), dict(source.mtp.named_parameters())) == []

    def test_moving_to_the_meta_device_afterwards(self):
        """A trainer that drops the weights while they sleep: the check says so."""
        model = build(GPT)
        handle = freeze_mtp(model)
        model.to("meta")
        with pytest.raises(UnsupportedModelError, match="meta"):
            handle.check()


class TestLoadingAfterwards:
    """Weights that come after the call: the new baseline, still frozen."""

    @pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
    @pytest.mark.parametrize("kind", [GPT, HYBRID_MOE], ids=str)
    def test_parameters_stay_frozen(self, kind, assign):
        """`assign=True` puts other parameters in their place: frozen too, until remove()."""
        dormant, reference = build_pair(kind)
        handle = freeze_mtp(dormant)
        trainable = {n: p.requires_grad for n, p in dormant.named_parameters()}
        dormant.load_state_dict(build(kind, seed=5).state_dict(), assign=assign)
        assert {n: p.requires_grad for n, p in dormant.named_parameters()} == trainable
        trunk = {n: t for n, t in dormant.state_dict().items() if n in reference.state_dict()}
        reference.load_state_dict(trunk)
        assert_same(dormant, reference)
        handle.check()
        handle.remove()
        assert all(p.requires_grad for p in dormant.parameters())

    def test_loading_only_the_heads(self):
        """A folder of heads loaded into the block itself."""
        model, other = build(GPT), build(GPT, seed=7)
        handle = freeze_mtp(model)
        model.mtp.load_state_dict(other.mtp.state_dict())
        handle.check()
        assert differing(dict(model.mtp.named_parameters()), dict(other.mtp.named_parameters())) == []


class TestSharded:
    """DTensors: one rank's shard of a tensor, under the name of the whole."""

    @staticmethod
    def mesh():
        from torch.distributed.device_mesh import init_device_mesh

        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return init_device_mesh(kind, (torch.distributed.get_world_size(),))

    def test_before_the_call(self):
        """Refused by the class's name."""
        from torch.distributed.tensor import Shard, distribute_tensor

        model = build(GPT)
        model.mtp.requires_grad_(False)
        weight = distribute_tensor(model.mtp.layers[0].eh_proj.weight, self.mesh(), [Shard(0)])
        set_parameter(model, torch.nn.Parameter(weight, requires_grad=False))
        with pytest.raises(UnsupportedModelError, match=r"eh_proj\.weight is a torch\.distributed.*DTensor"):
            freeze_mtp(model)
        assert "_call_impl" not in vars(model)

    def test_sharded_after_the_call(self):
        """FSDP around a frozen model: the trunk trains as without MTP, and the proof refuses to guess."""
        from torch.distributed.fsdp import fully_shard

        dormant, reference = build_pair(GPT)
        handle = freeze_mtp(dormant)
        for model in (dormant, reference):
            for layer in model.decoder.layers:
                fully_shard(layer, mesh=self.mesh())
            fully_shard(model, mesh=self.mesh())
        with pytest.raises(UnsupportedModelError, match=r"mtp\..* is a torch\.distributed.*DTensor"):
            handle.check()
        (output, grads), (expected, expected_grads) = run(dormant), run(reference)
        assert same_bytes(output, expected)
        assert (
            differing(*({n: g.full_tensor() for n, g in gs.items()} for gs in (grads, expected_grads))) == []
        )
        with pytest.raises(UnsupportedModelError, match="DTensor"):
            handle.check()
        assert handle.executions == 0


class TestOffloadedOptimizer:
    """Megatron's HybridDeviceOptimizer steps copies that it keeps on the CPU."""

    @staticmethod
    def optimizer(parameters):
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        return HybridDeviceOptimizer(
            [{"params": list(parameters)}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            pin_cpu_grads=False,
            pin_cpu_params=False,
            overlap_cpu_optimizer_d2h_h2d=False,
            lr=1e-2,
            weight_decay=0.1,
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_it_holds_nothing_of_mtps(self, dtype):
        """Trainable parameters only: the check sees through it and finds none of the heads."""
        model = build(GPT, params_dtype=dtype)
        handle = freeze_mtp(model)
        assert handle.check(
            self.optimizer(p for p in model.parameters() if p.requires_grad)
        ).optimizer_checked

    def test_heads_among_its_parameters_are_found(self):
        """Given all parameters."""
        model = build(GPT, params_dtype=torch.bfloat16)
        handle = freeze_mtp(model)
        with pytest.raises(MTPTrainedError, match="optimizer"):
            handle.check(self.optimizer(model.parameters()))

    @pytest.mark.parametrize("where", ["sub-optimizer", "map"])
    def test_heads_hidden_inside_it_are_found(self, where):
        """In an optimizer that it drives, or in its map from parameters to copies."""
        model = build(GPT)
        handle = freeze_mtp(model)
        optimizer = self.optimizer(p for p in model.parameters() if p.requires_grad)
        head = model.mtp.layers[0].enorm.weight
        if where == "map":
            optimizer.cpu_copys_map_gpu_param[head.detach().clone()] = head
        else:
            optimizer.cpu_optimizers[0].add_param_group({"params": [head]})
        with pytest.raises(MTPTrainedError, match=r"enorm\.weight is retained but"):
            handle.check(optimizer)
