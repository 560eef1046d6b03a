"""Tiny models of Transformers' own classes, trained by other people's trainers."""

import json
from pathlib import Path

import torch
import transformers

from golden_folders import write_golden

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCAB = 128


def load_model(folder: Path, dtype: torch.dtype | str = "auto") -> transformers.PreTrainedModel:
    """Transformers' own model of a folder; it leaves the MTP layers behind."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def token_rows(count: int = 16, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """Random sequences with themselves as labels."""
    ids = torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def training_arguments(out: Path, cls=transformers.TrainingArguments, **arguments):
    """Two steps with a checkpoint after each, large enough to move every tensor."""
    settings = {
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "logging_steps": 100,
    }
    return cls(output_dir=str(out), **(settings | arguments))


def write_tokenizer(folder: Path) -> Path:
    """Give a folder a tokenizer with a word for each row of its embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": 64,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_two_depths(path: Path) -> Path:
    """A Qwen 3.5 folder with two MTP layers."""

    def double(tensors):
        second = {
            name.replace("mtp.layers.0.", "mtp.layers.1."): (dtype, shape, data[::-1])
            for name, (dtype, shape, data) in tensors.items()
            if name.startswith("mtp.layers.0.")
        }
        return tensors | second

    return write_golden(path, "qwen3_5", change=double, mtp_num_hidden_layers=2)
