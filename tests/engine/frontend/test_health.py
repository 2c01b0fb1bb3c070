"""Health of several engines, as probes read it."""

from engine.frontend.health import HealthMonitor


def test_an_engine_that_comes_no_more_is_not_said_to_be_replaced() -> None:
    health = HealthMonitor(heartbeat_timeout_s=9.0, num_engines=2)
    for engine in (0, 1):
        health.ready(engine, now_s=0.0)
    health.died(1, "ended with code 70")
    assert health.judge(now_s=0.0).detail.endswith("ended with code 70; it is being replaced")
    health.engine_is_given_up(1)
    detail = "ready, 1 of 2 engines; engine 1: the engine process ended with code 70; it is given up"
    assert health.judge(now_s=0.0).detail == detail
