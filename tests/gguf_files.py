"Write models of transformers as GGUF files, with the keys and tensors that llama.cpp's converter gives each family."

import functools

import gguf
import numpy as np
import torch

from batchlab.models import tiny_model, tiny_tokenizer

BASE = """block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv """
RMS, ROPE = "attention.layer_norm_rms_epsilon ", "rope.freq_base "
HEAD, SIZED = "attention.key_length attention.value_length ", "vocab_size rope.dimension_count "
EXPERTS = "expert_count expert_used_count expert_feed_forward_length "
# by architecture of the file, the keys that the converter writes
KEYS = dict(
    llama=BASE + RMS + ROPE + HEAD + SIZED,
    qwen2=BASE + RMS + ROPE,
    qwen3=BASE + RMS + ROPE + HEAD,
    qwen2moe=BASE + RMS + ROPE + EXPERTS + "expert_shared_feed_forward_length",
    qwen3moe=BASE + RMS + ROPE + EXPERTS,
    gemma=BASE + RMS + HEAD,
    gemma2=BASE
    + RMS
    + HEAD
    + "attn_logit_softcapping final_logit_softcapping attention.sliding_window",
    gemma3=BASE + RMS + ROPE + HEAD + "rope.freq_base_swa attention.sliding_window",
    phi3=BASE
    + RMS
    + ROPE
    + "rope.dimension_count rope.scaling.original_context_length attention.sliding_window",
    starcoder2=BASE + ROPE + "attention.layer_norm_epsilon",
    granite=BASE
    + RMS
    + ROPE
    + SIZED
    + "attention.scale embedding_scale residual_scale logit_scale",
    olmo2=BASE + RMS + ROPE,
    smollm3=BASE + RMS + ROPE + SIZED,
    stablelm=BASE + "rope.dimension_count use_parallel_residual attention.layer_norm_epsilon",
    nemotron=BASE + RMS + ROPE + HEAD + SIZED + "attention.layer_norm_epsilon rope.scaling.type",
    lfm2=BASE + RMS + ROPE + "vocab_size shortconv.l_cache",
    gpt2=BASE.replace("attention.head_count_kv", "attention.layer_norm_epsilon"),
)
ARCHS = dict(
    mistral="llama",
    mixtral="llama",
    gemma3_text="gemma3",
    qwen2_moe="qwen2moe",
    qwen3_moe="qwen3moe",
)
EPS = "norm_epsilon norm_eps layer_norm_eps layer_norm_epsilon rms_norm_eps".split()
NAMES = dict(
    block_count="num_hidden_layers",
    context_length="max_position_embeddings",
    embedding_length="hidden_size",
    feed_forward_length="intermediate_size",
    expert_used_count="num_experts_per_tok",
    expert_feed_forward_length="moe_intermediate_size",
    expert_shared_feed_forward_length="shared_expert_intermediate_size",
    embedding_scale="embedding_multiplier",
    residual_scale="residual_multiplier",
    logit_scale="logits_scaling",
) | {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.scale": "attention_multiplier",
    "attention.sliding_window": "sliding_window",
    "shortconv.l_cache": "conv_L_cache",
}  # and all others are called the same


def arch_of(model):
    return ARCHS.get(model.config.model_type, model.config.model_type)


