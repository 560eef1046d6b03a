"""Core attention on PyTorch's kernels, against Megatron's own and against the definition in FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor

from torpor.errors import ConfigError, UnsupportedModelError
from torpor.megatron import attention
from torpor.megatron.attention import TorchDotProductAttention
from torpor.megatron.host import current_device
from torpor.megatron.specs import LocalBackend

pytestmark = pytest.mark.usefixtures("megatron_rank")
HEAD = 8

# Largest difference from the definition in FP64, of outputs and gradients, by the largest value or by 1,
# the size of the inputs: some roundings of products, sums, scores and probabilities.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 2e-2}


def make_config(dtype=torch.float32, heads: int = 4, groups: int = 2, **fields) -> TransformerConfig:
    base = {
        "num_layers": 2,
        "hidden_size": heads * HEAD,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": HEAD,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }
    return TransformerConfig(**base | fields)


def build(cls=TorchDotProductAttention, mask_type=AttnMaskType.causal, layer: int = 1, **fields):
    return cls(make_config(**fields), layer, mask_type, "self")


def make_inputs(
    queries: int,
    keys: int | None = None,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    dtype=torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    keys = queries if keys is None else keys
    g = torch.Generator().manual_seed(seed)
    shapes = [(queries, batch, heads, HEAD), (keys, batch, groups, HEAD), (keys, batch, groups, HEAD)]
    values = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    return [t.to(current_device(), dtype).requires_grad_() for t in values]


def define(query, key, value, forbidden=None, scale: float = HEAD**-0.5) -> Tensor:
    """The definition, in FP64, with a key/value head for each query head."""
    query, key, value = (t.double() for t in (query, key, value))
    key, value = (t.repeat_interleave(query.size(2) // t.size(2), dim=2) for t in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) * scale
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


def causal(queries: int, keys: int | None = None) -> Tensor:
    """True where a key is later than the query; the last query stands at the last key."""
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, device=current_device()).triu(keys - queries + 1).bool()


def outputs_and_gradients(attend, inputs: list[Tensor]) -> list[Tensor]:
    output = attend(*inputs)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad((output.double() * weight.to(output.device)).sum(), inputs)]


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1)
        assert error <= tolerance


def packed(*lengths: int, **fields) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    base = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": max(lengths)}
    return PackedSeqParams(**{"qkv_format": "thd", "max_seqlen_kv": max(lengths), **base, **fields})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("kind", ["causal", "none", "given", "one new token"])
def test_equals_megatrons_own(dtype, heads: int, groups: int, kind: str) -> None:
    """Values and gradients; twice the distance that each may have from the definition."""
    mask_type = AttnMaskType.no_mask if kind == "none" else AttnMaskType.causal
    queries, keys = (1, 13) if kind == "one new token" else (13, 13)
    inputs = make_inputs(queries, keys, heads=heads, groups=groups, dtype=dtype)
    mask = None
    if kind == "given":
        mask = causal(queries, keys) | (torch.arange(keys) == 2).to(current_device())
        mask[2, 2] = False
        mask = mask[None, None]
    sizes = {"dtype": dtype, "heads": heads, "groups": groups}
    found = [
        outputs_and_gradients(lambda q, k, v, module=module: module(q, k, v, mask), inputs)
        for module in (
            build(mask_type=mask_type, **sizes),
            build(DotProductAttention, mask_type=mask_type, **sizes),
        )
    ]
    assert_close(*found, tolerance=2 * TOLERANCE[dtype])
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 40),
    earlier=st.integers(0, 9),
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
    is_causal=st.booleans(),
)
def test_equals_the_definition_in_fp64(queries, earlier, batch, groups, dtype, is_causal) -> None:
    """Queries that are the last of more keys too."""
    keys = queries + earlier
    inputs = make_inputs(queries, keys, batch=batch, groups=groups, dtype=dtype)
    module = build(
        mask_type=AttnMaskType.causal if is_causal else AttnMaskType.no_mask, groups=groups, dtype=dtype
    )
    forbidden = causal(queries, keys) if is_causal else None
    assert_close(
        outputs_and_gradients(lambda *qkv: module(*qkv, None), inputs),
        outputs_and_gradients(lambda *qkv: define(*qkv, forbidden), inputs),
        TOLERANCE[dtype],
    )


def test_heads_of_a_group_are_neighbours() -> None:
    """Groups dealt out in turn would be another model: the comparison above tells the two apart."""
    query, key, value = make_inputs(9, heads=4, groups=2)
    got = build()(query, key, value, None)
    in_turn = define(query, key.repeat(1, 1, 2, 1), value.repeat(1, 1, 2, 1), causal(9))
    with pytest.raises(AssertionError):
        assert_close([got], [in_turn], TOLERANCE[torch.float32])


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """And finite gradients."""
    inputs = make_inputs(7)
    mask = causal(7)
    mask[3] = True
    output, *grads = outputs_and_gradients(lambda *qkv: build()(*qkv, mask[None, None]), inputs)
    assert output[3].abs().max() == 0
    assert output[2].abs().max() > 0
    assert all(grad.isfinite().all() for grad in grads)


def test_a_mask_counts_alone() -> None:
    """As in Megatron's, whose causal layer sees later keys where the mask it is given allows that."""
    inputs = make_inputs(5)
    nothing_masked = torch.zeros(1, 1, 5, 5, dtype=torch.bool, device=current_device())
    assert_close([build()(*inputs, nothing_masked)], [define(*inputs)], TOLERANCE[torch.float32])


