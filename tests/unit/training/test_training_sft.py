"""The fine-tuning step: samples that share a row learn what they learn apart, and only responses count."""

import dataclasses

import pytest
import torch

import tiny
from chats import chat, chat_tokenizer, write_records
from torpor.checkpoints.folder import open_folder
from torpor.dormancy import freeze_mtp
from torpor.megatron.models import build_model
from torpor.megatron.parallel import Layout
from torpor.megatron.weights import load_weights
from torpor.training import samples
from torpor.training.config import SftConfig
from torpor.training.data import Batch
from torpor.training.loop import Job, prepare_job, run_step
from torpor.training.sft import sft_objective
from torpor.training.sources import find_sources

RECORDS = [
    chat("one", "1"),
    chat("fifteen", "fifteen is 15"),
    chat("2", "two"),
    chat("four and five", "9 " * 9),
]
LENGTH = 160
FAMILIES = {"gpt": tiny.write_mimo, "hybrid": tiny.write_nemotron_h}


def settings(**values):
    known = {"model": "m", "output": "o", "data": "d", "sequence_length": LENGTH, "steps": 1, "dtype": "fp32"}
    return SftConfig(**known | {"held_out": 0.0, "global_batch_size": 1} | values)


def rows_of(folder, records=RECORDS, **values):
    write_records(folder / "chat.jsonl", records)
    (folder / "tokens").mkdir(exist_ok=True)
    return samples.prepare_rows(
        find_sources([folder / "chat.jsonl"]),
        chat_tokenizer(),
        vocab_size=320,
        folder=folder / "tokens",
        settings=settings(**values),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / name, tokenizer=False) for name, write in FAMILIES.items()}


def build_job(path, rows, *, freeze=True, **values) -> Job:
    from torpor.megatron import padding

    config = settings(**values)
    folder = open_folder(path)
    chunks = build_model(
        folder.config, Layout(), torch.float32, recompute=config.recompute, per_token_loss=True
    )
    load_weights(chunks, folder)
    padding.leave_padding_uncounted(chunks)
    if freeze:
        freeze_mtp(chunks)
    return prepare_job(chunks, config, rows, sft_objective(), steps=1)


def step(job, batches: list[Batch] | None = None):
    """One step over these micro-batches; its loss, and the gradients of all parameters by name."""
    if batches is not None:
        job = dataclasses.replace(
            job, training_batches=lambda _: iter(batches), num_micro_batches=len(batches)
        )
    gradients = {}
    real = job.optimizer.step

    def keep_gradients():
        for name, parameter in job.chunks[0].module.named_parameters():
            if parameter.requires_grad:
                gradients[name] = parameter.main_grad.clone()
        return real()

    job.optimizer.step = keep_gradients
    try:
        record = run_step(job, 0)
    finally:
        job.optimizer.step = real
    return record.metrics["loss"], gradients


def all_batches(rows):
    return [rows.batch([row], torch.device("cpu")) for row in range(len(rows.training))]


