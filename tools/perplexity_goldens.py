#!/usr/bin/env python3
"""Compute how likely SmolLM2 finds a text, with the GGUF loader of transformers, in fp32.

    python3 tools/perplexity_goldens.py --gguf "$(./kvlab get smollm2)" --out spec/data/tasks/perplexity.json
                                                          # needs torch, transformers and gguf

Writes {"text": …, "decode": 64, "tokens": [its ids], "nll": the mean of -log p of the last 64}.
"""
import argparse, json, os
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = ("The harbour town lies at the end of a long valley. In the morning the fishing boats come back, and the market "
        "opens before the shops do. My grandmother sold bread there for forty years. She knew every captain by name, and "
        "every captain knew that her bread was gone by nine o'clock. When the railway came in 1887, many people said that "
        "the town would lose its quiet. It did not happen. The trains brought a few painters, who stayed for the light, and "
        "a doctor, who stayed for the painters. The old lighthouse was closed, but nobody wanted to pull it down, so it "
        "became a school. Children learned to read in a room with eight windows and a view of the sea, and on stormy days "
        "the teacher had to shout. My grandmother used to say that this was why everybody in our town speaks so loudly.")
DECODE = 64


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokens = AutoTokenizer.from_pretrained(folder, gguf_file=name)(TEXT)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    nll = [-log_p[i - 1, tokens[i]].item() for i in range(len(tokens) - DECODE, len(tokens))]
    with open(args.out, "w") as file:
        json.dump({"text": TEXT, "decode": DECODE, "tokens": tokens, "nll": sum(nll) / DECODE}, file)
        file.write("\n")


main()
