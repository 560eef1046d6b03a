"""Models built from Hugging Face configs: the same logits as Transformers, and refusals by name."""

import json

import pytest
import torch

import tiny
from megatron_steps import logits_of
from torpor.checkpoints.folder import open_folder
from torpor.errors import CheckpointError, ConfigError, UnsupportedModelError
from torpor.megatron import capabilities
from torpor.megatron.models import build_model, build_transformer_config, hybrid_layer_pattern
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights

TOKENS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))


def read_config(write, path, **fields):
    return json.loads((write(path / "folder", tokenizer=False, **fields) / "config.json").read_text())


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (tiny.write_mimo, {}),
        (tiny.write_mimo, {"tie_word_embeddings": True, "num_mtp": 2}),
        (tiny.write_mimo, {"rope_theta": 10000, "num_mtp": 0}),
        (tiny.write_nemotron_h, {"pattern": "M*-", "mtp_pattern": "*-"}),
        (tiny.write_nemotron_h, {"num_mtp": 2}),
        (tiny.write_nemotron_h, {"n_group": 2, "topk_group": 1}),
        (
            tiny.write_nemotron_h,
            {
                "pattern": "EM*E",
                "n_routed_experts": 8,
                "n_group": 4,
                "topk_group": 2,
                "num_experts_per_tok": 4,
            },
        ),
        (tiny.write_nemotron_h, {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_logits_equal_those_of_transformers(tmp_path, megatron_rank, write, fields, mtp):
    """FP32 logits of the trunk differ from Transformers' by less than 1e-4 of their scale."""
    folder = open_folder(write(tmp_path / "folder", tokenizer=False, **fields))
    chunks = build_model(folder.config, Layout(), torch.float32, mtp=mtp)
    load_weights(chunks, folder)
    expected = tiny.load_reference(folder.path)(TOKENS).logits
    assert (logits_of(chunks, TOKENS) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_logits_do_not_match_under_another_rope_base(tmp_path, megatron_rank):
    """The comparison above notices a field that is read wrongly."""
    folder = open_folder(tiny.write_mimo(tmp_path / "folder", tokenizer=False))
    chunks = build_model(folder.config | {"rope_theta": 10000}, Layout(), torch.float32)
    load_weights(chunks, folder)
    expected = tiny.load_reference(folder.path)(TOKENS).logits
    assert (logits_of(chunks, TOKENS) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_a_model_without_mtp_has_no_mtp_module(tmp_path, megatron_rank):
    for name, write in (("a", tiny.write_mimo), ("b", tiny.write_nemotron_h)):
        config = json.loads((write(tmp_path / name, tokenizer=False) / "config.json").read_text())
        (whole,) = build_model(config, Layout(), torch.float32)
        (trunk,) = build_model(config, Layout(), torch.float32, mtp=False)
        kept = {n for n in whole.state_dict() if not n.startswith("mtp.")}
        assert set(trunk.state_dict()) == kept != set(whole.state_dict())


def test_a_random_model_is_reproducible_and_not_degenerate(tmp_path, megatron_rank):
    """Building twice with one seed gives the same weights; no weight matrix is constant."""
    from megatron.core import tensor_parallel

    config = read_config(tiny.write_nemotron_h, tmp_path)
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        models.append(build_model(config, Layout(), torch.float32)[0])
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(p.std() > 0 for name, p in first.items() if p.dim() >= 2)


def test_hybrid_pattern_names_stages_and_mtp_layers(tmp_path):
    config = read_config(tiny.write_nemotron_h, tmp_path, pattern="ME*-", num_mtp=2)
    assert hybrid_layer_pattern(config) == "ME*-/*E/*E"
    assert hybrid_layer_pattern(config, pipeline=2) == "ME|*-/*E/*E"
    assert hybrid_layer_pattern(config, mtp=False) == "ME*-"
    words = {k: v for k, v in config.items() if k != "hybrid_override_pattern"}
    words["layers_block_type"] = ["mamba", "moe", "full_attention", "mlp"]
    assert hybrid_layer_pattern(words) == "ME*-/*E/*E"


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_recompute_reaches_megatron(tmp_path, recompute):
    config = build_transformer_config(
        read_config(tiny.write_mimo, tmp_path), Layout(), torch.bfloat16, recompute=recompute
    )
    assert config.recompute_granularity == recompute
    assert config.bf16
    assert config.params_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("write", "field", "value"),
    [
        (tiny.write_mimo, "attention_bias", False),
        (tiny.write_mimo, "hidden_act", "gelu"),
        (tiny.write_mimo, "mlp_bias", True),
        (tiny.write_mimo, "use_sliding_window", True),
        (tiny.write_mimo, "layer_types", ["full_attention", "sliding_attention"]),
        (tiny.write_mimo, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        (tiny.write_mimo, "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        (tiny.write_mimo, "partial_rotary_factor", 0.5),
        (tiny.write_mimo, "quantization_config", {"quant_method": "fp8"}),
        (tiny.write_mimo, "num_attention_heads", "four"),
        (tiny.write_nemotron_h, "attention_bias", True),
        (tiny.write_nemotron_h, "use_bias", True),
        (tiny.write_nemotron_h, "mlp_bias", True),
        (tiny.write_nemotron_h, "mamba_proj_bias", True),
        (tiny.write_nemotron_h, "mamba_hidden_act", "gelu"),
        (tiny.write_nemotron_h, "mlp_hidden_act", "silu"),
        (tiny.write_nemotron_h, "sliding_window", 128),
        (tiny.write_nemotron_h, "rope_scaling", {"type": "linear"}),
        (tiny.write_nemotron_h, "residual_in_fp32", True),
        (tiny.write_nemotron_h, "hidden_dropout", 0.1),
        (tiny.write_nemotron_h, "use_conv_bias", False),
        (tiny.write_nemotron_h, "conv_kernel", 3),
        (tiny.write_nemotron_h, "layer_norm_epsilon", 1e-6),
        (tiny.write_nemotron_h, "time_step_limit", [0.001, 0.1]),
        (tiny.write_nemotron_h, "mamba_d_conv", 3),
        (tiny.write_nemotron_h, "n_shared_experts", 2),
        (tiny.write_nemotron_h, "norm_topk_prob", False),
        (tiny.write_nemotron_h, "n_group", 3),
        (tiny.write_nemotron_h, "moe_latent_size", 16),
    ],
)
def test_unsupported_field_is_refused_by_name(tmp_path, write, field, value):
    """The message holds the field and its value, so that nobody has to guess."""
    config = read_config(write, tmp_path) | {field: value}
    shown = value["rope_type"] if field.startswith("rope_") and "rope_type" in value else value
    shown = shown["type"] if isinstance(shown, dict) and "type" in shown else shown
    shown = shown[1] if field == "layer_types" else shown
    with pytest.raises((UnsupportedModelError, CheckpointError)) as error:
        build_transformer_config(config, Layout(), torch.float32)
    assert field in str(error.value)
    assert repr(shown) in str(error.value)


@pytest.fixture
def installed_transformer_engine(monkeypatch):
    monkeypatch.setattr(capabilities, "has_transformer_engine", lambda: True)


@pytest.mark.usefixtures("installed_transformer_engine")
@pytest.mark.parametrize("write", [tiny.write_nemotron_h, tiny.write_mimo])
def test_local_layers_where_transformer_engine_is_installed(tmp_path, megatron_rank, write):
    config = read_config(write, tmp_path)
    has_experts = write is tiny.write_nemotron_h
    assert build_transformer_config(config, Layout(), torch.float32).moe_grouped_gemm is has_experts
    (chunk,) = build_model(config, Layout(), torch.float32, transformer_impl="local")
    assert not chunk.config.moe_grouped_gemm
    homes = {type(module).__module__ for module in chunk.modules()}
    assert "megatron.core.extensions.transformer_engine" not in homes


@pytest.mark.usefixtures("installed_transformer_engine")
def test_latent_experts_are_transformer_engines(tmp_path):
    config = read_config(tiny.write_nemotron_h, tmp_path, moe_latent_size=16)
    assert build_transformer_config(config, Layout(), torch.float32).moe_latent_size == 16
    with pytest.raises(UnsupportedModelError, match=r"moe_latent_size = 16(?s:.*)quantisation and adapters"):
        build_transformer_config(config, Layout(), torch.float32, transformer_impl="local")


def test_fused_kernels_are_those_of_the_model_and_the_machine(tmp_path, monkeypatch, megatron_rank):
    fusions = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion")

    sources = {
        write: read_config(write, tmp_path / write.__name__)
        for write in (tiny.write_mimo, tiny.write_nemotron_h)
    }

    def fused(write):
        config = build_transformer_config(sources[write], Layout(), torch.float32)
        return [getattr(config, name) for name in fusions]

    assert fused(tiny.write_mimo) == [False, False, False]
    monkeypatch.setattr(capabilities, "is_cpu_host", lambda: False)
    assert fused(tiny.write_mimo)[:2] == [True, True]
    assert fused(tiny.write_nemotron_h) == [False, True, False]
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    assert fused(tiny.write_mimo) == [True, True, True]
    assert fused(tiny.write_nemotron_h) == [False, True, False]


def test_group_limited_routing_of_another_kind_is_refused(tmp_path):
    """Two of four groups with two experts for each token: the two routers would score groups differently."""
    fields = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
    with pytest.raises(UnsupportedModelError, match=r"topk_group = 2.*num_experts_per_tok = 2"):
        build_transformer_config(
            read_config(tiny.write_nemotron_h, tmp_path, **fields), Layout(), torch.float32
        )


def test_options_of_absent_layers_do_not_matter(tmp_path):
    """A pattern without Mamba and experts ignores what only those would read."""
    config = read_config(tiny.write_nemotron_h, tmp_path, pattern="*-", mtp_pattern="*-")
    config |= {"conv_kernel": 3, "n_shared_experts": 2, "layer_norm_epsilon": 1e-6}
    built = build_transformer_config(config, Layout(), torch.float32)
    assert built.num_moe_experts is None
    assert built.layernorm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=3), ["tensor parallel size 3", "num_attention_heads = 4"]),
        (Layout(tensor=4), ["tensor parallel size 4", "num_key_value_heads = 2"]),
        (Layout(pipeline=3), ["pipeline parallel size 3", "num_hidden_layers = 4", "1, 2, 4"]),
        (Layout(expert=3), ["expert parallel size 3", "n_routed_experts = 4"]),
        (Layout(tensor=2), ["tensor parallel size is 2", "sequence_parallel"]),
        (Layout(context=3), ["context parallel size 3", "mamba_num_heads / tensor parallel size = 4"]),
    ],
)
def test_layout_that_does_not_divide_is_refused_with_both_numbers(tmp_path, layout, words):
    config = read_config(tiny.write_nemotron_h, tmp_path)
    if layout.tensor > 2:
        layout = Layout(tensor=layout.tensor, sequence_parallel=True)
    with pytest.raises(ConfigError) as error:
        build_transformer_config(config, layout, torch.float32)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_groups_of_mamba_heads_that_context_parallelism_would_tear_are_refused(tmp_path):
    config = read_config(tiny.write_nemotron_h, tmp_path) | {"mamba_num_heads": 6}
    message = r"context parallel size 3 neither divides n_groups / tensor parallel size = 2 nor is a multiple"
    with pytest.raises(ConfigError, match=message):
        build_transformer_config(config, Layout(context=3), torch.float32)
    # Three ranks that share one group's heads, and three that have a group each.
    for groups in (1, 3):
        build_transformer_config(config | {"n_groups": groups}, Layout(context=3), torch.float32)


def test_vocabulary_that_tensor_parallelism_does_not_divide_is_refused(tmp_path):
    config = read_config(tiny.write_mimo, tmp_path, vocab=321)
    with pytest.raises(ConfigError, match="tensor parallel size 2 does not divide vocab_size = 321"):
        build_transformer_config(config, Layout(tensor=2), torch.float32)


def test_expert_parallelism_without_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expert parallel size is 2"):
        build_transformer_config(read_config(tiny.write_mimo, tmp_path), Layout(expert=2), torch.float32)


def test_unknown_family_dtype_recompute_and_layers_are_refused(tmp_path):
    config = read_config(tiny.write_mimo, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'llama'.*mimo"):
        build_transformer_config(config | {"model_type": "llama"}, Layout(), torch.float32)
    with pytest.raises(ConfigError, match="float16"):
        build_transformer_config(config, Layout(), torch.float16)
    with pytest.raises(ConfigError, match="'some'"):
        build_transformer_config(config, Layout(), torch.float32, recompute="some")
    with pytest.raises(ConfigError, match="'apex'"):
        build_transformer_config(config, Layout(), torch.float32, transformer_impl="apex")
