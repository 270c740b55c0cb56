import pretend_tensor  # noqa: F401
