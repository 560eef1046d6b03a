"""Dormancy does not depend on what a forward is given: labels, packing, embeddings, an inference context."""

import pytest
import torch

from parity import FULL_RECOMPUTE, assert_parity, run
from tiny_models import (
    GPT,
    HYBRID,
    HYBRID_MAMBA_MTP,
    HYBRID_MOE,
    SEQUENCE,
    Kind,
    batch,
    build,
    build_pair,
    same_bytes,
)
from torpor import freeze_mtp

MLP_ONLY = Kind("mlp-only", pattern="--", mtp_pattern="-")
# The sums of a longer row may be taken in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXPERTS = Kind("experts", pattern="-E", mtp_pattern="E", moe=True)


def packed():
    """Return a batch of one row that holds two sequences, in the THD format."""
    from megatron.core.packed_seq_params import PackedSeqParams

    inputs = batch(size=1) | {"attention_mask": None}
    device = inputs["input_ids"].device
    starts = torch.tensor([0, 7, SEQUENCE], dtype=torch.int32, device=device)
    longest = SEQUENCE - 7
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    positions = torch.cat([torch.arange(7, device=device), torch.arange(longest, device=device)])[None]
    return inputs | {"packed_seq_params": params, "position_ids": positions}


@pytest.mark.parametrize("recompute", [{}, FULL_RECOMPUTE], ids=["no-recompute", "full-recompute"])
@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no-labels"])
@pytest.mark.parametrize("kind", [GPT, HYBRID_MOE, HYBRID_MAMBA_MTP, MLP_ONLY, EXPERTS], ids=str)
def test_packed_sequences(kind, labels, recompute):
    """THD packing, with and without labels and recompute."""
    inputs = packed() | ({} if labels else {"labels": None})
    assert_parity(kind, inputs=inputs, **recompute)


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_packed_samples_are_separate_sequences(kind):
    """Their logits are those of a row each, asleep; what is in one changes no bit of the next."""
    model = build(kind)
    freeze_mtp(model)
    inputs = packed() | {"labels": None}
    together = model(**inputs)
    for begin, end in ((0, 7), (7, SEQUENCE)):
        alone = {name: inputs[name][:, begin:end] for name in ("input_ids", "position_ids")}
        torch.testing.assert_close(together[:, begin:end], model(**alone, attention_mask=None), **CLOSE)
    changed = inputs["input_ids"].clone()
    changed[0, 6] = (changed[0, 6] + 1) % 64
    after = model(**inputs | {"input_ids": changed})
    assert not same_bytes(after[:, 6], together[:, 6])
    assert same_bytes(after[:, 7:], together[:, 7:])


def test_where_layers_refuse_an_input_dormancy_lets_them(monkeypatch):
    """Megatron's own local attention takes no packed sequences and says so; the model is as before."""
    from megatron.core.transformer.enums import AttnBackend

    # Megatron writes the backend into the environment, and refuses another in the same process.
    for kernels in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{kernels}_ATTN", "0")
    model = build(GPT, attention_backend=AttnBackend.local)
    handle = freeze_mtp(model)
    with pytest.raises(AssertionError, match="Packed sequence"):
        run(model, **packed())
    assert model.config.mtp_num_layers == 1
    run(model)
    handle.check()


@pytest.mark.parametrize("kind", [GPT, MLP_ONLY], ids=str)
def test_an_inference_context_outside_inference_mode(kind):
    """A log-prob pass may carry one: it is InferenceMode that says whether heads may run."""
    from megatron.core.inference.contexts import StaticInferenceContext

    dormant, reference = build_pair(kind)
    handle = freeze_mtp(dormant)
    outputs = []
    for model in (dormant.eval(), reference.eval()):
        context = StaticInferenceContext(max_batch_size=2, max_sequence_length=2 * SEQUENCE)
        with torch.no_grad():
            outputs.append(model(**batch() | {"labels": None, "inference_context": context}))
    assert outputs[0].shape[1] == SEQUENCE
    assert same_bytes(*outputs)
    handle.check()


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", [GPT, HYBRID_MOE], ids=str)
def test_log_probs_of_a_model_in_eval(kind, grad):
    """What RL asks of policy and reference: logits of the whole sequence, without labels."""
    dormant, reference = build_pair(kind)
    handle = freeze_mtp(dormant)
    inputs = batch() | {"labels": None}
    with grad():
        log_probs, expected = (m.eval()(**inputs).log_softmax(-1) for m in (dormant, reference))
    assert log_probs.shape == (2, SEQUENCE, 64)
    assert same_bytes(log_probs.detach(), expected.detach())
    handle.check()


@pytest.mark.parametrize("kind", [GPT, HYBRID], ids=str)
def test_embeddings_instead_of_ids(kind):
    """A wrapper that embeds by itself may give no ids at all."""
    embedded = torch.randn(SEQUENCE, 2, 32, generator=torch.Generator().manual_seed(5))
    embedded = embedded.to(batch()["input_ids"].device)
    inputs = {"input_ids": None, "position_ids": None, "decoder_input": embedded}
    assert_parity(kind, inputs=inputs)


def test_an_output_processor_sees_the_trunks_hidden_states():
    """GPTModel hands hidden states to a processor of the caller's: one sequence long, not two."""
    seen = []

    def process(hidden_states, output_layer, output_weight, **rest):
        seen.append((hidden_states.shape[0], rest["config"].mtp_num_layers))
        return output_layer(hidden_states, weight=output_weight)[0]

    assert_parity(GPT, inputs={"output_processor": process})
    assert seen[0] == (SEQUENCE, None)


@pytest.mark.parametrize("positional", [3, 5])
def test_positional_arguments(positional):
    """Trainers pass the first arguments by position."""
    dormant, reference = build_pair(GPT)
    freeze_mtp(dormant)
    inputs = batch()
    ordered = [inputs["input_ids"], inputs["position_ids"], inputs["attention_mask"], None, inputs["labels"]]
    rest = {} if positional == 5 else {"labels": inputs["labels"]}
    outputs = [model(*ordered[:positional], **rest) for model in (dormant, reference)]
    assert same_bytes(*(o.detach() for o in outputs))
