"""Small distillations from folder to folder, as `torpor distill` runs them."""

import yaml

import tiny
from torpor.training.config import DistillConfig
from torpor.training.config_file import read_config

WRITERS = {"nemotron_h": tiny.write_nemotron_h, "mimo": tiny.write_mimo}


def write_models(folder, write, **options):
    write(folder / "teacher", seed=1, **options)
    write(folder / "student", seed=2, **options)
    (folder / "text.txt").write_text("The dormouse sleeps through the winter. " * 200)


def read(folder, output="run", **changes):
    values = {
        "teacher": "teacher",
        "student": "student",
        "output": output,
        "data": "text.txt",
        "sequence_length": 64,
        "global_batch_size": 2,
        "steps": 6,
        "lr": 5e-3,
        "dtype": "bf16",
        "save_every": 3,
        "eval_batches": 1,
    }
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(values | changes))
    return read_config(DistillConfig, folder / f"{output}.yaml")
