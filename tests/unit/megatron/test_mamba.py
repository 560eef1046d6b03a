"""Mamba-2 in plain PyTorch against the recurrence that defines it, one position after the other in FP64."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.host import current_device
from torpor.megatron.mamba import GatedGroupNorm, TorchMambaMixer, scan_chunks


def scan_positions(x, dt, A, B, C, D) -> Tensor:
    """The same model, position by position."""
    num_batch, length, num_heads, head_size = x.shape
    B, C = (t.repeat_interleave(num_heads // t.size(2), dim=2) for t in (B, C))
    state = x.new_zeros(num_batch, num_heads, head_size, B.size(-1))
    y = []
    for s in range(length):
        written = dt[:, s, :, None, None] * x[:, s, :, :, None] * B[:, s, :, None, :]
        state = torch.exp(dt[:, s] * A)[..., None, None] * state + written
        y.append((state * C[:, s, :, None, :]).sum(-1) + D[:, None] * x[:, s])
    return torch.stack(y, dim=1)


def make_inputs(length: int, groups: int = 2, dtype=torch.float64, steep: float = 1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    batch, heads, head, state = 2, 4, 3, 5
    inputs = [
        torch.randn(batch, length, heads, head, generator=g, dtype=torch.float64),
        F.softplus(torch.randn(batch, length, heads, generator=g, dtype=torch.float64)) * steep,
        -torch.rand(heads, generator=g, dtype=torch.float64) * 16,
        torch.randn(batch, length, groups, state, generator=g, dtype=torch.float64),
        torch.randn(batch, length, groups, state, generator=g, dtype=torch.float64),
        torch.randn(heads, generator=g, dtype=torch.float64),
    ]
    return [t.to(dtype).requires_grad_() for t in inputs]


def outputs_and_gradients(scan, inputs: list[Tensor]) -> list[Tensor]:
    y = scan(*inputs)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad((y.double() * weight).sum(), inputs)]


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 23), chunk=st.sampled_from([1, 2, 4, 5, 8, 64]), groups=st.sampled_from([1, 2, 4])
)
def test_equals_the_recurrence_in_fp64(length: int, chunk: int, groups: int) -> None:
    """Lengths that the chunk size does and does not divide; outputs and the gradients of all inputs."""
    inputs = make_inputs(length, groups)
    wanted = outputs_and_gradients(scan_positions, inputs)
    got = outputs_and_gradients(lambda *args: scan_chunks(*args, chunk_size=chunk), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_fp32_stays_close_to_fp64() -> None:
    wanted = outputs_and_gradients(scan_positions, make_inputs(200))
    got = outputs_and_gradients(
        lambda *a: scan_chunks(*a, chunk_size=64), make_inputs(200, dtype=torch.float32)
    )
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() < 3e-6 * b.abs().max()


def test_bf16_inputs_are_computed_in_fp32() -> None:
    inputs = make_inputs(40, dtype=torch.bfloat16)
    got = scan_chunks(*inputs, chunk_size=16)
    wanted = scan_positions(*(t.double() for t in inputs))
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_steep_decay_gives_finite_outputs_and_gradients() -> None:
    """Decay that underflows over a chunk: its inverse would overflow, and must never be formed."""
    got = outputs_and_gradients(
        lambda *args: scan_chunks(*args, chunk_size=64), make_inputs(128, dtype=torch.float32, steep=50)
    )
    assert all(torch.isfinite(t).all() for t in got)


def test_recurrence_is_told_apart_from_one_without_carry() -> None:
    """The comparison above can fail: chunks that forget the state of the chunk before are found out."""
    x, dt, A, B, C, D = make_inputs(8)
    halves = [
        scan_chunks(x[:, half], dt[:, half], A, B[:, half], C[:, half], D, chunk_size=4)
        for half in (slice(0, 4), slice(4, 8))
    ]
    assert (torch.cat(halves, dim=1) - scan_positions(x, dt, A, B, C, D)).abs().max() > 1e-3


def test_gated_norm_works_group_by_group() -> None:
    norm = GatedGroupNorm(6, 3, eps=1e-5, dtype=torch.float64, device=torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6.0))
    y, gate = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    gated = y * gate * torch.sigmoid(gate)
    wanted = torch.cat(
        [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.split(3, -1)], -1
    )
    torch.testing.assert_close(norm(y, gate), wanted * torch.arange(6.0))


def build_mixer(heads: int = 4, groups: int = 2, **config) -> TorchMambaMixer:
    return TorchMambaMixer(
        TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            mamba_num_heads=heads,
            mamba_head_dim=4,
            mamba_num_groups=groups,
            mamba_state_dim=8,
            **config,
        ),
        MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        d_model=16,
        chunk_size=4,
        layer_number=3,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


@pytest.mark.usefixtures("megatron_rank")
class TestMixer:
    def test_equals_the_definition_position_by_position(self) -> None:
        mixer = build_mixer().double()
        hidden = torch.randn(11, 2, 16, dtype=torch.float64, device=current_device())
        got, bias = mixer(hidden)
        assert bias is None

        z, x, B, C, dt = (hidden @ mixer.in_proj.weight.T).transpose(0, 1).split([16, 16, 16, 16, 4], -1)
        channels = torch.cat([x, B, C], -1)
        convolved = torch.zeros_like(channels)
        for s in range(11):
            for back in range(min(s, 3) + 1):
                convolved[:, s] += channels[:, s - back] * mixer.conv1d_weight[:, 0, 3 - back]
        x, B, C = F.silu(convolved + mixer.conv1d_bias).split([16, 16, 16], -1)
        y = scan_positions(
            x.unflatten(-1, (4, 4)), F.softplus(dt + mixer.dt_bias), -mixer.A_log.exp(),
            B.unflatten(-1, (2, 8)), C.unflatten(-1, (2, 8)), mixer.D,
        )  # fmt: skip
        y = mixer.norm(y.flatten(2), z).transpose(0, 1) @ mixer.out_proj.weight.T
        # The step size and the decay are FP32 in the mixer, whatever the dtype of the model.
        torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-6)

    def test_no_position_sees_a_later_one(self) -> None:
        mixer = build_mixer()
        hidden = torch.randn(10, 1, 16, device=current_device())
        changed = hidden.clone()
        changed[6:] += 1
        assert torch.equal(mixer(hidden)[0][:6], mixer(changed)[0][:6])
        assert not torch.equal(mixer(hidden)[0][6:], mixer(changed)[0][6:])

    def test_bf16_model_keeps_decay_in_fp32(self) -> None:
        mixer = build_mixer(params_dtype=torch.bfloat16, bf16=True)
        assert mixer.A_log.dtype == mixer.D.dtype == torch.float32
        out, _ = mixer(torch.randn(5, 1, 16, dtype=torch.bfloat16, device=current_device()))
        assert out.dtype == torch.bfloat16

    def test_starts_with_the_published_ranges(self) -> None:
        mixer = build_mixer(heads=64, groups=1)
        steps, decays = F.softplus(mixer.dt_bias), mixer.A_log.exp()
        assert steps.min() >= 0.99e-3
        assert steps.max() <= 0.101
        assert decays.min() >= 0.99
        assert decays.max() <= 16.1
        assert torch.equal(mixer.D, torch.ones(64, device=current_device()))

    def test_packed_samples_start_from_an_empty_state(self) -> None:
        """Values and gradients of the samples, one of a single token, as of separate sequences."""
        mixer, lengths = build_mixer().double(), (6, 1, 9)
        ends = torch.tensor([0, 6, 7, 16], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        hidden = torch.randn(16, 1, 16, dtype=torch.float64, device=current_device())
        weight = torch.randn_like(hidden)

        def run(mix) -> list[Tensor]:
            output = mix(hidden)
            return [output, *torch.autograd.grad((output * weight).sum(), list(mixer.parameters()))]

        together = run(lambda x: mixer(x, packed_seq_params=packed)[0])
        apart = run(lambda x: torch.cat([mixer(sample)[0] for sample in x.split(lengths)]))
        # Step sizes and decays are FP32 in both, whatever the dtype of the model.
        torch.testing.assert_close(together, apart, rtol=1e-6, atol=1e-9)
        as_one = run(lambda x: mixer(x)[0])
        assert not torch.allclose(as_one[0][6:], apart[0][6:], rtol=1e-3, atol=1e-3)

    def test_packed_samples_do_not_reach_one_another(self) -> None:
        """Not a bit changes in a sample when another does, though the last tokens of that one are near."""
        mixer, ends = build_mixer(), torch.tensor([0, 5, 11], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        hidden = torch.randn(11, 1, 16, device=current_device())
        changed = hidden.clone()
        changed[4] += 1
        for params, reaches in ((packed, False), (None, True)):
            before, after = (mixer(x, packed_seq_params=params)[0] for x in (hidden, changed))
            assert torch.equal(before[5:], after[5:]) is not reaches

    def test_refuses_an_inference_cache(self) -> None:
        with pytest.raises(UnsupportedModelError, match="Mamba layer 3: an inference cache"):
            build_mixer()(torch.randn(8, 1, 16, device=current_device()), inference_context=object())

    def test_refuses_groups_that_do_not_divide_the_heads(self) -> None:
        with pytest.raises(ConfigError, match="4 heads, 3 groups; tensor parallel size 1"):
            build_mixer(groups=3)
