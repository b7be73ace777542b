"""What tests that start processes of their own share."""

import os


def with_devices(count: int) -> dict[str, str]:
    """This process's environment, for one whose CPU looks like so many devices to JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        **os.environ,
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip(),
        "JAX_PLATFORMS": "cpu",
    }
