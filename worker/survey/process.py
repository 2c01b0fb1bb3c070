"""The process of a survey: `echo '{"model_path": "..."}' | python -m worker.survey.process`.

Owns: imports in the order of the engine process, and the report: each finding is one line of JSON, so that
earlier findings are read even if a later one takes the process down. For a list of models it is the memory
that each needs, or what is wrong with one that cannot be loaded.
"""

import json
import sys
from dataclasses import asdict

import msgspec

from worker.devices.lazy_imports import import_torch, load_shapes
from worker.worker_config import WorkerConfig


def main() -> None:
    asked = json.load(sys.stdin)
    configs = msgspec.convert(asked if isinstance(asked, list) else [asked], list[WorkerConfig])
    import_torch(configs[0].device)
    load_shapes()  # models are built without memory, and all shapes asked for
    from worker.survey.needs import survey_needs
    from worker.survey.survey import survey

    for each in survey_needs(configs) if isinstance(asked, list) else survey(configs[0]):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
