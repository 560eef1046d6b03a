"""Log-probabilities of a dormant policy at every layout: values and gradients of one rank."""

import pytest
import torch

import tiny
from ranks.launch import run_ranks
from tiny_models import differing
from torpor import freeze_mtp, policy
from torpor.checkpoints.folder import open_folder
from torpor.megatron import parallel
from torpor.megatron.checkpointing import find_latest, load_checkpoint, save_checkpoint
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training import vocabulary

TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
LENGTHS = [4, 8, 4]  # of the samples of a packed row
SP = Layout(tensor=2, sequence_parallel=True)
LAYOUTS = {
    "dense": {"tp2": Layout(tensor=2), "tp2sp": SP, "pp2": Layout(pipeline=2), "cp2": Layout(context=2)},
    "dense-tied": {"tp2sp": SP, "pp2": Layout(pipeline=2)},
    "hybrid": {"tp2sp": SP, "pp2": Layout(pipeline=2), "ep2": Layout(expert=2), "cp2": Layout(context=2)},
}
SOURCES = {
    "dense": (tiny.write_mimo, {"layers": 2}),
    "dense-tied": (tiny.write_mimo, {"layers": 2, "tie_word_embeddings": True}),
    "hybrid": (tiny.write_nemotron_h, {"pattern": "M*-E"}),
}


def packing():
    """The first row as three sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        total_tokens=sum(LENGTHS),
    )


def objective(values):
    """A loss in which every entry of both counts differently."""
    weights = torch.linspace(0.5, 1.5, values["log_probs"].numel()).view_as(values["log_probs"])
    loss = (weights * values["log_probs"]).sum() + (weights.flip(1) * values["entropy"]).sum()
    return loss, {name: value.detach() for name, value in values.items()}


def gradients(wrapped, is_packed):
    """Run two micro-batches through the schedule; leave gradients in the buffers, return the values."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arguments = {"packed_seq_params": packing()} if is_packed else {}

    def forward_step(batches, chunk):
        return policy.forward(chunk, next(batches), temperature=0.7, **arguments), objective

    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(TOKENS.split(1)),
        model=wrapped,
        num_microbatches=2,
        seq_length=TOKENS.shape[1],
        micro_batch_size=1,
        forward_only=False,
    )


def run_layout(path, layout, out, is_packed):
    """Values at a layout; gradients saved as a checkpoint, in the place of the weights."""
    from torpor.training.loop import wrap_for_training

    folder = open_folder(path)
    chunks = build_model(folder.config, layout, torch.float32)
    load_weights(chunks, folder)
    handle = freeze_mtp(chunks)
    wrapped = wrap_for_training(chunks)
    # What training scripts set: a stage's output is freed once it has been sent on.
    chunks[0].config.deallocate_pipeline_outputs = True
    without_gradient = None
    if not is_packed:
        without_gradient = policy.compute_log_probs(wrapped, TOKENS, temperature=0.7, micro_batch_size=1)
    reports = gradients(wrapped, is_packed)
    handle.check()
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.main_grad)
    save_checkpoint(out, 1, wrapped)
    return {"without_gradient": without_gradient, "reports": reports}


def run_layouts(sources, layouts, out):
    """Run everything on this rank, seven tokens at a time."""
    vocabulary.chunk_size = seven
    results = {}
    for source, path in sources.items():
        for name, layout in layouts[source].items():
            parallel.initialize(layout, seed=1)
            for is_packed in (False, True):
                key = (source, name, is_packed)
                results[key] = run_layout(path, layout, out / "-".join(map(str, key)), is_packed)
            if layout.context > 1:
                # Summed over the ranks, as autograd's own gather does it: each has the whole loss already.
                backward = policy._GatherContext.backward
                policy._GatherContext.backward = staticmethod(summed_backward)
                run_layout(path, layout, out / f"{source}-{name}-wrong", False)
                policy._GatherContext.backward = backward
            parallel.shutdown()
    return results, run_interleaved()


def run_interleaved():
    """Two virtual stages on each of two ranks, with heads asleep and without heads."""
    from matrix.cases import LAYOUTS, Case
    from matrix.training import build_chunks, start_layout
    from tiny_models import GPT, VOCAB

    (layout,) = (layout for layout in LAYOUTS if layout.name == "pp2-vpp2")
    case = Case(GPT, layout)
    start_layout(case)
    dormant, reference = (build_chunks(case, mtp, seed=1) for mtp in (True, False))
    for chunk, without in zip(dormant, reference, strict=True):
        names = without.state_dict().keys()
        without.load_state_dict({n: t for n, t in chunk.state_dict().items() if n in names}, strict=True)
    handle = freeze_mtp(dormant)
    tokens = TOKENS.repeat(2, 1) % VOCAB
    results = [
        policy.compute_log_probs(chunks, tokens, micro_batch_size=1) for chunks in (dormant, reference)
    ]
    handle.check()
    return results


def seven(projection):
    return 7


def summed_backward(ctx, grad):
    torch.distributed.all_reduce(grad := grad.clone())
    return grad[:, ctx.own_S], None, None


def saved_gradients(path, config):
    """Read what `run_layout` saved, whatever the layout."""
    chunks = build_model(config, Layout(), torch.float32)
    load_checkpoint(find_latest(path), chunks)
    return {name: p.detach() for name, p in chunks[0].named_parameters() if "mtp." not in name}


def largest_difference(found, expected):
    """Relative to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max()) for n, e in expected.items())


@pytest.mark.timeout(600)
def test_every_layout_gives_what_one_rank_gives(tmp_path, megatron_rank, monkeypatch):
    """Tensor, sequence, pipeline, context, expert parallel; padded and packed; tied, hybrid, interleaved."""
    monkeypatch.setattr(vocabulary, "chunk_size", seven)
    sources = {
        name: write(tmp_path / name, tokenizer=False, **fields) for name, (write, fields) in SOURCES.items()
    }
    arguments = (sources, LAYOUTS, tmp_path / "two")
    (first, interleaved), (last, also_interleaved) = run_ranks(run_layouts, 2, *arguments, timeout=400)
    assert len(last) == 2 * sum(map(len, LAYOUTS.values()))
    for source, path in sources.items():
        config = open_folder(path).config
        for is_packed in (False, True):
            out = tmp_path / "one" / f"{source}-{is_packed}"
            one = run_layout(path, Layout(), out, is_packed)
            grads = saved_gradients(out, config)
            for name in LAYOUTS[source]:
                key = (source, name, is_packed)
                for report, expected in zip(last[key]["reports"], one["reports"], strict=True):
                    assert largest_difference(report, expected) < 1e-5, key
                found = saved_gradients(tmp_path / "two" / "-".join(map(str, key)), config)
                assert largest_difference(found, grads) < 1e-4, key
                if not is_packed:
                    for rank in (first, last):
                        values = rank[key]["without_gradient"]
                        assert largest_difference(values, one["without_gradient"]) < 1e-5, key
            if not is_packed and (tmp_path / "two" / f"{source}-cp2-wrong").exists():
                wrong = saved_gradients(tmp_path / "two" / f"{source}-cp2-wrong", config)
                assert largest_difference(wrong, grads) > 0.5

    # Several chunks on a rank: each runs as many micro-batches, and values reach every stage.
    dormant, reference = interleaved
    assert dormant["log_probs"].shape == (4, 16)
    assert dormant["log_probs"][:, 1:].max() < 0 < dormant["entropy"][:, 1:].min()
    for values in (reference, *also_interleaved):
        assert differing(values, dormant) == []
