#!/usr/bin/env python3
"""Make small random Hugging Face models, and their logits for one prompt each.

    python3 tools/hf_goldens.py --out spec/data/hf          # needs torch and transformers

For each model of the table below writes to OUT/NAME/:
    config.json        as transformers writes it; llama in the style of version 4,
                       with rope_theta and rope_scaling at the top level
    model.safetensors  fp32 weights, random from a fixed seed
    golden.json        {"tokens": [40 ids], "logits": [[vocab numbers] for each position]},
                       from eager attention in fp32; nine digits give a float exactly
Norm weights and biases are random too, so a forward pass that leaves one out gives
other logits. All attention is grouped-query; the shapes differ on purpose.
"""
import argparse, json, math, os
import torch
from transformers import (AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig,
                          LlamaForCausalLM, MistralConfig, MistralForCausalLM, MixtralConfig,
                          MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)

COMMON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, max_position_embeddings=512,
              bos_token_id=0, eos_token_id=1)

SMALL = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
             max_position_embeddings=256, bos_token_id=0, eos_token_id=1, rms_norm_eps=1e-5,
             tie_word_embeddings=True)

MODELS = {
    # A separate output head; head_dim = hidden / heads.
    "llama": (LlamaForCausalLM, LlamaConfig(
        **COMMON, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    # Scaled rotary frequencies. The original length is short, so they matter within 40 tokens.
    "llama3": (LlamaForCausalLM, LlamaConfig(
        **COMMON, intermediate_size=72, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="llama3", rope_theta=1000.0, factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=64))),
    # Biases on q, k and v.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(
        **COMMON, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    # Norms on each head's q and k; a group of three; heads * head_dim differs from hidden.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(
        **COMMON, intermediate_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    # Stretched frequencies, with the factor for attention that the paper suggests. The trained
    # length is short, so that pairs of all three kinds are there.
    "yarn": (LlamaForCausalLM, LlamaConfig(
        **SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0,
                             original_max_position_embeddings=32))),
    "yarn_mscale": (LlamaForCausalLM, LlamaConfig(
        **SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        rope_parameters=dict(rope_type="yarn", rope_theta=500.0, factor=8.0, mscale=2.0, mscale_all_dim=0.7,
                             truncate=False, original_max_position_embeddings=64))),
    # Read past the length that it was trained with.
    "dynamic": (LlamaForCausalLM, LlamaConfig(
        **(SMALL | dict(max_position_embeddings=16)), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1000.0, factor=3.0))),
    # A window in every layer, and in some of them.
    "mistral": (MistralForCausalLM, MistralConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=11)),
    "qwen3_window": (Qwen3ForCausalLM, Qwen3Config(
        **(SMALL | dict(num_hidden_layers=3)), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    # Experts: in every layer, and in every second one with a dense one.
    "mixtral": (MixtralForCausalLM, MixtralConfig(
        **SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=5,
        num_experts_per_tok=2, sliding_window=None)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **SMALL, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[])),
    "qwen3_moe_some": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        **(SMALL | dict(num_hidden_layers=3)), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False,
        decoder_sparse_step=2, mlp_only_layers=[])),
    # Local layers with a rotation and a window of their own, soft caps, norms before and after.
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(
        **(SMALL | dict(num_hidden_layers=3)), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24, attn_logit_softcapping=None, final_logit_softcapping=None,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1000000.0),
                             sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(
        **(SMALL | dict(num_hidden_layers=3)), num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        sliding_window=7, query_pre_attn_scalar=24, attn_logit_softcapping=1.5, final_logit_softcapping=2.0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
}


@torch.no_grad()
def randomise(model):
    """Draws weights so large that logits and attention scores are about 1."""
    for name, weight in model.named_parameters():
        weight.normal_()
        if "norm" in name:
            weight.mul_(0.3).add_(0 if "gemma" in model.config.model_type else 1)
        elif name.endswith("bias"):
            weight.mul_(0.5)
        elif "embed" in name or "lm_head" in name:
            weight.mul_(0.2)
        else:
            weight.mul_(1.5 / math.sqrt(weight.shape[-1]))


@torch.no_grad()
def logits_of(model, tokens):
    return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].float()


def write_old_style(path):
    """Rewrites config.json as transformers 4 did."""
    with open(path) as f:
        config = json.load(f)
    rope = config.pop("rope_parameters")
    config.update(rope_theta=rope["rope_theta"], rope_scaling=None, torch_dtype=config.pop("dtype"))
    config.pop("head_dim", None)
    config.pop("transformers_version", None)
    with open(path, "w") as f:
        f.write(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_golden(path, tokens, logits):
    rows = ",\n".join("[" + ",".join(f"{x:.9g}" for x in row) + "]" for row in logits.tolist())
    with open(path, "w") as f:
        f.write(f'{{"tokens": {json.dumps(tokens)},\n"logits": [\n{rows}]}}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=MODELS, help="names of models")
    args = parser.parse_args()
    for seed, (name, (kind, config)) in enumerate(MODELS.items()):
        if name not in args.only:
            continue
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = kind(config).float()
        randomise(model)
        tokens = torch.randint(config.vocab_size, (args.tokens,)).tolist()
        logits = logits_of(model, tokens)

        folder = os.path.join(args.out, name)
        model.save_pretrained(folder)
        extra = os.path.join(folder, "generation_config.json")
        if os.path.exists(extra):
            os.remove(extra)
        if name == "llama":
            write_old_style(os.path.join(folder, "config.json"))
        write_golden(os.path.join(folder, "golden.json"), tokens, logits)

        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        error = (logits_of(again, tokens) - logits).abs().max().item()
        size = os.path.getsize(os.path.join(folder, "model.safetensors"))
        print(f"{name}: {size} bytes, logits std {logits.std().item():.3f}, reloaded within {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
