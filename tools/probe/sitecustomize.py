import probe

probe.install()
