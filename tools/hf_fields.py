#!/usr/bin/env python3
"""Change every field of a config.json, one by one, and note what transformers makes of it.

    python3 tools/hf_fields.py --out spec/data/hf_fields.json     # needs torch and transformers

For each family the weights and the config come from a folder of spec/data/hf. The fields are
those of the family's config class, of every other family's, of transformers' base class, of
generation, and those that older versions wrote. Each is left out, set to null, to values of
the wrong type and to other sensible ones; then several fields are changed at once. A change
is an object of fields, in which "absent" means that the field is left out. Each family has
    "="  the changes whose logits are bit-identical to those of the unchanged config
    "!"  those for which transformers raises, the folder's tensors are not the model's, or
         the logits are not finite
    "#"  [change, logits] for all others, of golden.json's 40 tokens: 6 numbers of the last
         token and 2 of the 21st
Changes of one field are grouped, {"field": [value, ...]}; those of several are in a list.
"fields" are those of the family's config class.
"""
import argparse, dataclasses, json, logging, os, shutil, tempfile, warnings
import torch
import transformers
from transformers import (AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, Gemma2Config,
                          Gemma3TextConfig, GenerationConfig, Glm4MoeLiteConfig, LlamaConfig, MistralConfig,
                          MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig)

# The folder of spec/data/hf with a small model of each family, and its config class.
FAMILIES = {
    "llama": ("llama", LlamaConfig), "mistral": ("mistral", MistralConfig),
    "mixtral": ("mixtral", MixtralConfig), "qwen2": ("qwen2", Qwen2Config),
    "qwen3": ("qwen3_window", Qwen3Config), "qwen3_moe": ("qwen3_moe", Qwen3MoeConfig),
    "gemma2": ("gemma2", Gemma2Config), "gemma3_text": ("gemma3", Gemma3TextConfig),
    "deepseek_v2": ("deepseek_v2_groups", DeepseekV2Config), "deepseek_v3": ("deepseek_v3", DeepseekV3Config),
    "deepseek_v32": ("deepseek_v32", DeepseekV32Config), "glm4_moe_lite": ("glm4_moe_lite", Glm4MoeLiteConfig),
}

# Fields that are in no config class, but in files on the hub, or that only code reads.
OTHER = ["rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings",
         "rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "is_causal", "per_layer_config",
         "torch_dtype", "_name_or_path", "auto_map", "hidden_act", "cache_implementation", "sliding_window_size",
         "use_mrope", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "pruned_heads", "torchscript",
         "output_attentions", "num_labels", "attn_implementation", "_attn_implementation", "attention_chunk_size",
         "experts_implementation", "tie_last_hidden_states", "tokenizer_class", "num_experts", "qk_norm",
         "logit_scale", "mlp_only_layers", "shared_expert_intermediate_size", "no_such_field", "num_local_experts",
         "num_nextn_predict_layers", "moe_layer_freq", "scoring_func", "topk_method", "rope_interleave", "qk_head_dim",
         "first_k_dense_replace", "ep_size", "seq_aux", "aux_loss_alpha"]

WRONG = ["absent", None, "x", [], {}, True, -1]
# No 2.0 for integers and no 2 for floats: JSON has one kind of number.
OF_TYPE = {bool: [True, False, 0, 1], int: [0, 1, 2, 3, 1.5, 1e300], float: [0.0, 0.5, 2.5, 1e-12, 1e300],
           str: ["silu", "gelu", "gelu_pytorch_tanh"], list: [[0], ["full_attention"]]}

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
GONE = dict(rope_parameters="absent", rope_scaling="absent", rope_theta="absent")


def without(fields, name):
    return {k: v for k, v in fields.items() if k != name}


