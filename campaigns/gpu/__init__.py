"""Measurements of the GPU path on a GPU: correctness, speed, and where its time goes (commands).

    python -m campaigns.gpu --out FOLDER

Needs the repository and torch, triton, transformers and numpy; what else a part needs and does not find, it
names, and is skipped. Each part is a process of its own with a time limit, and what it has found by then is
in FOLDER. docs/benchmarks/gpu.md says what the parts are.
"""
