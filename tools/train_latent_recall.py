#!/usr/bin/env python3
"""Train a small recall model with latent attention (MLA) that learns which tokens to read (DSA).

    python3 tools/train_latent_recall.py --out lua/models/recall_latent       # 300 s on a GPU

The prompts, the files and the measurements are those of tools/train_recall.py; config.json is one
of DeepseekV32ForCausalLM. Training has three stages, as that of DeepSeek-V3.2 (arXiv:2512.02556):
    dense    the model without its indexer learns the task, through the stages of train_recall.py
    indexer  the model is frozen. The indexer of each layer learns to predict the attention of a
             query, summed over the heads: the loss is the Kullback-Leibler divergence
    sparse   attention reads only the TOPK tokens that the indexer selects. The model learns the
             task on, the indexer the attention over the selected tokens; neither's gradients reach
             the other
Needs PyTorch and nothing else.
"""
import argparse, math, os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import train_recall as recall
from train_recall import EPS, HIDDEN, INNER, LAYERS, MAX_POSITIONS, MLP, THETA, VOCAB, linear

HEADS, Q_RANK, KV_RANK, NOPE, ROPE, V_DIM = 8, 192, 128, 32, 32, 64
INDEX_HEADS, INDEX_DIM, TOPK = 4, 64, 128
QUERIES = 192  # of a prompt, for which the indexer's loss is computed: its last ones and random ones


