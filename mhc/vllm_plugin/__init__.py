"""vLLM plugin: DeepSeek V4's DSpark draft keeps its embeddings 2-D into its first layer.

`python -m mhc vllm-status` says what it would change in the installed vLLM, and why, without a GPU.
"""
