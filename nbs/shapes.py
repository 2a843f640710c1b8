"""Models that chapters 23, 23b and 62 measure: random weights in the shape of a published model, and files in Q4_0."""

import sys, tempfile
from pathlib import Path

import torch

from batchlab.models import load_model

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from gguf_files import gguf_file

ROPE, SIZES = dict(rope_type="default"), dict(vocab_size=49_152, tie_word_embeddings=True)
SHAPES = {
    "smollm2-135m": dict(
        model_type="llama",
        num_hidden_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_parameters=ROPE | dict(rope_theta=1e5),
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3",
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters=ROPE | dict(rope_theta=1e6),
    ),
    "llama-1b": dict(
        model_type="llama",
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rope_parameters=ROPE | dict(rope_theta=5e5),
    ),
}


HOME = tempfile.TemporaryDirectory()  # as long as this process lives


def shape_folder(shape):
    "The folder of a model of `shape`, a name of `SHAPES`, with random weights in bf16; its embeddings are the head, too."
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(HOME.name) / shape
    if not folder.exists():
        config = AutoConfig.for_model(**SHAPES[shape] | SIZES, max_position_embeddings=8192)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def as_q4_0(folder, model=None):
    "A `.gguf` file in `folder` of `model`, else the default one, in Q4_0, its embeddings and its head in Q8_0."
    model, file = model or load_model(dtype="fp32")[0], Path(folder) / "model.q4_0.gguf"
    return gguf_file(file, model, {"general.file_type": 2}, form="Q4_0", outer="Q8_0")
