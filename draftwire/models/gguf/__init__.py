"""Checkpoints in llama.cpp's format, GGUF, which are read once into a folder of safetensors."""