def rotate_pairs(x, cos, sin):
    """Rotates neighbouring numbers, as the published weights of DeepSeek's models want it."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotate_halves(x, cos, sin):
    """Rotates the first ROPE numbers, in halves: the indexer's way."""
    turned, rest = x[..., :ROPE], x[..., ROPE:]
    return torch.cat((recall.rotate(turned, cos.repeat(1, 2), sin.repeat(1, 2)), rest), -1)


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq_b, self.wk = linear(Q_RANK, INDEX_HEADS * INDEX_DIM), linear(HIDDEN, INDEX_DIM)
        self.k_norm, self.weights_proj = nn.LayerNorm(INDEX_DIM, 1e-6), linear(HIDDEN, INDEX_HEADS)

    def keys(self, x, cos, sin):
        return rotate_halves(self.k_norm(self.wk(x)), cos, sin)

    def scores(self, x, latent, keys, cos, sin):
        """Logits [rows, queries, keys] of all keys."""
        q = self.wq_b(latent).unflatten(-1, (INDEX_HEADS, INDEX_DIM)).transpose(1, 2)
        q = rotate_halves(q, cos, sin)
        each = F.relu((q @ keys[:, None].transpose(-1, -2)).float() * INDEX_DIM ** -0.5)
        weights = self.weights_proj(x).float() * INDEX_HEADS ** -0.5
        return torch.einsum("rhqk,rqh->rqk", each, weights)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_a_proj, self.q_b_proj = linear(HIDDEN, Q_RANK), linear(Q_RANK, HEADS * (NOPE + ROPE))
        self.q_a_layernorm, self.kv_a_layernorm = nn.RMSNorm(Q_RANK, 1e-6), nn.RMSNorm(KV_RANK, 1e-6)
        self.kv_a_proj_with_mqa = linear(HIDDEN, KV_RANK + ROPE)
        self.kv_b_proj = linear(KV_RANK, HEADS * (NOPE + V_DIM))
        self.o_proj, self.indexer = linear(HEADS * V_DIM, HIDDEN), Indexer()

    def parts(self, x, cos, sin, past):
        """q, k, v [rows, heads, ...], q's latent, and what a cache holds: latents, rotated keys, index keys,
        each [rows, 1, length, ...]."""
        latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        q = torch.cat((q[..., :NOPE], rotate_pairs(q[..., NOPE:], cos, sin)), -1)
        kv, turned = self.kv_a_proj_with_mqa(x).split((KV_RANK, ROPE), -1)
        new = (self.kv_a_layernorm(kv), rotate_pairs(turned, cos, sin),
               self.indexer.keys(x.detach(), cos, sin))
        new = [t[:, None] for t in new]
        cache = [torch.cat((a, b), 2) for a, b in zip(past, new)] if past else new
        k, v = self.kv_b_proj(cache[0][:, 0]).unflatten(-1, (HEADS, NOPE + V_DIM)).transpose(1, 2) \
            .split((NOPE, V_DIM), -1)
        k = torch.cat((k, cache[1].expand(-1, HEADS, -1, -1).to(k.dtype)), -1)
        return q, k, v, latent, cache

    def forward(self, x, cos, sin, past, topk, losses):
        q, k, v, latent, cache = self.parts(x, cos, sin, past)
        count, length = q.shape[2], k.shape[2]
        if losses is not None and not topk:
            losses.append(self.indexer_loss(x, latent, q, k, cache[2][:, 0], cos, sin))
        mask = None
        if topk or past:
            mask = torch.ones(count, length, dtype=torch.bool, device=x.device).tril(length - count)
        if topk:
            scores = self.indexer.scores(x.detach(), latent.detach(), cache[2][:, 0], cos, sin)
            scores = scores.masked_fill(~mask, -math.inf)
            best = scores.topk(min(topk, length), -1).indices
            mask = mask & torch.zeros_like(scores, dtype=torch.bool).scatter(2, best, True)
            if losses is not None:
                losses.append(self.sparse_loss(scores, best, q, k))
            mask = mask[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2)), cache

    def indexer_loss(self, x, latent, q, k, keys, cos, sin):
        """KL(attention, softmax of the indexer's logits), for some queries of each prompt."""
        n = x.shape[1]
        at = torch.cat((torch.randperm(n - QUERIES // 2, device=x.device)[:QUERIES // 2],
                        torch.arange(n - QUERIES // 2, n, device=x.device)))
        unseen = torch.arange(n, device=x.device) > at[:, None]
        with torch.no_grad():
            score = (q[:, :, at] @ k.transpose(-1, -2)).float() * (NOPE + ROPE) ** -0.5
            wanted = score.masked_fill(unseen, -math.inf).softmax(-1).mean(1)
        guess = self.indexer.scores(x.detach()[:, at], latent.detach()[:, at], keys, cos[at], sin[at])
        return divergence(wanted, guess.masked_fill(unseen, -math.inf))

    def sparse_loss(self, scores, best, q, k):
        """The same over the selected tokens, for the last queries."""
        at = slice(-QUERIES // 2, None)
        best, guess = best[:, at], scores[:, at].gather(2, best[:, at])
        with torch.no_grad():
            score = (q[:, :, at] @ k.transpose(-1, -2)).float() * (NOPE + ROPE) ** -0.5
            score = score.gather(3, best[:, None].expand(-1, HEADS, -1, -1))
            wanted = score.masked_fill(guess[:, None] == -math.inf, -math.inf).softmax(-1).mean(1)
        return divergence(wanted, guess)


def divergence(wanted, guess):
    log = guess.log_softmax(-1)
    each = wanted * (wanted.clamp_min(1e-20).log() - log)
    return each.masked_fill(wanted <= 0, 0).sum(-1).mean()


class Layer(recall.Layer):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, EPS)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, past=None, topk=None, losses=None):
        """Logits [rows, count, vocab] and each layer's cache. topk: attention reads so many tokens; None: all.
        losses: a list to which each layer adds its indexer's."""
        start = past[0][0].shape[2] if past else 0
        place = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        rate = THETA ** (-torch.arange(0, ROPE, 2, device=tokens.device) / ROPE)
        angle = place[:, None] * rate
        x, caches = self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, angle.cos(), angle.sin(), past[i] if past else None, topk, losses)
            caches.append(cache)
        return F.linear(self.norm(x), self.embed_tokens.weight), caches


def of_indexer(model):
    """The parameters of the indexers, and the others."""
    both = ([], [])
    for name, p in model.named_parameters():
        both[0 if ".indexer." in name else 1].append(p)
    return both


def train_selection(model, seconds, lengths, topk, device):
    """The stages of the indexer (topk None) and of sparse attention."""
    ours, others = of_indexer(model)
    for p in others:
        p.requires_grad_(topk is not None)
    groups = [{"params": ours, "peak": 1e-3}] + ([{"params": others, "peak": 1e-4}] if topk else [])
    adam = torch.optim.AdamW(groups, lr=0, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    begin, step, done = time.time(), 0, 0.0
    while done < 1:
        length = lengths[torch.randint(len(lengths), ()).item()]
        rows, queries = recall.TOKENS_PER_STEP // length, 2 ** torch.randint(5, ()).item()
        tokens, answer = recall.recalls(rows, length, 8, queries, device)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * min(1, (step + 1) / 50) * (0.51 + 0.49 * math.cos(math.pi * done))
        losses = []
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens, None, topk, losses)[0]
        target, answer = tokens[:, 1:], answer[:, 1:]
        loss = torch.stack(losses).mean()
        if topk:
            each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target.flatten(), reduction="none")
            each = each.view_as(target)
            (each[answer].mean() + recall.FILLER_LOSS * each[~answer].mean() + loss).backward()
        else:
            loss.backward()
        nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        adam.step()
        adam.zero_grad()
        if step % 100 == 0:
            right = (logits[:, :-1].argmax(-1) == target)[answer].float().mean().item()
            print(f"step {step:5d}  {time.time() - begin:6.1f} s  {'sparse' if topk else 'indexer':7s}  length {length:5d}"
                  f"  divergence {loss.item():.4f}  answer tokens right {right:.3f}", flush=True)
        step += 1
        done = (time.time() - begin) / seconds
    for p in others:
        p.requires_grad_(True)
    print(f"trained {step} steps in {time.time() - begin:.0f} s", flush=True)


def evaluate(model, lengths, count, needles, device):
    """Accuracies of dense attention, and of the model's own selection."""
    topks = [None, TOPK // 8, TOPK // 4, TOPK // 2, TOPK, 2 * TOPK]
    half = Model().to(device, torch.bfloat16)
    half.load_state_dict(model.state_dict())
    print(f"\nExact match over {count * recall.QUERIES} queries asked alone, {needles} needles, weights and "
          "arithmetic bf16, by tokens that a query reads\n")
    print("| tokens | all | " + " | ".join(str(k) for k in topks[1:]) + " |\n|" + "---|" * (len(topks) + 1))
    for length in lengths:
        torch.manual_seed(2000 + length)
        row = recall.asked_alone(half, length, needles, count, device, topks)
        print(f"| {length} | " + " | ".join(f"{r:.3f}" for r in row) + " |", flush=True)


CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": recall.BOS, "eos_token_id": None, "first_k_dense_replace": LAYERS, "hidden_act": "silu",
    "hidden_size": HIDDEN, "index_head_dim": INDEX_DIM, "index_n_heads": INDEX_HEADS, "index_topk": TOPK,
    "initializer_range": 0.02, "intermediate_size": INNER, "kv_lora_rank": KV_RANK,
    "max_position_embeddings": MAX_POSITIONS, "mlp_layer_types": ["dense"] * LAYERS,
    "model_type": "deepseek_v32", "moe_intermediate_size": 64, "n_group": 1, "n_routed_experts": 2,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts_per_tok": 1,
    "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "rms_norm_eps": EPS,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": V_DIM, "vocab_size": VOCAB}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", required=True)
    p.add_argument("--seconds", type=float, default=300, help="of all three stages")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prompts", type=int, default=32, help="evaluation prompts of 16 queries")
    p.add_argument("--needles", type=int, default=32, help="needles in an evaluation prompt")
    p.add_argument("--lengths", default="1024,4096,8192,16384", help="evaluation lengths")
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}")

    torch.manual_seed(a.seed)
    model, begin = Model().to(device), time.time()
    recall.train(model, None, 0.66 * a.seconds, False, device)
    lengths = [512, 1024, 2048, 4096] if a.seconds > 60 else [512]
    train_selection(model, 0.16 * a.seconds, lengths, None, device)
    train_selection(model, 0.18 * a.seconds, lengths, TOPK, device)
    print(f"trained for {time.time() - begin:.0f} s in all", flush=True)

    rounded = {name: t.cpu().bfloat16() for name, t in model.state_dict().items()}
    model = Model()
    model.load_state_dict(rounded)
    os.makedirs(a.out, exist_ok=True)
    recall.write_safetensors(os.path.join(a.out, "model.safetensors"), {"model." + n: t for n, t in rounded.items()})
    recall.write_json(os.path.join(a.out, "config.json"), CONFIG)
    recall.write_json(os.path.join(a.out, "tokens.json"), recall.TOKENS)
    recall.write_golden(os.path.join(a.out, "golden.json"), model)
    evaluate(model.to(device), [int(n) for n in a.lengths.split(",")], a.prompts, a.needles, device)


if __name__ == "__main__":
    main()
