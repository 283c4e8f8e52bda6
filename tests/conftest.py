"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# A test run repeats: hypothesis draws the same examples every time, and a slow machine fails none of them.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")