def rotations():
    """What a rotation may look like, as rope_scaling alone, beside rope_parameters, and in them."""
    kinds = [{}, {"rope_type": "zzz"}, {"rope_type": 3}, {"rope_type": "default"}, {"type": "linear", "factor": 2.0},
             {"rope_type": "linear", "factor": 2}, {"type": "linear", "rope_type": "dynamic", "factor": 2.0},
             {"type": "su", "factor": 2.0}, {"rope_type": "longrope"}, {"rope_type": "proportional", "rope_theta": 1e4},
             {"rope_type": "default", "factor": 2.0}, {"rope_type": "default", "no_such_field": 3},
             {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "linear"},
             {"rope_type": "linear", "factor": 0.5}, {"rope_type": "linear", "factor": 0},
             {"rope_type": "linear", "factor": "x"}, {"rope_type": "linear", "factor": None},
             {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
             {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": "x"},
             {"rope_type": "default", "rope_theta": None}, {"rope_type": "default", "rope_theta": 777.0},
             YARN, LLAMA3 | {"rope_theta": 1e4}]
    yield from ({"rope_scaling": x} for x in [[1, 2], "x", 3, True])
    for kind in kinds:
        yield GONE | {"rope_scaling": kind}
        yield {"rope_scaling": kind}
        yield GONE | {"rope_parameters": kind}
    for field in YARN:
        yield GONE | {"rope_parameters": without(YARN, field)}
        yield GONE | {"rope_parameters": YARN | {field: None}}
    for field, values in dict(attention_factor=[1.5, 0, None, "x"], beta_fast=[4.0, 0, None, "x"], beta_slow=[2, 0, None],
                              mscale=[2.0, 0, None], mscale_all_dim=[0.7, None], truncate=[False, None, "x"],
                              no_such_field=[1]).items():
        for value in values:
            yield GONE | {"rope_parameters": YARN | {field: value}}
    yield GONE | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.7}}
    yield GONE | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0}}
    yield GONE | {"rope_parameters": YARN, "original_max_position_embeddings": 16}
    yield GONE | {"rope_parameters": without(YARN, "original_max_position_embeddings"),
                  "original_max_position_embeddings": 16}
    for field in LLAMA3:
        yield GONE | {"rope_parameters": without(LLAMA3, field), "rope_theta": 1e4}
    yield GONE | {"rope_parameters": LLAMA3, "rope_theta": 1e3, "original_max_position_embeddings": 16}
    yield GONE | {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}, "rope_theta": 1e3}
    yield GONE | {"rope_theta": 777.0}
    yield {"rope_theta": 777.0}
    yield GONE | {"rope_theta": 777.0, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}
    yield GONE | {"rope_theta": 777.0, "rope_scaling": {"rope_type": "default", "rope_theta": 99.0}}
    yield GONE | {"rope_scaling": {"type": "dynamic", "factor": 3.0}, "max_position_embeddings": 512}
    yield GONE | {"rope_theta": None}
    yield GONE | {"partial_rotary_factor": 0.5}
    yield GONE | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}}
    yield GONE | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0},
                                      "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}}
    yield GONE | {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": YARN}}
    yield GONE | {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}
    yield GONE | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
    yield GONE | {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}
    yield GONE | {"rope_parameters": {"full_attention": {"rope_type": "default"}, "rope_type": "default"}}
    yield GONE | {"rope_parameters": {"full_attention": 3}}
    yield GONE | {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}
    yield GONE | {"rope_local_base_freq": 500.0}
    yield GONE | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0, "rope_theta": 5e5}


def windows(layers):
    kinds = ["full_attention", "sliding_attention"]
    some = [kinds[i % 2] for i in range(layers)]
    for types in [some, some[::-1], kinds[:1] * layers, kinds[1:] * layers, some[1:], ["chunked_attention"] * layers,
                  ["x"] * layers, [1] * layers, "full_attention"]:
        for window in [5, None]:
            yield {"layer_types": types, "sliding_window": window, "use_sliding_window": "absent"}
            yield {"layer_types": types, "sliding_window": window, "use_sliding_window": True}
    for use in [True, False, None, "absent"]:
        for window in [5, None, "absent"]:
            yield {"use_sliding_window": use, "sliding_window": window, "max_window_layers": 1, "layer_types": "absent"}
    for last in [0, 1, "absent", None]:
        yield {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": last, "layer_types": "absent"}
    for pattern in [1, 2, 3, 0, "absent", None]:
        yield {"sliding_window_pattern": pattern, "layer_types": "absent"}


def routers(layers):
    """How experts may be grouped, chosen and spread over the layers."""
    for method in ["greedy", "group_limited_greedy", "noaux_tc"]:
        for groups, most in [(1, 1), (2, 1), (3, 1), (3, 3), (4, 3), (8, 1), (None, None), (2, 5)]:
            yield {"topk_method": method, "n_group": groups, "topk_group": most}
    for method in ["softmax", "sigmoid", "x"]:
        yield {"scoring_func": method}
    for types in [["dense"] * layers, ["sparse"] * layers, ["sparse"] + ["dense"] * (layers - 1), ["sparse"], ["x"] * layers,
                  "sparse", None, [None] * layers]:
        yield {"mlp_layer_types": types}
        yield {"mlp_layer_types": types, "first_k_dense_replace": 0}
    yield {"n_routed_experts": "absent", "num_local_experts": 4}
    yield {"n_routed_experts": "absent", "num_experts": 4}
    yield {"n_routed_experts": "absent", "num_local_experts": 8, "num_experts": 8}
    yield {"layer_types": ["indexed_attention"] * layers}
    for factor in [None, 4.0]:
        yield GONE | {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7, "factor": factor}}
    yield GONE | {"rope_parameters": YARN | {"mscale_all_dim": 0.7}}
    yield GONE | {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0}}
    yield GONE | {"rope_scaling": without(YARN, "rope_type") | {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
                  "rope_theta": 10000}


def cases(config, layers, fields, own):
    for name in GenerationConfig._get_default_generation_params():
        yield from ({name: value} for value in [None, "x", 2])
    for name, default in fields.items():
        values = WRONG + OF_TYPE.get(type(default), [False, 2, "silu", {"x": 1}])
        if name not in own and name not in OTHER:
            values = ["absent", None, "x", True, 2]
        if isinstance(config.get(name), int) and not isinstance(config[name], bool):
            values = values + [config[name] + 1, 2 * config[name]]
        yield from ({name: value} for value in values)
    yield from rotations()
    yield from windows(layers)
    yield {"num_local_experts": "absent", "num_experts": config.get("num_local_experts", 4)}
    yield {"num_local_experts": "absent", "num_experts": "absent"}
    for last in [[0], [1], [7], ["x"], [0, 1], None]:
        yield {"mlp_only_layers": last}
    if "kv_lora_rank" in config:
        yield from routers(layers)


def fields_of_all():
    """Field -> a default of its type, of any family or version."""
    fields = {name: None for name in OTHER}
    for _, kind in FAMILIES.values():
        for field in dataclasses.fields(kind):
            has = field.default is not dataclasses.MISSING
            fields[field.name] = field.default if has else fields.get(field.name)
    fields.pop("rope_parameters")
    fields |= {"layer_types": [], "sliding_window": 1, "head_dim": 1, "num_key_value_heads": 1, "eos_token_id": 1,
               "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}
    return fields


@torch.no_grad()
def run(folder, tokens):
    model, about = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                        output_loading_info=True)
    if any(about[kind] for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]):
        return None
    logits = model.eval()(torch.tensor([tokens]), use_cache=False, output_attentions=False,
                          output_hidden_states=False, return_dict=True).logits[0].float()
    return logits if logits.isfinite().all() else None


