import _probe

_probe.install()
