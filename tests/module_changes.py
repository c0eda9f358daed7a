"""Ways in which users change a module of a model, each of which must take effect on every path.

A change takes a module and a list. It edits the module or returns another one for its place, and appends to
the list on every call.
"""

import torch
from torch import nn


def scaled(x):
    """Each channel times another factor, which no norm undoes; of an (output, state) pair the output."""
    if isinstance(x, tuple):
        return scaled(x[0]), *x[1:]
    return x * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device)


def forward_hook(module, calls):
    def changed(module, args, output):
        calls.append(module)
        return scaled(output)

    module.register_forward_hook(changed)
    return module


def forward_pre_hook(module, calls):
    def changed(module, args):
        calls.append(module)
        x = args[0]
        return scaled(x) if x.is_floating_point() else (x + 1) % module.weight.shape[0], *args[1:]

    module.register_forward_pre_hook(changed)
    return module


class Scaled(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, weight):
        self.calls.append(self)
        return scaled(weight.flatten()).view_as(weight)


def parametrization(module, calls):
    nn.utils.parametrize.register_parametrization(module, "weight", Scaled(calls))
    calls.clear()  # registering calls it once
    return module


def forward_of_the_instance(module, calls):
    """As accelerate and others do: `forward` set on the module, not on its class."""
    forward = module.forward

    def changed(*args, **options):
        calls.append(module)
        return scaled(forward(*args, **options))

    module.forward = changed
    return module


class Adapter(nn.Module):
    """LoRA: base(x) + up(down(x)); around a module that is not a linear map, scaled(base(x)).

    It has the attributes of the module it wraps, so code that reads its `weight` runs, and ignores it.
    """

    def __init__(self, base, calls):
        super().__init__()
        self.base, self.calls = base, calls
        if isinstance(base, nn.Linear):
            self.down = nn.Linear(base.in_features, 2, bias=False).to(base.weight)
            self.up = nn.Linear(2, base.out_features, bias=False).to(base.weight)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x, *args, **options):
        self.calls.append(self)
        y = self.base(x, *args, **options)
        return y + self.up(self.down(x)) if isinstance(self.base, nn.Linear) else scaled(y)


CHANGES = {
    "forward hook": forward_hook,
    "forward pre-hook": forward_pre_hook,
    "parametrization": parametrization,
    "forward of the instance": forward_of_the_instance,
    "adapter": Adapter,
}


def weighted_modules(model):
    """The names of the modules that hold weights and no other module."""
    return [
        name
        for name, module in model.named_modules()
        if "weight" in module._parameters and not list(module.children())
    ]


def change(model, name, how):
    """Change the module of that name; the returned list grows with its every call."""
    calls = []
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, CHANGES[how](model.get_submodule(name), calls))
    return calls
