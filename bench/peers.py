#!/usr/bin/env python3
"""What other people's kernels take for the work of `kvlab bench`, on the same shapes.

    ./kvlab bench --json > ours.jsonl
    python3 bench/peers.py --ours ours.jsonl        (needs PyTorch with CUDA)

Besides PyTorch (cuDNN, FlashAttention 2, eager and compiled), these are measured where this
Python has them: FlashInfer, FlashAttention 3 (flash_attn_interface or sgl_kernel), vLLM,
DeepGEMM, FlashMLA and transformers. A peer that is not here is a row that says why, and is named again
at the end. Every result is checked first, against another way to compute some of its rows.

Times are medians of 31 between events, after an untimed 100 ms and, before each repeat, a
read of 512 MiB that empties the L2: as in lua/kvlab/shell/bench.lua. --json: a row is an
object a line.
"""
import argparse
import json
import os
import signal
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))

try:
    import torch
    import torch.nn.attention  # 2.3 or later
except ImportError as problem:
    sys.exit(f"peers.py needs PyTorch 2.3 or later: {problem}")

import peer_attention  # noqa: E402
import peer_experts  # noqa: E402
import peer_latent  # noqa: E402
import peer_others  # noqa: E402
from peer_base import Missing  # noqa: E402

REPEATS, SETTLE_S, COMPILE_S = 31, 0.1, 60


def stop(*_):
    raise TimeoutError("not done in time")


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


def cases():
    """(id, the name of our row, what makes the case)"""
    yield from peer_attention.cases()
    yield from peer_others.cases()
    yield from peer_latent.cases()
    yield from peer_experts.cases()


def measure(case, make, timer, found):
    """Puts the time of a peer into its row, or why it has none."""
    signal.alarm(getattr(case, "SECONDS", COMPILE_S))
    try:
        work = make()
        case.check(work())
        found["us"] = timer(work)
    except Missing as problem:
        found["skipped"] = first_line(problem)
    except AssertionError as problem:
        found["error"] = "wrong result: " + first_line(problem)
    except Exception as problem:   # out of memory, no such backend, no compiler
        found["error"] = first_line(problem)
    signal.alarm(0)


def run(given, timer, say):
    """Measures the cases that were asked for. Returns what was skipped: {why: ids}."""
    ours = read_ours(given.ours) if given.ours else {}
    skipped = {}
    for row, name, make in cases():
        if given.ids and row not in given.ids:
            continue
        case = make()
        for peer, prepare in case.peers().items():
            found = {"id": row, "name": name, "peer": peer, "us": None}
            measure(case, prepare, timer, found)
            if "skipped" in found:
                skipped.setdefault(found["skipped"], set()).add(row)
            if (row, name) in ours:
                found["ours_us"] = ours[row, name]
                if found["us"]:
                    found["ours_by_peer"] = ours[row, name] / found["us"]
            say(found)
            prepare = None
            release()
        del case
        release()
    return skipped


def release():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


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


def text(row):
    took = f"{row['us']:10.1f} us" if row["us"] else "       none   "
    line = f"{row['id']:7} {row['name']:50} {row['peer']:38} {took}"
    if "ours_us" in row:
        line += f"  ours {row['ours_us']:10.1f} us"
    if "ours_by_peer" in row:
        line += f"  {row['ours_by_peer']:6.3f}"
    return line + "  " + row.get("error", row.get("skipped", ""))


def main():
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("ids", nargs="*", help="P1 P5 …; all of them when there are none")
    words.add_argument("--ours", metavar="FILE", help="what `kvlab bench --json` printed")
    words.add_argument("--json", action="store_true", help="an object a line")
    given = words.parse_args()
    known = {row for row, _, _ in cases()}
    for row in given.ids:
        if row not in known:
            sys.exit(f"peers.py: no peers for {row}; there are {' '.join(sorted(known))}")
    if not torch.cuda.is_available():
        sys.exit(f"peers.py: PyTorch {torch.__version__} finds no CUDA device")
    device = torch.cuda.get_device_name()
    if not given.json:
        print(f"{device}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}, "
              f"cuDNN {torch.backends.cudnn.version()}")

    def say(row):
        row.update(device=device, torch=torch.__version__)
        print(json.dumps(row) if given.json else text(row).rstrip(), flush=True)

    signal.signal(signal.SIGALRM, stop)
    skipped = run(given, Timer(), say)
    for why, ids in skipped.items():
        if not given.json:
            print(f"skipped in {' '.join(sorted(ids))}: {why}")


if __name__ == "__main__":
    main()
