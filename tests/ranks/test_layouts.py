"""Weights at every layout: the same logits, checkpoints that reshard, exports that do not show the layout."""

import pytest
import torch

import tiny
from megatron_steps import logits_of
from ranks.launch import run_ranks
from torpor.checkpoints.folder import open_folder
from torpor.megatron import parallel
from torpor.megatron.checkpointing import find_latest, load_checkpoint, save_checkpoint
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import export_folder, load_weights

TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
TWO_RANKS = {
    "tp2": Layout(tensor=2),
    "tp2sp": Layout(tensor=2, sequence_parallel=True),
    "pp2": Layout(pipeline=2),
    "ep2": Layout(expert=2),
    "dp2": Layout(),
}
FOUR_RANKS = {
    "tp2pp2": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "pp2ep2": Layout(pipeline=2, expert=2),
    "pp4": Layout(pipeline=4),
    "tp2ep2": Layout(tensor=2, expert=2, sequence_parallel=True),
}
SOURCES = {
    "dense": (tiny.write_mimo, {"layers": 4, "num_mtp": 2}),
    "tied": (tiny.write_mimo, {"layers": 4, "tie_word_embeddings": True}),
    "hybrid": (tiny.write_nemotron_h, {"pattern": "M*-E", "num_mtp": 2}),
    "hybrid-tied": (tiny.write_nemotron_h, {"pattern": "M*-E", "tie_word_embeddings": True}),
}


def fitting(source, layouts):
    """The layouts that a model can have: experts need sequence parallelism under TP, EP needs experts."""
    has_experts = source.startswith("hybrid")
    return {
        name: layout
        for name, layout in layouts.items()
        if (has_experts or layout.expert == 1)
        and not (has_experts and layout.tensor > 1 and not layout.sequence_parallel)
    }


def load_save_and_reload(sources, out, all_layouts):
    """Load each folder at each layout, save it, then load each of these checkpoints at the next layout."""
    results = {}
    for source, path in sources.items():
        folder, layouts = open_folder(path), fitting(source, all_layouts)
        for name, layout in layouts.items():
            parallel.initialize(layout, seed=1)
            chunks = build_model(folder.config, layout, torch.float32)
            load_weights(chunks, folder)
            results[source, name] = logits_of(chunks, TOKENS)
            save_checkpoint(out / source / name, 1, chunks)
            if layout.pipeline > 1 and parallel.is_last_stage():
                has_output_weight = chunks[0].output_layer.weight is not None
                assert has_output_weight != source.endswith("tied"), source
            parallel.shutdown()
        names = list(layouts)
        for writer, reader in zip(names, names[1:] + names[:1], strict=True):
            parallel.initialize(layouts[reader], seed=2)
            chunks = build_model(folder.config, layouts[reader], torch.float32)
            load_checkpoint(find_latest(out / source / writer), chunks)
            results[source, f"{writer} as {reader}"] = logits_of(chunks, TOKENS)
            parallel.shutdown()
    return results


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "layouts"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2", "4"])
def test_every_layout_gives_the_logits_and_the_export_of_one_rank(tmp_path, megatron_rank, world, layouts):
    """Dense and hybrid, tied and untied: direct loads and resharded ones agree, exports are the source."""
    sources = {}
    for source, (write, fields) in SOURCES.items():
        sources[source] = write(tmp_path / f"{source}-folder", tokenizer=False, **fields)
    *_, last = run_ranks(load_save_and_reload, world, sources, tmp_path, layouts, timeout=500)
    assert len(last) == sum(2 * len(fitting(source, layouts)) for source in sources)

    for source, path in sources.items():
        folder = open_folder(path)
        chunks = build_model(folder.config, Layout(), torch.float32)
        load_weights(chunks, folder)
        expected = logits_of(chunks, TOKENS)
        for (of, name), logits in last.items():
            if of == source:
                assert (logits - expected).abs().max() < 1e-5 * expected.abs().max(), (source, name)
        for name in fitting(source, layouts):
            out = tmp_path / f"{source}-{name}-export"
            export_folder(find_latest(tmp_path / source / name), folder, out)
            export = open_folder(out)
            assert set(export.tensors) == set(folder.tensors)
            for tensor in folder.tensors:
                assert export.read_bytes(tensor) == folder.read_bytes(tensor), (source, name, tensor)


def read_names(path, layouts):
    """Load a folder at each layout and say which tensors this rank read."""
    from torpor.checkpoints.folder import Folder

    folder, original, read = open_folder(path), Folder.read_tensor, []

    def record(self, name):
        read[-1].append(name)
        return original(self, name)

    Folder.read_tensor = record
    for layout in layouts:
        parallel.initialize(layout, seed=1)
        read.append([])
        load_weights(build_model(folder.config, layout, torch.float32), folder)
        parallel.shutdown()
    return read


def test_ranks_read_only_what_they_hold(tmp_path):
    """Under PP each stage reads its own layers, under EP each rank its own experts; nothing is read twice."""
    path = tiny.write_nemotron_h(tmp_path / "source", tokenizer=False)
    ranks = run_ranks(read_names, 2, path, [Layout(pipeline=2), Layout(expert=2)], timeout=400)
    (first, last), by_expert = zip(*ranks, strict=True)
    later = ("backbone.layers.2", "backbone.layers.3", "mtp.", "lm_head")
    assert not any(name.startswith(later) for name in first)
    assert not any(name.startswith(("backbone.layers.0", "backbone.layers.1")) for name in last)
    assert set(first) & set(last) == {"backbone.embeddings.weight"}
    for rank, names in enumerate(by_expert):
        assert len(names) == len(set(names))
        experts = {int(name.split(".experts.")[1][0]) for name in names if ".experts." in name}
        assert experts == {2 * rank, 2 * rank + 1}
