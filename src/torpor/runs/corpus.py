"""Real text that every machine has: the sources of the running interpreter's standard library."""

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from torpor.errors import ConfigError

# Not prose and not ordinary code: generated tables, and packages that some systems ship and others do not.
LEFT_OUT = {"encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages"}
LEFT_OUT |= {"test", "tests", "tkinter", "turtledemo", "__pycache__", "config"}
LONGEST_CHARACTERS = 60_000
LEAST_CHARACTERS = 500_000
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Corpus:
    """Text on disk, one document a line.

    Args:
        path: The `.jsonl` file, its field is `text`.
        documents: How many lines.
        characters: How much text.
    """

    path: Path
    documents: int
    characters: int


def write_standard_library(path: Path, *, max_characters: int) -> Corpus:
    """Collect the sources of Python's standard library into one `.jsonl` file.

    Modules come in an order that depends on their names alone (and looks random, so that a part of the
    corpus resembles the whole); each is one document, cut to `LONGEST_CHARACTERS`.

    Args:
        path: File to write.
        max_characters: Stop after the document that reaches this much text.

    Returns:
        What was written.

    Raises:
        ConfigError: This interpreter comes without its sources (some embedded builds do).
    """
    library = Path(sysconfig.get_path("stdlib"))
    modules = [file for file in library.rglob("*.py") if not LEFT_OUT & set(file.relative_to(library).parts)]
    modules.sort(key=lambda file: hashlib.sha256(file.relative_to(library).as_posix().encode()).digest())
    documents = characters = 0
    with path.open("w", encoding="utf-8") as lines:
        for module in modules:
            text = module.read_text(encoding="utf-8", errors="ignore")[:LONGEST_CHARACTERS]
            if not text.strip():
                continue
            name = module.relative_to(library).as_posix()
            lines.write(json.dumps({"text": text, "module": name}) + "\n")
            documents, characters = documents + 1, characters + len(text)
            if characters >= max_characters:
                break
    if characters < LEAST_CHARACTERS:
        raise ConfigError(
            f"the standard library in {library} has {characters:,} characters of source, the demo needs"
            f" {LEAST_CHARACTERS:,}\n"
            "  This Python was built without its sources. Use another one:\n"
            "  make clean demo PYTHON=/path/to/python3.12"
        )
    return Corpus(path, documents, characters)


def train_tokenizer(corpus: Corpus, folder: Path, *, vocab_size: int) -> int:
    """Train a byte-level BPE tokenizer and write it as a Hugging Face tokenizer.

    Args:
        corpus: Text to learn from.
        folder: Folder to write `tokenizer.json` and its companions to; made if missing.
        vocab_size: Wanted number of tokens, `END_OF_TEXT` among them.

    Returns:
        The number of tokens the tokenizer has.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with corpus.path.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    wrapped.save_pretrained(folder)
    return len(wrapped)
