#!/usr/bin/env python3
"""Compute what SmolLM2 answers, with the GGUF loader of transformers, in fp32.

    python3 tools/smollm2_goldens.py --gguf "$(./kvlab get smollm2)" --out spec/data/gguf/smollm2.json
                                                          # needs torch, transformers and gguf

Writes {"tokens": [ids of a prompt], "greedy": [the 200 ids that follow], "every": 48,
"logits": {"POSITION": [every 48th logit after that many tokens]}}. With --logits=FILE it also
writes all logits of the prompt, f32 [tokens, vocab], as safetensors. It prints how long loading
took and its peak memory; with --time also the medians of the speeds of some prefills, and of 64
decoded tokens after a context, on --device and in --dtype. With --static, those tokens are decoded
by generate() with a static cache, which compiles the model on a GPU. bench/small_model_peers.py
measures the same of kvlab.
"""
import argparse, json, os, resource, statistics, time
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = ("The capital of France is Paris. The river that runs through it is the Seine, and on its banks "
          "stand the Louvre, the Eiffel Tower and the cathedral of Notre-Dame. A visitor who has three days "
          "should begin with")
EVERY, DECODED = 48, 64


def cut(ids, n):
    return ids.repeat(1, n // ids.shape[1] + 1)[:, :n]


def seconds(work):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def generate(model, ids, count):
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                   do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation="static")


def decode(model, cache, ids):
    for i in range(DECODED):
        token = ids[:, i % ids.shape[1]][None]
        cache = model(token, past_key_values=cache, use_cache=True).past_key_values


def speeds(model, ids, args):
    """Tokens/s of a prefill, and of decoding: medians. The first call of each is not counted."""
    prefills, decodes = [], []
    ids = ids.to(args.device)
    prompt, context = cut(ids, args.prefill), cut(ids, args.context)
    for _ in range(args.repeats + 1):
        prefills.append(args.prefill / seconds(lambda: model(prompt, use_cache=True, logits_to_keep=1)))
    for _ in range(args.repeats + 1):
        if args.static:
            times = [seconds(lambda: generate(model, context, n)) for n in (1, DECODED + 1)]
            decodes.append(DECODED / (times[1] - times[0]))
        else:
            cache = model(context, use_cache=True, logits_to_keep=1).past_key_values
            decodes.append(DECODED / seconds(lambda: decode(model, cache, ids)))
    return statistics.median(prefills[1:]), statistics.median(decodes[1:])


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out")
    parser.add_argument("--logits")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of a timed prefill")
    parser.add_argument("--context", type=int, default=512, help="tokens before the decoded ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="eager")
    parser.add_argument("--device", default="cpu", help="where --time computes")
    parser.add_argument("--dtype", default="float32", help="in which --time computes")
    parser.add_argument("--static", action="store_true", help="--time decodes with a static cache")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokens = AutoTokenizer.from_pretrained(folder, gguf_file=name)(PROMPT)["input_ids"]
    before = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32,
                                                 attn_implementation=args.attention).eval()
    loaded = time.perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ids = torch.tensor([tokens])
    logits = model(ids, use_cache=False).logits[0].float()
    if args.logits:
        save_file({"logits": logits.contiguous(), "tokens": ids[0].to(torch.int32)}, args.logits)

    if args.out:
        greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, min_new_tokens=200,
                                do_sample=False, eos_token_id=-1, pad_token_id=0)[0, len(tokens):].tolist()
        places = [1, len(tokens) // 2, len(tokens)]
        rows = ",\n".join(f'"{at}": [' + ",".join(f"{x:.9g}" for x in logits[at - 1, ::EVERY].tolist()) + "]"
                          for at in places)
        with open(args.out, "w") as f:
            f.write(f'{{"tokens": {json.dumps(tokens)},\n"greedy": {json.dumps(greedy)},\n"every": {EVERY},\n'
                    f'"logits": {{{rows}}}}}\n')

    print(f"{len(tokens)} tokens; loaded in {loaded:.2f} s, peak memory {peak:.0f} MiB")
    if args.time:
        model = model.to(args.device, getattr(torch, args.dtype))
        prefills, decodes = speeds(model, ids, args)
        print(f"prefill of {args.prefill}: {prefills:.1f} tokens/s; "
              f"decode after {args.context}: {decodes:.1f} tokens/s")


if __name__ == "__main__":
    main()
