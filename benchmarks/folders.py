"""How fast are verify, graft and inspect beside the obvious bound, and how much memory do they take?

    python benchmarks/folders.py [--gib 1] [--large-gib 4] [--rounds 5] [--at FOLDER]

Every ratio is taken within one run, tool and bound in turn, and is the median of its rounds:

- verify: bytes a second against `sha256sum` of the same files, as many at a time as there are processors;
- verify with a receipt, which hashes every tensor of both folders, against the same;
- graft of the large folder: against `cp` and `sync` of a file as large as what has to be written, both begun
  with nothing left to be written back;
- peak memory of verify and graft for a small and a large folder;
- inspect: wall and processor time for 160 sparse shards of 689 GB in all, 91 991 tensors.

Folders are made under --at and removed afterwards. What the page cache holds is read from there.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
ATTENTION = [f"self_attn.{n}_proj" for n in "qkvo"]
MLP = [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
HEADS_SHARE = 2  # one in so many bytes is MTP


def write_tensors(file: Path, tensors: dict[str, int], seed: int) -> None:
    """Write a safetensors file of BF16 tensors of so many bytes, no two alike."""
    header, end = {}, 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(4 * MIB)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        left = end
        for i in range(-(-end // len(block))):
            stream.write(struct.pack("<QQ", seed, i) + block[16 : min(len(block), left)])
            left -= len(block)


def write_folder(path: Path, gib: float, heads: bool) -> Path:
    """Write a model of about this size: 16 layers in 8 shards, and one MTP layer in a file of its own."""
    path.mkdir(parents=True)
    total, layers = int(gib * 2**30), 16
    unit = total * (HEADS_SHARE - 1) // HEADS_SHARE // (layers * 7) // 64 * 64
    weight_map = {}

    def write(file: str, tensors: dict[str, int], seed: int) -> None:
        write_tensors(path / file, tensors, seed)
        weight_map.update(dict.fromkeys(tensors, file))

    for shard in range(8):
        names = [f"model.layers.{i}.{n}.weight" for i in (2 * shard, 2 * shard + 1) for n in ATTENTION + MLP]
        write(f"model-{shard + 1:05d}-of-00008.safetensors", dict.fromkeys(names, unit), shard)
    if heads:
        names = [f"mtp.layers.0.{n}.weight" for n in ATTENTION + MLP] + ["mtp.fc.weight"]
        sizes = dict.fromkeys(names, total // HEADS_SHARE // 8 // 64 * 64)
        sizes |= {f"mtp.{n}.weight": 4096 for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        write("mtp.safetensors", sizes, 99)
    index = {"weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": layers, "mtp_num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_sparse_folder(path: Path) -> Path:
    """Write the shape of a 671-billion-parameter FP8 model: 160 shards whose tensors are holes."""
    path.mkdir()
    hidden, tensors = 7168, []

    def linear(name: str, rows: int, columns: int) -> None:
        tensors.append((f"{name}.weight", "F8_E4M3", [rows, columns], rows * columns))
        scale = [-(-rows // 128), -(-columns // 128)]
        tensors.append((f"{name}.weight_scale_inv", "F32", scale, 4 * scale[0] * scale[1]))

    def plain(name: str, *shape: int) -> None:
        size = 2
        for n in shape:
            size *= n
        tensors.append((name, "BF16", list(shape), size))

    def mlp(at: str, inner: int) -> None:
        linear(f"{at}.gate_proj", inner, hidden)
        linear(f"{at}.up_proj", inner, hidden)
        linear(f"{at}.down_proj", hidden, inner)

    def layer(at: str, experts: int) -> None:
        plain(f"{at}.input_layernorm.weight", hidden)
        plain(f"{at}.post_attention_layernorm.weight", hidden)
        linear(f"{at}.self_attn.q_a_proj", 1536, hidden)
        plain(f"{at}.self_attn.q_a_layernorm.weight", 1536)
        linear(f"{at}.self_attn.q_b_proj", 24576, 1536)
        linear(f"{at}.self_attn.kv_a_proj_with_mqa", 576, hidden)
        plain(f"{at}.self_attn.kv_a_layernorm.weight", 512)
        linear(f"{at}.self_attn.kv_b_proj", 32768, 512)
        linear(f"{at}.self_attn.o_proj", hidden, 16384)
        if not experts:
            return mlp(f"{at}.mlp", 18432)
        plain(f"{at}.mlp.gate.weight", experts, hidden)
        tensors.append((f"{at}.mlp.gate.e_score_correction_bias", "F32", [experts], 4 * experts))
        for name in [*(f"experts.{i}" for i in range(experts)), "shared_experts"]:
            mlp(f"{at}.mlp.{name}", 2048)

    plain("model.embed_tokens.weight", 129280, hidden)
    for i in range(61):
        layer(f"model.layers.{i}", 256 if i >= 3 else 0)
    plain("model.norm.weight", hidden)
    plain("lm_head.weight", 129280, hidden)
    mtp = "model.layers.61"
    layer(mtp, 256)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        plain(f"{mtp}.{name}.weight", hidden)
    plain(f"{mtp}.eh_proj.weight", hidden, 2 * hidden)
    plain(f"{mtp}.embed_tokens.weight", 129280, hidden)
    plain(f"{mtp}.shared_head.head.weight", 129280, hidden)

    shards = 160
    per_shard, weight_map = sum(t[3] for t in tensors) / shards, {}
    done = number = 0
    while tensors:
        number += 1
        file, header, end = f"model-{number:05d}-of-{shards:05d}.safetensors", {}, 0
        while tensors and (done < number * per_shard or number == shards):
            name, dtype, shape, size = tensors.pop(0)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            weight_map[name] = file
            end, done = end + size, done + size
        text = json.dumps(header).encode()
        with (path / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256,
        "hidden_size": hidden,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def timed(command: list[str]) -> tuple[float, float, float]:
    """Run a command; return its wall time, its processor time and its peak memory in MiB."""
    os.sync()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    code = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r.returncode)"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, int(done.stdout.splitlines()[-1]) / 1024


def torpor(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "torpor", *map(str, arguments)]


def sha256sum(*folders: Path) -> list[str]:
    jobs = len(os.sched_getaffinity(0))
    files = " ".join(f"{folder}/*.safetensors" for folder in folders)
    return ["bash", "-c", f"ls -S {files} | xargs -P {jobs} -n 1 sha256sum"]


def ratios(tool, bound, rounds: int) -> dict[str, float]:
    """Run tool and bound in turn; how fast the tool is where the bound is 1."""
    walls = [(tool()[0], bound()[0]) for _ in range(rounds)]
    return {
        "tool_s": statistics.median(a for a, _ in walls),
        "bound_s": statistics.median(b for _, b in walls),
        "ratio": statistics.median(b / a for a, b in walls),
        "ratios": [round(b / a, 3) for a, b in walls],
    }


def measure(at: Path, args: argparse.Namespace) -> dict[str, object]:
    results: dict[str, object] = {"processors": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    source = write_folder(at / "source", args.gib, heads=True)
    tuned = write_folder(at / "tuned", args.gib, heads=False)
    startup = statistics.median(timed(torpor("--version"))[0] for _ in range(args.rounds))
    results["startup_s"] = startup

    def graft():
        shutil.rmtree(at / "out", ignore_errors=True)
        return timed(torpor("graft", "--heads", source, "--trunk", tuned, "--out", at / "out"))

    def copy():
        (at / "copy").unlink(missing_ok=True)
        return timed(["bash", "-c", f"cp {source}/mtp.safetensors {at}/copy && sync {at}/copy"])

    small = graft()
    out, receipt = at / "out", at / "receipt.json"

    def receive():
        receipt.unlink(missing_ok=True)
        return timed(torpor("verify", source, out, "--receipt", receipt))

    results["verify"] = ratios(
        lambda: timed(torpor("verify", source, out)), lambda: timed(sha256sum(source, out)), args.rounds
    )
    results["verify with a receipt"] = ratios(receive, lambda: timed(sha256sum(source, out)), args.rounds)
    memory = {f"{args.gib} GiB": (timed(torpor("verify", source, out))[2], small[2])}
    for path in (source, tuned, out):
        shutil.rmtree(path)
    source = write_folder(at / "source", args.large_gib, heads=True)
    tuned = write_folder(at / "tuned", args.large_gib, heads=False)
    results["graft"] = ratios(graft, copy, args.rounds)
    memory[f"{args.large_gib} GiB"] = (timed(torpor("verify", source, out))[2], graft()[2])
    (at / "copy").unlink()
    results["peak_mib"] = {size: {"verify": v, "graft": g} for size, (v, g) in memory.items()}
    for path in (source, tuned, out):
        shutil.rmtree(path)

    sparse = write_sparse_folder(at / "sparse")
    runs = [timed(torpor("inspect", sparse, "--json")) for _ in range(args.rounds)]
    results["inspect"] = {
        "wall_s": statistics.median(run[0] for run in runs),
        "processor_s": statistics.median(run[1] for run in runs),
        "best_wall_s": min(run[0] for run in runs),
    }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--large-gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.at) as at:
        results = measure(Path(at), args)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
