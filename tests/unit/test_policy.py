"""Log-probabilities of a dormant policy: what they are, and that heads have no part in them."""

import pytest
import torch

from tiny_models import (
    GPT,
    GPT_MOE,
    GPT_TIED,
    HYBRID,
    HYBRID_MOE,
    SEQUENCE,
    VOCAB,
    build,
    build_pair,
    differing,
    gradients,
)
from torpor import ConfigError, UnsupportedModelError, freeze_mtp, policy
from torpor.training import vocabulary

pytestmark = pytest.mark.usefixtures("megatron_rank")

KINDS = pytest.mark.parametrize("kind", [GPT, GPT_TIED, GPT_MOE, HYBRID, HYBRID_MOE], ids=str)
TOKENS = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Seven tokens at a time: several chunks, the last one shorter."""
    monkeypatch.setattr(vocabulary, "chunk_size", lambda projection: 7)


def objective(values):
    """A loss in which every entry of both counts differently."""
    weights = torch.linspace(0.5, 1.5, values["log_probs"].numel()).view_as(values["log_probs"])
    return (weights * values["log_probs"]).sum() + (weights.flip(0) * values["entropy"]).sum()


def run(model, tokens=TOKENS, **arguments):
    """Do one forward and backward; return values and gradients."""
    values = policy.forward(model, tokens, **arguments)
    objective(values).backward()
    return {name: value.detach() for name, value in values.items()}, gradients(model)


def run_plain(model, tokens=TOKENS, temperature=1.0):
    """The same from the logits of an ordinary forward."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, positions, None)
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    first = torch.zeros_like(log_p[:, :1, 0])
    values = {
        "log_probs": torch.cat([first, log_p[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]], 1),
        "entropy": torch.cat([first, -(log_p.exp() * log_p).sum(-1)[:, :-1]], 1),
    }
    objective(values).backward()
    return {name: value.detach() for name, value in values.items()}, gradients(model)


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        scale = expected[name].abs().max()
        assert (value - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@KINDS
def test_values_and_gradients_are_those_of_a_model_without_heads(kind, dtype):
    """Byte for byte, of log-probabilities, entropies and the gradient of every parameter."""
    dormant, reference = build_pair(kind, params_dtype=dtype)
    handle = freeze_mtp(dormant)
    values, grads = run(dormant)
    expected, expected_grads = run(reference)
    assert differing(values, expected) == []
    assert expected_grads
    assert differing(grads, expected_grads) == []
    handle.check()


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (GPT, torch.float64, 1e-12),
        (GPT_TIED, torch.float64, 1e-12),
        (GPT, torch.float32, 2e-5),
        (HYBRID, torch.float32, 2e-5),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_log_softmax(kind, dtype, tolerance):
    """Against the logits of an ordinary forward and autograd through them, in FP64 to 12 digits."""
    dormant, reference = build_pair(kind)
    freeze_mtp(dormant)
    values, grads = run(dormant.to(dtype), temperature=0.7)
    expected, expected_grads = run_plain(reference.to(dtype), temperature=0.7)
    assert_close(values, expected, tolerance)
    assert_close(grads, expected_grads, tolerance)


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_a_fused_cross_entropy_is_not_asked_for_labels(kind):
    """There are none, in policy and in ordinary logits alike; nobody derives some from the tokens."""
    dormant, reference = build_pair(kind, cross_entropy_loss_fusion=True)
    handle = freeze_mtp(dormant)
    for model in (dormant, reference):
        model.compute_language_model_loss = lambda *args: pytest.fail("a cross-entropy was computed")
    values, grads = run(dormant)
    expected, expected_grads = run_plain(reference)
    assert_close(values, expected, 2e-5)
    assert_close(grads, expected_grads, 2e-5)
    handle.check()


def test_rows_of_padding_are_no_tokens():
    """A vocabulary that was padded to divide over ranks: the rollout's distribution is over its tokens."""
    size, model = VOCAB - 5, build(GPT, mtp=False).double()
    tokens = TOKENS.clamp(max=size - 1)
    values, grads = run(model, tokens, vocab_size=size)
    compared = policy.compute_log_probs(model, tokens, vocab_size=size)
    assert differing(values, compared) == []
    model.zero_grad()
    forward = model.forward
    model.forward = lambda *inputs: forward(*inputs)[..., :size]
    expected, expected_grads = run_plain(model, tokens)
    del model.forward
    assert_close(values, expected, 1e-12)
    assert_close(grads, expected_grads, 1e-12)
    assert (run(model, tokens)[0]["log_probs"] - expected["log_probs"]).abs().max() > 1e-3


def test_an_entry_is_about_its_own_token():
    """Entry t says how likely token t was after those before it; the first one, after nothing, is 0."""
    model = build(GPT, mtp=False)
    row = TOKENS[0].tolist()
    values = policy.forward(model, TOKENS[:1])
    for t in (1, 2, SEQUENCE - 1):
        logits = model(TOKENS[:1, :t], torch.arange(t)[None], None)[0, -1]
        assert values["log_probs"][0, t].item() == pytest.approx(
            logits.log_softmax(-1)[row[t]].item(), abs=1e-5
        )
    assert values["log_probs"][0, 0] == values["entropy"][0, 0] == 0


class TestAwakeHeads:
    def test_are_refused(self):
        """Nobody asked for their loss: the message says what to call."""
        with pytest.raises(UnsupportedModelError, match=r"mtp_num_layers=1.*awake(?s:.*)freeze_mtp"):
            policy.forward(build(GPT), TOKENS)

    @pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
    def test_would_change_the_gradient(self, kind, monkeypatch):
        """What the refusal is for: values agree, and gradients are wrong without a word."""
        awake, reference = build_pair(kind)
        monkeypatch.setattr(policy, "_refuse_awake", lambda model: None)
        values, grads = run(awake)
        expected, expected_grads = run(reference)
        assert differing(values, expected) == []
        assert set(expected_grads) < set(differing(grads, expected_grads)) | {"output_layer.weight"}

    def test_on_purpose(self):
        """Inside awake() the heads run, and their loss is part of the gradient."""
        model, reference = build_pair(GPT)
        handle = freeze_mtp(model)
        with handle.awake():
            values, grads = run(model)
        expected, expected_grads = run(reference)
        assert differing(values, expected) == []
        assert "embedding.word_embeddings.weight" in differing(grads, expected_grads)


def test_logits_never_exist_as_a_whole():
    """The output layer projects nothing, and no saved tensor is as large as all logits."""
    model = build(GPT)
    freeze_mtp(model)
    projected, saved = [], []
    model.output_layer._forward_impl = lambda *args, **kwargs: projected.append(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        policy.forward(model, TOKENS)
    assert projected == []
    assert not any(VOCAB in shape and shape.numel() > VOCAB * 32 for shape in saved)


def test_padding_on_the_right_changes_nothing():
    """Tokens are causal: what follows a sequence has no part in its entries."""
    model = build(HYBRID, mtp=False)
    padded = torch.cat([TOKENS[:, :10], torch.zeros(2, 6, dtype=torch.int64)], 1)
    short, long = (policy.forward(model, tokens) for tokens in (TOKENS[:, :10], padded))
    for name in short:
        assert (short[name] - long[name][:, :10]).abs().max() < 1e-5


def pack(lengths, padded=None):
    """Describe a row that holds sequences of these lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts, starts_padded = (
        torch.tensor([0, *torch.tensor(each).cumsum(0).tolist()], dtype=torch.int32)
        for each in (lengths, padded or lengths)
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts_padded if padded else None,
        cu_seqlens_kv_padded=starts_padded if padded else None,
        max_seqlen_q=max(padded or lengths),
        max_seqlen_kv=max(padded or lengths),
    )


def test_a_packed_row_gives_what_each_sequence_gives_alone():
    """Sequences in one row do not see each other, and the first token of each has 0."""
    model = build(GPT)
    freeze_mtp(model)
    sequences = [TOKENS[0, :5], TOKENS[1, :9], TOKENS[0, 5:7]]
    packed, grads = run(model, torch.cat(sequences)[None], packed_seq_params=pack([5, 9, 2]))
    grads = {name: grad.clone() for name, grad in grads.items()}
    model.zero_grad()
    alone = [policy.forward(model, sequence[None]) for sequence in sequences]
    joined = {name: torch.cat([values[name] for values in alone], 1) for name in packed}
    objective(joined).backward()
    assert_close(packed, {name: value.detach() for name, value in joined.items()}, 1e-5)
    assert_close(grads, gradients(model), 1e-4)
    assert packed["log_probs"][0, [0, 5, 14]].tolist() == [0, 0, 0]


def test_forgotten_packing_is_noticed_by_that_comparison():
    """The row as one sequence: later ones see earlier ones, and only the first token has 0."""
    model = build(GPT, mtp=False)
    row = TOKENS[:1]
    packed = policy.forward(model, row, packed_seq_params=pack([7, 9]))["log_probs"]
    one = policy.forward(model, row)["log_probs"]
    assert (packed[0, 8:] - one[0, 8:]).abs().max() > 1e-3
    assert one[0, 7] != 0 == packed[0, 7]


def test_first_tokens_and_positions_of_padded_packing():
    """A sequence begins where its padding before it ends; what is left of the row counts by itself."""
    row = torch.zeros(1, 10, dtype=torch.int64)
    is_first = policy._first_tokens(row, pack([2, 3], padded=[4, 4]))
    assert is_first[0].nonzero().flatten().tolist() == [0, 4, 8]
    assert policy._positions(is_first).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]


class TestComputeLogProbs:
    def test_equals_forward_without_a_trace(self):
        """In micro-batches, through the schedule: no gradient, the mode as before, heads asleep."""
        model = build(GPT_MOE)
        handle = freeze_mtp(model)
        model.train()
        model.decoder.eval()  # a part that is in another mode than the whole
        tokens = torch.cat([TOKENS, TOKENS.flip(1)])
        values = policy.compute_log_probs(model, tokens, temperature=0.7, micro_batch_size=2)
        expected = policy.forward(model, tokens, temperature=0.7)
        assert model.training
        assert not model.decoder.training
        for name, value in values.items():
            assert not value.requires_grad
            assert (value - expected[name]).abs().max() < 1e-5
        handle.check()

    def test_the_mode_comes_back_after_an_error(self):
        model = build(GPT)  # awake: refused in the forward
        with pytest.raises(UnsupportedModelError):
            policy.compute_log_probs(model, TOKENS)
        assert model.training

    @pytest.mark.parametrize("size", [0, 3])
    def test_sizes_that_do_not_divide_are_refused(self, size):
        with pytest.raises(ConfigError, match=rf"2 sequences .* micro-batches of {size}"):
            policy.compute_log_probs(build(GPT, mtp=False), TOKENS, micro_batch_size=size)


def test_a_training_step_through_ddp_and_the_schedule():
    """Clipped ratios against old log-probabilities: the same step as of the model without heads."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from torpor.megatron.optimizer import build_optimizer
    from torpor.training.loop import wrap_for_training

    def step(model):
        wrapped = wrap_for_training([model])
        optimizer = build_optimizer(
            wrapped,
            lr=1e-2,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            clip_grad=1.0,
            distributed=False,
            dtype=torch.bfloat16,
        )
        old = policy.compute_log_probs(wrapped, TOKENS)["log_probs"]

        def loss(values):
            ratio = (values["log_probs"] - old).exp()
            advantages = torch.tensor([[1.0], [-1.0]])
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            return loss, {"loss": loss.detach()}

        get_forward_backward_func()(
            forward_step_func=lambda _, chunk: (policy.forward(chunk, TOKENS), loss),
            data_iterator=None,
            model=wrapped,
            num_microbatches=1,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        assert optimizer.step()[0]
        return optimizer

    dormant, reference = build_pair(GPT_TIED, params_dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    handle = freeze_mtp(dormant)
    handle.check(step(dormant))
    step(reference)
    trained = dict(reference.named_parameters())
    assert set(differing(before, trained)) == set(trained)
    assert differing({n: p for n, p in dormant.named_parameters() if n in trained}, trained) == []


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        (TOKENS[0], {}, r"shape \(16,\).*\[b, s\]"),
        (TOKENS.float(), {}, r"torch.float32.*int64"),
        (TOKENS[:, :0], {}, r"shape \(2, 0\)"),
        (TOKENS, {"temperature": 0.0}, r"temperature is 0.0"),
        (TOKENS, {"vocab_size": 0}, r"vocab_size is 0"),
        (TOKENS, {"packed": True}, r"shape \(2, 16\)(?s:.*)one row"),
    ],
    ids=["one-row", "not-ids", "empty", "temperature", "vocabulary", "packed-rows"],
)
def test_what_does_not_fit_is_refused(tokens, arguments, message):
    """Before the model is called."""
    if arguments.pop("packed", False):
        arguments = {"packed_seq_params": pack([7, 9])}
    model = build(GPT, mtp=False)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    with pytest.raises(ConfigError, match=message):
        policy.forward(model, tokens, **arguments)


class Group:
    """A context-parallel group as seen from one of its ranks."""

    def __init__(self, size, rank):
        self.size, self.rank = lambda: size, lambda: rank


def test_context_parallel_ranks_hold_a_chunk_of_each_end():
    """Of 8 tokens rank 0 of 2 holds 0 1 6 7 and rank 1 holds 2 3 4 5; of packed sequences likewise."""
    row = torch.arange(8)[None]
    assert [policy._Context.of(Group(2, rank), row, None).take(row)[0].tolist() for rank in (0, 1)] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]
    row = torch.arange(12)[None]
    assert policy._Context.of(Group(2, 1), row, pack([4, 8])).take(row)[0].tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(ConfigError, match=r"6 tokens cannot be cut into 4 equal chunks"):
        policy._Context.of(Group(2, 0), row, pack([6, 6]))
