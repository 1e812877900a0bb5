"""P6 to P8, P11, P13 and E: what others take for selecting, scoring, logits and steps."""
import math

import torch
import torch.nn.functional as F

import peer_base as base
from peer_base import Case, expect, int32, package, randn


class TopK(Case):
    def __init__(self, rows, n, k, kind=None):
        self.k = k
        self.x = randn(rows, n, dtype=torch.float32)
        if kind == "clustered":
            self.x = 1 + 1e-3 * self.x
        if kind == "8 values":
            self.x = torch.randint(0, 8, (rows, n), device=base.DEVICE).float()

    def check(self, out):
        values, indices = out
        for row in {0, len(self.x) - 1}:
            want = self.x[row].sort(descending=True).values[:self.k]
            picked = self.x[row][indices[row].long()].sort(descending=True).values
            if len(set(indices[row].tolist())) != self.k:
                raise AssertionError("an index occurs twice")
            expect(picked, want, 0, "what was picked")
            expect(values[row].sort(descending=True).values, want, 0, "the values")

    def flashinfer(self):
        module = package("flashinfer", "top_k")
        return lambda: module.top_k(self.x, self.k, sorted=False)

    def peers(self):
        return {"torch.topk": lambda: lambda: torch.topk(self.x, self.k, sorted=False),
                "FlashInfer": self.flashinfer}


def popcount(x):
    """The number of ones of i64 below 2^63."""
    for mask, step in ((0x5555555555555555, 1), (0x3333333333333333, 2),
                       (0x0F0F0F0F0F0F0F0F, 4)):
        x = (x & mask) + ((x >> step) & mask)
    for step in (8, 16, 32):
        x = x + (x >> step)
    return x & 127


def eager_and_compiled(work, *given):
    compiled = torch.compile(work)
    return {"torch eager": lambda: lambda: work(*given),
            "torch compiled": lambda: lambda: compiled(*given)}


class HashSelect(Case):
    """A query is hashed by random planes; the nearest 30% of the blocks are selected."""

    def __init__(self, batch, blocks, bits=63):
        self.planes, self.query = randn(base_dim(), bits), randn(batch, base_dim())
        self.codes = torch.randint(0, 2**62, (batch, blocks), device=base.DEVICE)
        self.weights = 2 ** torch.arange(bits, device=base.DEVICE)
        self.k = math.ceil(0.3 * blocks)

    def code(self, planes, query):
        return ((query @ planes > 0).long() * self.weights).sum(1)

    def work(self, planes, query, codes):
        distance = popcount(self.code(planes, query)[:, None] ^ codes)
        return torch.topk(distance.float(), self.k, largest=False, sorted=False)[1]

    def check(self, out):
        code = self.code(self.planes, self.query)[0].item()
        distances = torch.tensor([bin(code ^ c).count("1") for c in self.codes[0].tolist()])
        got = distances[out[0].cpu()].sort().values
        expect(got, distances.sort().values[:self.k], 0, "the distances")

    def peers(self):
        return eager_and_compiled(self.work, self.planes, self.query, self.codes)


def base_dim():
    return 128


class QuestScores(Case):
    """sum over d of max(q min, q max), the best of a group: [seqs, kv_heads, blocks]."""

    def __init__(self, seqs, blocks):
        self.q = randn(seqs, 8, 4, 128)
        middle = randn(seqs, blocks, 8, 128)
        self.low, self.high = middle - 1, middle + 1

    @staticmethod
    def work(q, low, high):
        low, high = (x.permute(0, 2, 1, 3)[:, :, None] for x in (low, high))
        q = q[:, :, :, None]
        return torch.maximum(q * low, q * high).float().sum(-1).amax(2)

    def check(self, out):
        q = self.q[-1, -1].float()[:, None]
        low, high = self.low[-1, :, -1].float(), self.high[-1, :, -1].float()
        want = torch.maximum(q * low, q * high).sum(-1).amax(0)
        expect(out[-1, -1], want, 0.02)

    def peers(self):
        return eager_and_compiled(self.work, self.q, self.low, self.high)


