"""The map covers every tensor, moves elements only, and gives them back bit for bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.name_map import (
    Concatenate,
    Entry,
    Identity,
    InterleaveQKV,
    Split,
    StackExperts,
    SwapHalves,
)
from torpor.errors import CheckpointError


def rows(*names):
    """A tensor whose rows are the given heads, each of two rows."""
    return torch.tensor([[100.0 * name + row] for name in names for row in (0, 1)])


def test_interleaved_heads():
    """Two groups of two query heads: q0 q1 k0 v0 q2 q3 k1 v1, as the docstring says."""
    op = InterleaveQKV(num_groups=2, heads_per_group=2, head_dim=2)
    q, k, v = rows(0, 1, 2, 3), rows(10, 11), rows(20, 21)
    (packed,) = op.pack([q, k, v])
    assert torch.equal(packed, rows(0, 1, 10, 20, 2, 3, 11, 21))
    assert all(torch.equal(a, b) for a, b in zip(op.unpack([packed]), (q, k, v), strict=True))


def test_interleaved_biases():
    """Biases have the rows of their weights."""
    op = InterleaveQKV(num_groups=1, heads_per_group=2, head_dim=1)
    (packed,) = op.pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0])])
    assert packed.tolist() == [1, 2, 3, 4]
    assert [t.tolist() for t in op.unpack([packed])] == [[1, 2], [3], [4]]


def test_swapped_halves():
    """A projection of (hidden, token) becomes one of (token, hidden)."""
    weight, hidden, token = torch.randn(4, 6), torch.randn(3), torch.randn(3)
    (swapped,) = SwapHalves().pack([weight])
    torch.testing.assert_close(swapped @ torch.cat((token, hidden)), weight @ torch.cat((hidden, token)))
    assert torch.equal(SwapHalves().unpack([swapped])[0], weight)


def test_concatenated_gate_and_up():
    """The gate's rows come first."""
    gate, up = torch.zeros(2, 3), torch.ones(2, 3)
    (packed,) = Concatenate().pack([gate, up])
    assert packed[:, 0].tolist() == [0, 0, 1, 1]
    assert [t[0, 0].item() for t in Concatenate().unpack([packed])] == [0, 1]


def test_split_rows():
    """Parts are cut in order and need not be equal."""
    parts = Split((1, 2)).pack([torch.tensor([5.0, 6.0, 7.0])])
    assert [part.tolist() for part in parts] == [[5], [6, 7]]
    assert Split((1, 2)).unpack(parts)[0].tolist() == [5, 6, 7]


def test_stacked_experts():
    """Experts get a dimension in front, in their order."""
    experts = [torch.full((2, 3), float(i)) for i in range(3)]
    (stacked,) = StackExperts(3).pack(experts)
    assert stacked.shape == (3, 2, 3)
    assert stacked[:, 0, 0].tolist() == [0, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(StackExperts(3).unpack([stacked]), experts, strict=True))


def test_stacked_gated_experts():
    """Each expert's gate and up are put together first."""
    op = StackExperts(2, each=Concatenate())
    tensors = [torch.full((1, 3), float(i)) for i in range(4)]  # gate 0, up 0, gate 1, up 1
    (stacked,) = op.pack(tensors)
    assert stacked[:, :, 0].tolist() == [[0, 1], [2, 3]]
    assert all(torch.equal(a, b) for a, b in zip(op.unpack([stacked]), tensors, strict=True))


@settings(deadline=None)
@given(groups=st.integers(1, 4), heads=st.integers(1, 4), dim=st.integers(1, 4), width=st.integers(0, 3))
def test_interleaving_is_a_permutation(groups, heads, dim, width):
    """No element is lost, made or changed, for any number of heads; NaNs and signed zeros included."""
    op = InterleaveQKV(groups, heads, dim)
    sizes = (groups * heads * dim, groups * dim, groups * dim)
    values = [
        torch.randint(-(2**15), 2**15, (n, width), dtype=torch.int16).view(torch.bfloat16) for n in sizes
    ]
    packed = op.pack(values)
    assert same_bits(op.unpack(packed), values)
    before = torch.cat([v.flatten() for v in values]).view(torch.int16)
    assert torch.equal(packed[0].flatten().view(torch.int16).sort().values, before.sort().values)


