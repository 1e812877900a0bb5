"""X1: what PyTorch takes for a layer of experts."""
import torch
import torch.nn.functional as F

import peer_base as base
from peer_base import Case, Missing, expect, randn

SHAPES = (("GLM-4.7-Flash", 2048, 1536, 64, 4), ("Qwen3-30B-A3B", 2048, 768, 128, 8),
          ("DeepSeek-V3", 7168, 2048, 256, 8))


def grouped():
    """The product of the rows of each group with a matrix of its own."""
    found = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if not found:
        raise Missing(f"torch {torch.__version__} has no grouped_mm")
    return found


class Experts(Case):
    def __init__(self, hidden, inner, experts, active, tokens):
        self.active = active
        self.x = randn(tokens, hidden)
        self.chosen = torch.rand(tokens, experts, device=base.DEVICE).topk(active).indices
        self.weights = torch.full((tokens, active), 1 / active, device=base.DEVICE)
        self.gate_up = torch.empty(experts, 2 * inner, hidden, device=base.DEVICE,
                                   dtype=torch.bfloat16).normal_(std=hidden**-0.5)
        self.down = torch.empty(experts, hidden, inner, device=base.DEVICE,
                                dtype=torch.bfloat16).normal_(std=inner**-0.5)

    def work(self, multiply):
        pairs = self.chosen.flatten()
        order = pairs.argsort()
        counts = torch.zeros(len(self.down), dtype=torch.int32, device=base.DEVICE)
        ends = counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int32))
        ends = ends.cumsum(0, dtype=torch.int32)
        rows = order // self.active
        gate, up = multiply(self.x[rows], self.gate_up.mT, offs=ends).chunk(2, -1)
        y = multiply(F.silu(gate) * up, self.down.mT, offs=ends)
        y = y * self.weights.flatten()[order, None]
        return torch.zeros_like(self.x).index_add_(0, rows, y.to(self.x.dtype))

    def check(self, out):
        want = 0
        for e, weight in zip(self.chosen[-1], self.weights[-1]):
            gate, up = (self.gate_up[e].float() @ self.x[-1].float()).chunk(2)
            want = want + weight * (self.down[e].float() @ (F.silu(gate) * up))
        expect(out[-1], want, 0.03)

    def replayed(self):
        """One launch for the host: its time is the device's."""
        multiply, graph = grouped(), torch.cuda.CUDAGraph()
        self.work(multiply)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = self.work(multiply)

        def replay():
            graph.replay()
            return out
        return replay

    def peers(self):
        return {"torch grouped_mm": lambda: lambda m=grouped(): self.work(m),
                "torch grouped_mm, replayed": self.replayed}


def cases():
    """(id, the name of our row, what makes the case)"""
    for name, *sizes in SHAPES:
        for tokens in (1, 16, 64, 512, 4096):
            yield ("X1", f"experts of {name}, tokens: {tokens}",
                   lambda s=tuple(sizes), n=tokens: Experts(*s, n))
