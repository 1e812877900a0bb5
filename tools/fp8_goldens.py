#!/usr/bin/env python3
"""Make small random models whose matrices are FP8 with scales, and their logits.

    python3 tools/fp8_goldens.py --out spec/data/fp8       # needs torch and transformers

For each model of MODELS writes to OUT/NAME/:
    config.json        with the quantization_config that checkpoints of its kind have
    model.safetensors  matrices of the layers in F8_E4M3, their scales in F32, all else in F32
    golden.json        {"tokens": [20 ids], "logits": [[vocab numbers] of the last 4 tokens]}
The logits are those of transformers with each matrix multiplied out number by number, in
float64 throughout. Blocks do not divide the matrices, so the last ones are cut off. Where
they do (NAME even), and accelerate is there, transformers' own FP8 loader is compared, too:
it prints its largest difference, and the correlation of logits whose scales are left out.
"""
import argparse, json, math, os
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SMALL = dict(vocab_size=24, hidden_size=48, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
             head_dim=16, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
LLAMA = (LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=40))
EVEN = (LlamaForCausalLM, LlamaConfig(**SMALL, intermediate_size=32))
MOE = (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, intermediate_size=40, moe_intermediate_size=24, num_experts=3,
                                           num_experts_per_tok=2))


def compressed(strategy, **more):
    weights = dict(num_bits=8, type="float", symmetric=True, dynamic=False, strategy=strategy, block_structure=None,
                   group_size=None, actorder=None, observer="minmax", observer_kwargs={}) | more
    return dict(quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed",
                ignore=["lm_head"], kv_cache_scheme=None, global_compression_ratio=None, config_groups=dict(
                    group_0=dict(targets=["Linear"], weights=weights, output_activations=None,
                                 input_activations=dict(num_bits=8, type="float", dynamic=True))))


def blocks(rows, columns, **more):
    return dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3",
                weight_block_size=[rows, columns]) | more


# Name -> model, quantization_config, rows and columns of a block (0: all), the scales' suffix.
MODELS = {
    "block": (LLAMA, blocks(32, 32), 32, 32, "_scale_inv"),
    "flat": (LLAMA, blocks(5, 100), 5, 100, "_scale_inv"),
    "even": (EVEN, blocks(16, 16, modules_to_not_convert=["lm_head"]), 16, 16, "_scale_inv"),
    "experts": (MOE, blocks(16, 32, modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]), 16, 32,
                "_scale_inv"),
    "tensor": (LLAMA, dict(quant_method="fp8", activation_scheme="static", weight_block_size=None), 0, 0,
               "_scale_inv"),
    "rows": (LLAMA, dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0,
                         modules_to_not_convert=["lm_head"]), 1, 0, "_scale"),
    "compressed_tensor": (LLAMA, compressed("tensor"), 0, 0, "_scale"),
    "compressed_channel": (LLAMA, compressed("channel"), 1, 0, "_scale"),
    "compressed_block": (LLAMA, compressed("block", block_structure=[16, 16]), 16, 16, "_scale"),
}


def quantise(weight, rows, columns):
    """FP8 numbers and f32 scales; the numbers of every block use all of FP8's range."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    grid = [math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)]
    numbers, scales = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[at].abs().max() / 448 * 2 ** (2 * torch.rand(()))
            numbers[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return numbers, scales


def multiply_out(numbers, scales, rows, columns):
    """The weights, number by number, in float64."""
    rows, columns = rows or numbers.shape[0], columns or numbers.shape[1]
    out = numbers.double()
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] *= scales[i // rows, j // columns].double()
    return out


@torch.no_grad()
def logits_of(model, tokens):
    return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]


def stored_weights(folder):
    """What save_pretrained wrote, and the names of the matrices of its layers."""
    from safetensors.torch import load_file
    weights = load_file(os.path.join(folder, "model.safetensors"))
    return weights, [name for name in weights if name.endswith("_proj.weight")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    for seed, (name, ((kind, config), method, rows, columns, suffix)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = kind(config).float()
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                weight.normal_()
                weight.mul_(0.2).add_(1) if "norm" in parameter else weight.mul_(1.5 / math.sqrt(weight.shape[-1]))
        folder = os.path.join(args.out, name)
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "generation_config.json"))
        weights, matrices = stored_weights(folder)
        exact, raw = {k: v.double() for k, v in weights.items()}, dict(weights)
        for matrix in matrices:
            numbers, scales = quantise(weights[matrix], rows, columns)
            exact[matrix] = multiply_out(numbers, scales, rows, columns)
            raw[matrix] = numbers.float()
            weights[matrix] = numbers
            weights[matrix + suffix] = scales[0, 0].reshape(() if "compressed" not in name else 1) if rows == 0 else scales
            if method.get("activation_scheme") == "static":
                weights[matrix.removesuffix("weight") + "activation_scale"] = torch.tensor(0.1)
        tokens = torch.randint(config.vocab_size, (20,)).tolist()

        def with_weights(state, dtype):
            save_file({k: v.contiguous() for k, v in state.items()}, os.path.join(folder, "model.safetensors"),
                      metadata={"format": "pt"})
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                          experts_implementation="eager")
            return logits_of(loaded, tokens).double()

        truth = with_weights(exact, torch.float64)
        dropped = with_weights(raw, torch.float32)
        related = torch.corrcoef(torch.stack([truth.flatten(), dropped.flatten()]))[0, 1].item()
        save_file({k: v.contiguous() for k, v in weights.items()}, os.path.join(folder, "model.safetensors"),
                  metadata={"format": "pt"})
        path = os.path.join(folder, "config.json")
        with open(path) as f:
            fields = json.load(f)
        with open(path, "w") as f:
            f.write(json.dumps(fields | dict(quantization_config=method), indent=2, sort_keys=True) + "\n")
        with open(os.path.join(folder, "golden.json"), "w") as f:
            rows_of = ",\n".join("[" + ",".join(f"{x:.7g}" for x in row) + "]" for row in truth[-4:].tolist())
            f.write(f'{{"tokens": {json.dumps(tokens)},\n"logits": [\n{rows_of}]}}\n')
        line = f"{name}: {os.path.getsize(os.path.join(folder, 'model.safetensors'))} bytes, without scales {related:.3f}"
        if name == "even":
            try:
                again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
                line += f", transformers' FP8 loader within {(logits_of(again, tokens) - truth).abs().max().item():.1e}"
            except ImportError as why:
                line += f", transformers' FP8 loader not compared: {why}"
        print(line)


if __name__ == "__main__":
    main()