def same_bits(some, others):
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
        for a, b in zip(some, others, strict=True)
    )


HYBRIDS = {
    "every kind": {},
    "deep": {"num_mtp": 2, "mtp_pattern": "*-ME", "pattern": "MM-*"},
    "no mtp": {"num_mtp": 0},
    "latent experts": {"moe_latent_size": 16},
    "tied": {"tie_word_embeddings": True},
    "one group": {"num_key_value_heads": 1, "n_groups": 1},
    "mamba only": {"pattern": "M", "mtp_pattern": "M"},
}
DENSE = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "deep": {"num_mtp": 3, "layers": 1},
    "no mtp": {"num_mtp": 0},
    "as many groups as heads": {"num_key_value_heads": 4},
}


def case_id(case):
    return " ".join(case[1:])


@pytest.fixture(
    scope="module",
    params=[("nemotron_h", name) for name in HYBRIDS] + [("mimo", name) for name in DENSE],
    ids=case_id,
)
def folder(request, tmp_path_factory):
    """A folder whose names and shapes are Transformers' own."""
    family, case = request.param
    out = tmp_path_factory.mktemp("map") / "folder"
    if family == "mimo":
        return open_folder(tiny.write_mimo(out, tokenizer=False, **DENSE[case]))
    return open_folder(tiny.write_nemotron_h(out, tokenizer=False, dtype=torch.bfloat16, **HYBRIDS[case]))


def test_every_tensor_is_claimed_with_its_shape(folder):
    """Names and shapes, spelled out from config.json alone, are the folder's exactly."""
    name_map = find_family(folder.config).name_map(folder.config)
    name_map.check(folder.tensors)
    assert name_map.hf_shapes == {name: entry.shape for name, entry in folder.tensors.items()}


def test_there_and_back_is_bitwise(folder):
    """Packing and unpacking gives every tensor back; the packed ones have as many elements."""
    for entry in find_family(folder.config).name_map(folder.config).entries:
        tensors = [folder.read_tensor(name) for name in entry.hf_names]
        packed = entry.op.pack(tensors)
        assert len(packed) == len(entry.megatron_names)
        assert sum(t.numel() for t in packed) == sum(t.numel() for t in tensors)
        assert same_bits(entry.op.unpack(packed), tensors)


def test_mtp_goes_to_mtp(folder):
    """A tensor is MTP on both sides or on neither."""
    family = find_family(folder.config)
    for entry in family.name_map(folder.config).entries:
        sides = [family.is_mtp(name, folder.config) for name in entry.hf_names]
        sides += [name.startswith("mtp.") for name in entry.megatron_names]
        assert len(set(sides)) == 1, entry


