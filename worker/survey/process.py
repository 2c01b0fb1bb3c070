"""The process of a survey: `echo '{"model_path": "..."}' | python -m worker.survey.process`.

Owns: imports in the order of the engine process, and the report: each finding is one line of JSON, so that
earlier findings are read even if a later one takes the process down.
Never: looks at anything itself (survey.py).
"""

import json
import sys
from dataclasses import asdict

import msgspec

from worker.devices.lazy_imports import import_torch, load_shapes
from worker.worker_config import WorkerConfig


def main() -> None:
    config = msgspec.convert(json.load(sys.stdin), WorkerConfig)
    import_torch(config.device)
    load_shapes()  # models are built without memory, and all shapes asked for
    from worker.survey.survey import survey

    for each in survey(config):
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
