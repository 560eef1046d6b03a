"""A graft into the tuned folder itself: whole or not at all, at any instant."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from golden_folders import golden_tensors, read_manifest, write_golden, write_tensors
from torpor.checkpoints import in_place
from torpor.checkpoints.families import check_heads, count_mtp_layers
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import check_heads_fit, graft_in_place
from torpor.checkpoints.verify import verify_folders
from torpor.errors import CheckpointError, UnsupportedModelError

TRAINED = 1

# Kills a forked graft before its first call that changes the disk, then another before its second, and so on;
# after each, looks at what is there and lets another graft finish it.
KILL_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
from torpor.checkpoints.families import check_heads, count_mtp_layers
from torpor.checkpoints.folder import open_folder
from torpor.checkpoints.graft import graft_in_place

source, pristine, out = map(Path, sys.argv[1:])
CHANGES = set("write copy_file_range fsync link rename replace mkdir unlink truncate open rmdir".split())

def trunk(path):
    folder = open_folder(path)
    return {name: folder.sha256(name) for name in open_folder(pristine).tensors}

before = trunk(pristine)
kills = without = whole = 0
while True:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(pristine, out)
    child = os.fork()
    if not child:
        seen = 0
        def watch(frame, event, function):
            global seen
            if event == "c_call" and function.__name__ in CHANGES:
                if seen == kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1
        sys.setprofile(watch)
        graft_in_place(source, out)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert trunk(out) == before, kills
    folder = open_folder(out)
    if count_mtp_layers(folder).physical:
        check_heads(folder)
        whole += 1
    else:
        without += 1
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills += 1
    graft_in_place(source, out)
    check_heads(open_folder(out))
    if kills == 1:
        files = {file.name for file in out.iterdir()}
    assert {file.name for file in out.iterdir()} == files, kills
print(kills, without, whole)
"""


def write_pair(tmp_path, name, **tuned):
    """A source with heads, and a folder tuned from it that lost them."""
    source = write_golden(tmp_path / "source", name)
    return source, write_golden(tmp_path / "tuned", name, seed=TRAINED, heads=False, **tuned)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_one_file(tmp_path, name):
    """The trunk's file gets a shard's name, the heads' stand beside it, and an index lists both."""
    source, tuned = write_pair(tmp_path, name)
    inode = (tuned / "model.safetensors").stat().st_ino
    config = (tuned / "config.json").read_bytes()
    result = graft_in_place(source, tuned)
    manifest, out = read_manifest(name), open_folder(tuned)
    assert out.tensors.keys() == manifest["trunk"].keys() | manifest["mtp"].keys()
    old, new = golden_tensors(name), golden_tensors(name, TRAINED)
    for tensor in out.tensors:
        wanted = new if tensor in manifest["trunk"] or tensor in manifest["copies"] else old
        assert out.read_bytes(tensor) == wanted[tensor][2], tensor
    assert {file.name for file in tuned.glob("*.safetensors")} == {
        "model-00001-of-00001.safetensors",
        "model-mtp-00001-of-00001.safetensors",
    }
    assert (tuned / "model-00001-of-00001.safetensors").stat().st_ino == inode
    assert (tuned / "config.json").read_bytes() == config
    assert not [file for file in tuned.iterdir() if file.name.startswith(".")]
    assert set(result.copies) == manifest["copies"].keys()
    assert verify_folders(source, tuned).ok


def test_shards(tmp_path):
    """A sharded folder keeps its files, and its index what else it said; the configuration is mended."""
    source, tuned = write_pair(tmp_path, "nemotron_h")
    tensors = golden_tensors("nemotron_h", TRAINED)
    trunk = sorted(read_manifest("nemotron_h")["trunk"])
    (tuned / "model.safetensors").unlink()
    said = {"metadata": {"total_parameters": 7}, "weight_map": {}}
    for number in (1, 2):
        file, names = f"model-{number:05d}-of-00002.safetensors", trunk[number - 1 :: 2]
        write_tensors(tuned / file, {name: tensors[name] for name in names})
        said["weight_map"] |= dict.fromkeys(names, file)
    index = tuned / "model.safetensors.index.json"
    index.write_text(json.dumps(said))
    config = json.loads((tuned / "config.json").read_text())
    del config["mtp_hybrid_override_pattern"]
    (tuned / "config.json").write_text(json.dumps(config))
    result = graft_in_place(source, tuned)
    assert result.config_changes == ("mtp_hybrid_override_pattern",)
    assert verify_folders(source, tuned).ok
    now = json.loads(index.read_text())
    assert now["metadata"]["total_parameters"] == 7
    assert now["metadata"]["total_size"] == sum(t.nbytes for t in open_folder(tuned).tensors.values())
    assert said["weight_map"].items() <= now["weight_map"].items()


