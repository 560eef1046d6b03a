"""Adapters: what they compute, what is trained, what merging gives, what they are put on."""

import pytest
import torch

import tiny
from torpor.checkpoints.families import find_family
from torpor.checkpoints.folder import open_folder
from torpor.dormancy import freeze_mtp
from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.lora_targets import find_lora_targets, is_target
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights

FAMILIES = {"gpt": tiny.write_mimo, "hybrid": tiny.write_nemotron_h}
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(16).expand_as(TOKENS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: open_folder(write(folder / name, tokenizer=False)) for name, write in FAMILIES.items()}


def name_map(folder):
    return find_family(folder.config).name_map(folder.config)


def build(folder, *, targets="all-linear", recompute=None, adapt=True, **values):
    from torpor.megatron.lora import add_lora

    chunks = build_model(folder.config, Layout(), torch.float32, recompute=recompute)
    load_weights(chunks, folder)
    freeze_mtp(chunks)
    if adapt:
        settings = {"r": 4, "alpha": 8.0, "dropout": 0.0, "seed": 1} | values
        add_lora(chunks, find_lora_targets(name_map(folder), targets), **settings)
    return chunks[0]


def logits(model):
    with torch.no_grad():
        return model(TOKENS, POSITIONS, None)


def backward(model):
    model(TOKENS, POSITIONS, None, labels=TOKENS.roll(-1, 1)).mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def randomize(model):
    """Give every B values, so that the adapters count."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing_and_only_adapters_are_trained(folders, megatron_rank, family):
    plain = build(folders[family], adapt=False).eval()
    model = build(folders[family]).eval()
    assert torch.equal(logits(model), logits(plain))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if ".lora_" in n}
    assert not any(n.startswith("mtp.") or "experts.local_experts" in n for n in trained)
    assert backward(randomize(model).train()).keys() == trained


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_model_computes_what_the_adapted_one_does(folders, megatron_rank, family):
    from torpor.megatron.lora import merge_lora

    model = randomize(build(folders[family])).eval()
    adapted, before = logits(model), {n: p.clone() for n, p in model.named_parameters()}
    assert (adapted - logits(build(folders[family], adapt=False).eval())).abs().max() > 0.01
    merge_lora([model])
    assert torch.allclose(logits(model), adapted, atol=2e-5)
    merged = dict(model.named_parameters())
    for name, weight in before.items():
        if name.endswith(".lora_A"):
            base = name.removesuffix(".lora_A")
            delta = 8.0 / 4 * before[f"{base}.lora_B"] @ weight
            assert torch.allclose(merged[f"{base}.weight"], before[f"{base}.weight"] + delta, atol=1e-6)
    untouched = {
        n for n in before if n.endswith(".weight") and f"{n.removesuffix('.weight')}.lora_A" not in before
    }
    assert all(torch.equal(merged[n], before[n]) for n in untouched)
    merge_lora([model])  # there is nothing left to merge
    assert torch.equal(
        merged["decoder.layers.0." + _some(family)], model.get_parameter("decoder.layers.0." + _some(family))
    )


def _some(family):
    return "self_attention.linear_qkv.weight" if family == "gpt" else "mixer.in_proj.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_gives_every_adapter_its_gradient(folders, megatron_rank, family, monkeypatch):
    expected = backward(randomize(build(folders[family])).train())
    recomputed = backward(randomize(build(folders[family], recompute="full")).train())
    assert recomputed.keys() == expected.keys()
    assert all(torch.allclose(recomputed[n], g, atol=1e-6) for n, g in expected.items())

    monkeypatch.setattr("torpor.megatron.lora._require_grad", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(randomize(build(folders[family], recompute="full")).train())


def test_dropout_acts_in_training_alone(folders, megatron_rank):
    model = randomize(build(folders["gpt"], dropout=0.5))
    assert torch.equal(logits(model.eval()), logits(model.eval()))
    assert not torch.equal(logits(model.train()), logits(model.train()))
    assert torch.equal(logits(model.eval()), logits(randomize(build(folders["gpt"])).eval()))


def test_the_balance_of_experts_stays(folders, megatron_rank):
    model = build(folders["hybrid"])
    routers = [m for m in model.decoder.modules() if getattr(m, "expert_bias", None) is not None]
    assert routers
    assert all(router.frozen_expert_bias for router in routers)


def test_a_layer_of_another_kind_is_refused_before_anything_changes(folders, megatron_rank):
    from megatron.core.tensor_parallel import RowParallelLinear

    from torpor.megatron.lora import add_lora

    class Fused(RowParallelLinear):
        pass

    chunk = build(folders["gpt"], adapt=False)
    chunk.decoder.layers[1].mlp.linear_fc2.__class__ = Fused
    with pytest.raises(UnsupportedModelError, match=r"decoder\.layers\.1\.mlp\.linear_fc2 is a Fused"):
        add_lora([chunk], ["mlp.linear_fc2"], r=2, alpha=2.0, dropout=0.0, seed=1)
    assert not any(".lora_" in name for name, _ in chunk.named_parameters())
    assert all(p.requires_grad for n, p in chunk.named_parameters() if not n.startswith("mtp."))


# --- which layers a name stands for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "names", "paths"),
    [
        ("gpt", ["q_proj", "k_proj", "v_proj"], ["self_attention.linear_qkv"]),
        ("gpt", ["linear_qkv", "mlp.down_proj"], ["self_attention.linear_qkv", "mlp.linear_fc2"]),
        ("gpt", ["gate_proj", "up_proj"], ["mlp.linear_fc1"]),
        ("hybrid", ["up_proj"], ["mlp.linear_fc1", "mlp.shared_experts.linear_fc1"]),
        ("hybrid", ["mixer.in_proj", "o_proj"], ["self_attention.linear_proj", "mixer.in_proj"]),
        ("hybrid", ["shared_experts.down_proj"], ["mlp.shared_experts.linear_fc2"]),
    ],
)
def test_names_of_the_checkpoint_and_of_megatron_are_understood(folders, family, names, paths):
    assert find_lora_targets(name_map(folders[family]), names) == paths


def test_all_linear_layers_of_the_trunk(folders):
    names = {n for e in name_map(folders["hybrid"]).entries for n in e.megatron_names}
    targets = find_lora_targets(name_map(folders["hybrid"]), "all-linear")
    adapted = {name for name in names if is_target(name, targets)}
    assert all(name.startswith("decoder.") and "experts.experts" not in name for name in adapted)
    left = {
        n for n in names - adapted if n.startswith("decoder.") and n.endswith("weight") and "norm" not in n
    }
    assert {name.split(".", 3)[3] for name in left} == {
        "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.experts.linear_fc2.weight",
        "mlp.router.weight",
    }


@pytest.mark.parametrize(
    ("family", "names", "expected"),
    [
        ("gpt", ["q_proj", "v_proj"], ["a part of self_attention.linear_qkv", "k_proj, q_proj, v_proj"]),
        ("gpt", ["layers.0.mlp.down_proj"], ["a part of mlp.linear_fc2", "layers.1.mlp.down_proj"]),
        ("gpt", ["query_key_value"], ["'query_key_value' names no layer", "q_proj", "all-linear"]),
        ("gpt", ["mtp.layers.0.eh_proj"], ["mtp.layers.0.eh_proj, which takes no adapter (MTP"]),
        ("gpt", ["lm_head"], ["lm_head, which takes no adapter"]),
        ("hybrid", ["experts.0.up_proj"], ["experts.0.up_proj, which takes no adapter"]),
    ],
)
def test_names_that_stand_for_nothing_that_can_be_adapted_are_refused(folders, family, names, expected):
    with pytest.raises(ConfigError) as caught:
        find_lora_targets(name_map(folders[family]), names)
    for part in expected:
        assert part in str(caught.value)