def difference(one, other) -> float:
    assert one.keys() == other.keys()
    return max(((one[n] - other[n]).norm() / (other[n].norm() + 1e-12)).item() for n in one)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_in_one_row_learn_what_they_learn_apart(folders, tmp_path, megatron_rank, family, recompute):
    together = all_batches(rows_of(tmp_path))
    assert len(together) == 1
    assert len(together[0].cu_seqlens) == len(RECORDS) + 2  # a beginning, an end each, and padding
    apart = all_batches(rows_of(tmp_path, packing=False))
    assert len(apart) == len(RECORDS)

    loss, gradients = step(build_job(folders[family], rows_of(tmp_path), recompute=recompute), together)
    rows = rows_of(tmp_path, packing=False)
    loss_apart, gradients_apart = step(build_job(folders[family], rows, packing=False), apart)
    assert loss == pytest.approx(loss_apart, rel=1e-5)
    assert difference(gradients, gradients_apart) < 2e-4
    assert not any(name.startswith("mtp.") for name in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_whose_samples_see_each_other_is_told_apart(folders, tmp_path, megatron_rank, family):
    rows = rows_of(tmp_path)
    (batch,) = all_batches(rows)
    loss, gradients = step(build_job(folders[family], rows), [batch])
    # One long sample instead of four: everything sees what is before it.
    ends = batch.cu_seqlens[[0, -2, -1]]
    leaking = dataclasses.replace(batch, cu_seqlens=ends)
    leaked_loss, leaked = step(build_job(folders[family], rows), [leaking])
    assert abs(leaked_loss - loss) > 1e-3
    assert difference(leaked, gradients) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_only_responses_are_learned(folders, tmp_path, megatron_rank, family):
    """Against Megatron's own cross-entropy, token by token, with the mask taken from the text."""
    rows = rows_of(tmp_path, packing=False)
    job = build_job(folders[family], rows, packing=False)
    model = job.chunks[0]
    tokenizer = chat_tokenizer()
    expected = []
    for record in RECORDS:
        whole = tokenizer.apply_chat_template(record["messages"])["input_ids"]
        prompt = tokenizer.apply_chat_template(record["messages"][:1], add_generation_prompt=True)[
            "input_ids"
        ]
        ids = torch.tensor([whole])
        with torch.no_grad():
            losses = model(
                ids[:, :-1], torch.arange(len(whole) - 1)[None], None, labels=ids[:, 1:].contiguous()
            )
        expected.append(losses[0, len(prompt) - 1 :])
    mean = torch.cat(expected).mean().item()

    batches = all_batches(rows)
    assert step(job, batches)[0] == pytest.approx(mean, rel=1e-5)
    # The same with the mask one place off in either direction.
    for shift in (1, -1):
        shifted = [dataclasses.replace(b, loss_mask_BS=b.loss_mask_BS.roll(shift, 1)) for b in batches]
        fresh = build_job(folders[family], rows, packing=False)
        assert step(fresh, shifted)[0] != pytest.approx(mean, rel=1e-3)


def test_every_response_token_counts_the_same_however_they_are_spread(folders, tmp_path, megatron_rank):
    """A mean of micro-batches' means would weigh a short response as much as a long one."""
    rows = rows_of(tmp_path, packing=False)
    apart = all_batches(rows)
    both = [rows.batch([0, 1], torch.device("cpu")), rows.batch([2, 3], torch.device("cpu"))]
    loss, gradients = step(build_job(folders["gpt"], rows, packing=False), apart)
    loss_both, gradients_both = step(build_job(folders["gpt"], rows, packing=False), both)
    assert loss == pytest.approx(loss_both, rel=1e-6)
    assert difference(gradients, gradients_both) < 1e-4
    counts = [batch.loss_mask_BS.sum().item() for batch in apart]
    singles = [step(build_job(folders["gpt"], rows, packing=False), [batch])[0] for batch in apart]
    weighted = sum(c * s for c, s in zip(counts, singles, strict=True)) / sum(counts)
    assert loss == pytest.approx(weighted, rel=1e-5)
    assert loss != pytest.approx(sum(singles) / len(singles), rel=1e-3)


def test_padding_does_not_move_the_balance_of_experts(folders, tmp_path, megatron_rank, monkeypatch):
    def biases(length):
        values = {"sequence_length": length, "packing": False}
        rows = rows_of(tmp_path, **values)
        job = build_job(folders["hybrid"], rows, **values)
        step(job, all_batches(rows))
        return {n: b.clone() for n, b in job.chunks[0].module.named_buffers() if n.endswith("expert_bias")}

    tight, padded = biases(72), biases(250)
    assert any(name.startswith("decoder.") for name in tight)
    assert all(torch.equal(bias, padded[name]) for name, bias in tight.items())

    monkeypatch.setattr("torpor.megatron.padding.router_padding_mask", lambda model, mask: None)
    counted = biases(250)
    assert any(not torch.equal(bias, counted[name]) for name, bias in tight.items())


def test_megatron_cannot_leave_padding_out_by_itself(folders, tmp_path, megatron_rank, monkeypatch):
    """Where this fails, `leave_padding_uncounted` is not needed any more."""
    monkeypatch.setattr("torpor.megatron.padding.leave_padding_uncounted", lambda chunks: None)
    rows = rows_of(tmp_path)
    job = build_job(folders["hybrid"], rows)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        run_step(job, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_awake_heads_learn_from_packed_rows_too(folders, tmp_path, megatron_rank, family):
    rows = rows_of(tmp_path)
    job = build_job(folders[family], rows, freeze=False)
    record = run_step(job, 0)
    assert record.metrics["mtp_loss"] > 0
