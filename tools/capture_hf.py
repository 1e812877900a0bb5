#!/usr/bin/env python3
"""Write the inputs that every attention layer of a Hugging Face model gets for one text.

    python3 tools/capture_hf.py MODEL --text FILE --out DIR      # needs torch, transformers
    python3 tools/capture_hf.py MODEL --ids FILE --out DIR       # token ids, JSON or words
    python3 tools/capture_hf.py MODEL --random 320 --out DIR     # random token ids

MODEL is a folder or a name on the hub. The text goes through the model once. An attention
function, registered with transformers, sees each layer's output and its q, k and v as
attention gets them: rotated, with k and v not yet repeated for groups. DIR gets

    layer_000.safetensors   q, out [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim]
    manifest.json           shapes, scale, dtype, token ids, versions; written last

`./kvlab run lua/experiments/12_captured.lua --set capture=DIR` runs policies on it. It decodes
the last tokens of the text again, which for a causal model is the same as having generated them.
Attention must be softmax(scale q.k) v over all tokens up to the query's own. The script refuses a
model with sliding windows shorter than the text, soft caps, sinks or another mask.
"""
import argparse, datetime, json, os, sys
import torch
import transformers
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "kvlab_capture"


class Capture:
    """The attention function; it writes what it gets to `folder`."""

    def __init__(self, folder, layers):
        self.folder, self.wanted = folder, layers
        self.layers, self.shape = [], None

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer = module.layer_idx
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        self.refuse(module, query, key, value, attention_mask, kwargs)
        out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale,
                                              **kwargs)
        if self.wanted is None or layer in self.wanted:
            self.write(layer, query, key, value, out, scale)
        return out, weights

    def refuse(self, module, query, key, value, mask, more):
        """Exits if this attention is not the kind that a capture can hold."""
        tokens, window = query.shape[2], more.get("sliding_window")
        problems = [f"a {name}" for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
        if query.shape[0] != 1 or key.shape[2] != tokens:
            problems.append(f"{query.shape[0]} sequences of {tokens} queries and {key.shape[2]} keys")
        if value.shape[-1] != query.shape[-1]:
            problems.append(f"values of {value.shape[-1]} and keys of {query.shape[-1]} numbers")
        if window and window < tokens:
            problems.append(f"a sliding window of {window} tokens and a text of {tokens}")
        if not more.get("is_causal", getattr(module, "is_causal", True)):
            problems.append("attention that is not causal")
        if mask is not None:
            seen = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
            if not torch.equal(seen, torch.ones_like(seen).tril()):
                problems.append("a mask that is not causal")
        if problems:
            sys.exit(f"capture_hf: layer {module.layer_idx} has {problems[0]}, which a capture cannot hold")

    def write(self, layer, query, key, value, out, scale):
        def rows(x):  # [1, heads, tokens, dim] to [tokens, heads, dim]
            return x[0].transpose(0, 1).detach().cpu().contiguous()

        shape = dict(tokens=query.shape[2], heads=query.shape[1], kv_heads=key.shape[1],
                     head_dim=query.shape[3], scale=scale, dtype=str(query.dtype).split(".")[1])
        if self.shape not in (None, shape):
            sys.exit(f"capture_hf: layer {layer} has {shape}, the layers before {self.shape}")
        self.shape = shape
        self.layers.append(layer)
        save_file(dict(q=rows(query), k=rows(key), v=rows(value), out=out[0].detach().cpu().contiguous()),
                  os.path.join(self.folder, f"layer_{layer:03d}.safetensors"))


def read_ids(args, vocab):
    if args.random:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(vocab, (args.random,), generator=generator).tolist()
    if args.ids:
        with open(args.ids) as f:
            ids = [int(word) for word in f.read().replace(",", " ").strip("[] \n").split()]
    else:
        with open(args.text) as f:
            ids = AutoTokenizer.from_pretrained(args.model)(f.read())["input_ids"]
    ids = ids[:args.tokens]
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        sys.exit(f"capture_hf: {len(ids)} token ids, expected some, each from 0 to {vocab - 1}")
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="a text file, tokenised by the model's tokenizer")
    source.add_argument("--ids", help="a file of token ids")
    source.add_argument("--random", type=int, help="the number of random token ids")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", type=int, help="use only this many, from the start")
    parser.add_argument("--layers", help="write only these layers, such as 0,15,31")
    parser.add_argument("--seed", type=int, default=0, help="the seed of --random")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16 ...")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    wanted = {int(word) for word in args.layers.split(",")} if args.layers else None
    capture = Capture(args.out, wanted)
    AttentionInterface.register(NAME, capture)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, attn_implementation=NAME)
    ids = read_ids(args, model.config.get_text_config().vocab_size)
    os.makedirs(args.out, exist_ok=True)
    with torch.no_grad():
        model.eval().to(args.device).base_model(torch.tensor([ids], device=args.device), use_cache=False)
    if not capture.layers or wanted and wanted != set(capture.layers):
        sys.exit(f"capture_hf: layers {capture.layers} went through transformers' attention interface,"
                 f" expected {sorted(wanted) if wanted else 'some'}")
    manifest = dict(format="kvlab capture 1", model=args.model, model_type=model.config.model_type,
                    layers=sorted(capture.layers), **capture.shape, token_ids=ids,
                    date=datetime.date.today().isoformat(), torch=torch.__version__,
                    transformers=transformers.__version__)
    with open(os.path.join(args.out, "manifest.json"), "w") as f:
        f.write(json.dumps(manifest) + "\n")
    print(f"{args.out}: {len(capture.layers)} layers of {len(ids)} tokens")


if __name__ == "__main__":
    main()
