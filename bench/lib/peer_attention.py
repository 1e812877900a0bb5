"""P1 to P5 and P17: attention of other people, over the same shapes as ours."""
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import peer_base as base
from peer_base import Case, expect, int32, package, randn

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
GROUP = HEADS // KV_HEADS
SCALE = 1 / math.sqrt(DIM)  # of decode
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}


def sdpa(q, k, v, causal, backend):
    def work():
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                  enable_gqa=True)
    return work


def attend(q, k, v):
    """Softmax attention in f32: q [rows, dim], k and v [tokens, dim]."""
    weights = torch.softmax(q.float() @ k.float().T / math.sqrt(q.shape[-1]), dim=-1)
    return weights @ v.float()


def fa3(*functions):
    """FlashAttention 3: its own package, or the build that comes with SGLang."""
    try:
        return package("flash_attn_interface", *functions)
    except base.Missing as own:
        try:
            return package("sgl_kernel.flash_attn", *functions)
        except base.Missing as other:
            raise base.Missing(f"{own}; {other}") from None


class Decode(Case):
    """One query a sequence over pages in random order, [pages, 2, kv_heads, PAGE, DIM]."""

    def __init__(self, lens, dtype=torch.bfloat16):
        self.lens = lens
        self.width = math.ceil(max(lens) / PAGE)
        counts = [math.ceil(n / PAGE) for n in lens]
        order = torch.randperm(sum(counts), device=base.DEVICE).int()
        self.lists = list(order.split(counts))
        self.table = torch.zeros(len(lens), self.width, device=base.DEVICE,
                                 dtype=torch.int32)
        for row, pages in zip(self.table, self.lists):
            row[:len(pages)] = pages
        self.pool = torch.empty(sum(counts), 2, KV_HEADS, PAGE, DIM, device=base.DEVICE,
                                dtype=dtype)
        for part in self.pool.split(8192):
            part.copy_(randn(*part.shape))
        self.q = randn(len(lens), HEADS, DIM)
        self.seq_lens = int32(lens)

    def same_lengths(self):
        if len(set(self.lens)) > 1:
            raise base.Missing("contiguous KV has one length for all sequences")

    def half(self, sequence, which):
        """K (0) or V (1) of a sequence: [kv_heads, tokens, DIM]."""
        pages = self.pool[self.lists[sequence].long(), which]
        flat = pages.permute(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)
        return flat[:, :self.lens[sequence]]

    def check(self, out):
        out = out.reshape(len(self.lens), HEADS, DIM)
        for s in {0, len(self.lens) - 1}:
            k, v = self.half(s, 0), self.half(s, 1)
            for g in {0, KV_HEADS - 1}:
                rows = slice(g * GROUP, (g + 1) * GROUP)
                expect(out[s, rows], attend(self.q[s, rows], k[g], v[g]), 0.02)

    def cudnn(self):
        self.same_lengths()
        k, v = (torch.stack([self.half(s, which) for s in range(len(self.lens))])
                for which in (0, 1))
        return sdpa(self.q[:, :, None], k, v, False, "cudnn")

    def flashinfer(self):
        module = package("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
        space = torch.zeros(256 << 20, dtype=torch.uint8, device=base.DEVICE)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(space, "HND",
                                                            use_tensor_cores=True)
        starts = [0]
        for pages in self.lists:
            starts.append(starts[-1] + len(pages))
        last = [(n - 1) % PAGE + 1 for n in self.lens]
        wrapper.plan(int32(starts), torch.cat(self.lists), int32(last), HEADS, KV_HEADS,
                     DIM, PAGE, q_data_type=self.q.dtype, kv_data_type=self.pool.dtype)
        return lambda: wrapper.run(self.q, self.pool)

    def fa3(self):
        module = fa3("flash_attn_with_kvcache")
        k, v = (self.pool[:, which].transpose(1, 2).contiguous() for which in (0, 1))
        q = self.q[:, None]
        return lambda: module.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=self.seq_lens, page_table=self.table, causal=True)

    def vllm(self):
        module = package("vllm._custom_ops", "paged_attention_v2")
        x = 16 // self.pool.element_size()
        pages, seqs = len(self.pool), len(self.lens)
        k = self.pool[:, 0].reshape(pages, KV_HEADS, PAGE, DIM // x, x)
        k = k.permute(0, 1, 3, 2, 4).contiguous()
        v = self.pool[:, 1].transpose(2, 3).contiguous()
        longest = self.width * PAGE
        parts = math.ceil(longest / 512)

        def f32(*shape):
            return torch.empty(*shape, device=base.DEVICE, dtype=torch.float32)
        out = torch.empty_like(self.q)
        sums, tops = f32(seqs, HEADS, parts), f32(seqs, HEADS, parts)
        partial = torch.empty(seqs, HEADS, parts, DIM, device=base.DEVICE,
                              dtype=self.q.dtype)
        one = torch.ones(1, device=base.DEVICE)

        def work():
            module.paged_attention_v2(out, sums, tops, partial, self.q, k, v, KV_HEADS,
                                      SCALE, self.table, self.seq_lens, PAGE, longest,
                                      None, "auto", one, one)
            return out
        return work

    def peers(self):
        peers = {"torch cudnn, contiguous": self.cudnn, "FlashInfer": self.flashinfer,
                 "FlashAttention 3": self.fa3, "vLLM V2": self.vllm}
        if self.pool.dtype != torch.bfloat16:
            return {"FlashInfer": self.flashinfer}
        return peers


class SparseDecode(Decode):
    """A list of pages for each KV head: a KV head is a request with one KV head."""

    def __init__(self, lens, share):
        super().__init__(lens)
        count = math.ceil(share * self.width)
        picks = torch.stack([torch.randperm(self.width, device=base.DEVICE)[:count]
                             .sort().values for _ in range(len(lens) * KV_HEADS)])
        rows = self.table.repeat_interleave(KV_HEADS, 0)
        self.chosen = rows.gather(1, picks).int()
        heads = torch.arange(KV_HEADS, device=base.DEVICE).repeat(len(lens))[:, None]
        # A page of a head is a row of flat; its V lies KV_HEADS rows behind its K.
        self.rows = (self.chosen * (2 * KV_HEADS) + heads).int()
        flat = self.pool.reshape(-1, 1, PAGE, DIM)
        self.k, self.v = flat[:-KV_HEADS], flat[KV_HEADS:]
        self.tokens = count * PAGE

    def check(self, out):
        out = out.reshape(len(self.rows), GROUP, DIM)
        q = self.q.reshape(len(self.rows), GROUP, DIM)
        for r in {0, len(self.rows) - 1}:
            rows = self.rows[r].long()
            k, v = self.k[rows].reshape(-1, DIM), self.v[rows].reshape(-1, DIM)
            expect(out[r], attend(q[r], k, v), 0.02)

    def flashinfer(self):
        module = package("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")
        space = torch.zeros(256 << 20, dtype=torch.uint8, device=base.DEVICE)
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(space, "HND",
                                                            use_tensor_cores=True)
        requests, count = self.rows.shape
        wrapper.plan(int32(range(0, (requests + 1) * count, count)), self.rows.flatten(),
                     int32([PAGE] * requests), GROUP, 1, DIM, PAGE,
                     q_data_type=self.q.dtype, kv_data_type=self.pool.dtype)
        q = self.q.reshape(requests, GROUP, DIM)
        return lambda: wrapper.run(q, (self.k, self.v))

    def fa3(self):
        module = fa3("flash_attn_with_kvcache")
        k, v = self.k.transpose(1, 2), self.v.transpose(1, 2)  # one head: no copy
        q = self.q.reshape(-1, 1, GROUP, DIM)
        lens = int32([self.tokens] * len(q))
        return lambda: module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens,
                                                      page_table=self.rows, causal=True)

    def peers(self):
        return {"FlashInfer, heads as requests": self.flashinfer,
                "FlashAttention 3, heads as requests": self.fa3}


