"""Backends are named as "module:function" and loaded when first used; plans know the limits of the GPU."""

import subprocess
import sys

import pytest
import torch

from statetrack.errors import UserError
from statetrack.ops.backends import load, pick_backend
from statetrack.ops.delta_rule.options import OPTIONS_SCHEMA, DeltaRuleOptions
from statetrack.ops.triton_runtime.sizes import HOPPER, gpu_limits

CPU = torch.device("cpu")


def test_a_backend_is_picked_by_name_or_by_preference():
    backends = {"reference": "math:sqrt", "chunked": "math:fabs"}
    assert pick_backend("op", "reference", CPU, backends)(4.0) == 2.0
    assert pick_backend("op", "auto", CPU, backends)(-4.0) == 4.0


def test_a_backend_that_refuses_is_skipped_and_not_imported():
    backends = {"chunked": "no_such_module:function", "reference": "math:sqrt"}
    refusals = {"chunked": lambda: "it has no such module"}
    assert pick_backend("op", "auto", CPU, backends, refusals)(4.0) == 2.0
    with pytest.raises(UserError, match='"chunked" cannot run this: it has no such module'):
        pick_backend("op", "chunked", CPU, backends, refusals)


def test_a_wrong_name_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(AttributeError, match="no_such_function"):
            load("math:no_such_function")


def test_importing_the_ops_loads_no_backend():
    code = "import sys, statetrack.ops.delta_rule; print(*(m for m in sys.modules if 'delta_rule.' in m))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # what checks arguments and folds signs, and the loop over time, which gates share code with
    light = {"options", "gates", "reference"}
    assert {name.removeprefix("statetrack.ops.delta_rule.") for name in result.stdout.split()} <= light


def test_the_options_are_the_scalars_of_the_library_ops():
    names = [argument.split()[-1] for argument in OPTIONS_SCHEMA.split(", ")]
    assert names == list(DeltaRuleOptions._fields)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_gpu_to_ask_plans_assume_hopper(device):
    assert gpu_limits(torch.device(device)) == HOPPER
