#!/usr/bin/env python3
"""Make small random Hugging Face models, and their logits for one prompt each.

    python3 tools/hf_goldens.py --out spec/data/hf          # needs torch and transformers

For each model of the table below writes to OUT/NAME/:
    config.json        as transformers writes it; llama in the style of version 4,
                       with rope_theta and rope_scaling at the top level
    model.safetensors  fp32 weights, random from a fixed seed
    golden.json        {"tokens": [40 ids], "logits": [[vocab numbers] for each position]},
                       from eager attention in fp32; nine digits give a float exactly
and for DeepSeek-V3.2 golden_sparse.json, the same where the indexer selects 12 tokens.
Norm weights and biases are random too, so a forward pass that leaves one out gives
other logits. All attention is grouped-query; the shapes differ on purpose.
"""
import argparse, json, math, os
import torch
from transformers import (AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config,
                          DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM, Gemma2Config,
                          Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Glm4MoeLiteConfig,
                          Glm4MoeLiteForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM)
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as dsa

COMMON = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, max_position_embeddings=512,
              bos_token_id=0, eos_token_id=1)

SMALL = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
             max_position_embeddings=256, bos_token_id=0, eos_token_id=1, rms_norm_eps=1e-5,
             tie_word_embeddings=True)

LATENT = dict(vocab_size=48, hidden_size=32, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
              max_position_embeddings=256, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)

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
    # Latent attention: with a plain q_proj and the best experts of all; then with a latent of q and
    # experts of the best groups.
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
        first_k_dense_replace=1, routed_scaling_factor=1.5,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, mscale=0.707,
                             mscale_all_dim=0.707, original_max_position_embeddings=32))),
    "deepseek_v2_groups": (DeepseekV2ForCausalLM, DeepseekV2Config(
        **LATENT, q_lora_rank=24, n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
        first_k_dense_replace=0, routed_scaling_factor=2.0, topk_method="group_limited_greedy", n_group=3,
        topk_group=2, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    # YaRN turns q and k with a factor of its own, and has another one for the scale.
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(
        **LATENT, q_lora_rank=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=4, topk_group=2,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, mscale=1.6,
                             mscale_all_dim=0.8, original_max_position_embeddings=32))),
    # Pairs of the rotation lie apart; no weights of experts sum to 1.
    "deepseek_v3_apart": (DeepseekV3ForCausalLM, DeepseekV3Config(
        **LATENT, q_lora_rank=None, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5, n_group=1, topk_group=1, norm_topk_prob=False,
        rope_interleave=False, attention_bias=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    # Another epsilon than that of the latents' norms.
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(
        **(LATENT | dict(rms_norm_eps=1e-3)), q_lora_rank=24, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, routed_scaling_factor=1.8,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    # The indexer selects all 40 tokens; golden_sparse.json has what it gives when it selects 12.
    "deepseek_v32": (DeepseekV32ForCausalLM, DeepseekV32Config(
        **LATENT, q_lora_rank=24, n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=4, topk_group=2,
        index_topk=64, index_head_dim=32, index_n_heads=8,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=4.0, mscale=1.0,
                             mscale_all_dim=1.0, original_max_position_embeddings=32))),
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
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_().mul_(0.2)


@torch.no_grad()
def logits_of(model, tokens):
    return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].float()


def rotated_and_rounded(x):
    """What DeepSeek's kernel makes of index keys and queries: multiplied by Hadamard's matrix, then rounded to
    8-bit floats with a power of two as the scale of each row."""
    size = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    x = (x.double() @ matrix * size**-0.5).float()
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class SparseIndexer(dsa.DeepseekV32Indexer):
    """DeepSeek's indexer as published: transformers leaves out the rotation and the rounding."""
    topk, margin = 12, math.inf

    @torch.no_grad()
    def forward(self, hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs):
        batch, length, _ = hidden_states.shape
        cos, sin = position_embeddings
        q = self.wq_b(q_resid).view(batch, length, self.n_heads, self.head_dim)
        k = self.k_norm(self.wk(hidden_states)).unsqueeze(2)
        turned = [x[..., :self.qk_rope_head_dim] for x in (q, k)]
        turned = dsa.apply_rotary_pos_emb(*turned, cos, sin, unsqueeze_dim=2)
        q, k = (rotated_and_rounded(torch.cat([a, x[..., self.qk_rope_head_dim:]], -1)) for a, x in zip(turned, (q, k)))
        weights = self.weights_proj(hidden_states).double() * self.n_heads**-0.5 * self.head_dim**-0.5
        scores = torch.einsum("bshd,btd->bsht", q.double(), k.squeeze(2).double()).relu()
        scores = torch.einsum("bsh,bsht->bst", weights, scores) + attention_mask
        best, indices = scores.sort(dim=-1, descending=True, stable=True)  # of equal scores the earlier token wins
        margins = (best[:, self.topk:, self.topk - 1] - best[:, self.topk:, self.topk]).flatten()
        SparseIndexer.margin = min(SparseIndexer.margin, margins[margins > 0].min().item())
        return indices[..., :self.topk].to(torch.int32)


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
        if name == "deepseek_v32":
            for layer in model.model.layers:
                layer.self_attn.indexer.__class__ = SparseIndexer
            sparse = logits_of(model, tokens)
            write_golden(os.path.join(folder, "golden_sparse.json"), tokens, sparse)
            print(f"{name}: sparse logits differ by {(sparse - logits).abs().max().item():.3f}, margin of the last "
                  f"selected token {SparseIndexer.margin:.1e}")
            assert SparseIndexer.margin > 1e-5

        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        error = (logits_of(again, tokens) - logits).abs().max().item()
        size = os.path.getsize(os.path.join(folder, "model.safetensors"))
        print(f"{name}: {size} bytes, logits std {logits.std().item():.3f}, reloaded within {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    main()