class HammingScores(Case):
    """128-bit hashes of tokens: the nearest token of each block, [seqs, kv_heads, blocks]."""

    def __init__(self, seqs, tokens):
        shape = (seqs, tokens // 16, 8, 16, 2)
        self.codes = torch.randint(0, 2**62, shape, device=base.DEVICE)
        self.query = torch.randint(0, 2**62, (seqs, 1, 8, 1, 2), device=base.DEVICE)

    @staticmethod
    def work(query, codes):
        return -popcount(query ^ codes).sum(-1).amin(-1).float().transpose(1, 2)

    def check(self, out):
        pairs = (self.query[-1, 0, -1, 0], self.codes[-1, :4, -1])
        query, codes = (x.tolist() for x in pairs)
        want = [-min(sum(bin(a ^ b).count("1") for a, b in zip(query, token))
                     for token in block) for block in codes]
        expect(out[-1, -1, :4].cpu(), torch.tensor(want, dtype=torch.float32), 0)

    def peers(self):
        return eager_and_compiled(self.work, self.query, self.codes)


class IndexLogits(Case):
    """64 heads of 128 in f8e4m3: sum over heads of weight * relu(q . k), scaled."""

    HEADS, DIM, PAGE = 64, 128, 64

    def __init__(self, rows):
        self.rows = rows
        self.q = randn(rows, self.HEADS, self.DIM).to(torch.float8_e4m3fn)
        self.weights = randn(rows, self.HEADS, dtype=torch.float32)

    def keys(self, n):
        x = randn(n, self.DIM, dtype=torch.float32)
        scales = x.abs().amax(1) / 448
        return (x / scales[:, None]).to(torch.float8_e4m3fn), scales

    def row(self, r, k, scales):
        dots = torch.relu(k.float() @ self.q[r].float().T)
        return (dots * self.weights[r]).sum(1) * scales


class PrefillLogits(IndexLogits):
    def __init__(self, rows, tokens):
        super().__init__(rows)
        self.tokens = tokens
        self.k, self.scales = self.keys(tokens)
        self.starts = torch.zeros(rows, dtype=torch.int32, device=base.DEVICE)
        self.ends = torch.arange(tokens - rows + 1, tokens + 1, dtype=torch.int32,
                                 device=base.DEVICE)

    def check(self, out):
        for r in (0, self.rows - 1):
            n = self.tokens - self.rows + r + 1
            expect(out[r, :n], self.row(r, self.k[:n], self.scales[:n]), 1e-2)

    def deep_gemm(self):
        module = package("deep_gemm", "fp8_mqa_logits")
        return lambda: module.fp8_mqa_logits(self.q, (self.k, self.scales), self.weights,
                                             self.starts, self.ends, clean_logits=False)

    def peers(self):
        return {"DeepGEMM": self.deep_gemm}


class DecodeLogits(IndexLogits):
    """A page has its keys, and then a scale for each: u8 [pages, 64, 1, 132]."""

    def __init__(self, seqs, tokens):
        super().__init__(seqs)
        self.tokens, pages = tokens, seqs * tokens // self.PAGE
        k, self.scales = self.keys(seqs * tokens)
        self.k = k
        order = torch.randperm(pages, device=base.DEVICE)
        self.table = order.int().reshape(seqs, -1)
        room = self.PAGE * self.DIM
        flat = torch.empty(pages, self.PAGE * (self.DIM + 4), dtype=torch.uint8,
                           device=base.DEVICE)
        flat[order, :room] = k.view(torch.uint8).reshape(pages, room)
        flat[order, room:] = self.scales.view(torch.uint8).reshape(pages, -1)
        self.cache = flat.reshape(pages, self.PAGE, 1, self.DIM + 4)
        self.lens = int32([tokens] * seqs)

    def check(self, out):
        for s in (0, self.rows - 1):
            part = slice(s * self.tokens, (s + 1) * self.tokens)
            expect(out[s, :self.tokens], self.row(s, self.k[part], self.scales[part]), 1e-2)

    def deep_gemm(self):
        module = package("deep_gemm", "fp8_paged_mqa_logits",
                         "get_paged_mqa_logits_metadata")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        q = self.q[:, None]

        def call(lens):
            plan = module.get_paged_mqa_logits_metadata(lens, self.PAGE, sms)
            return lambda: module.fp8_paged_mqa_logits(
                q, self.cache, self.weights, lens, self.table, plan, self.tokens,
                clean_logits=False)
        try:
            work = call(self.lens)
            work()
        except Exception:  # later versions have a length for each new token
            work = call(self.lens[:, None].contiguous())
        return work

    def peers(self):
        return {"DeepGEMM": self.deep_gemm}


LLAMA_8B = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5,
                max_position_embeddings=131072)