def test_scale_and_its_way_around_fp16() -> None:
    """softmax_scale is taken as it is; apply_query_key_layer_scaling changes nothing in the end."""
    inputs = make_inputs(9)
    config = make_config(apply_query_key_layer_scaling=True)
    args = (config, 2, AttnMaskType.causal, "self")
    for cls in (TorchDotProductAttention, DotProductAttention):
        got = cls(*args, softmax_scale=0.7)(*inputs, None)
        assert_close([got], [define(*inputs, causal(9), scale=0.7)], TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_whatever_the_number_of_threads(dtype) -> None:
    """On the CPU."""
    inputs = [t.detach().cpu().requires_grad_() for t in make_inputs(300, dtype=dtype)]
    module, before = build(dtype=dtype), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(outputs_and_gradients(lambda *qkv: module(*qkv, None), inputs))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


class TestDropout:
    def test_draws_from_the_tensor_parallel_generator(self) -> None:
        """As Megatron's: ranks that hold other heads drop others. None is drawn in evaluation."""
        inputs, module = make_inputs(16), build(attention_dropout=0.5)
        plain = build()(*inputs, None)
        ordinary = torch.get_rng_state()
        states = [get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()]
        dropped = module(*inputs, None)
        states.append(get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone())
        assert not torch.equal(dropped, plain)
        assert not torch.equal(*states)
        assert torch.equal(torch.get_rng_state(), ordinary)
        assert torch.equal(module.eval()(*inputs, None), plain)

    def test_draws_from_the_ordinary_generator_with_sequence_parallelism(self) -> None:
        """As Megatron's, for which the ranks' ordinary generators differ there."""
        module = build(attention_dropout=0.5)
        module.config.sequence_parallel = True
        state = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
        module(*make_inputs(16), None)
        assert torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], state)

    def test_keeps_the_expected_value(self) -> None:
        """A quarter is dropped and the rest grows: over many heads the mean of equal values stays."""
        query, key, value = make_inputs(64, batch=16)
        with torch.no_grad():
            got = build(attention_dropout=0.25, mask_type=AttnMaskType.no_mask)(
                query, key, torch.ones_like(value), None
            )
        assert got.std() > 0.05
        assert abs(got.mean() - 1) < 0.02

    def test_an_argument_goes_before_the_configuration(self) -> None:
        config = make_config(attention_dropout=0.5)
        module = TorchDotProductAttention(
            config, 1, AttnMaskType.causal, "self", attention_dropout=0.0, softmax_scale=None
        )
        inputs = make_inputs(8)
        assert torch.equal(module(*inputs, None), build()(*inputs, None))


