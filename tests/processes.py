"""What tests that start processes of their own share."""

import os
import socket
import subprocess
import sys


def with_devices(count):
    """This process's environment, for one whose CPU looks like so many devices to JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        **os.environ,
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip(),
        "JAX_PLATFORMS": "cpu",
    }


def free_port():
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*words, **options):
    """Python with these words, its output kept; ``options`` as for ``Popen``."""
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], **kept | options)


def ended(*words, **options):
    """Python with these words, once it has ended in whatever way."""
    child = start(*words, **options)
    output, errors = child.communicate()
    return subprocess.CompletedProcess(words, child.returncode, output, errors)


def finish(*children):
    """What each printed, once all have ended well; none is left behind."""
    try:
        ended = [child.communicate(timeout=900) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, ended, strict=True):
        assert child.returncode == 0, errors[-4000:]
    return [printed for printed, _ in ended]


def python(*words, **options):
    """What Python with these words printed, once it has ended well."""
    return finish(start(*words, **options))[0]