class DecodeStep(Case):
    """One token of a model of Llama-8B's shape with random weights, over `context`."""

    SECONDS = 300  # torch.compile of 32 layers

    def __init__(self, context, config=None):
        self.context, self.config = context, config or LLAMA_8B

    def check(self, out):
        if not torch.isfinite(out).all():
            raise AssertionError("a logit is not finite")
        expect(out, self.want, 0.05, "the logits")

    def transformers(self):
        module = package("transformers", "LlamaConfig", "LlamaForCausalLM", "StaticCache")
        config = module.LlamaConfig(**self.config, attn_implementation="sdpa",
                                    tie_word_embeddings=False)
        torch.manual_seed(1)
        with torch.device(base.DEVICE):
            old = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            model = module.LlamaForCausalLM(config).eval()
            torch.set_default_dtype(old)
        cache = module.StaticCache(config=config, max_cache_len=self.context + 16)
        ids = torch.randint(0, config.vocab_size, (1, self.context), device=base.DEVICE)
        place = torch.tensor([[self.context]], device=base.DEVICE)
        step = torch.compile(model, mode="reduce-overhead", fullgraph=False)

        def forget():  # the step is always the one after the prompt
            for layer in cache.layers:
                if hasattr(layer, "cumulative_length"):
                    layer.cumulative_length = self.at(layer, ids.shape[1])

        with torch.no_grad():
            model(ids, past_key_values=cache)
            forget()
            self.want = model(ids[:, :1], past_key_values=cache,
                              position_ids=place).logits[0, -1].float()

        def work():
            forget()
            with torch.no_grad():
                return step(ids[:, :1], past_key_values=cache,
                            position_ids=place).logits[0, -1].float()
        return work

    @staticmethod
    def at(layer, n):
        """The number n as the cache's layer keeps its length."""
        length = layer.cumulative_length
        return length.fill_(n) if isinstance(length, torch.Tensor) else n

    def peers(self):
        return {"transformers, static cache, compiled": self.transformers}


class RmsNorm(Case):
    def __init__(self, tokens):
        self.x, self.weight = randn(tokens, 4096), randn(4096)
        self.residual = torch.zeros_like(self.x)

    def check(self, out):
        x = self.residual[-1].float()
        want = x / (x.square().mean() + 1e-5).sqrt() * self.weight.float()
        expect(out[-1], want, 0.02)

    def peers(self):
        def work():
            self.residual.add_(self.x)
            return F.rms_norm(self.residual, (4096,), self.weight, 1e-5)
        return {"torch eager": lambda: work}


class SiluMul(Case):
    def __init__(self, tokens):
        self.gate, self.up = randn(tokens, 14336), randn(tokens, 14336)

    def check(self, out):
        expect(out[-1], F.silu(self.gate[-1].float()) * self.up[-1].float(), 0.02)

    def peers(self):
        return {"torch eager": lambda: lambda: F.silu(self.gate) * self.up}


def cases():
    """(id, the name of our row, what makes the case)"""
    for rows, n, k, kind in ((1, 8192, 256, None), (64, 8192, 2048, None),
                             (1, 131072, 2048, None), (64, 131072, 2048, None),
                             (64, 131072, 2048, "clustered"),
                             (64, 1 << 20, 2048, None), (64, 131072, 2048, "8 values")):
        name = f"top-k [{rows}, {n}] k {k}" + (f", {kind}" if kind else "")
        yield "P6", name, lambda r=rows, n=n, k=k, c=kind: TopK(r, n, k, c)
    for batch, blocks in ((1, 8192), (64, 8192), (64, 65536)):
        yield ("P7", f"hash select, {batch} x {blocks} blocks",
               lambda b=batch, n=blocks: HashSelect(b, n))
    yield "P8", "scores by Quest's bound, 16 x 32768", lambda: QuestScores(16, 2048)
    yield ("P8", "scores of 128-bit token hashes, 16 x 32768",
           lambda: HammingScores(16, 32768))
    for rows, tokens in ((2048, 32768), (4096, 65536)):
        yield ("P11", f"index logits, prefill, {rows} over {tokens}",
               lambda r=rows, n=tokens: PrefillLogits(r, n))
    for seqs, tokens in ((64, 65536), (16, 32768)):
        yield ("P11", f"index logits, decode, {seqs} x {tokens}",
               lambda s=seqs, n=tokens: DecodeLogits(s, n))
    yield ("P13", "decode step, 32 layers of 4096, 1 x 1024, replayed",
           lambda: DecodeStep(1024))
    for n in (8192, 64):
        yield "E1", f"rmsnorm with residual, {n} tokens", lambda n=n: RmsNorm(n)
        yield "E3", f"silu_mul, {n} tokens", lambda n=n: SiluMul(n)
