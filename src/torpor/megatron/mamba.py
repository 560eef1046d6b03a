"""Mamba-2 in plain PyTorch: the mixer of hybrid models where mamba_ssm's kernels cannot run.

Shapes carry a suffix, one letter an axis:
    B batch   S sequence   H heads of this rank   P head size   G groups of this rank   N state size
    K chunks  L positions in a chunk   I, J positions in the same chunk, I reads what J wrote

To be imported after `torpor.megatron.host.prepare_host`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import all_to_all_hp2sp, all_to_all_sp2hp, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron.host import CPU, current_device
from torpor.megatron.packing import sample_bounds
from torpor.megatron.zigzag import zigzag_places


def scan_chunks(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    D_H: Tensor,
    chunk_size: int,
) -> Tensor:
    """Run the state space model of Mamba-2, chunk by chunk, in FP32 or wider.

    Position s of head h, which belongs to group g, keeps a state of P x N numbers::

        state = exp(dt[s] * A) * state + dt[s] * outer(x[s], B[s])
        y[s]  = state @ C[s] + D * x[s]

    Within a chunk this is one masked matrix product over all pairs of positions; only the states at the
    borders of chunks depend on one another.

    Args:
        x_BSHP: Input of each head.
        dt_BSH: Step sizes, positive.
        A_H: Decay rates, negative.
        B_BSGN: What each position writes, shared by the heads of a group.
        C_BSGN: What each position reads.
        D_H: Weight of the input itself in the output.
        chunk_size: Positions in a chunk; changes the cost, not the result.

    Returns:
        [B, S, H, P] in the dtype of the computation, FP64 for FP64 input and FP32 for everything else.

    Source:
        Dao and Gu, "Transformers are SSMs", 2024, section 6.
    """
    dtype = torch.promote_types(x_BSHP.dtype, torch.float32)
    num_batch, length, num_heads, _ = x_BSHP.shape
    num_groups = B_BSGN.size(2)
    chunk = min(chunk_size, length)
    padding = -length % chunk

    def split(t: Tensor) -> Tensor:
        """[B, S, ...] -> [B, K, L, ...]; the padding writes nothing, since its step size is zero."""
        t = t.to(dtype)
        if padding:
            t = torch.cat([t, t.new_zeros(num_batch, padding, *t.shape[2:])], dim=1)
        return t.unflatten(1, (-1, chunk))

    dt_BKLH = split(dt_BSH)
    x_BKLHP = split(x_BSHP) * dt_BKLH[..., None]
    B_BKLGN, C_BKLGN = split(B_BSGN), split(C_BSGN)

    # Decay is the exponential of a difference of two running sums. In FP32 the difference of two large sums
    # would lose what the exponential needs; the sums are small arrays, so they are kept in FP64.
    sums_BKLH = (dt_BKLH.double() * A_H.double()).cumsum(2)
    sums_BKHL = sums_BKLH.transpose(2, 3)
    totals_BKH = sums_BKHL[..., -1]
    decay_BKHIJ = _decay(sums_BKHL, sums_BKHL, torch.ones(chunk, chunk, device=x_BSHP.device).tril()).to(
        dtype
    )

    # Within chunks.
    scores_BKGIJ = torch.einsum("bkign,bkjgn->bkgij", C_BKLGN, B_BKLGN)
    weights_BKHIJ = scores_BKGIJ.repeat_interleave(num_heads // num_groups, dim=2) * decay_BKHIJ
    y_BKLHP = torch.einsum("bkhij,bkjhp->bkihp", weights_BKHIJ, x_BKLHP)

    # What each chunk adds to the state by its end.
    to_end_BKLH = (totals_BKH[:, :, None] - sums_BKLH).exp().to(dtype)
    written_BKHPN = torch.einsum(
        "bklgrp,bklgn->bkgrpn", (x_BKLHP * to_end_BKLH[..., None]).unflatten(3, (num_groups, -1)), B_BKLGN
    ).flatten(2, 3)

    # The state that each chunk starts from: the sum over earlier chunks of what they wrote, decayed since.
    num_chunks = written_BKHPN.size(1)
    if num_chunks > 1:
        ends_BHK = totals_BKH.cumsum(1).transpose(1, 2)
        starts_BHK = F.pad(ends_BHK[..., :-1], (1, 0))
        earlier = torch.ones(num_chunks, num_chunks, device=x_BSHP.device).tril(-1)
        carry_BHKK = _decay(starts_BHK, ends_BHK, earlier).to(dtype)
        state_BKHPN = torch.einsum("bhkj,bjhpn->bkhpn", carry_BHKK, written_BKHPN)
        from_start_BKLH = sums_BKLH.exp().to(dtype)
        read_BKLHP = torch.einsum(
            "bklgn,bkgrpn->bklgrp", C_BKLGN, state_BKHPN.unflatten(2, (num_groups, -1))
        ).flatten(3, 4)
        y_BKLHP = y_BKLHP + read_BKLHP * from_start_BKLH[..., None]

    y_BSHP = y_BKLHP.flatten(1, 2)[:, :length]
    return y_BSHP + D_H.to(dtype)[:, None] * x_BSHP.to(dtype)


def _decay(to: Tensor, since: Tensor, allowed: Tensor) -> Tensor:
    """Return exp(to[i] - since[j]) where `allowed`, and 0 elsewhere.

    The mask comes before the exponential: a forbidden difference is positive and may overflow, and infinity
    times a zero gradient would be NaN.
    """
    return (to[..., :, None] - since[..., None, :]).masked_fill(allowed == 0, -math.inf).exp()


class GatedGroupNorm(nn.Module):
    """RMSNorm over each group of the gated output, in FP32."""

    def __init__(
        self, size: int, group_size: int, eps: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.group_size = group_size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of y * silu(gate).

        Args:
            y: [..., size], FP32 or FP64.
            gate: [..., size], any dtype.

        Returns:
            [..., size] in the dtype of `y`.
        """
        gated = (y * F.silu(gate.to(y.dtype))).unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (gated * scale).flatten(-2) * self.weight.to(y.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the weight as a part of a tensor divided over the tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class TorchMambaMixer(MegatronModule):
    """Megatron's Mamba-2 mixer (ssm/mamba_mixer.py) without its kernels: same parameters, same checkpoints.

    Trains, under tensor, sequence and context parallelism. Each sample of a packed row starts from an empty
    state. Cached inference is refused.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        expand: int = 2,
        chunk_size: int = 64,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        """Build the mixer of one layer.

        Args:
            config: Sizes, dtype and initialisation.
            submodules: Classes of the two projections.
            d_model: Hidden size.
            d_conv: Width of the causal convolution.
            expand: Inner size in hidden sizes, where the configuration gives no number of heads.
            chunk_size: Positions in a chunk of the scan. What is quadratic in it is half as large with 64 as
                with 128, which the kernels use.
            layer_number: Number of the layer in the model, from 1.
            pg_collection: Process groups of the model.
            pp_layer_offset: Layers on earlier pipeline stages.
            name: Name of the module in the model.

        Raises:
            ConfigError: Tensor or context parallelism that does not divide the heads or the groups.
        """
        super().__init__(config)
        assert pg_collection is not None
        tp_size, cp_size = pg_collection.tp.size(), pg_collection.cp.size()
        num_heads = config.mamba_num_heads or d_model * expand // config.mamba_head_dim
        num_groups = config.mamba_num_groups
        if num_heads % tp_size or num_groups % tp_size or num_heads % num_groups:
            raise ConfigError(
                f"a Mamba layer has {num_heads} heads, {num_groups} groups; tensor parallel size {tp_size}\n"
                "  Each rank takes whole groups of equal size: tensor parallelism must divide both."
            )
        own_heads, own_groups = num_heads // tp_size, num_groups // tp_size
        if own_heads % cp_size or (own_groups % cp_size and cp_size % own_groups):
            raise ConfigError(
                f"a Mamba layer has {own_heads} heads, {own_groups} groups on a tensor parallel rank; "
                f"context parallel size {cp_size}\n"
                "  Each rank takes as many heads, of whole groups or of one: context parallelism must divide "
                "the heads, and divide the groups or be a multiple of them."
            )
        self.layer_number = layer_number
        self.pp_layer_offset = pp_layer_offset
        self.chunk_size = chunk_size
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.state_size = config.mamba_state_dim
        self.head_size = config.mamba_head_dim
        inner = num_heads * self.head_size
        self.num_heads, self.num_groups = num_heads // tp_size, num_groups // tp_size
        self.inner = inner // tp_size
        bc = self.num_groups * self.state_size

        projection = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            2 * inner + 2 * num_groups * self.state_size + num_heads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            name=f"{name}.in_proj" if name else None,
            **projection,
        )
        # Rows of this rank: gate, input, what is written, what is read, step size.
        self.in_proj_parts = {"z": self.inner, "x": self.inner, "B": bc, "C": bc, "dt": self.num_heads}
        self.in_proj.weight.partition_sizes = list(self.in_proj_parts.values())

        device = CPU if config.use_cpu_initialization else current_device()
        self.conv_parts = {"x": self.inner, "B": bc, "C": bc}
        conv_size = sum(self.conv_parts.values())
        with get_cuda_rng_tracker().fork():
            bound = 1 / math.sqrt(d_conv)
            kernel = torch.empty(conv_size, 1, d_conv, device=device, dtype=config.params_dtype)
            self.conv1d_weight = nn.Parameter(kernel.uniform_(-bound, bound))
            offset = torch.empty(conv_size, device=device, dtype=config.params_dtype)
            self.conv1d_bias = nn.Parameter(offset.uniform_(-bound, bound))
            # softplus(dt_bias) is spread evenly, in its logarithm, from 0.001 to 0.1.
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.rand(self.num_heads, device=device).mul(high - low).add(low).exp().clamp(min=1e-4)
            self.dt_bias = nn.Parameter((step + torch.log(-torch.expm1(-step))).to(config.params_dtype))
            # A and D stay in FP32 whatever the dtype of the model.
            self.A_log = nn.Parameter(torch.empty(self.num_heads, device=device).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.num_heads, device=device))
        self.norm = GatedGroupNorm(
            self.inner, self.inner // self.num_groups, eps=1e-5, dtype=config.params_dtype, device=device
        )
        self.norm.tp_group = self.tp_group
        for parameter in (
            self.conv1d_weight,
            self.conv1d_bias,
            self.dt_bias,
            self.A_log,
            self.D,
            self.norm.weight,
        ):
            # Different on each tensor parallel rank: each rank counts its own part in the gradient norm.
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 0
        for parameter in (self.conv1d_weight, self.conv1d_bias):
            parameter.partition_sizes = list(self.conv_parts.values())
        self.out_proj = build_module(
            submodules.out_proj,
            inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            name=f"{name}.out_proj" if name else None,
            **projection,
        )

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix along the sequence.

        Args:
            hidden_states: [S, B, hidden], S tokens of this context parallel rank; with sequence parallelism
                [S / tensor parallel size, B, hidden].
            inference_context: Refused unless None.
            inference_params: Refused unless None.
            packed_seq_params: Which samples the row is made of, see `torpor.megatron.packing`; B is 1 then.

        Returns:
            A tensor of the shape of the input, and the bias of the output projection (None).

        Raises:
            UnsupportedModelError: Inference with a cache.
            ConfigError: The samples do not make up the row, or context parallelism does not divide them.
        """
        if inference_context is not None or inference_params is not None:
            raise UnsupportedModelError(
                f"Mamba layer {self.layer_number}: an inference cache was passed; the PyTorch mixer "
                "keeps none\n"
                "  Run the whole sequence in one forward, or install mamba-ssm on a CUDA machine."
            )
        projected_SBE, _ = self.in_proj(hidden_states)
        z_SBI, projected_SBE = projected_SBE.split([self.inner, projected_SBE.size(-1) - self.inner], dim=-1)
        num_tokens = projected_SBE.size(0) * self.cp_group.size()
        bounds = sample_bounds(packed_seq_params, num_tokens) if packed_seq_params else [(0, num_tokens)]
        if self.cp_group.size() > 1:
            places_RS = zigzag_places(bounds, self.cp_group.size()).to(projected_SBE.device)
            projected_SBE = self._gather_sequence(projected_SBE, places_RS)
        # One sample after the other: neither the state nor the convolution reaches from one into the next.
        y_SBI = torch.cat([self._mix(projected_SBE[begin:end]) for begin, end in bounds])
        if self.cp_group.size() > 1:
            y_SBI = self._divide_sequence(y_SBI, places_RS)
        y_SBI = self.norm(y_SBI, z_SBI).to(hidden_states.dtype)
        return self.out_proj(y_SBI.contiguous())

    def _mix(self, projected_SBE: Tensor) -> Tensor:
        """Return the outputs [S, B, heads x head size] of one whole sequence, FP32 or wider."""
        cp_size = self.cp_group.size()
        num_heads, num_groups = self.num_heads // cp_size, max(1, self.num_groups // cp_size)
        bc = num_groups * self.state_size
        x_and_bc = num_heads * self.head_size + 2 * bc
        conv_BSE, dt_BSH = projected_SBE.transpose(0, 1).split([x_and_bc, num_heads], dim=-1)
        x_BSI, B_BSE, C_BSE = self._convolve(conv_BSE).split([x_and_bc - 2 * bc, bc, bc], dim=-1)
        y_BSHP = scan_chunks(
            x_BSI.unflatten(-1, (num_heads, self.head_size)),
            F.softplus(dt_BSH.float() + self._own(self.dt_bias).float()),
            -torch.exp(self._own(self.A_log).float()),
            B_BSE.unflatten(-1, (num_groups, self.state_size)),
            C_BSE.unflatten(-1, (num_groups, self.state_size)),
            self._own(self.D),
            self.chunk_size,
        )
        return y_BSHP.flatten(2).transpose(0, 1)

    def _convolve(self, x_BSE: Tensor) -> Tensor:
        """Return silu of each channel's causal convolution: a position sees itself and those before it."""
        weight, bias = (self._own(p, self.conv_parts) for p in (self.conv1d_weight, self.conv1d_bias))
        x_BES = F.pad(x_BSE.transpose(1, 2), (weight.size(-1) - 1, 0))
        return F.silu(F.conv1d(x_BES, weight, bias, groups=weight.size(0))).transpose(1, 2)

    # Under context parallelism each rank mixes whole sequences, of its share of the heads, as in Megatron
    # (ssm/mamba_context_parallel.py).

    def _gather_sequence(self, projected_SBE: Tensor, places_RS: Tensor) -> Tensor:
        """Return the projections of all tokens, in order, for this rank's share of the heads."""
        by_rank = self._by_rank(projected_SBE, ("x", "B", "C", "dt"), dim=2).flatten(2)
        own_SBE = all_to_all_sp2hp(by_rank, group=self.cp_group)
        return own_SBE.unflatten(0, (-1, projected_SBE.size(1)))[places_RS.flatten().argsort()]

    def _divide_sequence(self, y_SBI: Tensor, places_RS: Tensor) -> Tensor:
        """Return the outputs of all heads, for this rank's tokens."""
        own_SBI = all_to_all_hp2sp(y_SBI[places_RS.flatten()], group=self.cp_group)
        return own_SBI.unflatten(0, (-1, y_SBI.size(1)))

    def _own(self, parameter: Tensor, parts: Iterable[str] = ("dt",)) -> Tensor:
        """Return of a parameter, one number a head or made up of `parts`, what this rank's heads need."""
        if self.cp_group.size() == 1:
            return parameter
        return self._by_rank(parameter, parts, dim=0)[self.cp_group.rank()]

    def _by_rank(self, packed: Tensor, parts: Iterable[str], dim: int) -> Tensor:
        """Divide each part of a dimension over the context parallel ranks: [..., rank, own parts, ...].

        With fewer groups than ranks, neighbours whose heads are of the same group have all of it.
        """
        size, divided = self.cp_group.size(), []
        sizes = [self.in_proj_parts[name] for name in parts]
        for name, part in zip(parts, packed.split(sizes, dim), strict=True):
            if name in ("B", "C") and self.num_groups < size:
                groups = part.unflatten(dim, (self.num_groups, self.state_size))
                part = groups.repeat_interleave(size // self.num_groups, dim).flatten(dim, dim + 1)
            divided.append(part.unflatten(dim, (size, -1)))
        return torch.cat(divided, dim + 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return what Megatron's mixer returns: each part of the packed weights under a key of its own.

        The parts have different sizes on a rank, so only part by part can another number of ranks divide
        them.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        sharded = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(("A_log", "dt_bias", "D", "conv1d_weight", "conv1d_bias"), 0),
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            sharded.update(
                sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        packed = {
            "in_proj.weight": ("in_proj.weight", self.in_proj_parts),
            "conv1d_weight": ("conv1d.weight", self.conv_parts),
            "conv1d_bias": ("conv1d.bias", self.conv_parts),
        }
        for name, (saved_name, parts) in packed.items():
            whole = sharded[f"{prefix}{name}"]
            whole.key = f"{prefix}{saved_name}"
            sharded[f"{prefix}{name}"] = _split_tensor_factory(whole, list(parts.values()), list(parts), 0)
        return sharded