class TestPacked:
    LENGTHS = (5, 1, 9, 3)

    def attend(self, inputs, params, **fields) -> Tensor:
        return build(**fields)(*(t.squeeze(1) for t in inputs), None, packed_seq_params=params)

    @pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
    def test_equals_separate_sequences(self, mask_type) -> None:
        """To the bit, values and gradients."""
        inputs = make_inputs(sum(self.LENGTHS), batch=1)
        module = build(mask_type=mask_type)
        apart = outputs_and_gradients(
            lambda q, k, v: torch.cat(
                [
                    module(*part, None)
                    for part in zip(*(t.split(self.LENGTHS) for t in (q, k, v)), strict=True)
                ]
            ),
            inputs,
        )
        together = outputs_and_gradients(
            lambda *qkv: self.attend(qkv, packed(*self.LENGTHS), mask_type=mask_type), inputs
        )
        assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
        forbidden = torch.block_diag(*[torch.ones(n, n) for n in self.LENGTHS]) == 0
        forbidden = forbidden.to(current_device())
        if mask_type is AttnMaskType.causal:
            forbidden |= causal(sum(self.LENGTHS))
        assert_close(together[:1], [define(*inputs, forbidden)], TOLERANCE[torch.float32])

    def test_samples_do_not_see_one_another(self) -> None:
        """What a sample holds changes no bit of another; in one long sequence it does."""
        inputs = make_inputs(12, batch=1)
        changed = [t.detach().clone() for t in inputs]
        for t in changed:
            t[2] += 1
        for params, leaks in ((packed(5, 7), False), (packed(12), True)):
            before, after = (self.attend(given, params) for given in (inputs, changed))
            assert not torch.equal(before[2:5], after[2:5])
            assert torch.equal(before[5:], after[5:]) is not leaks

    def test_padding_belongs_to_its_sample(self) -> None:
        """Real tokens come before it and never see it; what follows the last sample is one of its own."""
        inputs = make_inputs(14, batch=1)
        ends = torch.tensor([0, 4, 12], dtype=torch.int32)
        params = packed(3, 6, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends)
        got = self.attend(inputs, params)
        for begin, end in ((0, 3), (4, 10), (12, 14)):
            alone = self.attend([t[begin:end] for t in inputs], packed(end - begin))
            assert torch.equal(got[begin:end], alone)
        with pytest.raises(ConfigError, match=r"layer 1: padding .*cu_seqlens_q_padded.* would be seen"):
            self.attend(inputs, params, mask_type=AttnMaskType.no_mask)

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (packed(4, 8, qkv_format="sbhd"), "qkv_format is 'sbhd'; supported is 'thd'"),
            (packed(4, 8, cu_seqlens_q=None, cu_seqlens_kv=None), "cu_seqlens_q is None"),
            (packed(4, 8, cu_seqlens_kv=torch.tensor([0, 5, 12])), "in self-attention they are the same"),
            (packed(4, 9), r"cu_seqlens_q is \[0, 4, 13\] for a row of 12 tokens"),
            (packed(4, -2), r"cu_seqlens_q is \[0, 4, 2\] for a row of 12 tokens"),
            (packed(4, 8, local_cp_size=1), "context parallel group of its own"),
        ],
    )
    def test_refuses_what_does_not_describe_the_row(self, params, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.attend(make_inputs(12, batch=1), params)

    def test_refuses_a_mask_beside_it(self) -> None:
        inputs = [t.squeeze(1) for t in make_inputs(12, batch=1)]
        with pytest.raises(ConfigError, match="attention_mask was passed beside packed_seq_params"):
            build()(*inputs, causal(12)[None, None], packed_seq_params=packed(12))


class Ranks:
    """Context parallel ranks one after the other in this process: everyone's keys and values are at hand."""

    def __init__(self, monkeypatch, size: int) -> None:
        self.current, self.count = 0, size
        monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", self.gather)

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.current

    def gather(self, here: Tensor, group) -> Tensor:
        everyone = torch.cat([torch.cat([k, v], dim=-1) for _, k, v in self.parts])
        assert group is self
        assert torch.equal(here, everyone.chunk(self.count)[self.current])
        return everyone

    def attend(self, inputs, lengths, order, mask=None, **fields) -> Tensor:
        """Divide the inputs, run every rank, put the outputs together again."""
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        groups.cp = self
        module = TorchDotProductAttention(make_config(), 1, AttnMaskType.causal, "self", pg_collection=groups)
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        own = [
            torch.cat(
                [
                    torch.arange(length).chunk(2 * self.count)[index] + begin
                    for begin, length in zip(begins, lengths, strict=True)
                    for index in order(rank, self.count)
                ]
            )
            for rank in range(self.count)
        ]
        self.parts = [[t[positions] for t in inputs] for positions in own]
        outputs = []
        for rank, part in enumerate(self.parts):
            self.current = rank
            if len(lengths) == 1:
                outputs.append(module(*part, mask if mask is None else mask[:, :, own[rank]]))
            else:
                part = [t.squeeze(1) for t in part]
                outputs.append(module(*part, None, packed_seq_params=packed(*lengths)))
        return torch.cat(outputs)[torch.cat(own).argsort()]


def zig_zag(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


class TestContextParallel:
    @pytest.mark.parametrize("size", [2, 3, 4])
    @pytest.mark.parametrize("lengths", [(24,), (48,), (24, 48, 24)])
    def test_equals_one_rank(self, monkeypatch, size: int, lengths) -> None:
        """Values, and gradients added up over the ranks; one long sequence and packed ones."""
        inputs, ranks = make_inputs(sum(lengths), batch=1), Ranks(monkeypatch, size)
        forbidden = torch.block_diag(*[torch.ones(n, n) for n in lengths]) == 0
        forbidden = forbidden.to(current_device()) | causal(sum(lengths))
        assert_close(
            outputs_and_gradients(lambda *qkv: ranks.attend(qkv, lengths, zig_zag), inputs),
            outputs_and_gradients(lambda *qkv: define(*qkv, forbidden), inputs),
            TOLERANCE[torch.float32],
        )

    def test_a_mask_has_the_queries_of_the_rank_and_all_keys(self, monkeypatch) -> None:
        inputs, mask = make_inputs(16), causal(16)
        mask[5:, 5] = True
        got = Ranks(monkeypatch, 2).attend(inputs, (16,), zig_zag, mask[None, None])
        assert_close([got], [define(*inputs, mask)], TOLERANCE[torch.float32])

    @pytest.mark.parametrize(
        "order",
        [
            lambda rank, size: (2 * rank, 2 * rank + 1),
            lambda rank, size: (2 * size - 1 - rank, rank),
            lambda rank, size: (rank, size + rank),
        ],
        ids=["in a row", "late chunk first", "dealt out in turn"],
    )
    def test_another_order_is_caught(self, monkeypatch, order) -> None:
        """Batches cut in another way would give another model."""
        inputs = make_inputs(24, batch=1)
        got = Ranks(monkeypatch, 3).attend(inputs, (24,), order)
        with pytest.raises(AssertionError):
            assert_close([got], [define(*inputs, causal(24))], 1e-2)

    def test_refuses_samples_that_it_cannot_cut(self, monkeypatch) -> None:
        params = packed(8, 6)
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        groups.cp = ranks = Ranks(monkeypatch, 2)
        monkeypatch.setattr(
            attention, "gather_from_sequence_parallel_region", lambda t, group: torch.cat([t, t])
        )
        module = TorchDotProductAttention(make_config(), 1, AttnMaskType.causal, "self", pg_collection=groups)
        inputs = [t.squeeze(1) for t in make_inputs(7, batch=1)]
        with pytest.raises(ConfigError, match="a sample of 6 tokens cannot be cut into 4 equal chunks"):
            module(*inputs, None, packed_seq_params=params)
        assert ranks.size() == 2

    def test_refuses_other_ways(self, monkeypatch) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        groups.cp = Ranks(monkeypatch, 2)
        for attention_type, way, message in (
            ("self", "p2p", "cp_comm_type is 'p2p'; supported is 'all_gather'"),
            ("cross", None, "context_parallel_size is 2; supported is 1: this is cross-attention"),
        ):
            with pytest.raises(UnsupportedModelError, match=message):
                TorchDotProductAttention(
                    make_config(),
                    1,
                    AttnMaskType.no_mask,
                    attention_type,
                    cp_comm_type=way,
                    pg_collection=groups,
                )


class TestRefusals:
    """Everything that the kernels cannot do is named when the layer is built."""

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"softmax_type": "learnable"}, "softmax_type is 'learnable'; supported is 'vanilla'"),
            ({"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one'"),
            ({"window_size": (4, 0)}, r"window_size is \(4, 0\); supported is None"),
            ({"qk_clip": True}, "qk_clip is True; supported is False"),
            ({"log_max_attention_logit": True}, "log_max_attention_logit is True"),
            ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention is True"),
            ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention is True"),
            ({"use_kitchen_attention": True}, "use_kitchen_attention is True"),
            ({"attention_backend": AttnBackend.flash}, "attention_backend is <AttnBackend.flash: 1>"),
        ],
    )
    def test_names_the_field(self, fields, message: str) -> None:
        config = make_config()
        for name, value in fields.items():
            setattr(config, name, value)
        with pytest.raises(UnsupportedModelError, match=f"attention of layer 3: {message}"):
            TorchDotProductAttention(config, 3, AttnMaskType.causal, "self")

    def test_a_window_only_counts_in_layers_that_have_it(self) -> None:
        fields = {"window_size": (4, 0), "window_attn_skip_freq": 2}
        build(layer=2, **fields)
        with pytest.raises(UnsupportedModelError, match="attention of layer 3: window_size"):
            build(layer=3, **fields)

    def test_a_softmax_in_16_bits_only_counts_with_16_bits(self) -> None:
        build(attention_softmax_in_fp32=False)
        with pytest.raises(UnsupportedModelError, match="attention_softmax_in_fp32 is False"):
            build(dtype=torch.bfloat16, attention_softmax_in_fp32=False)

    def test_refuses_inputs_that_it_would_ignore(self) -> None:
        inputs, module = make_inputs(6), build()
        with pytest.raises(ConfigError, match="layer 1: an attention_bias was passed"):
            module(*inputs, None, attention_bias=torch.zeros(1, 1, 6, 6))
        with pytest.raises(ConfigError, match=r"attention_mask is of torch\.float32"):
            module(*inputs, torch.zeros(1, 1, 6, 6))
        padding = torch.zeros(inputs[0].size(1), 1, 1, 6, dtype=torch.bool)
        padding[..., 4:] = True
        with pytest.raises(ConfigError, match="each of them would see the tokens after it"):
            module(*inputs, padding)
        with pytest.raises(ConfigError, match="each of them would see the tokens after it"):
            module(*inputs, padding[0, 0, 0])
        build(mask_type=AttnMaskType.no_mask)(*inputs, padding.to(inputs[0].device))
        module(inputs[0][-1:], *inputs[1:], padding.to(inputs[0].device))
        with pytest.raises(ConfigError, match="6 queries for 4 keys in causal order"):
            module(inputs[0], inputs[1][:4], inputs[2][:4], None)


def test_the_configuration_can_ask_for_megatrons_own() -> None:
    assert LocalBackend(make_config()).core_attention() is TorchDotProductAttention
    local = make_config(attention_backend=AttnBackend.local)
    assert LocalBackend(local).core_attention() is DotProductAttention
