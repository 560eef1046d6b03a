"""The local norm: the configured kind, dtype and epsilon, tagged for sequence parallelism."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from torpor.errors import UnsupportedModelError
from torpor.megatron.host import current_device
from torpor.megatron.norm import LocalNorm


def make_config(**fields) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2} | fields)


def test_rms_norm_follows_its_definition() -> None:
    norm = LocalNorm(make_config(normalization="RMSNorm"), hidden_size=8, eps=1e-3)
    scale = torch.arange(8.0, device=current_device())
    with torch.no_grad():
        norm.weight.copy_(scale)
    x = torch.randn(3, 2, 8, device=current_device())
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * scale
    torch.testing.assert_close(norm(x), wanted)
    assert set(dict(norm.named_parameters())) == {"weight"}


def test_layer_norm_follows_its_definition() -> None:
    norm = LocalNorm(make_config(normalization="LayerNorm"), hidden_size=8, eps=1e-3)
    x = torch.randn(3, 2, 8, device=current_device())
    wanted = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), wanted)
    assert set(dict(norm.named_parameters())) == {"weight", "bias"}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_every_parameter_is_tagged(normalization: str, sequence_parallel: bool) -> None:
    """Megatron sums the gradients of what is tagged over the ranks that see different parts of a sequence."""
    config = make_config(
        normalization=normalization,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    parameters = list(LocalNorm(config, hidden_size=8).parameters())
    assert [parameter.sequence_parallel for parameter in parameters] == [sequence_parallel] * len(parameters)
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}


def test_what_layer_specs_say_beside_is_accepted() -> None:
    assert LocalNorm(make_config(), hidden_size=8, eps=1e-5, has_residual=True) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma is on"),
        ({"normalization": "L2Norm"}, "normalization is 'L2Norm'"),
    ],
)
def test_other_norms_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        LocalNorm(make_config(**fields), hidden_size=8)