def about(model):
    "The metadata of `model` by key, without the name of its architecture."
    c, arch = model.config, arch_of(model)
    ropes = getattr(c, "rope_parameters", None) or {}
    rope, size = ropes.get("full_attention", ropes), c.hidden_size // c.num_attention_heads
    size = getattr(c, "head_dim", None) or size
    part = rope.get("partial_rotary_factor", 1)
    eps = next((getattr(c, name) for name in EPS if hasattr(c, name)), None)
    values = {
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": getattr(c, "rms_norm_eps", eps),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(part * size),
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": ropes.get("sliding_attention", rope).get("rope_theta"),
        "rope.scaling.type": "none",
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", 256),
        "expert_count": getattr(c, "num_experts", getattr(c, "num_local_experts", None)),
        "feed_forward_length": getattr(c, "intermediate_size", 4 * c.hidden_size),
    }
    keys = KEYS[arch].split()
    if c.model_type == "mixtral":
        keys = [*(KEYS["llama"].replace(HEAD, "").split()), "expert_count", "expert_used_count"]
    found = {}
    for key in keys:
        value = values[key] if key in values else getattr(c, NAMES.get(key, key))
        found[key] = 0 if value is None else value
    if arch == "lfm2":
        kv = dict(full_attention=c.num_key_value_heads, conv=0)
        found["attention.head_count_kv"] = [kv[kind] for kind in c.layer_types]
    if rope.get("rope_type") in ("linear", "yarn"):
        scaling = {"type": rope["rope_type"], "factor": float(rope["factor"])}
        if rope["rope_type"] == "yarn":
            scaling["original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    if rope.get("rope_type") == "longrope":
        found["rope.scaling.attn_factor"] = model.model.rotary_emb.attention_scaling
    return found


def weights(model):
    "The tensors of `model` by their names in a file, fp32."
    from transformers.pytorch_utils import Conv1D

    c, arch = model.config, arch_of(model)
    archs = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], c.num_hidden_layers)
    found = {}
    for name, x in model.named_parameters():  # a tied head is none
        holder, part = model.get_submodule(name.rpartition(".")[0]), name.split(".")[-2]
        x = x.detach().float()
        if name.endswith("norm.weight"):
            x = x + (arch.startswith("gemma") or arch == "nemotron")
        if isinstance(holder, Conv1D) and x.ndim == 2:
            x = x.T
        heads = dict(q_proj=c.num_attention_heads, k_proj=getattr(c, "num_key_value_heads", 0))
        if part in heads and arch in ("llama", "granite", "smollm3"):
            x = x.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).reshape(x.shape)
        if ".experts." in name:
            down = names.get_name(name.replace("gate_up_proj", "down_proj")) + ".weight"
            halves = dict(zip(("gate", "up"), x.chunk(2, 1))) if "gate_up" in name else dict(down=x)
            found |= {down.replace("down", half): y for half, y in halves.items()}
        else:
            found[names.get_name(name, (".weight", ".bias"))] = x.squeeze(1) if x.ndim > 2 else x
    rope = getattr(c, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        own = model.model.rotary_emb.inv_freq
        plain = rope["rope_theta"] ** -(torch.arange(0, 2 * len(own), 2) / (2 * len(own)))
        found["rope_freqs.weight"] = plain / own
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"])
    return {name: x.contiguous().numpy() for name, x in found.items()}


def words(size, **more):
    "The metadata of `tiny_tokenizer`, filled up to `size` tokens, and `more` of it."
    tok = tiny_tokenizer()
    tokens = tok.convert_ids_to_tokens([*range(len(tok))])
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    return {
        f"tokenizer.{key}": value
        for key, value in {
            "ggml.model": "gpt2",
            "ggml.pre": "gpt-2",
            "ggml.tokens": tokens[:size],
            "ggml.token_type": ([3] * 3 + [1] * 256 + [5] * (size - 259))[:size],
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 2,
            "ggml.padding_token_id": 0,
            "chat_template": tok.chat_template,
            **more,
        }.items()
        if value is not None
    }


def put(writer, key, value):
    "Write `value` under `key` with the type that the converter gives it."
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)


def write(path, arch, metadata, tensors, form="F32", outer="", **options):
    """Write a file of these `metadata` by key and numpy `tensors` by name, matrices in this `form`, embeddings and head in `outer`, if it is
    given; returns its path."""
    w = gguf.GGUFWriter(path, arch, **options)
    for key, value in metadata.items():
        put(w, key, value)
    for name, x in tensors.items():
        of = outer and name.startswith(("token_embd", "output.")) and outer or form
        kind = gguf.GGMLQuantizationType[of if x.ndim > 1 and x.shape[-1] % 32 == 0 else "F32"]
        w.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(x), kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def gguf_file(path, model, metadata=None, tensors=None, **options):
    """Write `model` as a file; returns its path. `metadata`, `tensors`: more of them, or None in place of one
    that is to be left out; a key that begins with a dot is one of the architecture."""
    arch, size = arch_of(model), model.config.vocab_size
    said = {f".{key}": value for key, value in about(model).items()} | words(size)
    said |= {"general.file_type": 0} | (metadata or {})
    said = {arch + k if k[0] == "." else k: v for k, v in said.items() if v is not None}
    held = {k: x for k, x in (weights(model) | (tensors or {})).items() if x is not None}
    return write(path, arch, said, held, **options)


SIZES = dict(qwen3=dict(head_dim=128))


def files_of_families(tmp_path_factory):
    "`file_of(arch, form)`: the file of a tiny model in bf16, its matrices in `form`, made once."

    @functools.cache
    def file_of(arch, form="Q4_0"):
        model = tiny_model(arch, **SIZES.get(arch, {})).to(torch.bfloat16)
        return gguf_file(tmp_path_factory.mktemp(arch) / "m.gguf", model, form=form, outer="Q8_0")

    return file_of
