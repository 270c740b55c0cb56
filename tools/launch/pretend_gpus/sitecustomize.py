import os

if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    import pretend_tensor  # noqa: F401
