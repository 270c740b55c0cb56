"""Stands in for simple_parsing: the fields of the data classes as options."""

import argparse
import dataclasses
import typing


class ArgumentParser(argparse.ArgumentParser):
    def __init__(self, prog=None, add_config_path_arg=False):
        super().__init__(prog)
        self.classes = {}

    def add_arguments(self, kind, dest):
        self.classes[dest] = kind
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            hint = (typing.get_args(hints[field.name]) or [hints[field.name]])[0]
            read = (lambda text: text.lower() in ("true", "1")) if hint is bool else hint
            self.add_argument(f"--{field.name}", type=read, default=field.default)

    def parse_args(self):
        values = vars(super().parse_args())

        def pick(kind):
            return kind(**{field.name: values[field.name] for field in dataclasses.fields(kind)})

        return argparse.Namespace(**{dest: pick(kind) for dest, kind in self.classes.items()})
