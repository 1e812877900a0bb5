#!/usr/bin/env python3
"""Compute what SmolLM2 answers, with the GGUF loader of transformers, in fp32.

    python3 tools/smollm2_goldens.py --gguf "$(./kvlab get smollm2)" --out spec/data/gguf/smollm2.json
                                                          # needs torch, transformers and gguf

Writes {"tokens": [ids of a prompt], "greedy": [the 200 ids that follow], "every": 48,
"logits": {"POSITION": [every 48th logit after that many tokens]}}. With --logits=FILE it also
writes all logits of the prompt, f32 [tokens, vocab], as safetensors. It prints how long loading
took and its peak memory; with --time also how long a prefill and a decoded token take.
"""
import argparse, json, os, resource, time
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = ("The capital of France is Paris. The river that runs through it is the Seine, and on its banks "
          "stand the Louvre, the Eiffel Tower and the cathedral of Notre-Dame. A visitor who has three days "
          "should begin with")
EVERY = 48


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out")
    parser.add_argument("--logits")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="eager")
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
        long = ids.repeat(1, 512 // len(tokens) + 1)[:, :512]
        prefills, decodes = [], []
        for _ in range(3):
            start = time.perf_counter()
            cache = model(long, use_cache=True, logits_to_keep=1).past_key_values
            prefills.append(time.perf_counter() - start)
            start = time.perf_counter()
            for i in range(64):
                cache = model(ids[:, i % len(tokens)][None], past_key_values=cache, use_cache=True).past_key_values
            decodes.append(time.perf_counter() - start)
        print(f"prefill of 512: {512 / min(prefills):.0f} tokens/s; "
              f"decode after them: {64 / min(decodes):.1f} tokens/s")


if __name__ == "__main__":
    main()