class Prefill(Case):
    """Contiguous: q [queries, heads, dim] over k and v [keys, kv_heads, dim]. Causal: the
    queries are the newest tokens; otherwise each sees all keys."""

    def __init__(self, queries, keys, causal, dim=DIM):
        self.causal = causal
        self.q = randn(queries, HEADS, dim)
        self.k, self.v = randn(keys, KV_HEADS, dim), randn(keys, KV_HEADS, dim)

    def check(self, out):
        out = out.reshape(-1, *self.q.shape[1:])
        queries, keys = len(self.q), len(self.k)
        for head in (0, HEADS - 1):
            g = head // GROUP
            for row in (0, 1, queries // 3, queries - 1):
                seen = keys - queries + row + 1 if self.causal else keys
                want = attend(self.q[row, head][None], self.k[:seen, g], self.v[:seen, g])
                expect(out[row, head], want[0], 0.02)

    def torch(self, backend):
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (self.q, self.k, self.v))
        work = sdpa(q, k, v, self.causal, backend)
        return lambda: work()[0].transpose(0, 1)

    def fa3(self):
        module = fa3("flash_attn_func")

        def work():
            out = module.flash_attn_func(self.q[None], self.k[None], self.v[None],
                                         causal=self.causal)
            return out[0] if isinstance(out, tuple) else out
        return work

    def flashinfer(self):
        module = package("flashinfer", "single_prefill_with_kv_cache")
        return lambda: module.single_prefill_with_kv_cache(
            self.q, self.k, self.v, causal=self.causal, backend="auto")

    def peers(self):
        return {"torch cudnn": lambda: self.torch("cudnn"),
                "torch flash2": lambda: self.torch("flash2"),
                "FlashAttention 3": self.fa3, "FlashInfer": self.flashinfer}


def zipf(seqs, longest):
    return [max(1, longest // i) for i in range(1, seqs + 1)]


def cases():
    """(id, the name of our row, what makes the case)"""
    for row, batch, keys in (("P1", 16, 32768), ("P2", 1, 32768), ("P2", 1, 131072),
                             ("P3", 8, 4096), ("P3", 16, 8192), ("P3", 64, 4096)):
        yield (row, f"paged decode, {batch} x {keys}",
               lambda b=batch, n=keys: Decode([n] * b))
    yield ("P1-f8", "paged decode, 16 x 32768, f8e4m3 KV",
           lambda: Decode([32768] * 16, torch.float8_e4m3fn))
    yield ("P1-zipf", "paged decode, 32 of 131072 / i tokens",
           lambda: Decode(zipf(32, 131072)))
    for batch, keys, share in ((16, 32768, 0.1), (1, 131072, 0.05)):
        yield ("P4", f"sparse decode, {100 * share:g}% of {batch} x {keys}",
               lambda b=batch, n=keys, s=share: SparseDecode([n] * b, s))
    for n in (4096, 16384, 32768):
        yield "P5", f"prefill, causal, {n}", lambda n=n: Prefill(n, n, True)
    yield ("P5", "prefill, 4096 over 32768, all seen",
           lambda: Prefill(4096, 32768, False))
    for dim in (64, 96, 192, 256):
        yield ("P17", f"prefill, causal, 16384, head_dim {dim}",
               lambda dim=dim: Prefill(16384, 16384, True, dim))
