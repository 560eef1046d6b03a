"""Samples on disk, rows of them, and the batches made of those."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chats import chat, chat_tokenizer, write_records
from torpor.errors import ConfigError
from torpor.training import samples
from torpor.training.config import SftConfig
from torpor.training.data import BatchPlan, training_batches
from torpor.training.sources import find_sources, read_records

RECORDS = [chat("a" * n, "b" * n) for n in range(1, 9)] + [{"prompt": "1+1=", "completion": "2"}]
CPU = torch.device("cpu")


def settings(**values):
    known = {
        "model": "m",
        "output": "o",
        "data": "d",
        "sequence_length": 96,
        "global_batch_size": 1,
        "steps": 1,
    }
    return SftConfig(**known | {"held_out": 0.0} | values)


def prepare(tmp_path, records=None, **values):
    if records is not None or not (tmp_path / "chat.jsonl").exists():
        write_records(tmp_path / "chat.jsonl", records or RECORDS)
    (tmp_path / "tokens").mkdir(exist_ok=True)
    return samples.prepare_rows(
        find_sources([tmp_path / "chat.jsonl"]),
        chat_tokenizer(),
        vocab_size=300,
        folder=tmp_path / "tokens",
        settings=settings(**values),
    )


def samples_in(batch):
    """Every sample of a batch as (tokens read, tokens to predict of its response)."""
    found = []
    for row in range(batch.tokens_BS.shape[0]):
        starts = (batch.positions_BS[row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], batch.tokens_BS.shape[1]], strict=True):
            here = slice(start, end)
            if batch.padding_mask_BS[row, here].any():
                assert batch.padding_mask_BS[row, here].all()
                assert not batch.loss_mask_BS[row, here].any()
                continue
            read, labels = batch.tokens_BS[row, here], batch.labels_BS[row, here]
            assert torch.equal(read[1:], labels[:-1])
            found.append((read.tolist(), labels[batch.loss_mask_BS[row, here] == 1].tolist()))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_sample_is_in_the_rows_once_with_its_response_and_nothing_else(tmp_path, packing):
    rows = prepare(tmp_path, packing=packing)
    tokenizer = chat_tokenizer()
    found = [sample for row in range(len(rows.training)) for sample in samples_in(rows.batch([row], CPU))]
    expected = []
    for record in RECORDS:
        if "messages" in record:
            text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
            response = record["messages"][1]["content"] + "<|im_end|>\n"
        else:
            text, response = "1+1=2<eos>", "2<eos>"
        tokens = tokenizer(text)["input_ids"]
        expected.append((tokens[:-1], tokenizer(response)["input_ids"]))
    assert sorted(found) == sorted(expected)
    assert len(rows.training) < len(RECORDS) if packing else len(rows.training) == len(RECORDS)


def test_a_packed_row_says_where_its_samples_end_and_padding_is_a_sample_of_its_own(tmp_path):
    rows = prepare(tmp_path)
    for row in range(len(rows.training)):
        batch = rows.batch([row], CPU)
        ends = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert (ends[0], ends[-1]) == (0, 96)
        assert ends[:-1] == (batch.positions_BS[0] == 0).nonzero().flatten().tolist()
    assert prepare(tmp_path, packing=False).batch([0], CPU).cu_seqlens is None


def test_samples_of_a_row_can_be_padded_to_lengths_that_divide(tmp_path):
    plain = prepare(tmp_path)
    (folder,) = (tmp_path / "tokens").iterdir()
    rows = samples.SampleRows(
        samples.Samples(folder),
        sequence_length=96,
        packing=True,
        excess_length_strategy="raise",
        held_out=0.0,
        seed=1,
        multiple_of=4,
    )
    for row in range(len(rows.training)):
        batch = rows.batch([row], CPU)
        lengths = batch.cu_seqlens.diff()
        assert not (lengths % 4).any()
        assert (batch.positions_BS[0] == 0).nonzero().flatten().tolist() == batch.cu_seqlens[:-1].tolist()
        assert not (batch.loss_mask_BS[batch.padding_mask_BS] != 0).any()
    assert rows.counts.filled == plain.counts.filled
    assert rows.counts.response == plain.counts.response


def test_what_is_done_with_long_samples_has_to_be_said(tmp_path):
    records = [*RECORDS, chat("x", "y" * 200)]
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, records)
    for part in ("1 of 10 samples", "sequence_length 96", "chat.jsonl:10", "excess_length_strategy: drop"):
        assert part in str(caught.value)

    dropped = prepare(tmp_path, records, excess_length_strategy="drop")
    assert (dropped.counts.used, dropped.counts.too_long) == (9, 1)
    assert "1 samples longer than sequence_length are left out" in dropped.describe()

    cut = prepare(tmp_path, records, excess_length_strategy="truncate")
    assert (cut.counts.used, cut.counts.too_long) == (10, 1)
    assert "1 samples longer than sequence_length are cut off" in cut.describe()
    found = [s for row in range(len(cut.training)) for s in samples_in(cut.batch([row], CPU))]
    longest = max(found, key=lambda sample: len(sample[0]))
    assert len(longest[0]) == 96
    assert set(longest[1]) == {chat_tokenizer().convert_tokens_to_ids("y")}


def test_a_sample_whose_response_is_cut_off_entirely_is_left_out_and_counted(tmp_path):
    cut = prepare(tmp_path, [*RECORDS, chat("x" * 200, "y")], excess_length_strategy="truncate")
    assert (cut.counts.used, cut.counts.too_long, cut.counts.without_response) == (9, 1, 1)
    assert "1 samples without a response token are left out" in cut.describe()


def test_a_sample_of_one_token_more_than_a_row_fits(tmp_path):
    longest = len(chat_tokenizer().apply_chat_template(RECORDS[7]["messages"])["input_ids"])
    assert prepare(tmp_path, sequence_length=longest - 1).counts.too_long == 0
    with pytest.raises(ConfigError, match="longer than sequence_length"):
        prepare(tmp_path, sequence_length=longest - 2)


def test_samples_are_encoded_once_and_again_when_anything_changes(tmp_path, monkeypatch):
    first = prepare(tmp_path)

    def fail(*_):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(samples.SampleEncoder, "encode", fail)
        assert prepare(tmp_path, packing=False).digest() == first.digest()
        with pytest.raises(AssertionError):
            prepare(tmp_path, RECORDS[:-1])
    assert not list((tmp_path / "tokens").glob("*.partial"))
    assert prepare(tmp_path, RECORDS[:-1]).digest() != first.digest()


def test_a_record_that_is_malformed_far_into_the_data_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"chat\.jsonl:10"):
        prepare(tmp_path, [*RECORDS, {"text": "no"}])
    assert list((tmp_path / "tokens").iterdir()) == []


def test_records_come_from_tables_as_they_do_from_lines(tmp_path):
    import datasets

    # Arrow gives either call both arguments.
    calls = [{"tool_calls": [{"arguments": arguments}]} for arguments in ({"city": "Jena"}, {"n": 3})]
    turns = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", **call}]} for call in calls
    ]
    records = [*RECORDS[:-3], *turns]
    assert len(records) == 8
    write_records(tmp_path / "chat.jsonl", records)
    dataset = datasets.Dataset.from_list(records)
    dataset.save_to_disk(str(tmp_path / "set"))
    dataset.to_parquet(tmp_path / "chat.parquet")
    for name, place in (
        ("chat.jsonl", "chat.jsonl:8"),
        ("set", "set row 8"),
        ("chat.parquet", "parquet row 8"),
    ):
        (source,) = find_sources([tmp_path / name])
        read = list(read_records(source))
        assert [record for _, record in read] == records
        assert read[-1][0].endswith(place)


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "words"), ("a.jsonl", "3\n"), ("b.jsonl", "[" * 10**5)]
)
def test_sources_without_records_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        samples.check_first_record(find_sources([tmp_path / name]), chat_tokenizer())


def test_no_record_at_all_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"there is no record in .*empty\.jsonl"):
        samples.check_first_record(find_sources([tmp_path / "empty.jsonl"]), chat_tokenizer())


def test_two_ranks_see_what_one_sees(tmp_path):
    rows = prepare(tmp_path, packing=False)
    plans = [BatchPlan(1, 4, rank, 2) for rank in range(2)]
    together = [
        s for plan in plans for batch in training_batches(rows, plan, 1, CPU) for s in samples_in(batch)
    ]
    alone = [s for batch in training_batches(rows, BatchPlan(2, 4, 0, 1), 1, CPU) for s in samples_in(batch)]
    assert sorted(together) == sorted(alone)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_puts_every_sample_into_one_row_that_it_fits(places):
    rows = samples.pack_best_fit(range(len(places)), places, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(places)))
    filled = [sum(places[i] for i in row) for row in rows]
    assert all(count <= 20 for count in filled)
    # Best fit leaves no two rows that would fit into one.
    assert sum(count <= 10 for count in filled) <= 1
    assert rows == samples.pack_best_fit(np.arange(len(places)), np.array(places), 20)


def test_the_places_of_records_are_kept(tmp_path):
    prepare(tmp_path)
    (folder,) = (tmp_path / "tokens").iterdir()
    assert json.loads((folder / "places.json").read_text())[3].endswith("chat.jsonl:4")
