"""Layer specs of HybridModel and GPTModel: Transformer Engine's where it is installed, local ones elsewhere.

A configuration whose `transformer_impl` is "local" gets local ones everywhere.

The local specs save under the names that Transformer Engine's have: a norm that Transformer Engine fuses into
the linear layer after it is written as that layer's `layer_norm_weight`. One checkpoint serves both.

To be imported after `torpor.megatron.host.prepare_host`.
"""

import dataclasses
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from torpor.errors import UnsupportedModelError
from torpor.megatron import capabilities
from torpor.megatron.attention import TorchDotProductAttention
from torpor.megatron.mamba import TorchMambaMixer
from torpor.megatron.norm import LocalNorm

_ATTENTION_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_MIXER_NORM = {"norm.": "mixer.in_proj.layer_norm_"}


class LocalBackend(LocalSpecProvider):
    """Megatron's local modules, with a norm that serves sequence parallelism and PyTorch's attention kernels.

    Where the configuration's `attention_backend` is "local", the core attention is Megatron's own.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config

    def core_attention(self) -> type:
        """Return the core attention of attention layers."""
        if self.config.attention_backend is AttnBackend.local:
            return super().core_attention()
        return TorchDotProductAttention

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Return the norm; which kind it is, the configuration says."""
        return LocalNorm


class LocalHybridStack(HybridStack):
    """A hybrid stack with a local final norm: models/hybrid/hybrid_block.py has TENorm wired in."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = LocalNorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def hybrid_stack_spec(config: TransformerConfig) -> ModuleSpec:
    """Return the spec of a HybridModel's stack: attention, MLP, MoE, Mamba-2 layers and the MTP block.

    Args:
        config: The model's configuration.
    """
    if capabilities.uses_transformer_engine(config.transformer_impl):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec

        return spec if capabilities.has_mamba_ssm() else _with_torch_mixer(spec)

    backend = LocalBackend(config)
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=LocalNorm,
                    mixer=ModuleSpec(
                        module=MambaMixer if capabilities.has_mamba_ssm() else TorchMambaMixer,
                        submodules=MambaMixerSubmodules(in_proj=column, out_proj=row),
                    ),
                    mamba_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=_MIXER_NORM,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=LocalNorm,
                    self_attention=_attention_spec(config, backend),
                    self_attn_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=_ATTENTION_NORM,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=LocalNorm,
                    mlp=get_mlp_module_spec_for_backend(backend),
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map=_MLP_NORM,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=LocalNorm,
                    # The number of experts is read from the configuration; here it only has to be one.
                    mlp=get_mlp_module_spec_for_backend(backend, num_experts=config.num_moe_experts or 1),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    # The inner layers come from the MTP part of the layer pattern.
                    layer_specs=[get_mtp_layer_spec_for_backend(mtp_model_layer_spec=None, backend=backend)]
                ),
            ),
        ),
    )


def gpt_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the specs of the decoder layers that this pipeline stage holds, dense and MoE as configured.

    Args:
        config: The model's configuration; `moe_layer_freq` says which layers are MoE layers.
        vp_stage: Virtual stage, where there are several on a rank.

    Raises:
        UnsupportedModelError: Multi-latent attention without Transformer Engine.
    """
    if capabilities.uses_transformer_engine(config.transformer_impl):
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
        )
    layers = _local_gpt_layers(config)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers[first : first + count], layer_norm=LocalNorm)


def gpt_mtp_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of a GPTModel's MTP block, or None where this stage holds none.

    The inner layer of each MTP layer is built like the decoder's last layer.

    Args:
        config: The model's configuration; `mtp_num_layers` says how many MTP layers there are.
        vp_stage: Virtual stage, where there are several on a rank.
    """
    if not config.mtp_num_layers:
        return None
    if capabilities.uses_transformer_engine(config.transformer_impl):
        spec = gpt_layer_spec(config, vp_stage)
        return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage)
    return get_gpt_mtp_block_spec_for_backend(
        config, _local_gpt_layers(config)[-1], LocalBackend(config), vp_stage=vp_stage
    )


def _attention_spec(config: TransformerConfig, backend: LocalBackend) -> ModuleSpec:
    """Return the spec of causal self-attention from local modules."""
    if config.multi_latent_attention:
        raise UnsupportedModelError(
            "multi_latent_attention is on: Torpor builds it only with Transformer Engine\n"
            "  Install transformer-engine on a CUDA machine to use this model."
        )
    qk_norm = LocalNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _local_gpt_layers(config: TransformerConfig) -> list[ModuleSpec]:
    """Return the spec of every decoder layer of the whole model, from local modules."""
    backend = LocalBackend(config)

    def layer(is_moe: bool) -> ModuleSpec:
        num_experts = config.num_moe_experts if is_moe else None
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=LocalNorm,
                self_attention=_attention_spec(config, backend),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=LocalNorm,
                mlp=get_mlp_module_spec_for_backend(backend, num_experts=num_experts),
                mlp_bda=get_bias_dropout_add,
                # Megatron's local GPT spec maps the norm before an MoE layer too, and Transformer Engine's
                # does not.
                sharded_state_dict_keys_map=_ATTENTION_NORM | ({} if is_moe else _MLP_NORM),
            ),
        )

    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        pattern = [0] * config.num_layers
    elif isinstance(frequency, int):
        pattern = [int(index % frequency == 0) for index in range(config.num_layers)]
    else:
        pattern = list(frequency)
    if len(pattern) != config.num_layers:
        raise UnsupportedModelError(
            f"moe_layer_freq names {len(pattern)} layers and the model has num_layers={config.num_layers}"
        )
    return [layer(bool(is_moe)) for is_moe in pattern]


def _with_torch_mixer(spec: ModuleSpec) -> ModuleSpec:
    """Return a hybrid stack spec with the plain PyTorch mixer in place of the one that needs mamba_ssm."""
    layer = spec.submodules.mamba_layer
    mixer = dataclasses.replace(layer.submodules.mixer, module=TorchMambaMixer)
    layer = dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mixer=mixer))
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, mamba_layer=layer))
