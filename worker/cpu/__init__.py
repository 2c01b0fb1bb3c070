"""The CPU's own kernels: built once from csrc/, put under a model's layers where they compute the same."""
