"""AdamW with the step in the group: PyTorch's arithmetic, and only the book-keeping is different."""

import copy

import pytest
import torch
from megatron.core import utils as megatron_utils
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from torpor.errors import ConfigError
from torpor.megatron.host import current_device
from torpor.megatron.optimizer import GroupStepAdamW, build_optimizer

SETTINGS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


def make_parameters() -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((3, 4), (5,), (2, 2, 2))]


def run_steps(optimizer, parameters, steps: range) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=g)
        if step == 1:
            parameters[1].grad = None  # a parameter without a gradient is left alone
        optimizer.step()


def test_equals_torch_adamw_bit_for_bit() -> None:
    ours, theirs = make_parameters(), make_parameters()
    every_step = range(2, 12)
    run_steps(GroupStepAdamW(ours, **SETTINGS), ours, every_step)
    run_steps(torch.optim.AdamW(theirs, foreach=False, **SETTINGS), theirs, every_step)
    for a, b, start in zip(ours, theirs, make_parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)


def test_a_parameter_without_gradient_has_no_state() -> None:
    parameters = make_parameters()
    optimizer = GroupStepAdamW(parameters, **SETTINGS)
    run_steps(optimizer, parameters, range(1, 2))
    assert parameters[1] not in optimizer.state
    assert torch.equal(parameters[1], make_parameters()[1])


def test_state_is_shaped_like_fused_adams_and_resumes_bit_for_bit() -> None:
    straight, resumed = make_parameters(), make_parameters()
    run_steps(GroupStepAdamW(straight, **SETTINGS), straight, range(2, 8))

    first = GroupStepAdamW(resumed, **SETTINGS)
    run_steps(first, resumed, range(2, 5))
    saved = copy.deepcopy(first.state_dict())
    assert saved["param_groups"][0]["step"] == 3
    assert all(set(state) == {"exp_avg", "exp_avg_sq"} for state in saved["state"].values())
    second = GroupStepAdamW(resumed, **SETTINGS)
    second.load_state_dict(saved)
    run_steps(second, resumed, range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_an_empty_group_counts_no_steps() -> None:
    parameters = make_parameters()
    optimizer = GroupStepAdamW([{"params": parameters}, {"params": []}], **SETTINGS)
    run_steps(optimizer, parameters, range(2, 4))
    assert [group.get("step") for group in optimizer.param_groups] == [2, None]


def test_refuses_what_it_does_not_do() -> None:
    with pytest.raises(ConfigError, match="decoupled_weight_decay"):
        GroupStepAdamW(make_parameters(), adam_w_mode=False)
    with pytest.raises(ConfigError, match="optimizer_cuda_graph"):
        GroupStepAdamW(make_parameters(), capturable=True)
    with pytest.raises(ConfigError, match="closure"):
        GroupStepAdamW(make_parameters()).step(lambda: 0.0)


def test_clipping_is_megatrons_own(megatron_rank, monkeypatch) -> None:
    """Above the limit and below it."""
    if clip_grads.multi_tensor_scale_tensor_impl is not None:
        pytest.skip("Transformer Engine clips here")

    def clip(limit):
        parameters = make_parameters()
        for parameter in parameters:
            parameter.grad = (100 * parameter.detach()).to(current_device())
        norm = clip_grads.get_grad_norm_fp32([p.grad for p in parameters], 2, torch.distributed.group.WORLD)
        clip_grads.clip_grad_by_total_norm_fp32(parameters, limit, norm)
        return norm, [parameter.grad for parameter in parameters]

    monkeypatch.setattr(clip_grads, "l2_norm_impl", megatron_utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", megatron_utils.local_multi_tensor_scale)
    expected = {limit: clip(limit) for limit in (1.0, 1e6)}
    TestBuildOptimizer().build(torch.float32, distributed=False)
    assert clip_grads.l2_norm_impl is not megatron_utils.local_multi_tensor_l2_norm
    assert clip_grads.multi_tensor_scale_impl is not megatron_utils.local_multi_tensor_scale
    for limit, (norm, gradients) in expected.items():
        our_norm, ours = clip(limit)
        assert our_norm == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(ours, gradients, rtol=1e-6, atol=0)


class Chunk(MegatronModule):
    """A matrix that trains, one that is frozen, and a norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        like = {"dtype": config.params_dtype, "device": current_device()}
        self.weight = torch.nn.Parameter(torch.ones(4, 4, **like))
        self.frozen = torch.nn.Parameter(torch.ones(4, 4, **like), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(4, **like))

    def forward(self, x):
        return (x @ self.weight @ self.frozen * self.norm).sum() * 0  # only decay moves anything


@pytest.mark.usefixtures("megatron_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributed", [False, True])
class TestBuildOptimizer:
    def build(self, dtype, distributed):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=1,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        chunk = DistributedDataParallel(config, ddp, Chunk(config))
        settings = {"clip_grad": 1.0, "distributed": distributed, "dtype": dtype}
        return chunk, build_optimizer([chunk], **SETTINGS, **settings)

    def test_matrices_decay_norms_do_not_and_what_is_frozen_is_left_out(self, dtype, distributed) -> None:
        chunk, optimizer = self.build(dtype, distributed)
        chunk(torch.ones(1, 4, dtype=dtype, device=current_device())).backward()
        finalize_model_grads([chunk])
        done, norm, _ = optimizer.step()
        assert done
        assert norm == 0.0
        module = chunk.module
        decayed = torch.full((4, 4), 1 - 3e-2 * 0.1)
        torch.testing.assert_close(module.weight.float().cpu(), decayed, rtol=0, atol=2e-3)
        assert (module.weight < 1).all()
        assert torch.equal(module.norm.cpu(), torch.ones(4, dtype=dtype))
        assert torch.equal(module.frozen.cpu(), torch.ones(4, 4, dtype=dtype))

        inner = [part.optimizer for part in optimizer.chained_optimizers]
        assert all(isinstance(part, GroupStepAdamW) for part in inner)
        elements = sum(state["exp_avg"].numel() for part in inner for state in part.state.values())
        assert elements == 4 * 4 + 4
        assert all(state["exp_avg"].dtype == torch.float32 for part in inner for state in part.state.values())

    def test_refuses_a_wrapper_built_for_the_other_kind(self, dtype, distributed) -> None:
        chunk, _ = self.build(dtype, distributed)
        with pytest.raises(ConfigError, match="use_distributed_optimizer"):
            build_optimizer([chunk], **SETTINGS, clip_grad=1.0, distributed=not distributed, dtype=dtype)

    def test_refuses_other_dtypes(self, dtype, distributed) -> None:
        chunk, _ = self.build(dtype, distributed)
        with pytest.raises(ConfigError, match="float16"):
            build_optimizer([chunk], **SETTINGS, clip_grad=1.0, distributed=distributed, dtype=torch.float16)
