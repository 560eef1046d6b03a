"""What Megatron-LM documents of its own MTP switch, and what dormancy makes of each case.

HybridModel.forward after 0.19 takes `compute_mtp_loss`: False skips the MTP branch outside inference and
leaves its parameters loaded; labels alone decide whether loss or logits come back; what speculative decoding
keeps does not depend on it (Megatron-LM, megatron/core/models/hybrid/hybrid_model.py; its tests of the
contract are in tests/unit_tests/transformer/test_multi_token_prediction.py). GPTModel and released
HybridModels have no such argument and behave as with True.
"""

from types import SimpleNamespace

import pytest
import torch

from native_argument import hybrid_model_with_argument
from tiny_models import GPT_LEARNED, HYBRID, SEQUENCE, VOCAB, batch, build, same_bytes
from torpor import freeze_mtp

HIDDEN = 32

# What the caller gives, None where the model has no such argument; are there labels; what upstream runs then:
# the MTP layer, the MTP loss, the main loss.
DOCUMENTED = [
    (True, True, (1, 1, 1)),
    (True, False, (1, 1, 0)),
    (False, True, (0, 0, 1)),
    (False, False, (0, 0, 0)),
]
RELEASED = [(None, True, (1, 1, 1)), (None, False, (1, 1, 0))]
CASES = pytest.mark.parametrize(
    ("kind", "compute_mtp_loss", "has_labels", "awake"),
    [
        *((HYBRID, *case) for case in DOCUMENTED),
        *((HYBRID, *case) for case in RELEASED),
        *((GPT_LEARNED, *case) for case in RELEASED),
    ],
    ids=str,
)


@pytest.fixture
def build_counted(monkeypatch):
    """Build a model, and what counts its calls of the MTP layer, the MTP loss and the main loss."""
    from megatron.core.models.gpt import gpt_model
    from megatron.core.models.hybrid import hybrid_model

    def build_it(kind, compute_mtp_loss):
        if compute_mtp_loss is not None:
            monkeypatch.setattr(hybrid_model, "HybridModel", hybrid_model_with_argument())
        model = build(kind)
        calls = {"mtp": 0, "mtp_loss": 0, "main_loss": 0}
        main_loss = model.compute_language_model_loss

        def count(name):
            calls[name] += 1

        def process_mtp_loss(*, hidden_states, config, **rest):
            count("mtp_loss")
            return hidden_states.chunk(1 + config.mtp_num_layers)[0]

        def compute_language_model_loss(labels, logits):
            count("main_loss")
            return main_loss(labels, logits)

        model.mtp.layers[0].register_forward_hook(lambda *_: count("mtp"))
        model.compute_language_model_loss = compute_language_model_loss
        for module in (gpt_model, hybrid_model):
            monkeypatch.setattr(module, "process_mtp_loss", process_mtp_loss)
        return model, calls

    return build_it


@CASES
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_asleep_only_labels_decide(kind, compute_mtp_loss, has_labels, awake, training, build_counted):
    """Awake as documented; asleep neither MTP layer nor MTP loss, and the main result all the same."""
    model, calls = build_counted(kind, compute_mtp_loss)
    inputs = batch() | ({} if has_labels else {"labels": None})
    if compute_mtp_loss is not None:
        inputs["compute_mtp_loss"] = compute_mtp_loss
    shape = (2, SEQUENCE) if has_labels else (2, SEQUENCE, VOCAB)
    model.train(training)

    before = model(**inputs)
    assert tuple(calls.values()) == awake
    handle = freeze_mtp(model)
    calls.update(dict.fromkeys(calls, 0))
    after = model(**inputs)
    assert calls == {"mtp": 0, "mtp_loss": 0, "main_loss": int(has_labels)}
    assert before.shape == after.shape == shape
    # The spy of the MTP loss adds nothing, so that what comes back is the main result in both.
    assert same_bytes(before, after)
    handle.check()
    handle.remove()
    calls.update(dict.fromkeys(calls, 0))
    model(**inputs)
    assert tuple(calls.values()) == awake


@pytest.mark.parametrize("buffer", [False, True], ids=["assigned", "copied-into-a-buffer"])
@pytest.mark.parametrize(
    ("kind", "compute_mtp_loss"),
    [(HYBRID, True), (HYBRID, False), (HYBRID, None), (GPT_LEARNED, None)],
    ids=str,
)
def test_speculative_decoding_keeps_its_state(kind, compute_mtp_loss, buffer, build_counted):
    """In inference the hidden states that heads draft from are kept, asleep or not, and no head runs."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.enums import InferenceCudaGraphScope

    model, calls = build_counted(kind, compute_mtp_loss)
    model.eval()
    hidden_SBH = torch.randn(SEQUENCE, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    hidden_SBH = hidden_SBH.to(next(model.parameters()).device)
    model.decoder.forward = lambda *args, **kwargs: hidden_SBH
    if buffer:
        model.config.inference_cuda_graph_scope = InferenceCudaGraphScope.block

    def infer():
        context = SimpleNamespace(
            is_dynamic_batching=lambda: True,
            is_static_batching=lambda: False,
            num_speculative_tokens=1,
            mtp_decoder_hidden_states=torch.zeros_like(hidden_SBH) if buffer else None,
            config=SimpleNamespace(materialize_only_last_token_logits=False),
        )
        inputs = batch(size=1) | {"labels": None, "inference_context": context, "runtime_gather_output": True}
        if compute_mtp_loss is not None:
            inputs["compute_mtp_loss"] = compute_mtp_loss
        with InferenceMode.active(), torch.no_grad():
            logits = model(**inputs)
        return logits, context.mtp_decoder_hidden_states

    logits, state = infer()
    handle = freeze_mtp(model)
    logits_asleep, state_asleep = infer()
    assert same_bytes(state, hidden_SBH)
    assert same_bytes(state_asleep, hidden_SBH)
    assert same_bytes(logits, logits_asleep)
    assert calls == {"mtp": 0, "mtp_loss": 0, "main_loss": 0}
    handle.check()
