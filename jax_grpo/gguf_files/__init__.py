"""Models in GGUF files, llama.cpp's format, as folders of Hugging Face's: weights, config.json, tokenizer and chat template.

Reads such files with the `gguf` package, which is optional. Knows no model of ours, and nobody but `config.files` imports it.
"""