def test_many_added_files(tmp_path, monkeypatch):
    """Heads larger than a shard go into several."""
    monkeypatch.setattr(in_place, "MAX_SHARD_BYTES", 20_000)
    source, tuned = write_pair(tmp_path, "deepseek_v3")
    graft_in_place(source, tuned)
    files = sorted(file.name for file in tuned.glob("model-mtp-*"))
    assert len(files) > 2
    assert files[-1] == f"model-mtp-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert verify_folders(source, tuned).ok


def test_heads_that_are_there(tmp_path):
    """A folder with its heads is left as it is, to the byte."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    graft_in_place(source, tuned)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tuned.iterdir()}
    result = graft_in_place(source, tuned)
    assert (result.mtp, result.copies, result.written_bytes) == ((), (), 0)
    assert {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tuned.iterdir()} == before


def test_where_nothing_can_be_linked(tmp_path, monkeypatch):
    """Without hard links the trunk's file keeps its name, and the folder is as sound."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    source, tuned = write_pair(tmp_path, "deepseek_v3")
    graft_in_place(source, tuned)
    assert (tuned / "model.safetensors").exists()
    assert verify_folders(source, tuned).ok


def test_killed_at_every_write(tmp_path):
    """Whenever it dies, the folder opens and has all of its heads or none; the next graft finishes it."""
    source = write_golden(tmp_path / "source", "nemotron_h")
    tuned = write_golden(
        tmp_path / "tuned", "nemotron_h", seed=TRAINED, heads=False, num_nextn_predict_layers=0
    )
    done = subprocess.run(
        [sys.executable, "-c", KILL_EVERYWHERE, source, tuned, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kills, without, whole = map(int, done.stdout.split())
    assert kills > 15
    assert without > 10
    assert whole > 2
    assert verify_folders(source, tmp_path / "out").ok


def test_two_single_files_are_still_told_apart(tmp_path):
    """Only a hard link of a shard may stand beside the index; another file of that name is refused."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    graft_in_place(source, tuned)
    os.link(tuned / "model-00001-of-00001.safetensors", tuned / "model.safetensors")
    check_heads(open_folder(tuned))
    (tuned / "model.safetensors").unlink()
    (tuned / "model.safetensors").write_bytes((tuned / "model-00001-of-00001.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="an index that does not mention it"):
        open_folder(tuned)


def test_other_heads_are_not_overwritten(tmp_path):
    """A refusal leaves the folder as it was."""
    stale = "model.layers.3.eh_proj.weight"
    other = golden_tensors("deepseek_v3", seed=7)[stale]
    source, tuned = write_pair(tmp_path, "deepseek_v3", change=lambda tensors: tensors | {stale: other})
    before = {file.name: file.read_bytes() for file in tuned.iterdir()}
    with pytest.raises(CheckpointError, match=f"has {stale} already"):
        graft_in_place(source, tuned)
    assert {file.name: file.read_bytes() for file in tuned.iterdir()} == before


def test_full_disk(tmp_path, monkeypatch):
    """One message, and a folder without heads that still opens."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    source, tuned = write_pair(tmp_path, "qwen3_5")
    monkeypatch.setattr(in_place.Shard, "write", fail)
    with pytest.raises(
        CheckpointError, match=r"could not be written .* No space left(.|\n)*torpor graft --heads"
    ):
        graft_in_place(source, tuned)
    assert count_mtp_layers(open_folder(tuned)).physical == 0
    assert not [file for file in tuned.iterdir() if file.name.startswith(".")]


def test_another_process_at_work(tmp_path):
    """Its hidden folder is locked: nothing is mixed."""
    source, tuned = write_pair(tmp_path, "qwen3_5")
    other = tuned / ".mtp.in-place.partial"
    other.mkdir()
    lock = in_place.lock_folder(other)
    try:
        with pytest.raises(CheckpointError, match="another process is adding tensors"):
            graft_in_place(source, tuned)
    finally:
        os.close(lock)
    graft_in_place(source, tuned)
    assert not other.exists()


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_model_of_another_size(tmp_path, field):
    """Seen from the configuration alone, before anything is trained."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    config = read_manifest("deepseek_v3")["config"]
    check_heads_fit(source, config)
    with pytest.raises(CheckpointError, match=f"the model has {field} 7, .* has {config[field]}"):
        check_heads_fit(source, config | {field: 7})


def test_model_that_heads_cannot_fit(tmp_path):
    """Another family, one that is not known, a quantisation that is not known, a source without heads."""
    source = write_golden(tmp_path / "source", "deepseek_v3")
    config = read_manifest("deepseek_v3")["config"]
    with pytest.raises(CheckpointError, match="the model is a glm4_moe"):
        check_heads_fit(source, read_manifest("glm4_moe")["config"])
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        check_heads_fit(source, {"model_type": "llama"})
    with pytest.raises(UnsupportedModelError, match="'homemade'"):
        check_heads_fit(source, config | {"quantization_config": {"quant_method": "homemade"}})
    headless = write_golden(tmp_path / "headless", "deepseek_v3", heads=False)
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        check_heads_fit(headless, config)
