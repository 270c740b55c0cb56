import os

if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    import _pretend_tensor  # noqa: F401
