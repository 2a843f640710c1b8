"""Families of models that chapter 70 and the reference page on models show, and `tests/test_runners.py` tries: `(name, what is special, settings of a tiny one)`."""

from transformers.models.gptj import modeling_gptj

EAGER = dict(attn_implementation="eager")  # some versions' fused kernel drops the soft cap
CONV = dict(layer_types=["conv", "full_attention"], num_key_value_heads=4)
HYBRID = dict(layer_types=["linear_attention", "full_attention"])
SHARES_KV = dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_kv_shared_layers=2,
    altup_num_inputs=2,
    laurel_rank=8,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=259,
    activation_sparsity_pattern=[0.0] * 4,
)
LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    head_dim=8,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    num_key_value_heads=4,
)

PACKED = [
    ("llama", "grouped heads", {}),
    ("qwen3", "norms on queries and keys", {}),
    ("gpt_bigcode", "one KV head", {}),
    ("granite", "scaling of its own", {}),
    ("cohere", "attention beside the MLP", {}),
    ("olmo2", "norms behind attention and MLP", {}),
    ("gpt2", "learned positions", {}),
    ("opt", "learned positions", {}),
    ("biogpt", "learned positions", {}),
    ("gpt_neox", "partial rotary", {}),
    ("phi", "partial rotary", {}),
    ("phi3", "one matrix for Q, K and V", {}),
    ("glm", "partial rotary", {}),
    ("mistral", "windows", {}),
    ("gemma3", "windows in some layers", {}),
    ("gemma2", "soft-capping, windows", EAGER),
    ("gpt_oss", "sinks, windows, experts", {}),
    ("mixtral", "experts", {}),
    ("qwen3_moe", "experts", {}),
    ("deepseek_v3", "keys longer than values", LATENT),
    ("gemma3n_text", "layers that share KV", SHARES_KV),
    ("stablelm", "partial rotary", {}),
    ("nemotron", "partial rotary", {}),
]
NOT_PACKED = [
    ("bloom", "ALiBi", {}),
    ("falcon", "ALiBi", dict(alibi=True)),
    ("gpt_neo", "attention of its own", {}),
    ("xglm", "attention of its own", {}),
    ("diffllama", "two attentions a layer", {}),
    ("doge", "mask of its own", {}),
    ("llama4_text", "attention in chunks", {}),
    ("bert", "sees both ways", {}),
    ("lfm2", "convolution", CONV),
    ("qwen3_next", "linear attention", HYBRID),
    ("jamba", "state space", {}),
    ("mamba", "state space", {}),
]
FAMILIES = PACKED + NOT_PACKED
# transformers 5.24 wrote the attention of these anew: they run packed since, and padded before.
REWRITTEN = ["codegen", "gptj"]
RUN_PACKED = {name for name, _, _ in PACKED} | {
    name for name in REWRITTEN if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS")
}
