"""Hugging Face checkpoints: read into our parameters, and written from them."""

from dualpipe_jax.hf.load import load_config, load_params
from dualpipe_jax.hf.read_config import model_config
from dualpipe_jax.hf.save import save_params, to_tensors
from dualpipe_jax.hf.write_config import hf_config

__all__ = ["load_config", "load_params", "model_config", "save_params", "to_tensors", "hf_config"]
