#!/usr/bin/env python3
"""Train the small recall model and measure what block selection costs it.

    python3 tools/train_recall.py --out lua/models/recall          # minutes on a GPU
    python3 tools/train_recall.py --out lua/models/recall --refine --seconds 240
    python3 tools/train_recall.py --out smoke --seconds 30 --prompts 1 --lengths 512

Writes to --out:
    config.json        as Hugging Face writes it for LlamaForCausalLM
    model.safetensors  the weights, bf16, Hugging Face tensor names
    tokens.json        token ids and constants of the prompt generator
    golden.json        one short prompt and its fp32 logits, to check a forward pass against
and prints the accuracies as Markdown tables. Needs PyTorch and nothing else.

A prompt is a context and then queries. A context of C tokens is BOS and C - 1
tokens of filler, over which N needles `KEY k1 k2 VAL v1 v2 END` are laid. A
query is `Q k1 k2 A v1 v2`; the model has to say v1 v2. Every draw is uniform,
unless this says otherwise:
    filler   x = (x + floor((F + 1)^u)) mod F,  u in [0, 1); the token is filler_first + x.
             x starts anywhere. The step is Zipf-like: P(k) = log(1 + 1/k) / log(F + 1).
             The chain also runs under the needles, which overwrite it.
    places   N draws from 0 .. C - 1 - 7 N, sorted; needle i = 0 .. N - 1 starts at
             token 1 + draw + 7 i. So needles never overlap and none covers BOS.
    keys     the pairs (k1, k2) of one prompt are distinct; a single k1 or k2 may repeat.
    values   v1 and v2 are independent.
    queries  a shuffle of the needles, begun again from its start when it runs out.
"""
import argparse, json, math, os, struct, time
import torch
import torch.nn as nn
import torch.nn.functional as F

BOS, KEY, VAL, END, QUERY, ANSWER = range(6)
KEYS, VALUES, FILLERS = 256, 256, 496
KEY_FIRST, VALUE_FIRST, FILLER_FIRST, VOCAB = 16, 272, 528, 1024
NEEDLE, ASK, QUERIES = 7, 6, 16

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 256, 4, 8, 2, 64, 704
THETA, EPS, MAX_POSITIONS = 500000.0, 1e-5, 32768

TOKENS_PER_STEP, PEAK_LR, WARMUP, FILLER_LOSS = 32768, 1e-3, 100, 0.02
# A stage: the share of the run from which the next stage may begin, lengths, fewest needles. The
# next stage begins when 95% of the answer tokens are right. In the stage without lengths the model
# learns to copy, see copies().
CURRICULUM = [(0, None, 0), (0.20, [256], 2), (0.40, [512, 1024], 8), (0.70, [1024, 2048, 4096], 8),
              (2, [2048, 4096, 8192], 8)]
REFINE, REFINE_LR = [(2, [512, 1024, 2048, 4096, 8192, 16384], 8)], 5e-4  # with --refine
BLOCK, SINK, RECENT = 16, 1, 2


# ---- prompts ----------------------------------------------------------------

def prompts(rows, context, needles, queries, device):
    """Contexts [rows, context] and queries [rows, queries, 6], answers included."""
    def draw(high, *shape):
        return torch.randint(high, (rows, *shape), device=device)

    def shuffle():
        return torch.rand(rows, needles, device=device).argsort(1)

    step = (FILLERS + 1) ** torch.rand(rows, context, device=device)
    step[:, 0] = draw(FILLERS)
    tokens = FILLER_FIRST + step.long().cumsum(1) % FILLERS
    tokens[:, 0] = BOS

    index = torch.arange(needles, device=device)
    places = 1 + draw(context - NEEDLE * needles, needles).sort(1).values + NEEDLE * index
    pairs = draw(KEYS * KEYS - needles + 1, needles).sort(1).values + index
    pairs = pairs.gather(1, shuffle())
    k1, k2 = KEY_FIRST + pairs // KEYS, KEY_FIRST + pairs % KEYS
    v1, v2 = VALUE_FIRST + draw(VALUES, needles), VALUE_FIRST + draw(VALUES, needles)

    def phrase(*parts):
        return torch.stack([p if torch.is_tensor(p) else torch.full_like(k1, p) for p in parts], 2)

    span = places[:, :, None] + torch.arange(NEEDLE, device=device)
    tokens.scatter_(1, span.flatten(1), phrase(KEY, k1, k2, VAL, v1, v2, END).flatten(1))
    asked = shuffle()[:, torch.arange(queries, device=device) % needles]
    asks = phrase(QUERY, k1, k2, ANSWER, v1, v2)
    return tokens, asks.gather(1, asked[:, :, None].expand(-1, -1, ASK))


