"""The check of --data-parallel-size, and what several engines change in the options of each.

Owns: the device of each engine, and the reports that the choice between engines needs.
Never: counts memory (`tokenyard doctor` does, worker/startup/survey.py).
"""

from engine.options.option_declaration import OptionError
from engine.options.options import Options
from scheduler.prefix_keys import JournalContent
from worker.machine import visible_gpus


def check_engines(options: Options) -> None:
    """Refuse more engines than there are devices; each takes one GPU, in the order of their numbers."""
    asked = f"--data-parallel-size {options.data_parallel_size}"
    if options.data_parallel_size == 1:
        return
    if options.device.startswith("cuda:"):
        raise OptionError(
            f"{asked} with --device {options.device}",
            "each engine has a GPU of its own",
            "use --device cuda, and CUDA_VISIBLE_DEVICES to choose which GPUs",
        )
    num_gpus = len(visible_gpus())
    if device_of(options) == "cuda" and options.data_parallel_size > num_gpus:
        raise OptionError(
            asked,
            f"each engine takes a GPU, and there are {num_gpus}",
            "lower it, or use --device cpu, where engines share the cores",
        )


def device_of(options: Options) -> str:
    """Name the device. Several engines must not choose one each: the last would find no GPU left."""
    if options.device == "auto" and options.data_parallel_size > 1:
        return "cuda" if visible_gpus() else "cpu"
    return options.device


def prefix_journal(options: Options) -> JournalContent | None:
    """Reports that the choice between engines needs."""
    is_read = options.enable_prefix_caching and options.data_parallel_size > 1
    return JournalContent.KEYS if is_read else None
