"""Hugging Face checkpoint folders: raw safetensors bytes, families, name maps, verification."""