def test_hybrid_names_of_megatron(nemotron_h):
    """The names of Megatron's distributed checkpoint, written out once by hand."""
    config = open_folder(nemotron_h).config
    names = set(find_family(config).name_map(config).by_megatron)
    mamba = ["A_log", "D", "dt_bias", "norm.weight", "out_proj.weight", "in_proj.layer_norm_weight"]
    mamba += [f"in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")]
    mamba += [f"conv1d.{kind}.{part}" for kind in ("weight", "bias") for part in "xBC"]
    attention = ["linear_qkv.weight", "linear_qkv.layer_norm_weight", "linear_proj.weight"]
    moe = ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"]
    for part, fc in itertools.product(("mlp.experts.experts", "mlp.shared_experts"), ("fc1", "fc2")):
        moe.append(f"{part}.linear_{fc}.weight")
    mlp = ["linear_fc1.weight", "linear_fc1.layer_norm_weight", "linear_fc2.weight"]
    inner = "mtp.layers.0.mtp_model_layer.layers"
    assert names == {
        "embedding.word_embeddings.weight",
        "decoder.final_norm.weight",
        "output_layer.weight",
        *(f"decoder.layers.0.mixer.{name}" for name in mamba),
        *(f"decoder.layers.1.self_attention.{name}" for name in attention),
        *(f"decoder.layers.2.mlp.{name}" for name in mlp),
        *(f"decoder.layers.3.{name}" for name in moe),
        *(f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        *(f"{inner}.0.self_attention.{name}" for name in attention),
        *(f"{inner}.1.{name}" for name in moe),
    }


def test_dense_names_of_megatron(mimo):
    """The names of Megatron's distributed checkpoint, written out once by hand."""
    config = open_folder(mimo).config
    names = set(find_family(config).name_map(config).by_megatron)
    layer = [f"mlp.linear_fc1.{kind}" for kind in ("weight", "layer_norm_weight")]
    layer += [f"self_attention.linear_qkv.{kind}" for kind in ("weight", "bias", "layer_norm_weight")]
    layer += ["mlp.linear_fc2.weight", "self_attention.linear_proj.weight"]
    ends = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    assert names == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        *(f"decoder.layers.{i}.{name}" for i in (0, 1) for name in layer),
        *(f"mtp.layers.{i}.transformer_layer.{name}" for i in (0, 1) for name in layer),
        *(f"mtp.layers.{i}.{name}.weight" for i in (0, 1) for name in ends),
    }


def test_second_depth_of_a_hybrid(tmp_path):
    """Depth 1 of a pattern of four begins at index 4, with its projections, and ends at 7, with its norm."""
    folder = open_folder(
        tiny.write_nemotron_h(tmp_path / "f", num_mtp=2, mtp_pattern="*-ME", tokenizer=False)
    )
    by_megatron = find_family(folder.config).name_map(folder.config).by_megatron
    assert by_megatron["mtp.layers.1.eh_proj.weight"].hf_names == ("mtp.layers.4.eh_proj.weight",)
    assert by_megatron["mtp.layers.1.final_layernorm.weight"].hf_names == (
        "mtp.layers.7.final_layernorm.weight",
    )
    assert by_megatron["mtp.layers.1.mtp_model_layer.layers.2.mixer.D"].hf_names == ("mtp.layers.6.mixer.D",)


def spoilt(folder, drop=(), add=(), reshape=None):
    tensors = {name: entry for name, entry in folder.tensors.items() if name not in drop}
    some = next(iter(tensors.values()))
    tensors |= dict.fromkeys(add, some)
    if reshape:
        import dataclasses

        tensors[reshape] = dataclasses.replace(tensors[reshape], shape=(1, 2, 3))
    return tensors


def test_unclaimed_missing_and_misshapen_tensors(nemotron_h):
    """Each is refused, with the first names and how many."""
    folder = open_folder(nemotron_h)
    name_map = find_family(folder.config).name_map(folder.config)
    with pytest.raises(CheckpointError, match=r"1 missing \(mtp\.layers\.0\.enorm\.weight\)"):
        name_map.check(spoilt(folder, drop=["mtp.layers.0.enorm.weight"]))
    extra = [f"mtp.layers.9.x{i}" for i in range(7)]
    with pytest.raises(CheckpointError, match=r"7 that .* does not account for .*x4 and 2 more\)"):
        name_map.check(spoilt(folder, add=extra))
    with pytest.raises(CheckpointError, match=r"lm_head.weight .*shape \[1, 2, 3\], .* gives it \[320, 32\]"):
        name_map.check(spoilt(folder, reshape="lm_head.weight"))


def test_entries_are_values():
    """Equal entries are equal, so that a map can be compared with another."""
    assert Entry(("a",), ("b",), ((1,),)) == Entry(("a",), ("b",), ((1,),), Identity())
