"""The sampler of a model that generates, by its part among ranks, and the compiler of its grammars."""

from worker.checkpoint.checkpoint_files import find_checkpoint
from worker.devices.device import Device
from worker.ranks.ranks import Ranks, samples
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.row_sampler import RowSampler
from worker.sampling.sampler import Sampler
from worker.worker_config import ModelFacts, WorkerConfig


def open_grammars(config: WorkerConfig, facts: ModelFacts) -> Grammars:
    """Open the grammars of a checkpoint's vocabulary; what they need is read in a thread of its own."""
    grammars = Grammars(
        find_checkpoint(config.model_path), vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
    )
    grammars.open_ahead()
    return grammars


def open_sampler(
    config: WorkerConfig, facts: ModelFacts, device: Device, grammars: Grammars, ranks: Ranks
) -> RowSampler:
    """Open the sampler of one rank."""
    if samples(ranks):
        return Sampler(vocab_size=facts.vocab_size, device=device, grammars=grammars, ranks=ranks)
    return FollowingSampler(
        vocab_size=facts.vocab_size,
        max_num_seqs=config.max_num_seqs,
        device=device,
        ranks=ranks,
        drawn_by=Sampler(vocab_size=facts.vocab_size, device=device),
    )
