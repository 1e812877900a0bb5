#!/usr/bin/env python3
"""What PyTorch takes for the work of `kvlab bench`, on the same shapes.

    ./kvlab bench --json > ours.jsonl
    python3 bench/peers.py --ours ours.jsonl        (needs PyTorch with CUDA)

Times are medians of 31 between events, after an untimed 100 ms and, before each repeat, a
read of 512 MiB that empties the L2: as in lua/kvlab/shell/bench.lua. Contiguous KV, where ours is
paged. A peer that is not there is a row that says why. --json: a row is an object a line.
"""
import argparse
import json
import math
import signal
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as problem:
    sys.exit(f"peers.py needs PyTorch 2.3 or later: {problem}")

HEADS, KV_HEADS, DIM = 32, 8, 128
REPEATS, SETTLE_S, COMPILE_S = 31, 0.1, 60


def stop(*_):
    raise TimeoutError(f"not done after {COMPILE_S} s")


class Timer:
    def __init__(self):
        self.memory = torch.rand(1 << 27, device="cuda")
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def __call__(self, work):
        """Microseconds of one call."""
        start, end = self.events
        work()
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self.memory.sum()
            work()
            torch.cuda.synchronize()
        times = []
        for _ in range(REPEATS):
            self.memory.sum()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


# ---- the cases: each returns the work of its peers, {name: function} -----------------


def attention(batch, queries, keys, causal, backends):
    """KV heads are repeated without copies where a backend cannot group them."""
    q = randn(batch, HEADS, queries, DIM)
    k, v = randn(batch, KV_HEADS, keys, DIM), randn(batch, KV_HEADS, keys, DIM)

    def call(backend):
        def work():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                      enable_gqa=True)
        return work

    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
    return {f"torch {name}": call(names[name]) for name in backends}


def topk(rows, n, k, clustered=False):
    x = randn(rows, n, dtype=torch.float32)
    if clustered:
        x = 1 + 1e-3 * x
    return {"torch.topk": lambda: torch.topk(x, k, sorted=False)}


def hash_select(batch, blocks, bits=64):
    """Queries hashed by random planes, Hamming distance to every block, the nearest 30%."""
    planes, query = randn(DIM, bits), randn(batch, DIM)
    codes = torch.randint(-2**62, 2**62, (batch, blocks), device="cuda")
    weights = 2 ** torch.arange(bits - 1, device="cuda")
    masks = [0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F]
    k = math.ceil(0.3 * blocks)

    def work(planes, query, codes):
        ones = (query @ planes > 0).long()
        code = (ones[:, :-1] * weights).sum(1) - (ones[:, -1] << 62) * 2
        x = code[:, None] ^ codes
        x = (x & masks[0]) + ((x >> 1) & masks[0])
        x = (x & masks[1]) + ((x >> 2) & masks[1])
        x = (x & masks[2]) + ((x >> 4) & masks[2])
        for step in (8, 16, 32):
            x = x + (x >> step)
        return torch.topk((x & 127).float(), k, largest=False, sorted=False)[1]

    compiled = torch.compile(work)
    return {"torch eager": lambda: work(planes, query, codes),
            "torch compiled": lambda: compiled(planes, query, codes)}


def rmsnorm(tokens):
    x, weight = randn(tokens, 4096), randn(4096)
    residual = torch.zeros_like(x)

    def work():
        residual.add_(x)
        return F.rms_norm(residual, (4096,), weight, 1e-5)
    return {"torch eager": work}


def silu_mul(tokens):
    gate, up = randn(tokens, 14336), randn(tokens, 14336)
    return {"torch eager": lambda: F.silu(gate) * up}


def cases():
    """(id, the name of our row, the peers of it)"""
    for row, batch, keys in (("P1", 16, 32768), ("P2", 1, 32768), ("P2", 1, 131072),
                             ("P3", 8, 4096), ("P3", 16, 8192), ("P3", 64, 4096)):
        yield (row, f"paged decode, {batch} x {keys}",
               lambda b=batch, n=keys: attention(b, 1, n, False, ("cudnn",)))
    for n in (16384, 32768):
        yield ("P5", f"prefill, causal, {n}",
               lambda n=n: attention(1, n, n, True, ("cudnn", "flash2")))
    yield ("P5", "prefill, 4096 over 32768, all seen",
           lambda: attention(1, 4096, 32768, False, ("cudnn", "flash2")))
    for rows, n, k, clustered in ((1, 8192, 256, 0), (64, 8192, 2048, 0),
                                  (1, 131072, 2048, 0), (64, 131072, 2048, 0),
                                  (64, 131072, 2048, 1)):
        name = f"top-k [{rows}, {n}] k {k}" + (", clustered" if clustered else "")
        yield "P6", name, lambda r=rows, n=n, k=k, c=clustered: topk(r, n, k, c)
    for batch, blocks in ((1, 8192), (64, 8192), (64, 65536)):
        yield ("P7", f"hash select, {batch} x {blocks} blocks",
               lambda b=batch, n=blocks: hash_select(b, n))
    for n in (8192, 64):
        yield "E1", f"rmsnorm with residual, {n} tokens", lambda n=n: rmsnorm(n)
        yield "E3", f"silu_mul, {n} tokens", lambda n=n: silu_mul(n)


def read_ours(path):
    """Our rows' times by id and name."""
    rows = {}
    try:
        with open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as problem:
                    sys.exit(f"{path}, line {number} is no JSON: {problem}")
                if "us" in row:
                    rows[row["id"], row["name"]] = row["us"]
    except OSError as problem:
        sys.exit(str(problem))
    return rows


def first_line(problem):
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:100]


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("ids", nargs="*", help="P1 P5 …; all of them when there are none")
    words.add_argument("--ours", metavar="FILE", help="what `kvlab bench --json` printed")
    words.add_argument("--json", action="store_true", help="an object a line")
    given = words.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"peers.py: PyTorch {torch.__version__} finds no CUDA device")
    known = {row for row, _, _ in cases()}
    for row in given.ids:
        if row not in known:
            sys.exit(f"peers.py: no peers for {row}; there are {' '.join(sorted(known))}")
    ours = read_ours(given.ours) if given.ours else {}
    device = torch.cuda.get_device_name()
    if not given.json:
        print(f"{device}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, "
              f"cuDNN {torch.backends.cudnn.version()}")
    signal.signal(signal.SIGALRM, stop)
    timer = Timer()
    for row, name, make in cases():
        if given.ids and row not in given.ids:
            continue
        for peer, work in make().items():
            found = {"id": row, "name": name, "peer": peer, "us": None}
            signal.alarm(COMPILE_S)
            try:
                found["us"] = timer(work)
            except Exception as problem:   # out of memory, no such backend, no compiler
                found["error"] = first_line(problem)
            signal.alarm(0)
            if (row, name) in ours:
                found["ours_us"] = ours[row, name]
                if found["us"]:
                    found["ours_by_peer"] = ours[row, name] / found["us"]
            found.update(device=device, torch=torch.__version__)
            show(found, given.json)


def show(row, as_json):
    if as_json:
        print(json.dumps(row), flush=True)
        return
    took = f"{row['us']:10.1f} us" if row["us"] else "       none   "
    line = f"{row['id']:4} {row['name']:44} {row['peer']:14} {took}"
    if "ours_us" in row:
        line += f"  ours {row['ours_us']:10.1f} us"
    if "ours_by_peer" in row:
        line += f"  {row['ours_by_peer']:6.3f}"
    print(line + ("  " + row["error"] if "error" in row else ""), flush=True)


if __name__ == "__main__":
    main()
