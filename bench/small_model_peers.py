#!/usr/bin/env python3
"""A real model (P22) in kvlab, in transformers and in llama.cpp, in one run: on few cores, or,
with --device=cuda and without llama.cpp, on a GPU.

    ./kvlab get smollm2
    python3 bench/small_model_peers.py --rounds=5 --python=PYTHON --llama-bench=PATH
    python3 bench/small_model_peers.py --device=cuda

PYTHON has torch, transformers and gguf; PATH is llama.cpp's llama-bench. What is not there is
left out, and named at the end. All read the same GGUF, with full attention and the same number of
threads: a prefill of 2048 tokens, and 64 decoded tokens after 512. kvlab computes with weights of
f32 and bf16, transformers with f32 (attention by sdpa), and llama.cpp with the file's own 4-bit
and 8-bit weights. On a GPU, transformers computes with bf16, too, and decodes with its default cache
and with a static one, for which it compiles the model.

The peers run one after the other, round by round, so that what else the machine does meets all of
them. A figure is the median over the rounds, with the lowest and highest. --out also writes every
round's figures, a JSON object a line. Libraries choose their kernels by the processor: variables
that choose others (OPENBLAS_CORETYPE, MKL_ENABLE_INSTRUCTIONS, ...) are taken out.
"""
import argparse
import datetime
import json
import os
import re
import shutil
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PREFILL, CONTEXT, DECODED = 2048, 512, 64
COLUMNS = f"prefill of {PREFILL}", f"decode after {CONTEXT}"


class Failed(Exception):
    pass


def run(command, **changes):
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("OPENBLAS_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_"))}
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **changes})
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Failed(f"{command[0]}: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout


def kvlab(args):
    """Tokens/s of both dtypes: {name: (prefill, decode)}."""
    out = run([os.path.join(ROOT, "kvlab"), "bench", "P22", f"--device={args.device}", "--json"],
              OMP_NUM_THREADS=str(args.threads))
    speeds = {}
    for row in map(json.loads, out.splitlines()):
        if row["id"] != "P22":
            continue
        if "error" in row:
            raise Failed(row["error"])
        dtype, what = re.search(r", (\w+), (\w+)", row["name"]).groups()
        tokens = PREFILL if what == "prefill" else 1
        speeds.setdefault(f"kvlab {dtype}", []).append(tokens / row["us"] * 1e6)
    if not speeds:
        raise Failed("bench P22 has no cases; ./kvlab get smollm2 fetches its model")
    return speeds


def transformers(args):
    speeds = {}
    ways = [("f32", "float32", False)]
    if args.device == "cuda":
        ways += [("bf16", "bfloat16", False), ("bf16, static", "bfloat16", True)]
    for name, dtype, is_static in ways:
        out = run([args.python, os.path.join(ROOT, "tools/smollm2_goldens.py"), "--gguf", args.gguf,
                   "--time", "--attention=sdpa", f"--threads={args.threads}",
                   f"--device={args.device}", f"--dtype={dtype}", f"--prefill={PREFILL}",
                   f"--context={CONTEXT}"] + ["--static"] * is_static)
        found = re.search(r"prefill of \d+: ([\d.]+) tokens/s; decode after \d+: ([\d.]+)", out)
        speeds[f"transformers {name}"] = [float(x) for x in found.groups()]
    return speeds


def llama_cpp(args):
    command = [args.llama_bench, "-m", args.gguf, "-t", str(args.threads), "-o", "json", "-r", "3"]
    folder = os.path.dirname(os.path.abspath(args.llama_bench))
    libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    speeds = []
    for shape in (["-p", PREFILL, "-n", 0], ["-p", 0, "-n", DECODED, "-d", CONTEXT]):
        rows = json.loads(run(command + [str(x) for x in shape], LD_LIBRARY_PATH=libraries))
        speeds.append(statistics.median(rows[0]["samples_ts"]))
    return {"llama.cpp Q4_1": speeds}


def find(args):
    """The peers that are here, and for each that is not, why."""
    peers, missing = [("kvlab", kvlab)], []
    try:
        run([args.python, "-c", "import torch, transformers, gguf"])
        peers.append(("transformers", transformers))
    except (Failed, FileNotFoundError) as problem:
        missing.append(f"transformers: {problem} (--python=PYTHON names another Python)")
    if args.device == "cuda":
        missing.append("llama.cpp: it is measured on a CPU only")
    elif args.llama_bench and shutil.which(args.llama_bench):
        peers.append(("llama.cpp", llama_cpp))
    else:
        missing.append(f"llama.cpp: no {args.llama_bench or 'llama-bench'} "
                       "(--llama-bench=PATH says where it is)")
    return peers, missing


def processor(args):
    if args.device == "cuda":
        return run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()[0]
    with open("/proc/cpuinfo") as f:
        return re.search(r"model name\s*: (.*)", f.read()).group(1)


def commit():
    """Of the checkout, or of the bundle, which has it in a file."""
    try:
        with open(os.path.join(ROOT, "commit")) as f:
            return f.read().strip()
    except FileNotFoundError:
        return run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()


def measure(args, peers, out):
    """{name: [(prefill, decode) of each round]}"""
    speeds = {}
    for round in range(1, args.rounds + 1):
        for _, peer in peers:
            for name, (prefill, decode) in peer(args).items():
                speeds.setdefault(name, []).append((prefill, decode))
                row = {"id": "P22", "round": round, "name": name, COLUMNS[0]: prefill,
                       COLUMNS[1]: decode, "load": os.getloadavg()[0]}
                print(f"round {round}: {name:18} {prefill:8.1f} {decode:8.1f} tokens/s",
                      file=sys.stderr, flush=True)
                print(json.dumps(row), file=out, flush=True)
    return speeds


def show(speeds):
    print(f"\n| tokens/s | {COLUMNS[0]} | {COLUMNS[1]} |\n|---|---|---|")
    for name, rounds in speeds.items():
        cells = [f"{statistics.median(x):.1f} ({min(x):.1f} to {max(x):.1f})" for x in zip(*rounds)]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", help="the model; default: what ./kvlab get smollm2 says")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--llama-bench", default=shutil.which("llama-bench"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="a file for the figures of every round")
    args = parser.parse_args()
    try:
        args.gguf = args.gguf or run([os.path.join(ROOT, "kvlab"), "get", "smollm2"]).strip()
        peers, missing = find(args)
        with open(args.out or os.devnull, "w") as out:
            head = {"id": "header", "date": datetime.date.today().isoformat(), "processor": processor(args),
                    "threads": args.threads, "model": os.path.basename(args.gguf),
                    "commit": commit()}
            print(json.dumps(head), file=out, flush=True)
            show(measure(args, peers, out))
    except Failed as problem:
        sys.exit(f"small_model_peers: {problem}")
    for line in missing:
        print(f"not measured: {line}")


if __name__ == "__main__":
    main()
