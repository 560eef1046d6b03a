"""Hugging Face trainers on two ranks: one of them writes the heads, both hear of what went wrong."""

from pathlib import Path

import pytest

from golden_folders import write_golden
from ranks.launch import run_ranks


def train_replicated(source: Path, out: Path) -> list[str]:
    """Transformers' Trainer, replicated: two good checkpoints, then one that cannot have its heads."""
    import torch
    import transformers

    import torpor.huggingface
    from hf_training import load_model, token_rows, training_arguments
    from torpor.checkpoints.graft import graft_in_place
    from torpor.checkpoints.verify import verify_folders
    from torpor.errors import CheckpointError
    from torpor.huggingface import KeepMTPCallback

    writers = []

    def graft(heads, folder):
        writers.append(Path(folder).name)
        if folder.name == "checkpoint-3":
            raise CheckpointError("no room")
        return graft_in_place(heads, folder)

    torpor.huggingface.graft_in_place = graft
    trainer = transformers.Trainer(
        model=load_model(source),
        args=training_arguments(out, max_steps=4, ddp_backend="gloo"),
        train_dataset=token_rows(32),
        callbacks=[KeepMTPCallback(source)],
    )
    assert trainer.args.world_size == 2
    assert isinstance(
        trainer.accelerator.prepare(torch.nn.Linear(1, 1)), torch.nn.parallel.DistributedDataParallel
    )
    with pytest.raises(CheckpointError, match="checkpoint-3 was saved without its MTP layers: no room"):
        trainer.train()
    trainer.save_model(str(out / "final"))
    torch.distributed.barrier()
    for name in ("checkpoint-1", "checkpoint-2", "final"):
        assert verify_folders(source, out / name).ok, name
    return writers


def train_sharded(source: Path, out: Path) -> int:
    """PyTorch's FSDP2, saved as Accelerate saves it: gathered, and written by the first rank."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from hf_training import load_model, token_rows
    from torpor.checkpoints.verify import verify_folders
    from torpor.huggingface import keep_mtp

    rank = torch.distributed.get_rank()
    model = load_model(source)
    keep_mtp(model, source)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.float()  # FSDP2 takes one dtype
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = token_rows(4)
    for row in rows[rank::2]:
        model(**{name: tensor[None] for name, tensor in row.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = {
        name: tensor.to(dtypes[name]) for name, tensor in get_model_state_dict(model, options=options).items()
    }
    model.save_pretrained(out, is_main_process=rank == 0, state_dict=gathered)
    torch.distributed.barrier()
    result = verify_folders(source, out)
    assert result.ok
    assert len(result.copies) == 2
    return result.trunk_changed


def test_replicated(tmp_path):
    """Only the first rank touches the folders; the failure of one checkpoint ends both ranks alike."""
    source = write_golden(tmp_path / "source", "qwen3_5")
    first, second = run_ranks(train_replicated, 2, source, tmp_path / "out")
    assert first == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "final"]
    assert second == []


def test_sharded(tmp_path):
    """Copies follow the gathered trunk, and heads are the source's."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    changed = run_ranks(train_sharded, 2, source, tmp_path / "out")
    assert changed[0] == changed[1] > 0
