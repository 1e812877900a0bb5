#!/usr/bin/env python3
"""Tokens a second of transformers, for the shapes of lua/experiments/20_tokens_per_second.lua.

    ./kvlab run lua/experiments/20_tokens_per_second.lua --device=cuda
    python3 bench/tokens_peers.py > results/20_tokens_per_second/peers.jsonl
    ./kvlab run lua/experiments/20_tokens_per_second.lua --device=cuda     # shows both

It needs torch, transformers and a GPU. A model of Llama-8B's shape with random weights in bf16
decodes greedily (attention by sdpa) after prompts whose keys and values are random numbers: a step
takes as long as after real ones. Each row is the median of a few runs of steps. With --static, a
static cache and a compiled model decode one prompt, too (a minute more). Prints JSON, an object a
line; --quick runs a small shape on a CPU.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
from peer_others import LLAMA_8B  # noqa: E402

SMALL = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=2, vocab_size=1024)
RUNS, STEPS = 5, 8


def build(shape, device):
    config = transformers.LlamaConfig(**{**shape, "max_position_embeddings": 1 << 18})
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def filled(cache, config, sequences, tokens, device):
    """Random keys and values of all layers."""
    size = sequences, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        k = torch.randn(size, dtype=torch.bfloat16, device=device)
        cache.update(k, torch.randn_like(k), layer)
    return cache


def steps(model, forward, cache, sequences, tokens):
    """Seconds of a step, after RUNS + 1 runs of STEPS; the first run is not counted."""
    device = model.device
    token = torch.ones(sequences, 1, dtype=torch.long, device=device)
    position = torch.full((sequences, 1), tokens, device=device)
    times = []
    for _ in range(RUNS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            logits = forward(token, position_ids=position, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True).clone()
            position = position + 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / STEPS)
    return statistics.median(times[1:])


def show(name, sequences, tokens, seconds):
    size = f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
    print(json.dumps({"name": name, "prompts": f"{sequences}x{size}", "ms": seconds * 1e3,
                      "tokens_s": sequences / seconds}), flush=True)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.quick else "cuda"
    model = build(SMALL if args.quick else LLAMA_8B, device)
    print(json.dumps({"id": "header", "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                      "torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    unit = 16 if args.quick else 1024
    for sequences, tokens in ((1, 32 * unit), (1, 128 * unit), (8, 32 * unit)):
        cache = filled(transformers.DynamicCache(), model.config, sequences, tokens, device)
        show("transformers", sequences, tokens, steps(model, model.forward, cache, sequences, tokens))
        del cache
    if args.static:
        tokens = 32 * unit
        cache = transformers.StaticCache(config=model.config, max_cache_len=tokens + (RUNS + 1) * STEPS)
        filled(cache, model.config, 1, tokens, device)
        forward = torch.compile(model.forward, mode="reduce-overhead")
        show("transformers, static cache, compiled", 1, tokens, steps(model, forward, cache, 1, tokens))


if __name__ == "__main__":
    main()