def outcome(folder, config, change, tokens, base):
    config = {k: v for k, v in (config | change).items() if v != "absent"}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    try:
        logits = run(folder, tokens)
    except Exception:
        return "!"
    if logits is None:
        return "!"
    if base is not None and torch.equal(logits, base):
        return "="
    return [float(f"{x:.7g}") for x in logits[-1, :6].tolist() + logits[20, :2].tolist()]


class Found:
    """Changes with one kind of outcome."""

    def __init__(self):
        self.count, self.single, self.several, self.logits = 0, {}, [], []

    def add(self, change, what):
        self.count += 1
        if not isinstance(what, str):
            self.logits.append([change, what])
        elif len(change) == 1:
            (name, value), = change.items()
            self.single.setdefault(name, []).append(value)
        else:
            self.several.append(change)

    def text(self):
        def dump(x): return json.dumps(x, separators=(",", ":"))
        if self.logits:
            return "[\n" + ",\n".join(map(dump, self.logits)) + "]"
        return f'{{"single": {{\n' + ",\n".join(f'"{k}": {dump(v)}' for k, v in self.single.items()) + (
            f'}},\n"several": [\n' + ",\n".join(map(dump, self.several)) + "]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="spec/data/hf")
    parser.add_argument("--only", nargs="*", default=FAMILIES, help="names of families")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    fields, lines = fields_of_all(), []
    for family in args.only:
        source = os.path.join(args.models, FAMILIES[family][0])
        with open(os.path.join(source, "config.json")) as f:
            config = json.load(f)
        with open(os.path.join(source, "golden.json")) as f:
            tokens = json.load(f)["tokens"]
        folder, seen = tempfile.mkdtemp(), set()
        os.symlink(os.path.abspath(os.path.join(source, "model.safetensors")), os.path.join(folder, "model.safetensors"))
        shutil.copy(os.path.join(source, "config.json"), folder)
        base, found = run(folder, tokens), {"=": Found(), "!": Found(), "#": Found()}
        own = sorted(field.name for field in dataclasses.fields(FAMILIES[family][1]))
        for change in cases(config, config["num_hidden_layers"], fields, own):
            change = {k: v for k, v in change.items() if v != "absent" or k in config}
            if not change or json.dumps(change) in seen:
                continue
            seen.add(json.dumps(change))
            what = outcome(folder, config, change, tokens, base)
            found[what if isinstance(what, str) else "#"].add(change, what)
        shutil.rmtree(folder)
        lines.append(f'"{family}": {{"fields": {json.dumps(own)},\n' + ",\n".join(f'"{k}": {v.text()}' for k, v in found.items()) + "}")
        print(family, {kind: each.count for kind, each in found.items()}, flush=True)
    with open(args.out, "w") as f:
        f.write(f'{{"transformers": "{transformers.__version__}",\n' + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
