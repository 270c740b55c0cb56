"""The optimizer of muon.py."""

from patched import script

from gpt.muon import configure_optimizer

script.configure_optimizer = configure_optimizer
