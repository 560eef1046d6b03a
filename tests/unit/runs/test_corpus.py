"""The demo's text: real, the same every time, and enough of it."""

import json

import pytest

from torpor.errors import ConfigError
from torpor.runs import corpus


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus.write_standard_library(tmp_path_factory.mktemp("text") / "a.jsonl", max_characters=600_000)


def test_every_line_is_a_module_of_the_standard_library(text):
    documents = [json.loads(line) for line in text.path.read_text(encoding="utf-8").splitlines()]
    assert len(documents) == text.documents > 10
    assert sum(len(document["text"]) for document in documents) == text.characters >= 600_000
    assert all(document["module"].endswith(".py") for document in documents)
    assert not any("site-packages" in document["module"] for document in documents)
    assert max(len(document["text"]) for document in documents) <= corpus.LONGEST_CHARACTERS


def test_text_is_the_same_every_time(text, tmp_path):
    again = corpus.write_standard_library(tmp_path / "b.jsonl", max_characters=600_000)
    assert again.path.read_bytes() == text.path.read_bytes()


def test_python_without_its_sources_is_refused(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "small.py").write_text("x = 1\n")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    with pytest.raises(ConfigError, match="6 characters of source"):
        corpus.write_standard_library(tmp_path / "text.jsonl", max_characters=600_000)


def test_tokenizer_reads_back_what_it_wrote(text, tmp_path):
    from transformers import AutoTokenizer

    size = corpus.train_tokenizer(text, tmp_path, vocab_size=400)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    sample = 'def f(x):\n    return "naïve 深い眠り 🦔"  # twice\n'
    tokens = tokenizer(sample)["input_ids"]
    assert size == len(tokenizer) == 400
    assert tokenizer.decode(tokens) == sample
    assert tokenizer.eos_token_id == 0
    assert len(tokens) < len(sample.encode())
