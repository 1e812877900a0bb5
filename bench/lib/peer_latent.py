"""M1 to M3, M5 and M6: what others take for attention over latents (MLA, absorbed).

A key has 576 numbers, one for all heads, and its first 512 are the value.
"""
import torch

import peer_base as base
from peer_base import Case, expect, int32, package, randn
from peer_others import eager_and_compiled

DIM, VALUE, PAGE, SCALE = 576, 512, 64, 192 ** -0.5


def attend(q, keys):
    """q [..., heads, 576] over keys [..., n, 576]."""
    weights = (SCALE * (q @ keys.transpose(-1, -2)).float()).softmax(-1).to(q.dtype)
    return weights @ keys[..., :VALUE]


class Latents(Case):
    """One new token of each sequence, over keys that lie one after the other: torch knows no
    pages, and FlashMLA's are in that order."""

    def __init__(self, seqs, length, heads):
        self.q, self.keys = randn(seqs, heads, DIM), randn(seqs, length, DIM)

    def check(self, out):
        out = out.reshape(*self.q.shape[:2], VALUE)
        for s in {0, len(self.q) - 1}:
            expect(out[s], attend(self.q[s].float(), self.keys[s].float()), 0.02)

    def flash_mla(self):
        module = package("flash_mla", "get_mla_metadata", "flash_mla_with_kvcache")
        seqs, heads, _ = self.q.shape
        pages = self.keys.reshape(-1, PAGE, 1, DIM)
        table = int32(range(len(pages))).reshape(seqs, -1)
        lens = int32([self.keys.shape[1]] * seqs)
        plan = module.get_mla_metadata(lens, heads, 1)
        return lambda: module.flash_mla_with_kvcache(
            self.q[:, None], pages, table, lens, VALUE, *plan, softmax_scale=SCALE)[0]

    def peers(self):
        return {**eager_and_compiled(attend, self.q, self.keys), "FlashMLA": self.flash_mla}


class ListedLatents(Case):
    """Rows of q that each read tokens of their own: of their sequence in decode, of one prompt
    otherwise. torch gathers them first."""

    def __init__(self, seqs, rows, length, heads, k):
        self.q = randn(rows, heads, DIM)
        self.keys = randn(seqs * length, DIM)
        first = torch.arange(rows, device=base.DEVICE)[:, None] // (rows // seqs) * length
        self.listed = first + torch.randint(0, length, (rows, k), device=base.DEVICE)

    @staticmethod
    def work(q, keys, listed):
        return attend(q, keys[listed])

    def check(self, out):
        for r in {0, len(self.q) - 1}:
            expect(out[r], attend(self.q[r].float(), self.keys[self.listed[r]].float()), 0.02)

    def peers(self):
        return eager_and_compiled(self.work, self.q, self.keys, self.listed)


def cases():
    for row, seqs, length, heads in (("M5", 128, 4096, 128), ("M5", 1, 32768, 128),
                                     ("M5", 16, 32768, 128), ("M6", 1, 32768, 16),
                                     ("M6", 16, 32768, 16), ("M6", 128, 4096, 16)):
        yield (row, f"latents, {heads} heads, {seqs} x {length}",
               lambda s=seqs, n=length, h=heads: Latents(s, n, h))
    for row, rows, heads in (("M1", 1, 128), ("M1", 16, 128), ("M1", 64, 128),
                             ("M1", 128, 128), ("M2", 8, 8), ("M2", 8, 16), ("M2", 8, 64)):
        yield (row, f"latents, {heads} heads, 2048 listed for {rows} rows of decode",
               lambda r=rows, h=heads: ListedLatents(r, r, 32768, h, 2048))
    yield ("M3", "latents, 128 heads, 2048 listed for 2048 rows of a prompt",
           lambda: ListedLatents(1, 2048, 32768, 128, 2048))
