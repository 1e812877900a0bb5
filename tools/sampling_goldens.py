#!/usr/bin/env python3
"""Make the chances of tokens after the filters of transformers, for spec/lua/serve.

    python3 tools/sampling_goldens.py --out spec/data/sampling    # needs torch, transformers

Writes OUT/filters.json: {"vocab", "seen": ids of prompt and output, "logits": [rows],
"cases": [{"options": {...}, "row": number of the row, "chances": [vocab numbers]}]}. Each
option alone and many combinations are applied by the processors that generate() itself
would make for them, in its order.
"""
import argparse, json, os, random
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

VOCAB = 96
VALUES = {"temperature": [0.2, 0.7, 1.0, 2.5], "top_k": [1, 2, 7, 40, 200],
          "top_p": [0.05, 0.5, 0.9, 0.999, 1.0], "min_p": [0.0, 0.02, 0.1, 0.6, 1.0],
          "repetition_penalty": [0.8, 1.1, 2.0]}


def cases(rng):
    for name, values in VALUES.items():
        for value in values:
            yield {name: value}
    for _ in range(60):
        names = rng.sample(sorted(VALUES), rng.randint(2, len(VALUES)))
        yield {name: rng.choice(VALUES[name]) for name in sorted(names)}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=16,
                                         num_hidden_layers=1, num_attention_heads=1))
    seen = [rng.randrange(VOCAB) for _ in range(20)]
    seen += seen[:5]
    rows = [torch.randn(VOCAB) * spread for spread in (0.3, 1.0, 3.0, 6.0)]
    rows.append(torch.where(torch.arange(VOCAB) % 7 == 0, rows[2], torch.tensor(-float("inf"))))
    out = []
    for i, options in enumerate(cases(rng)):
        row = i % len(rows)
        given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
        config = GenerationConfig(do_sample=True, **given)
        processors = model._get_logits_processor(
            generation_config=config, input_ids_seq_length=len(seen), encoder_input_ids=None,
            prefix_allowed_tokens_fn=None, logits_processor=LogitsProcessorList(), device="cpu")
        scores = processors(torch.tensor([seen]), rows[row][None].clone())
        out.append(dict(options=options, row=row, chances=[
            float(f"{x:.8g}") for x in scores.softmax(-1)[0].tolist()]))
    os.makedirs(args.out, exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in out)
    logits = [[None if x == -float("inf") else float(f"{x:.9g}") for x in row.tolist()]
              for row in rows]
    with open(os.path.join(args.out, "filters.json"), "w") as f:
        f.write(f'{{"vocab": {VOCAB}, "seen": {json.dumps(seen)},\n'
                f'"logits": {json.dumps(logits)},\n"cases": [\n{lines}]}}\n')


if __name__ == "__main__":
    main()