# ---- model: module names are Hugging Face's, so state_dict() needs no map ---------

def linear(n_in, n_out):
    return nn.Linear(n_in, n_out, bias=False)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-b, a), -1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = (linear(HIDDEN, KV_HEADS * HEAD_DIM) for _ in range(2))

    def forward(self, x, cos, sin, past, select):
        rows, count, _ = x.shape
        q, k, v = (p(x).view(rows, count, -1, HEAD_DIM).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            q = q.unflatten(1, (KV_HEADS, -1))  # [rows, kv_head, group, count, head_dim]
            score = (q @ k[:, :, None].transpose(-1, -2)).float() / math.sqrt(HEAD_DIM)
            seen = torch.ones(count, k.shape[2], dtype=torch.bool, device=x.device)
            seen = seen.tril(k.shape[2] - count)
            if select:
                seen = seen & select(q.squeeze(3), k)[:, :, None, None]
            weight = score.masked_fill(~seen, -math.inf).softmax(-1).to(v.dtype)
            out = (weight @ v[:, :, None]).flatten(1, 2)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, INNER), linear(HIDDEN, INNER)
        self.down_proj = linear(INNER, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm = nn.RMSNorm(HIDDEN, EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, x, *attention):
        mixed, cache = self.self_attn(self.input_layernorm(x), *attention)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, past=None, select=None):
        """Logits [rows, count, vocab] and each layer's (k, v) [rows, kv_head, length, head_dim]."""
        start = past[0][0].shape[2] if past else 0
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        rate = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=tokens.device) / HEAD_DIM)
        angle = (place[:, None] * rate).repeat(1, 2)
        x, caches = self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, angle.cos(), angle.sin(), past[i] if past else None, select)
            caches.append(cache)
        return F.linear(self.norm(x), self.embed_tokens.weight), caches


# ---- training ---------------------------------------------------------------

