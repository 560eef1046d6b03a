"""A Mamba layer over context parallel ranks is the layer on one rank: values, and gradients added up."""

import torch

from ranks.launch import run_ranks
from torpor.megatron import parallel
from torpor.megatron.parallel import Layout
from torpor.megatron.zigzag import zigzag_places

TOKENS, HIDDEN = 24, 16
PACKED = [(0, 8), (8, 12), (12, 24)]


def build_mixer(groups: int, cp_group, heads: int = 4):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from torpor.megatron.mamba import TorchMambaMixer

    sizes = {"mamba_num_heads": heads, "mamba_head_dim": 4, "mamba_num_groups": groups, "mamba_state_dim": 8}
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, **sizes)
    process_groups = ProcessGroupCollection.use_mpu_process_groups()
    process_groups.cp = cp_group
    layers = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return TorchMambaMixer(
        config, layers, d_model=HIDDEN, chunk_size=4, layer_number=1, pg_collection=process_groups
    )


def compare_mixers() -> dict[str, dict[str, float]]:
    """Return how far outputs and gradients of the divided mixer are from the whole one's, by name."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    parallel.initialize(Layout(context=2), seed=1)
    alone = parallel_state.get_tensor_model_parallel_group()  # of one rank
    ranks = parallel_state.get_context_parallel_group()
    found = {}
    for groups in (1, 2, 4):
        for bounds in ([(0, TOKENS)], PACKED):
            whole, divided = build_mixer(groups, alone), build_mixer(groups, ranks)
            divided.load_state_dict(whole.state_dict())
            ends = torch.tensor([0, *[end for _, end in bounds]], dtype=torch.int32)
            params = {"qkv_format": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
            packed = PackedSeqParams(**params) if bounds is PACKED else None
            generator = torch.Generator().manual_seed(groups)
            hidden, weight = torch.randn(2, TOKENS, 1, HIDDEN, generator=generator)
            own = zigzag_places(bounds, 2)[ranks.rank()]

            expected = whole(hidden, packed_seq_params=packed)[0]
            (expected * weight).sum().backward()
            got = divided(hidden[own], packed_seq_params=packed)[0]
            (got * weight[own]).sum().backward()
            errors = {"output": _error(got, expected[own])}
            for (name, parameter), reference in zip(
                divided.named_parameters(), whole.parameters(), strict=True
            ):
                torch.distributed.all_reduce(parameter.grad, group=ranks)
                errors[name] = _error(parameter.grad, reference.grad)
            found[f"{groups} groups, {len(bounds)} samples"] = errors
    parallel.shutdown()
    return found


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def refuse_heads() -> str:
    """Return the message about three heads on two ranks."""
    from megatron.core import parallel_state

    from torpor.errors import ConfigError

    parallel.initialize(Layout(context=2), seed=1)
    try:
        build_mixer(1, parallel_state.get_context_parallel_group(), heads=3)
    except ConfigError as error:
        return str(error)
    finally:
        parallel.shutdown()
    return "not refused"


def compare_and_refuse() -> tuple[dict[str, dict[str, float]], str]:
    return compare_mixers(), refuse_heads()


def test_a_divided_mixer_equals_a_whole_one() -> None:
    """Fewer groups than ranks, as many and more; one sample and packed ones; heads that do not divide."""
    for found, refusal in run_ranks(compare_and_refuse, 2):
        assert len(found) == 6
        for name, errors in found.items():
            assert len(errors) == 9, errors
            assert max(errors.values()) < 1e-5, (name, errors)
        assert "3 heads, 1 groups on a tensor parallel rank; context parallel size 2" in refusal
