#!/usr/bin/env python3
"""Make small GGUF files, and what other readers make of them.

    python3 tools/gguf_goldens.py --hf spec/data/hf --out spec/data/gguf
                                                  # needs torch, transformers and gguf

Writes to OUT/:
    types.gguf           a tensor [2, 512] of each stored type, and metadata of each kind
    types.safetensors    the same tensors in f32, as gguf's own Python dequantises them
    llama.gguf, qwen2.gguf, qwen3.gguf, mixtral.gguf, qwen3_moe.gguf
                         the models of tools/hf_goldens.py, as llama.cpp's converter writes
                         them: rows of Q and K in pairs (llama only), matrices in Q8_0 where
                         their rows allow it, the others in F16
    NAME.json            {"tokens": [12 ids], "logits": [[vocab numbers] for each position]}
                         of NAME.gguf, loaded by transformers, eager attention in fp32;
                         its loader does not know how experts are stored, so there the
                         dequantised weights were put into the model
"""
import argparse, json, os, re, shutil, tempfile
import gguf, numpy, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]

# Where a block has its f16 numbers; all other bytes are random.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}


def random_blocks(kind, shape, rng):
    """Bytes [rows, bytes of a row]. The scales are normal, negative, tiny and subnormal."""
    quant = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[quant]
    rows, columns = shape
    blocks = rng.integers(0, 256, (rows, columns // values, size), dtype=numpy.uint8)
    if kind in ("F32", "F16", "BF16"):
        wide = (rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 12, shape)).astype(numpy.float32)
        if kind == "F32":
            return wide.view(numpy.uint8)
        if kind == "F16":
            return wide.astype(numpy.float16).view(numpy.uint8)
        return (wide.view(numpy.uint32) >> 16).astype(numpy.uint16).view(numpy.uint8)
    for at in HALVES[kind]:
        scale = rng.standard_normal(blocks.shape[:2]) * 2.0 ** rng.integers(-24, 4, blocks.shape[:2])
        blocks[:, :, at : at + 2] = scale.astype(numpy.float16)[..., None].view(numpy.uint8)
    return blocks.reshape(rows, -1)


def write_types(out, rng):
    writer, expected = gguf.GGUFWriter(os.path.join(out, "types.gguf"), "none"), {}
    writer.add_custom_alignment(64)
    for kind, value in {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4000000000,
                        "int32": -2000000000, "float32": 0.1, "uint64": 2**52 + 1, "int64": -(2**52) - 1,
                        "float64": 0.1, "bool": True, "string": "a \0 b\xe9"}.items():
        getattr(writer, "add_" + kind)("one." + kind, value)
    writer.add_bool("one.false", False)
    writer.add_array("many.strings", ["", "x", "\u0120the", "a \0 b"])
    writer.add_array("many.bytes", [b"\xff\xfe", b""])
    writer.add_array("many.integers", [3, -1, 2000000000])
    writer.add_array("many.floats", [0.5, -1.25])
    writer.add_array("many.booleans", [True, False, True])
    for kind in TYPES:
        blocks = random_blocks(kind, (2, 512), rng)
        quant = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, blocks, raw_dtype=quant)
        floats = gguf.quants.dequantize(blocks, quant).astype(numpy.float32)
        expected[kind] = torch.from_numpy(floats.reshape(2, 512).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, os.path.join(out, "types.safetensors"))


def in_pairs(weight, heads):
    """Rows of a head in the order that llama.cpp turns: 0, half, 1, half + 1, ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def stacked(weights, layers):
    """The experts' matrices of a layer as one, [experts, rows, columns]."""
    parts = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    found = {}
    for name in [name for name in weights if ".experts." in name]:
        layer, expert, part = re.fullmatch(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight", name).groups()
        found.setdefault((layer, parts[part]), {})[int(expert)] = (name, weights[name])
    return {f"blk.{layer}.ffn_{part}_exps.weight": [by_number[e] for e in sorted(by_number)]
            for (layer, part), by_number in found.items()}


def write_model(folder, arch, path):
    """Returns the weights as they are in the file."""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    rope = config.get("rope_parameters") or config
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    # the loader of transformers takes the size of the vocabulary from the tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    stored = {}

    def add(to, weight, turn=lambda x: x):
        if weight.ndim == 1:
            writer.add_tensor(to, weight)
            return weight
        kind = gguf.GGMLQuantizationType.Q8_0 if weight.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F16
        blocks = gguf.quants.quantize(turn(weight), kind)
        writer.add_tensor(to, blocks, raw_dtype=kind)
        return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)

    weights = {name: tensor.numpy() for name, tensor in load_file(os.path.join(folder, "model.safetensors")).items()}
    for to, experts in stacked(weights, config["num_hidden_layers"]).items():
        for (name, _), weight in zip(experts, add(to, numpy.stack([weight for _, weight in experts]))):
            stored[name] = weight
    for name, weight in weights.items():
        if ".experts." not in name:
            turns = arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
            count = heads if "q_proj" in name else kv_heads
            stored[name] = add(names.get_name(name, try_suffixes=(".weight", ".bias")), weight,
                               (lambda x: in_pairs(x, count)) if turns else lambda x: x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(numpy.ascontiguousarray(weight)).float() for name, weight in stored.items()}


def load_model(out, name, folder, weights):
    """The model of a GGUF file, by the loader of transformers where it knows the family."""
    options = dict(dtype=torch.float32, attn_implementation="eager")
    if name in ("mixtral", "qwen3_moe"):
        with tempfile.TemporaryDirectory() as copy:
            shutil.copy(os.path.join(folder, "config.json"), copy)
            save_file(weights, os.path.join(copy, "model.safetensors"), metadata={"format": "pt"})
            return AutoModelForCausalLM.from_pretrained(copy, **options)
    if name == "qwen3":  # the loader overlooks its head_dim
        options["config"] = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(out, gguf_file=name + ".gguf", **options)


@torch.no_grad()
def write_golden(out, name, tokens, model):
    logits = model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].float()
    rows = ",\n".join("[" + ",".join(f"{x:.9g}" for x in row) + "]" for row in logits.tolist())
    with open(os.path.join(out, name + ".json"), "w") as f:
        f.write(f'{{"tokens": {json.dumps(tokens)},\n"logits": [\n{rows}]}}\n')
    return logits


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", type=int, default=12)
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    write_types(args.out, numpy.random.default_rng(0))
    for name, arch in dict(llama="llama", qwen2="qwen2", qwen3="qwen3", mixtral="llama", qwen3_moe="qwen3moe").items():
        folder = os.path.join(args.hf, name)
        weights = write_model(folder, arch, os.path.join(args.out, name + ".gguf"))
        with open(os.path.join(folder, "golden.json")) as f:
            golden = json.load(f)
        tokens = golden["tokens"][: args.tokens]
        logits = write_golden(args.out, name, tokens, load_model(args.out, name, folder, weights))
        exact = torch.tensor(golden["logits"][: args.tokens])
        error = ((logits - exact).norm() / exact.norm()).item()
        print(f"{name}: {os.path.getsize(os.path.join(args.out, name + '.gguf'))} bytes, "
              f"{100 * error:.2f}% from the model in f32")
        assert error < (0.3 if name in ("mixtral", "qwen3_moe") else 0.05)  # rounding changes some tokens' experts


if __name__ == "__main__":
    main()
