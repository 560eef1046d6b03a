"""Over context parallel ranks a Mamba layer and the training loop do what they do on one rank."""

import numpy as np
import pytest
import torch

import tiny
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


def pretrain(path, tokens, *, divide: bool = True) -> dict[str, list[float]]:
    """Take two steps of pre-training, asleep and awake, on this rank; return what each reports.

    Args:
        path: Folder of the model.
        tokens: Array of the data.
        divide: Whether to divide the mean over a rank's own tokens by the context parallel size.
    """
    import torpor
    from torpor.checkpoints.folder import open_folder
    from torpor.megatron.models import build_model
    from torpor.megatron.weights import load_weights
    from torpor.training import loop
    from torpor.training.config import OptimizationConfig
    from torpor.training.data import PackedWindows

    if not divide:
        loop._mean_loss = lambda losses_BS: (losses_BS.mean(), {"loss": losses_BS.mean().detach()})
    folder, found = open_folder(path), {}
    windows = PackedWindows(tokens, sequence_length=16, held_out=0.0, seed=1)
    settings = {"sequence_length": 16, "global_batch_size": 2, "steps": 2, "dtype": "fp32"}
    for size, is_awake in ((1, False), (2, False), (1, True), (2, True)):
        layout = Layout(context=size)
        parallel.initialize(layout, seed=1)
        chunks = build_model(folder.config, layout, torch.float32)
        load_weights(chunks, folder)
        if not is_awake:
            torpor.freeze_mtp(chunks)
        config = OptimizationConfig(**settings, context_parallel=size)
        job = loop.prepare_job(chunks, config, windows, loop.language_model_objective(), steps=2)
        records = [loop.run_step(job, step) for step in range(2)]
        key = f"{'awake' if is_awake else 'asleep'}, context parallel size {size}"
        found[key] = [number for r in records for number in (r.grad_norm, *r.metrics.values())]
        parallel.shutdown()
    return found


def compare_all(path, tokens):
    return compare_mixers(), refuse_heads(), pretrain(path, tokens), pretrain(path, tokens, divide=False)


def test_two_ranks_compute_what_one_does(tmp_path) -> None:
    """A mixer with fewer groups than ranks, as many and more; heads that do not divide; the loop."""
    np.save(tmp_path / "tokens.npy", (np.arange(500) % 10 + 3).astype(np.uint16))
    tiny.write_mimo(tmp_path / "model", tokenizer=False)
    ranks = run_ranks(compare_all, 2, tmp_path / "model", tmp_path / "tokens.npy")
    for mixers, refusal, losses, undivided in ranks:
        assert len(mixers) == 6
        for name, errors in mixers.items():
            assert len(errors) == 9, errors
            assert max(errors.values()) < 1e-5, (name, errors)
        assert "3 heads, 1 groups on a tensor parallel rank; context parallel size 2" in refusal

        asleep, asleep_divided, awake, awake_divided = losses.values()
        assert asleep_divided == pytest.approx(asleep, rel=1e-4)
        # Megatron takes the mean of MTP's loss on each rank, and that over the ranks, though one of them has
        # the last token, which MTP has nothing to predict at: 8 and 7 tokens here.
        assert len(awake) == 2 * (len(asleep) // 2 + 2)
        assert awake_divided == pytest.approx(awake, rel=0.05)
        # Megatron's schedule multiplies a mean by the context parallel size.
        wrong = list(undivided.values())[1]
        assert wrong[0] == pytest.approx(2 * asleep[0], rel=1e-4)
