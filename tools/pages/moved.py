"""Lets the old address of a page lead to where its text is now: python -m tools.pages.moved

A page that is merged into another one, or goes, needs a line here.
"""

import sys

from tools.steps import ROOT

MOVED = {
    "aws": "launchers#a-cluster-on-aws",
    "by_hand/regroup": "by_hand/index",
    "containers": "launchers#your-sites-own-lines",
    "cost": "choose#hours-and-money",
    "debugging": "errors#finding-the-line-that-hangs",
    "glossary": "cheat_sheet#words",
    "gpt/accumulate": "gpt/fsdp#large-batches-accumulatepy",
    "gpt/async_save": "gpt/keep_snapshots#saving-in-the-background-async_savepy",
    "gpt/compare": "choose#ways-to-split",
    "gpt/frozen_layers": "gpt/finetune#frozen-layers-frozen_layerspy",
    "gpt/llama_tensor_parallel": "gpt/tensor_parallel#llama-llama_tensor_parallelpy",
    "gpt/local_sgd": "gpt/slow_network#local-sgd-local_sgdpy",
    "gpt/metrics": "gpt/evaluate#the-log-of-each-step-metricspy",
    "gpt/schedule": "gpt/evaluate#the-learning-rate-schedule-schedulepy",
    "gpt/skip_steps": "gpt/evaluate#a-gradient-that-is-not-finite-skip_stepspy",
    "hangs": "errors#it-hangs",
    "kubernetes": "launchers#kubernetes",
    "other_schedulers": "launchers#other-schedulers",
    "recipes/gradient_accumulation": "recipes/mixed_precision#accumulation-gradient_accumulationpy",
    "recipes/stragglers": "recipes/monitor#slow-ranks-stragglerspy",
}
# The script keeps what an address asks for (?params=8) and its section (#gpus), if it has one.
STUB = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>This page has moved</title>
<script>location.replace("{page}" + location.search + (location.hash || "{section}"))</script>
<meta http-equiv="refresh" content="0; url={page}{section}">
<p>This page has moved <a href="{page}{section}">here</a>.</p>
</html>
"""


def main():
    for old, new in MOVED.items():
        stub = ROOT / "site" / f"{old}.html"
        name, hash_sign, section = new.partition("#")
        page = ROOT / "site" / f"{name}.html"
        if stub.exists():
            sys.exit(f"tools/pages/moved.py: {old} is still a page")
        if not page.exists() or (section and f'id="{section}"' not in page.read_text()):
            sys.exit(f"tools/pages/moved.py: {old} leads to {new}, which is not there")
        stub.write_text(
            STUB.format(page="../" * old.count("/") + f"{name}.html", section=hash_sign + section)
        )


if __name__ == "__main__":
    main()