def copies(rows, length, device):
    """Random tokens that repeat with a random period, and which of them can be predicted.
    A model that has learned to look up what followed a token learns recall within a few
    hundred more steps. A model that began with recall was still guessing after thousands."""
    period = torch.randint(8, length // 2, (rows, 1), device=device)
    place = torch.arange(length, device=device)
    tokens = torch.randint(KEY_FIRST, VOCAB, (rows, length), device=device).gather(1, place % period)
    return tokens, place > period


def recalls(rows, length, fewest, queries, device):
    """Prompts of up to 64 needles, and which of their tokens are answers."""
    context = length - ASK * queries
    needles = torch.randint(fewest, min(64, context // 10) + 1, ()).item()
    text, asks = prompts(rows, context, needles, queries, device)
    tokens = torch.cat((text, asks.flatten(1)), 1)
    place = torch.arange(length, device=device)
    return tokens, ((place >= context) & ((place - context) % ASK >= 4)).expand(rows, -1)


def train(model, steps, seconds, refine, device):
    """Trains random weights through CURRICULUM. With `refine` it goes on from trained weights: with
    every length, a cosine schedule from the start, and one to 16 queries, so that the first query
    after the context counts more."""
    stages, peak, hold = (REFINE, REFINE_LR, 0) if refine else (CURRICULUM, PEAK_LR, 0.6)
    adam = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    begin, step, done, level, skill = time.time(), 0, 0.0, 0, 0.0
    while done < 1:
        if done > stages[level][0] and skill > 0.95:
            level, skill = level + 1, 0.0
        _, lengths, fewest = stages[level]
        length = lengths[torch.randint(len(lengths), ()).item()] if lengths else 256
        rows, queries = TOKENS_PER_STEP // length, 2 ** torch.randint(5, ()).item() if refine else QUERIES
        tokens, answer = (recalls(rows, length, fewest, queries, device) if lengths
                          else copies(rows, length, device))

        adam.param_groups[0]["lr"] = peak * min(1, (step + 1) / WARMUP) * (
            0.51 + 0.49 * math.cos(math.pi * max(0, done - hold) / (1 - hold)))
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)[0][:, :-1]
        target, answer = tokens[:, 1:], answer[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none").view_as(target)
        asked = loss[answer].mean()
        (asked + FILLER_LOSS * loss[~answer].mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

        skill += 0.05 * ((logits.argmax(-1) == target)[answer].float().mean().item() - skill)
        if step % 100 == 0:
            print(f"step {step:5d}  {time.time() - begin:6.1f} s  {'recall' if lengths else 'copy':6s}  length {length:5d}"
                  f"  answer loss {asked.item():.4f}  answer tokens right {skill:.3f}", flush=True)
        step += 1
        done = (time.time() - begin) / seconds if seconds else step / steps
    print(f"trained {step} steps in {time.time() - begin:.0f} s", flush=True)


# ---- evaluation: share of queries whose two value tokens are both right -------------

@torch.no_grad()
def asked_together(model, length, needles, count, device):
    """Prompts of `length` tokens that end with 16 queries; each follows the others before it and
    their true answers. Returns the accuracy."""
    right = 0
    for _ in range(count):
        text, asks = prompts(1, length - ASK * QUERIES, needles, QUERIES, device)
        logits, _ = model(torch.cat((text, asks.flatten(1)), 1))
        said = logits[:, text.shape[1]:].argmax(-1).view(QUERIES, ASK)
        right += (said[:, 3:5] == asks[0, :, 4:]).all(1).sum().item()
    return right / (count * QUERIES)


@torch.no_grad()
def asked_alone(model, context, needles, count, device, selects):
    """Prefills a context and forks it for each of 16 queries. Every query token is a decode step
    under `select`; None means full attention. Returns one accuracy for each of `selects`."""
    right = [0] * len(selects)
    for _ in range(count):
        text, asks = prompts(1, context, needles, QUERIES, device)
        shared = [[t.expand(QUERIES, -1, -1, -1) for t in cache] for cache in model(text)[1]]
        for i, select in enumerate(selects):
            past, token, said = shared, asks[0, :, :1], []
            for place in range(1, ASK):
                logits, past = model(token, past, select)
                guess = logits[:, -1:].argmax(-1)
                token = asks[0, :, place:place + 1] if place < 4 else guess
                said.append(guess)
            right[i] += (torch.cat(said[3:], 1) == asks[0, :, 4:]).all(1).sum().item()
    return [r / (count * QUERIES) for r in right]


def group_max(q, keys):
    return torch.einsum("bhgd,bhnd->bhgn", q, keys).amax(2)


# score(q [rows, kv_head, group, head_dim], k [rows, kv_head, blocks, 16, head_dim]) -> [rows, kv_head, blocks]
SCORES = {
    "oracle (max q·k in the block)": lambda q, k: group_max(q, k.flatten(2, 3)).unflatten(2, (-1, BLOCK)).amax(3),
    "Quest bound": lambda q, k: torch.maximum(
        q[:, :, :, None] * k.amin(3)[:, :, None], q[:, :, :, None] * k.amax(3)[:, :, None]).sum(-1).amax(2),
    "block mean": lambda q, k: group_max(q, k.mean(3)),
    "sink + recent only": lambda q, k: torch.arange(k.shape[2], device=k.device).float().expand(k.shape[:3]).clone(),
    "random": lambda q, k: torch.rand(k.shape[:3], device=k.device),
}


def selector(score, ratio):
    """Keeps sink and recent blocks and the best others: ceil(ratio * blocks) in all for each KV head."""
    def select(q, k):
        length = k.shape[2]
        k = F.pad(k, (0, 0, 0, -length % BLOCK), mode="replicate").unflatten(2, (-1, BLOCK))
        value = score(q, k)
        value[:, :, :SINK] = value[:, :, -RECENT:] = math.inf
        budget = max(SINK + RECENT, math.ceil(ratio * k.shape[2]))
        kept = torch.zeros_like(value, dtype=torch.bool).scatter(2, value.topk(budget).indices, True)
        return kept.repeat_interleave(BLOCK, 2)[:, :, :length]
    return select


def evaluate(model, lengths, count, needles, device):
    print(f"\nExact match over {count * QUERIES} queries, {needles} needles, weights rounded to bf16\n")
    print("| tokens | together, fp32 | together, bf16 | alone, fp32 | alone, bf16 |\n|---|---|---|---|---|")
    half = Model().to(device, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    for length in lengths:
        row = []
        for m in (model, half):
            torch.manual_seed(1000 + length)
            row += [asked_together(m, length, needles, count, device)]
        for m in (model, half):
            torch.manual_seed(2000 + length)
            row += asked_alone(m, length, needles, count, device, [None])
        print(f"| {length} | " + " | ".join(f"{r:.3f}" for r in row) + " |", flush=True)

    ratios = (0.02, 0.05, 0.10, 0.30)
    context = 4096 if 4096 in lengths else lengths[-1]
    torch.manual_seed(3000)
    table = asked_alone(model, context, needles, count, device,
                        [selector(s, r) for s in SCORES.values() for r in ratios])
    print(f"\nBlock selection at decode: context {context}, {needles} needles, block {BLOCK}, sink {SINK}, "
          f"recent {RECENT}, per KV head, {count * QUERIES} queries asked alone, fp32\n")
    print("| policy | " + " | ".join(f"{r:.0%}" for r in ratios) + " |\n|---|---|---|---|---|")
    for i, name in enumerate(SCORES):
        print(f"| {name} | " + " | ".join(f"{a:.3f}" for a in table[4 * i:4 * i + 4]) + " |", flush=True)


# ---- files ------------------------------------------------------------------

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": BOS, "eos_token_id": None, "head_dim": HEAD_DIM, "hidden_act": "silu",
    "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": INNER,
    "max_position_embeddings": MAX_POSITIONS, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS,
    "pretraining_tp": 1, "rms_norm_eps": EPS, "rope_scaling": None, "rope_theta": THETA,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": VOCAB}

TOKENS = {
    "bos": BOS, "key": KEY, "val": VAL, "end": END, "query": QUERY, "answer": ANSWER,
    "key_first": KEY_FIRST, "key_count": KEYS, "value_first": VALUE_FIRST, "value_count": VALUES,
    "filler_first": FILLER_FIRST, "filler_count": FILLERS, "vocab_size": VOCAB,
    "needle_length": NEEDLE, "query_length": ASK, "train_needles": [2, 64],
    "train_queries": QUERIES, "train_max_length": 8192}


def write_json(path, value, indent=2):
    with open(path, "w") as f:
        f.write(json.dumps(value, indent=indent) + "\n")


def write_safetensors(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, t in tensors.items():
        size = 2 * t.numel()
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for t in tensors.values():
            f.write(t.contiguous().view(torch.int16).numpy().tobytes())


def read_safetensors(path):
    with open(path, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        header, section = json.loads(f.read(size)), f.read()
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(bytearray(section[slice(*e["data_offsets"])]), dtype=torch.bfloat16)
            .view(e["shape"]) for name, e in header.items()}


@torch.no_grad()
def write_golden(path, model):
    """Writes token ids and the fp32 logits that a forward pass must give for the last four."""
    torch.manual_seed(4000)
    text, asks = prompts(1, 194, 8, 1, "cpu")
    tokens = torch.cat((text, asks.flatten(1)), 1)
    logits = model(tokens)[0][0, -4:]
    write_json(path, {
        "tokens": tokens[0].tolist(), "positions": list(range(tokens.shape[1] - 4, tokens.shape[1])),
        "first_logits": [[float(f"{x:.9g}") for x in row[:16].tolist()] for row in logits],
        "argmax": logits.argmax(-1).tolist(),
        "max_logit": [float(f"{x:.9g}") for x in logits.amax(-1).tolist()]}, None)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", required=True)
    p.add_argument("--steps", type=int, default=11000)
    p.add_argument("--seconds", type=float, help="train for this long instead of --steps")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--refine", action="store_true", help="go on from the weights in --out")
    p.add_argument("--prompts", type=int, default=32, help="evaluation prompts of 16 queries")
    p.add_argument("--needles", type=int, default=32, help="needles in an evaluation prompt")
    p.add_argument("--lengths", default="512,1024,2048,4096,8192,16384", help="evaluation lengths")
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}")

    torch.manual_seed(a.seed)
    model = Model().to(device)
    if a.refine:
        weights = read_safetensors(os.path.join(a.out, "model.safetensors"))
        model.load_state_dict({name.removeprefix("model."): t for name, t in weights.items()})
    train(model, a.steps, a.seconds, a.refine, device)

    rounded = {name: t.cpu().bfloat16() for name, t in model.state_dict().items()}
    model = Model()
    model.load_state_dict(rounded)
    os.makedirs(a.out, exist_ok=True)
    write_safetensors(os.path.join(a.out, "model.safetensors"), {"model." + n: t for n, t in rounded.items()})
    write_json(os.path.join(a.out, "config.json"), CONFIG)
    write_json(os.path.join(a.out, "tokens.json"), TOKENS)
    write_golden(os.path.join(a.out, "golden.json"), model)
    evaluate(model.to(device), [int(n) for n in a.lengths.split(",")], a.prompts, a.needles, device)


if __name__ == "__main__":
    main()
