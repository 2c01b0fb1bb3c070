"""The health of several models together.

Owns: the rule: ready while each model is ready that is neither given up nor optional, and none drains; live
while each moves.
"""

from collections.abc import Mapping

from engine.types import EngineState, Health


def joined_health(models: Mapping[str, Health]) -> Health:
    """Join the health of models by name. Those that are given up count only where all are."""
    are_optional = any(each.is_optional for each in models.values())
    hopeful = {name: each for name, each in models.items() if not (each.is_given_up or each.is_optional)}
    hopeful = hopeful or ({} if are_optional else dict(models))
    late = {name: each for name, each in models.items() if not each.is_ready}
    drains = [each for each in models.values() if each.state is EngineState.DRAINING]
    worst = next((each for each in (*drains, *hopeful.values()) if not each.is_ready), None)
    return Health(
        state=EngineState.READY if worst is None else worst.state,
        is_live=all(each.is_live for each in models.values()),
        detail="; ".join(f"{name}: {each.detail}" for name, each in late.items()) or "ready",
        num_steps=sum(each.num_steps for each in models.values()),
        progress=sum(each.progress for each in hopeful.values()) / len(hopeful) if hopeful else 1.0,
    )
