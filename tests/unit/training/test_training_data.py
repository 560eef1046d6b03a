"""Text to batches: every kind of source, packing, the split, the order, and resuming anywhere."""

import dataclasses
import json
import logging
from collections import Counter

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torpor.errors import ConfigError
from torpor.training import data, sources
from torpor.training.config import OptimizationConfig

TEXTS = ["one two", "drei", "vier fünf"]


def byte_tokenizer(eos="<eos>", extra=()):
    """A tokenizer with one token per byte, and an end-of-text token with the id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<eos>", *extra])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def settings(**values):
    return OptimizationConfig(**{"sequence_length": 8, "global_batch_size": 4, "steps": 1} | values)


def read_all(paths, text_key="text"):
    found = sources.find_sources(paths)
    return [text for source in found for text in sources.read_documents(source, text_key)]


def check_and_read(path):
    sources.check_not_empty(sources.find_sources([path]), "text")
    return read_all([path])


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def test_every_kind_of_source_gives_the_same_documents(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), tmp_path / "a.parquet")
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(str(tmp_path / "set"))
    datasets.DatasetDict({"test": dataset.select([0]), "train": dataset}).save_to_disk(
        str(tmp_path / "splits")
    )
    (tmp_path / "plain").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / "plain" / f"{index}.txt").write_text(text, encoding="utf-8")
    for name in ("a.jsonl", "a.parquet", "set", "splits", "plain"):
        assert read_all([tmp_path / name]) == TEXTS, name


def test_a_folder_is_searched_in_name_order_and_no_file_counts_twice(tmp_path):
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "sub" / "b.jsonl", ["second"])
    write_jsonl(tmp_path / "a.jsonl", ["first"])
    (tmp_path / "notes.md").write_text("not text for training")
    assert read_all([tmp_path, tmp_path / "a.jsonl"]) == ["first", "second"]


def test_blank_documents_lines_and_missing_values_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "x"}\n\n{"text": "  "}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["y", None]}), tmp_path / "b.parquet")
    assert read_all([tmp_path]) == ["x", "y"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", b"x", [".csv", ".jsonl"]),
        ("a.txt", b"ok\xff", ["not UTF-8 at byte 2"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', ["a.jsonl:2", "no JSON object"]),
        pytest.param("a.jsonl", b"[" * 10**5, ["a.jsonl:1", "no JSON object"], id="nested too deep"),
        ("a.jsonl", b'["x"]\n', ["a.jsonl:1", "is a list"]),
        ("a.jsonl", b'{"txt": "x"}\n', ["a.jsonl:1", "no field `text`", "Did you mean `text_key: txt`?"]),
        ("a.jsonl", b'{"text": 3}\n', ["a.jsonl:1", "holds a int"]),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\\ud800 x"}\n',
            ["a.jsonl:2", r"holds '\ud800' at character 0"],
        ),
        ("a.parquet", b"no parquet", ["is no Parquet file"]),
        ("a.txt", b" \n", ["there is no text in"]),
        ("a.jsonl", b"", ["there is no text in"]),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_and_read(tmp_path / name)
    for part in [name, *expected]:
        assert part in str(caught.value)


def test_bad_places_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        sources.find_sources([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"holds no \.txt"):
        sources.find_sources([tmp_path])
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": ["x"]}) for name in ("a", "b")}
    ).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="has the splits a, b and none is called train"):
        read_all([tmp_path / "splits"])
    datasets.Dataset.from_dict({"content": ["x"]}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ConfigError, match="no field `text`; it has content"):
        read_all([tmp_path / "set"])


def test_a_folder_without_a_tokenizer_or_without_an_end_of_text_token_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        data.load_tokenizer(tmp_path)
    byte_tokenizer(eos=None).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        data.load_tokenizer(tmp_path)


def test_remarks_about_the_model_type_are_not_shown(tmp_path, caplog):
    byte_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mimo"}')
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(caplog.handler)  # its records do not reach the root logger
    try:
        data.load_tokenizer(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
    assert logger.level == level


def test_equal_tokenizers_pass_and_each_difference_is_named():
    data.check_tokenizers(byte_tokenizer(), byte_tokenizer(), (320, 320))
    with pytest.raises(ConfigError, match=r"'zzz' is absent for the teacher, 257 for the student"):
        data.check_tokenizers(byte_tokenizer(), byte_tokenizer(extra=["zzz"]), (320, 320))
    with pytest.raises(ConfigError, match=r"320 in the teacher's config\.json, 321 in the student's"):
        data.check_tokenizers(byte_tokenizer(), byte_tokenizer(), (320, 321))
    with pytest.raises(ConfigError, match=r"largest token id is 256, but vocab_size in config\.json is 256"):
        data.check_tokenizers(byte_tokenizer(), byte_tokenizer(), (256, 256))
    other = byte_tokenizer()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigError, match="one vocabulary but split text differently"):
        data.check_tokenizers(byte_tokenizer(), other, (320, 320))
    with pytest.raises(ConfigError, match="end-of-text token is 256 for the teacher, 5 for the student"):
        data.check_tokenizers(
            byte_tokenizer(), byte_tokenizer(eos=byte_tokenizer().convert_ids_to_tokens(5)), (320, 320)
        )


def cache(tmp_path, texts, vocab_size=320):
    path = tmp_path / "tokens.npy"
    data.write_token_cache(path, texts, byte_tokenizer(), vocab_size)
    return path


def test_documents_are_joined_with_the_end_of_text_token(tmp_path):
    tokenizer = byte_tokenizer()
    tokens = np.load(cache(tmp_path, TEXTS))
    expected = [t for text in TEXTS for t in [*tokenizer(text)["input_ids"], 256]]
    assert tokens.tolist() == expected
    assert tokens.dtype == np.uint16
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.npy"]


def test_a_large_vocabulary_gets_wide_tokens(tmp_path):
    assert np.load(cache(tmp_path, TEXTS, vocab_size=2**16 + 1)).dtype == np.uint32


def test_many_documents_cross_the_batches_of_the_tokenizer(tmp_path):
    texts = [f"document {index}" for index in range(data._DOCUMENTS_PER_CALL + 3)]
    tokens = np.load(cache(tmp_path, texts))
    assert byte_tokenizer().decode(tokens).split("<eos>")[:-1] == texts


def test_an_error_while_tokenizing_leaves_no_file(tmp_path):
    def documents():
        yield "fine"
        raise ConfigError("bad record")

    with pytest.raises(ConfigError, match="bad record"):
        data.write_token_cache(tmp_path / "tokens.npy", documents(), byte_tokenizer(), 320)
    assert list(tmp_path.iterdir()) == []


def windows(tmp_path, num_tokens, **values):
    path = tmp_path / "counted.npy"
    np.save(path, np.arange(num_tokens, dtype=np.uint16))
    return data.PackedWindows(path, **{"sequence_length": 4, "held_out": 0.25, "seed": 7} | values)


def test_windows_overlap_in_one_token_so_that_each_is_predicted_once(tmp_path):
    packed = windows(tmp_path, 9, held_out=0.0)
    assert [packed.read(i).tolist() for i in range(2)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    batch = packed.batch([0, 1], torch.device("cpu"))
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.labels_BS.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert {t.dtype for t in (batch.tokens_BS, batch.labels_BS, batch.positions_BS)} == {torch.int64}


def test_held_out_windows_are_never_trained_on_and_the_split_follows_the_seed(tmp_path):
    packed = windows(tmp_path, 401)
    assert len(packed.held_out) == 25
    assert sorted([*packed.held_out, *packed.training]) == list(range(100))
    trained = {packed.training_window(sample) for sample in range(1000)}
    assert trained == set(packed.training.tolist())
    assert packed.held_out.tolist() == windows(tmp_path, 401).held_out.tolist()
    assert packed.held_out.tolist() != windows(tmp_path, 401, seed=8).held_out.tolist()


def test_each_epoch_visits_every_training_window_once_in_an_order_of_its_own(tmp_path):
    packed = windows(tmp_path, 401)
    size = len(packed.training)
    epochs = [[packed.training_window(e * size + i) for i in range(size)] for e in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(packed.training.tolist())
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_is_pinned_so_that_a_resumed_run_on_another_version_sees_the_same(tmp_path):
    packed = windows(tmp_path, 41)
    assert packed.held_out.tolist() == PINNED_HELD_OUT
    assert [packed.training_window(sample) for sample in range(10)] == PINNED_ORDER


# RandomState([7, 0]).permutation(10)[:2], sorted; RandomState([7, 1]) over the other eight, then [7, 2].
PINNED_HELD_OUT = [0, 1]
PINNED_ORDER = [8, 9, 4, 5, 7, 2, 3, 6, 9, 8]


def test_jumping_to_a_sample_gives_what_walking_there_gave(tmp_path):
    walked = windows(tmp_path, 401)
    order = [walked.training_window(sample) for sample in range(200)]
    for sample in (199, 3, 120):
        assert windows(tmp_path, 401).training_window(sample) == order[sample]
        assert walked.training_window(sample) == order[sample]


@pytest.mark.parametrize(("num_tokens", "held_out"), [(4, 0.0), (8, 0.25), (0, 0.0)])
def test_too_little_text_is_refused_with_the_numbers(tmp_path, num_tokens, held_out):
    with pytest.raises(ConfigError, match=rf"has {num_tokens} tokens, .* sequence_length 4"):
        windows(tmp_path, num_tokens, held_out=held_out)


@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_ranks_share_a_global_batch_without_gaps_and_alike_at_every_layout(data_size):
    plans = [data.BatchPlan(1, 8, rank, data_size) for rank in range(data_size)]
    for step in (0, 5):
        shares = [sample for plan in plans for micro in plan.samples(step) for sample in micro]
        assert sorted(shares) == list(range(step * 8, step * 8 + 8))
    assert all(plan.num_micro_batches == 8 // data_size for plan in plans)


def test_micro_batches_of_a_step_are_what_the_plan_says(tmp_path):
    packed = windows(tmp_path, 401)
    plan = data.BatchPlan(micro_batch_size=2, global_batch_size=8, data_rank=1, data_size=2)
    batches = list(data.training_batches(packed, plan, 3, torch.device("cpu")))
    assert plan.samples(3) == [[26, 27], [30, 31]]
    for batch, samples in zip(batches, plan.samples(3), strict=True):
        expected = [packed.read(packed.training_window(sample))[:-1].tolist() for sample in samples]
        assert batch.tokens_BS.tolist() == expected


def test_context_parallel_ranks_take_their_chunks_of_every_window(tmp_path):
    packed = windows(tmp_path, 401)
    plans = [data.BatchPlan(2, 8, 0, 1, context_rank=rank, context_size=2) for rank in (0, 1)]
    whole = next(data.training_batches(packed, data.BatchPlan(2, 8, 0, 1), 3, torch.device("cpu")))
    for plan, places in zip(plans, ([0, 3], [1, 2]), strict=True):
        own = next(data.training_batches(packed, plan, 3, torch.device("cpu")))
        for name in ("tokens_BS", "labels_BS", "positions_BS"):
            assert torch.equal(getattr(own, name), getattr(whole, name)[:, places])


def test_whatever_a_batch_holds_for_each_token_is_taken_along():
    @dataclasses.dataclass(frozen=True)
    class Labelled(data.Batch):
        scores_BSK: torch.Tensor
        cu_seqlens: torch.Tensor

    row = torch.arange(8).view(1, 8)
    batch = Labelled(row, row + 1, row, row[..., None] * torch.ones(3), torch.tensor([0, 8]))
    own = batch.take(torch.tensor([0, 1, 6, 7]))
    assert own.labels_BS.tolist() == [[1, 2, 7, 8]]
    assert own.scores_BSK[0, :, 2].tolist() == [0, 1, 6, 7]
    assert own.cu_seqlens.tolist() == [0, 8]


def test_evaluation_reads_held_out_windows_only_and_starts_again_after_the_last(tmp_path):
    packed = windows(tmp_path, 41)  # ten windows, two held out
    plan = data.BatchPlan(micro_batch_size=1, global_batch_size=3, data_rank=0, data_size=1)
    batches = list(data.held_out_batches(packed, plan, 0, torch.device("cpu")))
    firsts = [int(batch.tokens_BS[0, 0]) // 4 for batch in batches]
    assert firsts == [packed.held_out[0], packed.held_out[1], packed.held_out[0]]


def test_tokens_are_cached_until_data_or_tokenizer_change(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", ["some text to train on"] * 9)
    folder = tmp_path / "tokens"
    folder.mkdir()

    def prepare(tokenizer):
        return data.prepare_windows(
            sources.find_sources([source]),
            "text",
            tokenizer,
            vocab_size=320,
            folder=folder,
            settings=settings(),
        )

    first = prepare(byte_tokenizer()).digest()
    with monkeypatch.context() as patched:
        patched.setattr(data, "write_token_cache", lambda *_: pytest.fail("tokenized again"))
        assert prepare(byte_tokenizer()).digest() == first
    prepare(byte_tokenizer(extra=["zzz"]))
    assert len(list(folder.iterdir())) == 2
    write_jsonl(source, ["some text to learn from"] * 9)
    assert prepare(byte_tokenizer()).digest() != first


def test_epochs_become_steps(tmp_path):
    packed = windows(tmp_path, 401)  # 75 training windows
    assert data.count_steps(settings(steps=None, epochs=2), packed) == 38
    assert data.count_steps(settings(steps=None, epochs=0.001), packed) == 1
    assert data.count_steps(settings(steps=5), packed) == 5
