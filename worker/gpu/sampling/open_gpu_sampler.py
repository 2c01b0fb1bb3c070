"""The sampler of a GPU, by its part among ranks."""

from worker.devices.device import Device
from worker.gpu.sampling.gpu_sampler import GpuSampler
from worker.ranks.ranks import Ranks, samples
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler


def open_gpu_sampler(
    vocab_size: int, max_num_seqs: int, device: Device, grammars: Grammars, ranks: Ranks
) -> GpuSampler | FollowingSampler:
    """Open the sampler of one rank; its memory is allocated here."""
    if not samples(ranks):
        return FollowingSampler(vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, ranks=ranks)
    return GpuSampler(
        vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, grammars=grammars, ranks=ranks
    )
